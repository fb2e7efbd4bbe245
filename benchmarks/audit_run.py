"""Seconds and memory of ``milesbatch audit`` on a large run, against only digesting its bytes (the limit of any audit).

Run: ``python benchmarks/audit_run.py [--trajectories 100000] [--run DIR]``

A run is made in the formats of the real writers (rows are made as whole columns, which is fast), or given with ``--run``. Each
side is measured in a process of its own, in alternating rounds, with the files in the page cache; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from large_run import begin_run

from milesbatch.decisions.seeds import derive_seed
from milesbatch.records import BatchRecord, GroupRef, digest_bytes
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import create_exclusively, publishing
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.schema import FileMetadata, trajectory_schema
from milesbatch.trajectories.writer import content_tag

SAMPLES, GROUPS_PER_STEP, GROUPS_PER_LEASE, PROMPT = 8, 64, 4, 64
TOKENIZER, TEMPLATE = digest_bytes(b"tokenizer"), digest_bytes(b"template")

AUDIT = """
import json, resource, sys, time
from pathlib import Path
from milesbatch.audit.prove import audit_run
from milesbatch.store.layout import RunLayout
began = time.perf_counter()
verdict = audit_run(RunLayout(Path(sys.argv[1])))
seconds = time.perf_counter() - began
assert verdict.ok, verdict.violations[:5]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([seconds, peak, verdict.files, verdict.bytes, verdict.trajectories, verdict.verified_versions]))
"""
DIGEST = """
import json, resource, sys, time
from pathlib import Path
from milesbatch.store.durable import digest_file
began = time.perf_counter()
for path in Path(sys.argv[1]).rglob("*"):
    if path.is_file():
        digest_file(path)
print(json.dumps([time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=100_000, help="at least this many (default 100000)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a trajectory, prompt included (default 512)")
    parser.add_argument("--parameters", type=int, default=1_000_000, help="of the model (default 1000000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side (default 3)")
    parser.add_argument("--run", type=Path, help="an existing run instead of a made one")
    return parser.parse_args()


def make_run(root: Path, arguments: argparse.Namespace) -> RunLayout:
    steps = -(-arguments.trajectories // (GROUPS_PER_STEP * SAMPLES))
    layout, run = begin_run(
        root, "large", steps, samples=SAMPLES, groups_per_lease=GROUPS_PER_LEASE, groups_per_step=GROUPS_PER_STEP,
        fingerprints={"tokenizer": TOKENIZER, "chat_template": TEMPLATE},
    )  # fmt: skip
    digests = publish_versions(layout, steps, arguments.parameters)
    metadata = FileMetadata(run.run_id, TOKENIZER, TEMPLATE)
    for step in range(1, steps + 1):
        write_step(layout, step, max(0, step - 2), digests, metadata, arguments.tokens)
    return layout


def publish_versions(layout: RunLayout, last: int, parameters: int) -> list[str]:
    """Versions 0 .. ``last``, of which each changes 2 % of the elements."""
    import torch

    from milesbatch.weights.publisher import Publisher

    publisher = Publisher(layout, 1, keyframe_every=20, before_commit=lambda: None)
    tensors = {f"layer.{i}": torch.randn(parameters // 4, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    digests = []
    for version in range(last + 1):
        moves = torch.Generator().manual_seed(version)
        for tensor in tensors.values():
            where = torch.randint(tensor.numel(), (tensor.numel() // 50,), generator=moves)
            tensor[where] *= 1.01
        digests.append(publisher.publish(version, tensors.items(), {}).weights_digest)
    return digests


def write_step(
    layout: RunLayout, step: int, version: int, digests: list[str], metadata: FileMetadata, tokens: int
) -> None:
    refs = []
    first = (step - 1) * GROUPS_PER_STEP
    for block in range(first, first + GROUPS_PER_STEP, GROUPS_PER_LEASE):
        groups = range(block, block + GROUPS_PER_LEASE)
        table = make_table(groups, version, digests[version], metadata, tokens)

        def name_of(digest: str, groups: range = groups) -> str:
            return str(TrajectoryName(groups[0], groups[-1], 1, "rollout-0", content_tag(digest)))

        with publishing(layout.trajectories, name_of) as file:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with pa.ipc.new_file(file.stream, table.schema, options=options) as sink:
                sink.write_table(table)
        assert file.ref is not None
        refs += [
            GroupRef(
                group_id=group, path=file.ref.path, digest=file.ref.digest, content=file.ref.digest, version_min=version,
                version_max=version,
                samples=SAMPLES,
            )
            for group in groups
        ]  # fmt: skip
    record = BatchRecord(
        step=step, incarnation=1, trained=tuple(refs), rejected=(), stream_position=first + GROUPS_PER_STEP,
        created_at=utc_now(),
    )  # fmt: skip
    create_exclusively(layout.batch(step), record.to_bytes())


def make_table(groups: range, version: int, weights: str, metadata: FileMetadata, tokens: int) -> Any:
    """Rows of whole groups, column by column."""
    rows = len(groups) * SAMPLES
    random = np.random.default_rng(groups[0])
    ids, samples = np.repeat(np.array(groups), SAMPLES), np.tile(np.arange(SAMPLES), len(groups))
    mask = np.tile(np.arange(tokens) >= PROMPT, rows)
    logprobs = np.where(mask, -random.exponential(size=rows * tokens), 0).astype(np.float32)
    message = [{"role": "user", "content": "x" * PROMPT}, {"role": "assistant", "content": "y" * (tokens - PROMPT)}]
    seeds = [
        derive_seed(0, "sample", group, sample) for group, sample in zip(ids.tolist(), samples.tolist(), strict=True)
    ]
    when = datetime(2026, 3, 1, 12, tzinfo=UTC)
    schema = trajectory_schema()
    values: dict[str, Any] = {
        "group_id": ids,
        "sample_index": samples,
        "prompt_id": [f"p{group}" for group in ids.tolist()],
        "messages": [message] * rows,
        "tokens": lists(schema, "tokens", random.integers(50_000, size=rows * tokens, dtype=np.int32), tokens),
        "loss_mask": lists(schema, "loss_mask", mask, tokens),
        "logprobs": lists(schema, "logprobs", logprobs, tokens),
        "versions": [[{"start": PROMPT, "version": version}]] * rows,
        "weights_digest": [weights] * rows,
        "reward": random.random(rows),
        "rewards": [[("answer", 1.0)]] * rows,
        "finish_reason": ["stop"] * rows,
        "turns": np.ones(rows),
        "error": [None] * rows,
        "routed_experts": [None] * rows,
        "env": ["{}"] * rows,
        "seed": seeds,
        "worker": ["rollout-0"] * rows,
        "incarnation": np.ones(rows),
        "started": [when] * rows,
        "ended": [when] * rows,
        "prompt_tokens": np.full(rows, PROMPT),
        "response_tokens": np.full(rows, tokens - PROMPT),
    }
    columns = [column(values[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(metadata.to_arrow()))


def column(values: Any, of: Any) -> Any:
    if isinstance(values, pa.Array):
        return values
    return pa.array(values.astype(of.to_pandas_dtype()) if isinstance(values, np.ndarray) else values, type=of)


def lists(schema: Any, name: str, flat: np.ndarray[Any, Any], length: int) -> Any:
    of = schema.field(name).type
    offsets = np.arange(0, len(flat) + 1, length, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, type=of.value_type), type=of)


def measure(code: str, root: Path) -> list[float]:
    done = subprocess.run([sys.executable, "-c", code, str(root)], check=True, capture_output=True, text=True)
    result: list[float] = json.loads(done.stdout)
    return result


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="audit-run-") as scratch:
        began_s = time.monotonic()
        layout = RunLayout(arguments.run) if arguments.run else make_run(Path(scratch) / "run", arguments)
        if not arguments.run:
            print(f"made in {time.monotonic() - began_s:.0f} s")
        audits, digests = [], []
        for _ in range(arguments.rounds):
            audits.append(measure(AUDIT, layout.root))
            digests.append(measure(DIGEST, layout.root))
    audit_s, digest_s = (statistics.median(row[0] for row in rows) for rows in (audits, digests))
    _, _, files, num_bytes, trajectories, versions = audits[0]
    print(f"{trajectories:,.0f} trajectories, {versions:.0f} versions, {files:,.0f} files, {num_bytes:,.0f} bytes")
    print(f"audit: {audit_s:.1f} s, peak memory {max(row[1] for row in audits) / 2**20:,.0f} MiB")
    print(f"only digesting: {digest_s:.1f} s; ratio {audit_s / digest_s:.1f}")


if __name__ == "__main__":
    main()
