"""Seconds and memory of ``milesbatch traj`` on a run of 1,000,000 trajectories, against a plain scan of the same
columns.

Run: ``python benchmarks/trajectories_at_scale.py [--trajectories 1000000] [--groups-per-lease 8] [--run DIR]``

A run is made in the formats of the real writers (whole columns at a time, short responses), and a second one of a
tenth of its size, so that growing memory is seen. Each command is a process of its own, start of the interpreter
included, with the files in the page cache. The peer counts nothing: DuckDB over a ``pyarrow`` dataset of all files, no
fates, no digests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from large_run import begin_run

from milesbatch.records import BatchRecord, GroupRef, Rejection, digest_bytes
from milesbatch.store.clock import utc_now
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.schema import FileMetadata, trajectory_schema
from milesbatch.trajectories.writer import content_tag

SAMPLES, GROUPS_PER_STEP, PROMPT, LONGEST = 16, 128, 8, 24
TOKENIZER, WEIGHTS = digest_bytes(b"tokenizer"), digest_bytes(b"weights")
GROUP_BY = (
    "select step, count(*), avg(reward), avg(response_tokens) from trajectories where fate='trained' group by step"
)

COMMAND = """
import resource, sys
from milesbatch.cli.main import main
try:
    main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    sys.stderr.write(f"used {used.ru_maxrss} {used.ru_utime + used.ru_stime}\\n")
"""
PEER = """
import glob, resource, sys
import duckdb, pyarrow.dataset as ds
files = ds.dataset(sorted(glob.glob(sys.argv[1] + "/trajectories/*.arrow")), format="ipc")
connection = duckdb.connect()
connection.register("files", files)
query = "select group_id // 128, count(*), avg(reward), avg(response_tokens) from files group by 1"
print(len(connection.execute(query).fetchall()))
used = resource.getrusage(resource.RUSAGE_SELF)
sys.stderr.write(f"used {used.ru_maxrss} {used.ru_utime + used.ru_stime}\\n")
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=1_000_000, help="at least this many (default 1000000)")
    parser.add_argument("--groups-per-lease", type=int, default=8, help="groups of a file, 16 samples each (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each command (default 3)")
    parser.add_argument("--run", type=Path, help="an existing run instead of a made one")
    return parser.parse_args()


# -- a run ------------------------------------------------------------------------------------------------------------


def make_run(root: Path, trajectories: int, groups_per_lease: int) -> Path:
    steps = -(-trajectories // (GROUPS_PER_STEP * SAMPLES))
    layout, run = begin_run(
        root, "scale", steps, samples=SAMPLES, groups_per_lease=groups_per_lease, groups_per_step=GROUPS_PER_STEP,
        fingerprints={"tokenizer": TOKENIZER, "chat_template": ""},
    )  # fmt: skip
    metadata = FileMetadata(run.run_id, TOKENIZER, "")
    for step in range(1, steps + 1):
        write_step(layout, step, groups_per_lease, metadata)
    return root


def write_step(layout: RunLayout, step: int, groups_per_lease: int, metadata: FileMetadata) -> None:
    """Files and batch record of one step; three of its groups are rejected, one episode in a hundred failed."""
    first, version = (step - 1) * GROUPS_PER_STEP, max(0, step - 2)
    table = make_table(range(first, first + GROUPS_PER_STEP), version, metadata)
    trained, rejected = [], []
    for block in range(first, first + GROUPS_PER_STEP, groups_per_lease):
        groups = range(block, min(block + groups_per_lease, first + GROUPS_PER_STEP))
        name, digest = write_file(layout, groups, table.slice((block - first) * SAMPLES, len(groups) * SAMPLES))
        for group in groups:
            if group % GROUPS_PER_STEP < 3:
                rejected.append(Rejection(group_id=group, reason="zero_variance", path=name, digest=digest))
                continue
            trained.append(
                GroupRef(
                    group_id=group, path=name, digest=digest, content=digest, version_min=version, version_max=version,
                    samples=SAMPLES,
                )
            )  # fmt: skip
    record = BatchRecord(
        step=step, incarnation=1, trained=tuple(trained), rejected=tuple(rejected),
        stream_position=first + GROUPS_PER_STEP, created_at=utc_now(),
    )  # fmt: skip
    layout.batch(step).write_bytes(record.to_bytes())


def write_file(layout: RunLayout, groups: range, table: Any) -> tuple[str, str]:
    """As the writer of the project does it, without waiting for the disk."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    digest = digest_bytes(data)
    name = TrajectoryName(groups[0], groups[-1], 1, "rollout-0", content_tag(digest))
    layout.trajectory(name).write_bytes(data)
    return str(name), digest


def make_table(groups: range, version: int, metadata: FileMetadata) -> Any:
    """Rows of whole groups, column by column."""
    rows = len(groups) * SAMPLES
    random = np.random.default_rng(groups[0])
    ids, samples = np.repeat(np.array(groups), SAMPLES), np.tile(np.arange(SAMPLES), len(groups))
    lengths = random.integers(4, LONGEST + 1, rows)
    offsets = np.concatenate(([0], np.cumsum(lengths + PROMPT)))
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths + PROMPT)
    mask = place >= PROMPT
    failed = random.random(rows) < 0.01
    rewards = np.where(failed, 0.0, (random.random(rows) < 0.2 + 0.6 * groups[0] / 62_500).astype(float))
    when = datetime(2026, 3, 1, 12, tzinfo=UTC)
    schema = trajectory_schema()
    message = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]
    error = "reward function rewards:exact failed on prompt p{}: ValueError: no number (rewards.py:12)"
    values: dict[str, Any] = {
        "group_id": ids,
        "sample_index": samples,
        "prompt_id": [f"p{group}" for group in ids.tolist()],
        "messages": [message] * rows,
        "tokens": lists(schema, "tokens", random.integers(50_000, size=len(place), dtype=np.int32), offsets),
        "loss_mask": lists(schema, "loss_mask", mask, offsets),
        "logprobs": lists(schema, "logprobs", (mask * -random.random(len(place))).astype(np.float32), offsets),
        "versions": [[{"start": PROMPT, "version": version}]] * rows,
        "weights_digest": [WEIGHTS] * rows,
        "reward": rewards,
        "rewards": [[("exact", 1.0)]] * rows,
        "finish_reason": np.where(lengths == LONGEST, "length", "stop").tolist(),
        "turns": np.ones(rows),
        "error": [error.format(group) if bad else None for group, bad in zip(ids.tolist(), failed, strict=True)],
        "routed_experts": [None] * rows,
        "env": ['{"answer":"46"}'] * rows,
        "seed": random.integers(2**62, size=rows),
        "worker": ["rollout-0"] * rows,
        "incarnation": np.ones(rows),
        "started": [when] * rows,
        "ended": [when] * rows,
        "prompt_tokens": np.full(rows, PROMPT),
        "response_tokens": lengths,
    }
    columns = [column(values[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(metadata.to_arrow()))


def column(values: Any, of: Any) -> Any:
    if isinstance(values, pa.Array):
        return values
    return pa.array(values.astype(of.to_pandas_dtype()) if isinstance(values, np.ndarray) else values, type=of)


def lists(schema: Any, name: str, flat: Any, offsets: Any) -> Any:
    of = schema.field(name).type
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, type=of.value_type), type=of)


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    seconds: float
    cpu_s: float
    """Of all threads, which other work on the machine changes less."""
    peak_mib: float
    output: str


def measure(code: str, *arguments: object) -> Measured:
    began = time.perf_counter()
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    peak, cpu_s = done.stderr.rpartition("used ")[2].split()
    return Measured(seconds, float(cpu_s), int(peak) / 1024, done.stdout)


def median(found: list[Measured]) -> Measured:
    return Measured(
        statistics.median(one.seconds for one in found),
        statistics.median(one.cpu_s for one in found),
        max(one.peak_mib for one in found),
        found[-1].output,
    )


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="trajectories-at-scale-") as scratch:
        began = time.monotonic()
        large, small = arguments.run, None
        if large is None:
            large = make_run(Path(scratch) / "large", arguments.trajectories, arguments.groups_per_lease)
            small = make_run(Path(scratch) / "small", arguments.trajectories // 10, arguments.groups_per_lease)
            print(f"made in {time.monotonic() - began:.0f} s")
        report(large, small, arguments.rounds)


def report(large: Path, small: Path | None, rounds: int) -> None:
    commands = {
        "traj ls": ("traj", "ls", "--json"),
        "traj stats": ("traj", "stats", "--json"),
        "traj sql, group-by": ("traj", "sql", "--json", GROUP_BY),
    }
    found: dict[str, list[Measured]] = {name: [] for name in (*commands, "peer")}
    for _ in range(rounds):
        found["peer"].append(measure(PEER, large))
        for name, (group, command, *rest) in commands.items():
            found[name].append(measure(COMMAND, group, command, large, *rest))
    rows = json.loads(found["traj ls"][-1].output)
    print(f"{sum(row['trajectories'] for row in rows):,} trajectories in {len(rows):,} files")
    peer = median(found["peer"])
    print(f"plain scan (pyarrow dataset in DuckDB): {peer.seconds:.2f} s ({peer.cpu_s:.2f} s of processors), ", end="")
    print(f"peak {peer.peak_mib:.0f} MiB")
    for name, (group, command, *rest) in commands.items():
        result = median(found[name])
        less = "" if small is None else f" ({measure(COMMAND, group, command, small, *rest).peak_mib:.0f} for a tenth)"
        ratio = result.seconds / peer.seconds
        print(f"{name}: {result.seconds:.2f} s ({result.cpu_s:.2f} s of processors), ratio {ratio:.2f}, ", end="")
        print(f"peak {result.peak_mib:.0f} MiB{less}")


if __name__ == "__main__":
    main()
