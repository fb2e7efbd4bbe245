"""The Arrow schema of a trajectory file, version 1, and the way from trajectories to a table and back.

Owns: column names, types, and the file's metadata keys. Never: files. Invariant: ``from_table(to_table(x)) == x`` up to
the rounding of logprobs to float32. The page behind it is ``docs/format-trajectories.md``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any

import pyarrow as pa

from milesbatch import FORMAT_VERSION
from milesbatch.ids import VersionSpan
from milesbatch.records import RunRecord
from milesbatch.trajectories.trajectory import Message, Trajectory, env_text

DENSE_EXPERT_BYTES = 1
"""Width of a ``routed_experts`` entry in files of dense models, where the column holds only nulls."""

KEY_FORMAT = b"milesbatch.format"
KEY_RUN = b"milesbatch.run_id"
KEY_TOKENIZER = b"milesbatch.tokenizer_digest"
KEY_CHAT_TEMPLATE = b"milesbatch.chat_template_digest"


@dataclass(frozen=True, slots=True)
class FileMetadata:
    """What a trajectory file says about itself, beside its rows. Digests may be empty where there is no such thing."""

    run_id: str
    tokenizer_digest: str
    chat_template_digest: str = ""

    @classmethod
    def of_run(cls, record: RunRecord) -> FileMetadata:
        """What every trajectory file of a run says."""
        fingerprints = record.fingerprints
        return cls(record.run_id, fingerprints["tokenizer"], fingerprints.get("chat_template", ""))

    def to_arrow(self) -> dict[bytes, bytes]:
        """The schema metadata to write."""
        return {
            KEY_FORMAT: ".".join(str(part) for part in FORMAT_VERSION).encode(),
            KEY_RUN: self.run_id.encode(),
            KEY_TOKENIZER: self.tokenizer_digest.encode(),
            KEY_CHAT_TEMPLATE: self.chat_template_digest.encode(),
        }

    @classmethod
    def from_arrow(cls, metadata: dict[bytes, bytes]) -> FileMetadata:
        """Inverse of :meth:`to_arrow`.

        Raises:
            KeyError: a key is missing.
            UnicodeDecodeError: a value is not text.
        """
        return cls(*(metadata[key].decode() for key in (KEY_RUN, KEY_TOKENIZER, KEY_CHAT_TEMPLATE)))


def items(of: Any) -> Any:
    """The type of a list without nulls."""
    return pa.list_(pa.field("item", of, nullable=False))


def required(name: str, of: Any) -> Any:
    """A column, or a part of a struct, that is never null."""
    return pa.field(name, of, nullable=False)


def trajectory_schema(expert_bytes: int = DENSE_EXPERT_BYTES) -> Any:
    """The schema (``pyarrow.Schema``) of format version 1; ``expert_bytes`` is the width of ``routed_experts`` per
    token."""
    message = pa.struct(
        [
            required("role", pa.string()),
            required("content", pa.string()),
            pa.field("tool_calls", pa.string()),
            pa.field("tool_call_id", pa.string()),
        ]
    )
    span = pa.struct([required("start", pa.int32()), required("version", pa.int64())])
    return pa.schema(
        [
            required("group_id", pa.int64()),
            required("sample_index", pa.int32()),
            required("prompt_id", pa.string()),
            required("messages", items(message)),
            required("tokens", items(pa.int32())),
            required("loss_mask", items(pa.bool_())),
            required("logprobs", items(pa.float32())),
            required("versions", items(span)),
            required("weights_digest", pa.string()),
            required("reward", pa.float64()),
            required("rewards", pa.map_(pa.string(), pa.field("value", pa.float64(), nullable=False))),
            required("finish_reason", pa.dictionary(pa.int8(), pa.string())),
            required("turns", pa.int32()),
            pa.field("error", pa.string()),
            pa.field("routed_experts", items(pa.binary(expert_bytes))),
            required("env", pa.string()),
            required("seed", pa.int64()),
            required("worker", pa.string()),
            required("incarnation", pa.int32()),
            required("started", pa.timestamp("us", tz="UTC")),
            required("ended", pa.timestamp("us", tz="UTC")),
            required("prompt_tokens", pa.int32()),
            required("response_tokens", pa.int32()),
        ]
    )


def expert_bytes_of(schema: Any) -> int:
    """Width of ``routed_experts`` entries in a file's schema.

    Raises:
        KeyError: there is no such column.
        AttributeError: it has another type than a list of fixed-width bytes.
    """
    return int(schema.field("routed_experts").type.value_type.byte_width)


def to_table(trajectories: Sequence[Trajectory], metadata: FileMetadata) -> Any:
    """Trajectories as a ``pyarrow.Table`` of one row each, in the given order.

    Raises:
        ValueError: ``routed_experts`` has entries of different widths.
    """
    widths = {len(t.routed_experts[0]) for t in trajectories if t.routed_experts}
    if len(widths) > 1:
        raise ValueError(f"routed_experts has entries of {sorted(widths)} bytes in one file; a model has one width")
    schema = trajectory_schema(widths.pop() if widths else DENSE_EXPERT_BYTES)
    rows = [_row(trajectory) for trajectory in trajectories]
    columns = [pa.array([row[field.name] for row in rows], type=field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(metadata.to_arrow()))


def _row(trajectory: Trajectory) -> dict[str, Any]:
    row = {name: getattr(trajectory, name) for name in Trajectory.__slots__}
    row["messages"] = [
        {"role": m.role, "content": m.content, "tool_calls": m.tool_calls, "tool_call_id": m.tool_call_id}
        for m in trajectory.messages
    ]
    row["versions"] = [{"start": s.start, "version": s.version} for s in trajectory.versions]
    row["rewards"] = sorted(trajectory.rewards.items())
    row["env"] = env_text(trajectory.env)
    row["started"] = trajectory.started.astimezone(UTC)
    row["ended"] = trajectory.ended.astimezone(UTC)
    return row


def from_table(table: Any) -> list[Trajectory]:
    """Rows of a table with :func:`trajectory_schema` as trajectories, not validated.

    Raises:
        ValueError: ``env`` is not a JSON object.
    """
    return [_trajectory(row) for row in table.to_pylist()]


def _trajectory(row: dict[str, Any]) -> Trajectory:
    env = json.loads(row["env"])
    if not isinstance(env, dict):
        raise ValueError(f"env is not a JSON object: {row['env']!r}")
    experts = row["routed_experts"]
    changed = {
        "messages": tuple(Message(**message) for message in row["messages"]),
        "tokens": tuple(row["tokens"]),
        "loss_mask": tuple(row["loss_mask"]),
        "logprobs": tuple(row["logprobs"]),
        "versions": tuple(VersionSpan(**span) for span in row["versions"]),
        "rewards": dict(row["rewards"]),
        "routed_experts": None if experts is None else tuple(experts),
        "env": env,
        "started": row["started"].astimezone(UTC),
        "ended": row["ended"].astimezone(UTC),
    }
    return Trajectory(**{**row, **changed})
