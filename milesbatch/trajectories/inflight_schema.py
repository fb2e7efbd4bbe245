"""What is kept of an episode that a stop interrupted, and the Arrow schema of the files in ``inflight/``, version 1.

Owns: the value, its columns, and the file's metadata. Never: files, or whether a sample may be continued (the worker that
gets the lease judges that, ``rollout/unfinished.py``). Invariant: what passed :meth:`BegunSample.validate` says of each of its
tokens under which weights it was drawn, proven by their digest. The page behind it is ``docs/format-inflight.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from milesbatch import FORMAT_VERSION
from milesbatch.ids import VersionSpan, check_digest
from milesbatch.records import digest_bytes
from milesbatch.trajectories.experts import RoutedExperts
from milesbatch.trajectories.schema import KEY_FORMAT, KEY_RUN, KEY_TOKENIZER, items, required
from milesbatch.trajectories.trajectory import is_logprob

KEY_KIND = b"milesbatch.kind"
KEY_UNFINISHED = b"milesbatch.unfinished"
KIND = b"inflight"
"""Tells these files from trajectory files, whose names have the same form."""
_INT32, _INT64 = 2**31, 2**63
_FINISHED = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Life:
    """Up to which token of the response the engines of one incarnation came."""

    incarnation: int
    tokens: int


@dataclass(frozen=True, slots=True)
class BegunSample:
    """What earlier incarnations drew of one sample.

    Shapes: ``tokens`` and ``logprobs`` have equal length R of at least 1, the response alone; ``weights`` holds a digest for
    each of ``versions``, whose starts count from the first response token. ``finish_reason`` is null while tokens are to
    come.
    """

    group_id: int
    sample_index: int
    prompt_digest: str
    """Digest of the prompt's token ids, see :func:`tokens_digest`."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    weights: tuple[str, ...]
    """Weights digest of each of ``versions``: a version that was lost and published anew has other weights."""
    finish_reason: str | None
    started: datetime
    lives: tuple[Life, ...]
    """Ascending; the last one's ``tokens`` is R."""
    routed_experts: RoutedExperts | None = None
    """Of prompt and response; None where they are not recorded."""

    def validate(self) -> None:
        """Check that the parts agree.

        Raises:
            ValueError: they do not; names the sample and what is wrong.
        """
        try:
            _check_tokens(self)
            _check_versions(self)
            _check_lives(self)
        except ValueError as error:
            raise ValueError(f"begun sample {self.sample_index} of group {self.group_id}: {error}") from error


def _check_tokens(sample: BegunSample) -> None:
    if not 0 <= sample.group_id < _INT64 or not 0 <= sample.sample_index < _INT32:
        raise ValueError("a group or sample has no negative number")
    check_digest(sample.prompt_digest)
    if not sample.tokens or len(sample.tokens) != len(sample.logprobs):
        raise ValueError(f"it has {len(sample.tokens)} tokens and {len(sample.logprobs)} logprobs")
    if not all(0 <= token < _INT32 for token in sample.tokens):
        raise ValueError("a token is not a token id")
    if not all(is_logprob(value) for value in sample.logprobs):
        raise ValueError("a logprob is not the logarithm of a probability above 0")
    if sample.finish_reason is not None and sample.finish_reason not in _FINISHED:
        raise ValueError(f"finish_reason is {sample.finish_reason!r}; it is null or one of {_FINISHED}")
    if sample.started.tzinfo is None:
        raise ValueError(f"started has no time zone: {sample.started.isoformat()}")
    if sample.routed_experts is not None and len(sample.routed_experts) <= len(sample.tokens):
        raise ValueError(
            f"it has {len(sample.routed_experts)} entries of experts for a prompt and {len(sample.tokens)} tokens"
        )


def _check_versions(sample: BegunSample) -> None:
    spans = sample.versions
    if not spans or spans[0].start != 0 or len(spans) != len(sample.weights):
        raise ValueError(f"{len(spans)} versions with {len(sample.weights)} digests do not begin at its first token")
    for digest in sample.weights:
        check_digest(digest)
    if not all(0 <= span.version < _INT64 and span.start < len(sample.tokens) for span in spans):
        raise ValueError("a version is negative, or begins behind the last token")
    if not all(before.start < after.start and before.version < after.version for before, after in pairwise(spans)):
        raise ValueError("its versions do not ascend")


def _check_lives(sample: BegunSample) -> None:
    lives = sample.lives
    if not lives or lives[0].tokens < 1 or lives[0].incarnation < 1 or lives[-1].tokens != len(sample.tokens):
        raise ValueError(f"its lives {lives} do not add up to {len(sample.tokens)} tokens")
    if not all(a.incarnation < b.incarnation < _INT32 and a.tokens < b.tokens for a, b in pairwise(lives)):
        raise ValueError("its lives do not ascend")


def tokens_digest(tokens: Sequence[int]) -> str:
    """Digest of token ids as little-endian int32."""
    return digest_bytes(np.asarray(tokens, "<i4").tobytes())


@dataclass(frozen=True, slots=True)
class InflightMetadata:
    """What a file says about itself, beside its rows."""

    run_id: str
    tokenizer_digest: str

    def to_arrow(self, unfinished: int) -> dict[bytes, bytes]:
        """The schema metadata to write; ``unfinished`` counts the samples that end in the middle."""
        return {
            KEY_FORMAT: ".".join(str(part) for part in FORMAT_VERSION).encode(),
            KEY_KIND: KIND,
            KEY_RUN: self.run_id.encode(),
            KEY_TOKENIZER: self.tokenizer_digest.encode(),
            KEY_UNFINISHED: str(unfinished).encode(),
        }

    @classmethod
    def from_arrow(cls, metadata: dict[bytes, bytes]) -> InflightMetadata:
        """Inverse of :meth:`to_arrow`.

        Raises:
            KeyError: a key is missing.
            UnicodeDecodeError: a value is not text.
        """
        return cls(metadata[KEY_RUN].decode(), metadata[KEY_TOKENIZER].decode())


def inflight_schema(expert_bytes: int | None = None) -> Any:
    """The schema (``pyarrow.Schema``) of format version 1; with ``expert_bytes``, the width of an entry, it has the column
    ``routed_experts``."""
    span = pa.struct([required("start", pa.int32()), required("version", pa.int64()), required("weights", pa.string())])
    life = pa.struct([required("incarnation", pa.int32()), required("tokens", pa.int32())])
    experts = [] if expert_bytes is None else [pa.field("routed_experts", items(pa.binary(expert_bytes)))]
    return pa.schema(
        [
            required("group_id", pa.int64()),
            required("sample_index", pa.int32()),
            required("prompt_digest", pa.string()),
            required("tokens", items(pa.int32())),
            required("logprobs", items(pa.float32())),
            required("versions", items(span)),
            pa.field("finish_reason", pa.string()),
            required("started", pa.timestamp("us", tz="UTC")),
            required("lives", items(life)),
            *experts,
        ]
    )


def schema_like(schema: Any) -> Any:
    """The schema of a file that has, or lacks, the column ``routed_experts`` as ``schema`` does."""
    index = schema.get_field_index("routed_experts")
    if index < 0:
        return inflight_schema()
    of = schema.field(index).type
    is_right = pa.types.is_list(of) and pa.types.is_fixed_size_binary(of.value_type)
    return inflight_schema(of.value_type.byte_width if is_right else None)


def to_table(samples: Sequence[BegunSample], metadata: InflightMetadata) -> Any:
    """Samples as a ``pyarrow.Table`` of one row each, in the given order.

    Raises:
        ValueError: their experts are of several widths.
    """
    widths = {sample.routed_experts.width for sample in samples if sample.routed_experts is not None}
    if len(widths) > 1:
        raise ValueError(f"entries of experts have {sorted(widths)} bytes in one file; a model has one width")
    schema = inflight_schema(widths.pop() if widths else None)
    rows = [
        {
            "group_id": sample.group_id,
            "sample_index": sample.sample_index,
            "prompt_digest": sample.prompt_digest,
            "tokens": sample.tokens,
            "logprobs": sample.logprobs,
            "versions": [
                {"start": span.start, "version": span.version, "weights": digest}
                for span, digest in zip(sample.versions, sample.weights, strict=True)
            ],
            "finish_reason": sample.finish_reason,
            "started": sample.started.astimezone(UTC),
            "lives": [{"incarnation": life.incarnation, "tokens": life.tokens} for life in sample.lives],
            "routed_experts": None if sample.routed_experts is None else sample.routed_experts.entries(),
        }
        for sample in samples
    ]
    columns = [pa.array([row[field.name] for row in rows], type=field.type) for field in schema]
    unfinished = sum(sample.finish_reason is None for sample in samples)
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(metadata.to_arrow(unfinished)))


def from_table(table: Any) -> list[BegunSample]:
    """Rows of a table with :func:`inflight_schema`, not validated.

    Raises:
        ValueError, OverflowError: a time is none, or experts are there for no token.
    """
    return [
        BegunSample(
            group_id=row["group_id"],
            sample_index=row["sample_index"],
            prompt_digest=row["prompt_digest"],
            tokens=tuple(row["tokens"]),
            logprobs=tuple(row["logprobs"]),
            versions=tuple(VersionSpan(span["start"], span["version"]) for span in row["versions"]),
            weights=tuple(span["weights"] for span in row["versions"]),
            finish_reason=row["finish_reason"],
            started=row["started"].astimezone(UTC),
            lives=tuple(Life(**life) for life in row["lives"]),
            routed_experts=None if (found := row.get("routed_experts")) is None else RoutedExperts.from_entries(found),
        )
        for row in table.to_pylist()
    ]
