"""A small sound run of two incarnations, made with the project's writers, for audits to break; and tools to break it.

Six steps of 4 groups, 2 samples each. Incarnation 1 makes steps 1..3, checkpoint 2, and a file of two groups that wait;
incarnation 2 seals that and makes steps 4..6 and checkpoints 4 and 6. Keyframes are versions 0, 3 and 6.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from builders import (
    GROUPS_PER_LEASE,
    GROUPS_PER_STEP,
    IMPATIENT,
    FileSaver,
    commit_batch,
    make_facts,
    make_recipe,
    make_trajectory,
    past_incarnation,
    publish,
    unfenced,
)

from milesbatch.decisions.fates import FateTable
from milesbatch.decisions.seeds import derive_seed
from milesbatch.engines.protocol import VersionSpan
from milesbatch.records import BatchRecord, GroupRef, Record, WeightsManifest, canonical_json, digest_bytes
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.events import EventLog
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_run_record
from milesbatch.store.survey import read_incarnations, survey
from milesbatch.trainer.checkpointing import Checkpointer
from milesbatch.trajectories.groups import group_refs
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.trajectories.writer import write_trajectories

STEPS = 6
FIRST_LIFE = 3
R = TypeVar("R", bound=Record)
DIAGNOSIS = ("events", "logs", "tracking", "quarantine")


def sound_run(root: Path, determinism: str = "bitwise", steps: int = STEPS) -> RunLayout:
    """A finished run, as described above."""
    layout = RunLayout(root)
    lay_out(layout, make_recipe(steps=steps, determinism=determinism))
    (layout.model / "config.json").write_text('{"model_type": "made"}\n')
    (layout.model / "tokenizer.json").write_text('{"vocab": {}}\n')
    fingerprints = {"tokenizer": digest_bytes(b"tokenizer"), "chat_template": digest_bytes(b"template")}
    commit_run(layout, make_recipe(steps=steps, determinism=determinism), fingerprints)
    live(layout, range(1, FIRST_LIFE + 1), steps)
    generate(layout, range(FIRST_LIFE * GROUPS_PER_STEP, FIRST_LIFE * GROUPS_PER_STEP + 2))
    live(layout, range(FIRST_LIFE + 1, steps + 1), steps)
    return layout


def live(layout: RunLayout, steps: Iterable[int], last: int) -> int:
    """A controller takes over and dies; between, its incarnation makes ``steps``; every second one has a checkpoint."""
    incarnation = past_incarnation(layout)
    events = EventLog(layout, "trainer-0", incarnation)
    events.write("ready", seconds=2.0)
    if not layout.weights_manifest(0).exists():
        publish(layout, [0], incarnation)
    for step in steps:
        record_step(layout, step, incarnation)
        publish(layout, [step], incarnation)
        metrics = {"wait_s": 0.5, "train_s": 1.0, "publish_s": 0.25}
        events.write("train_step", step=step, replayed=False, metrics=metrics)
        if step % 2 == 0 or step == last:
            checkpoint(layout, step, incarnation)
            events.write("checkpoint_committed", step=step)
    events.close()
    return incarnation


def record_step(layout: RunLayout, step: int, incarnation: int) -> BatchRecord:
    """Generate what step ``step`` still needs, and record it with all its groups."""
    found = survey(layout, read_incarnations(layout))
    ready = {ref.group_id: ref for name in found.ready_files for ref in group_refs(layout.trajectory(name))}
    first = (step - 1) * GROUPS_PER_STEP
    for block in range(first, first + GROUPS_PER_STEP, GROUPS_PER_LEASE):
        if block not in ready:
            refs = generate(layout, range(block, block + GROUPS_PER_LEASE), incarnation=incarnation)
            ready.update({ref.group_id: ref for ref in refs})
    groups = [ready[group] for group in range(first, first + GROUPS_PER_STEP)]
    return commit_batch(layout, step, groups, incarnation)


def generate(
    layout: RunLayout, groups: range, *, version: int | None = None, incarnation: int = 1, **changes: Any
) -> tuple[GroupRef, ...]:
    """Commit a file of ``groups`` as a worker would; ``version`` defaults to what bitwise mode wants."""
    if version is None:
        version = max(0, groups[0] // GROUPS_PER_STEP - 1)
    spans: dict[str, Any] = {"versions": (VersionSpan(2, version),), "weights_digest": weights_digest(layout, version)}
    rows = [
        make_trajectory(group, sample, incarnation=incarnation, **{**spans, "seed": seed_of(group, sample), **changes})
        for group in groups
        for sample in range(2)
    ]
    run = read_run_record(layout)
    assert run is not None
    metadata = FileMetadata(run.run_id, run.fingerprints["tokenizer"], run.fingerprints["chat_template"])
    name, _ = write_trajectories(
        layout, rows, incarnation=incarnation, worker="rollout-0", metadata=metadata, before_commit=unfenced
    )
    return group_refs(layout.trajectory(name))


def seed_of(group: int, sample: int) -> int:
    return derive_seed(0, "sample", group, sample)


def weights_digest(layout: RunLayout, version: int) -> str:
    path = layout.weights_manifest(version)
    return (
        WeightsManifest.from_bytes(path.read_bytes(), str(path)).weights_digest if path.exists() else digest_bytes(b"")
    )


def checkpoint(layout: RunLayout, step: int, incarnation: int, **changes: Any) -> None:
    records = [read(BatchRecord, layout.batch(number)) for number in range(1, step + 1)]
    since = max(0, step - 2)
    fates = {str(g): str(fate) for g, fate in FateTable.of(records).fates.items() if fate.step > since}
    facts = {
        "weights_digest": weights_digest(layout, step),
        "stream_position": records[-1].stream_position,
        "fates_since": since,
        "fates": fates,
    }
    checkpointer = Checkpointer(layout, Fence(layout, incarnation), FileSaver(), 0, 1, 2, IMPATIENT)
    checkpointer.prepare(step)
    state = {"model.distcp": b"state %d" % step * 50, "optim.distcp": b"o" * 64}
    checkpointer.start(state, make_facts(step, **{**facts, **changes}))
    assert checkpointer.finish() == step


# -- breaking -------------------------------------------------------------------------------------------------------


def read(kind: type[R], path: Path) -> R:
    return kind.from_bytes(path.read_bytes(), str(path))


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a record and sign it again, so that only its meaning is wrong."""
    body = json.loads(path.read_bytes())
    del body["record_digest"]
    change(body)
    body["record_digest"] = digest_bytes(canonical_json(body))
    path.write_bytes(canonical_json(body))


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def artefacts(layout: RunLayout) -> list[Path]:
    """Every committed file."""
    return [
        path
        for path in sorted(layout.root.rglob("*"))
        if path.is_file() and path.suffix != ".alive" and path.relative_to(layout.root).parts[0] not in DIAGNOSIS
    ]


def trained_file(layout: RunLayout, step: int, index: int = 0) -> Path:
    return layout.trajectory(read(BatchRecord, layout.batch(step)).trained[index].path)
