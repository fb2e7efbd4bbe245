"""Small real run directories, made with the project's own writers: nothing here is faked.

A *past* incarnation is made by a child process that takes the run over and ends, so that its death is real.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from milesbatch.engines.protocol import VersionSpan
from milesbatch.evaluation.writer import Subject, commit_evaluation
from milesbatch.recipe.models import ArithmeticData, MadeModel, Recipe
from milesbatch.records import (
    BatchRecord,
    CheckpointManifest,
    EvaluationRecord,
    EvaluationSettings,
    GroupRef,
    IncarnationRecord,
    Rejection,
    Seal,
    WeightsManifest,
    digest_bytes,
)
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.durable import create_exclusively
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.store.patience import Patience
from milesbatch.store.takeover import Claimant, take_over
from milesbatch.trainer.checkpointing import Checkpointer, CheckpointFacts, read_checkpoint
from milesbatch.trajectories.groups import group_refs
from milesbatch.trajectories.inflight_schema import BegunSample, InflightMetadata, Life, tokens_digest
from milesbatch.trajectories.inflight_writer import write_inflight
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.trajectories.trajectory import Message, Trajectory
from milesbatch.trajectories.writer import write_trajectories
from milesbatch.weights.reader import read_manifest

AT = "2026-03-01T12:00:00.000000Z"
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
GROUPS_PER_STEP = 4
GROUPS_PER_LEASE = 2
IMPATIENT = Patience(0.0, print)


def unfenced() -> None:
    """The fencing check of a process that does not (yet) know that it was taken over."""


def make_recipe(**changes: Any) -> Recipe:
    """4 groups a step, 2 groups a lease, 2 samples a group, staleness 1; ``changes`` by section."""
    sections: dict[str, Any] = {
        "name": "small",
        "steps": 8,
        "model": MadeModel().model_dump(),
        "data": ArithmeticData().model_dump(),
        "rollout": {"samples_per_group": 2, "groups_per_lease": GROUPS_PER_LEASE, "staleness": 1},
        "trainer": {"groups_per_step": GROUPS_PER_STEP, "ranks": 1},
    }
    for name, value in changes.items():
        sections[name] = {**sections.get(name, {}), **value} if isinstance(value, dict) else value
    return Recipe.model_validate(sections)


def make_layout(root: Path) -> RunLayout:
    """Directories of a run, and nothing else."""
    layout = RunLayout(root)
    for directory in layout.directories():
        directory.mkdir(parents=True)
    return layout


def make_run(root: Path, recipe: Recipe | None = None) -> RunLayout:
    """A committed run without any incarnation."""
    layout, recipe = RunLayout(root), recipe or make_recipe()
    lay_out(layout, recipe)
    commit_run(layout, recipe, {"model": digest_bytes(b"model"), "data": digest_bytes(b"data")})
    return layout


# -- trajectories ---------------------------------------------------------------------------------------------------


def make_trajectory(group: int, sample: int = 0, version: int = 0, **changes: Any) -> Trajectory:
    """Prompt of 2 tokens, response of 3 under ``version``."""
    values: dict[str, Any] = {
        "group_id": group,
        "sample_index": sample,
        "prompt_id": f"p{group}",
        "messages": (Message("user", "1+1="), Message("assistant", "2")),
        "tokens": (5, 6, 7 + sample, 8, 9),
        "loss_mask": (False, False, True, True, True),
        "logprobs": (0.0, 0.0, -0.5, -1.25, -0.25),
        "versions": (VersionSpan(2, version),),
        "weights_digest": digest_bytes(f"weights {version}".encode()),
        "reward": float(sample % 2),
        "rewards": {"answer": float(sample % 2)},
        "finish_reason": "stop",
        "turns": 1,
        "seed": 1000 * group + sample,
        "worker": "rollout-0",
        "incarnation": 1,
        "started": START,
        "ended": START,
        "prompt_tokens": 2,
        "response_tokens": 3,
    }
    return Trajectory(**{**values, **changes})


def write_groups(
    layout: RunLayout,
    groups: Iterable[int],
    *,
    version: int = 0,
    incarnation: int = 1,
    worker: str = "rollout-0",
    samples: int = 2,
    before_commit: Callable[[], None] = unfenced,
    **changes: Any,
) -> tuple[GroupRef, ...]:
    """Commit one trajectory file of whole ``groups``; ``changes`` go into every trajectory."""
    rows = [
        make_trajectory(group, sample, version, worker=worker, incarnation=incarnation, **changes)
        for group in groups
        for sample in range(samples)
    ]
    name, _ = write_trajectories(
        layout,
        rows,
        incarnation=incarnation,
        worker=worker,
        metadata=FileMetadata("run-1", digest_bytes(b"tokenizer"), digest_bytes(b"template")),
        before_commit=before_commit,
        samples_per_group=samples,
    )
    return group_refs(layout.trajectory(name))


def save_unfinished(
    layout: RunLayout, groups: Sequence[int], *, incarnation: int = 1, worker: str = "rollout-0", tokens: int = 3
) -> TrajectoryName:
    """Save a block: two samples of its first group are begun, with ``tokens`` tokens under version 0."""
    samples = [
        BegunSample(
            group_id=groups[0],
            sample_index=sample,
            prompt_digest=tokens_digest((5, 6)),
            tokens=(7,) * tokens,
            logprobs=(-0.5,) * tokens,
            versions=(VersionSpan(0, 0),),
            weights=(digest_bytes(b"weights 0"),),
            finish_reason=None,
            started=START,
            lives=(Life(incarnation, tokens),),
        )
        for sample in range(2)
    ]
    name, _ = write_inflight(
        layout,
        samples,
        groups=groups,
        incarnation=incarnation,
        worker=worker,
        metadata=InflightMetadata("run-1", digest_bytes(b"tokenizer")),
        before_commit=unfenced,
    )
    return name


# -- batch records --------------------------------------------------------------------------------------------------


def make_ref(group: int, version: int = 0, version_max: int | None = None) -> GroupRef:
    """A reference to a group in a file that is not looked at."""
    return GroupRef(
        group_id=group,
        path=f"{group:06d}-{group:06d}.i000001.rollout-0.0123456789abcdef.arrow",
        digest=digest_bytes(str(group).encode()),
        content=digest_bytes(b"content %d" % group),
        version_min=version,
        version_max=version if version_max is None else version_max,
        samples=2,
    )


def make_rejection(group: int, reason: Any = "stale") -> Rejection:
    return Rejection(group_id=group, reason=reason, path="x.arrow", digest=digest_bytes(str(group).encode()))


def make_batch(
    step: int, trained: Sequence[GroupRef], rejected: Sequence[Rejection] = (), incarnation: int = 1
) -> BatchRecord:
    ids = [group.group_id for group in (*trained, *rejected)]
    return BatchRecord(
        step=step,
        incarnation=incarnation,
        trained=tuple(trained),
        rejected=tuple(rejected),
        stream_position=max(ids, default=-1) + 1,
        created_at=AT,
    )


def commit_batch(
    layout: RunLayout, step: int, trained: Sequence[GroupRef], incarnation: int = 1, rejected: Sequence[Rejection] = ()
) -> BatchRecord:
    record = make_batch(step, trained, rejected, incarnation)
    create_exclusively(layout.batch(step), record.to_bytes())
    return record


# -- weights --------------------------------------------------------------------------------------------------------


def publish(
    layout: RunLayout, versions: Iterable[int], incarnation: int = 1, keyframe_every: int = 3
) -> list[WeightsManifest]:
    """Publish ``versions`` in order through the real publisher, going on from what is there."""
    import torch

    from milesbatch.weights.publisher import Publisher

    publisher = Publisher(layout, incarnation, keyframe_every=keyframe_every, before_commit=unfenced)
    manifests = []
    for version in versions:
        if publisher.snapshot_version is None and version > 0 and layout.weights_manifest(version - 1).exists():
            publisher.seed(version - 1)
        weight = torch.arange(256, dtype=torch.float32)
        weight[: version + 1] += version
        manifests.append(publisher.publish(version, [("w", weight), ("b", torch.tensor([float(version)]))], {}))
    return manifests


# -- checkpoints ----------------------------------------------------------------------------------------------------


@dataclass
class FileSaver:
    """A saver that writes its state as files at once: enough for everything but the tensors."""

    running: bool = False
    states: list[Mapping[str, Any]] = field(default_factory=list)

    def start(self, state_dict: Mapping[str, Any], directory: Path, afterwards: Callable[[], None] | None) -> None:
        self.states.append(state_dict)
        for name, data in state_dict.items():
            (directory / name).write_bytes(data)
        self.running = True
        if afterwards is not None:
            afterwards()

    def await_copy(self) -> None:
        return

    def later(self, action: Callable[[], None]) -> None:
        action()

    @property
    def is_done(self) -> bool:
        return self.running

    def wait(self) -> None:
        self.running = False


def make_facts(step: int, **changes: Any) -> CheckpointFacts:
    values: dict[str, Any] = {
        "step": step,
        "weights_digest": digest_bytes(f"weights {step}".encode()),
        "stream_position": step * GROUPS_PER_STEP,
        "fates_since": 0,
        "fates": {},
        "pending": (),
        "divergences": (),
    }
    return CheckpointFacts(**{**values, **changes})


def commit_checkpoint(layout: RunLayout, step: int, incarnation: int = 1, keep: int = 100) -> CheckpointManifest:
    checkpointer = Checkpointer(layout, Fence(layout, incarnation), FileSaver(), 0, 1, keep, IMPATIENT)
    checkpointer.prepare(step)
    checkpointer.start({"model.distcp": b"state %d" % step * 50, "optim.distcp": b"o" * 64}, make_facts(step))
    assert checkpointer.finish() == step
    return read_checkpoint(layout, step)


# -- evaluations ----------------------------------------------------------------------------------------------------


def make_settings(num_prompts: int = 2, samples: int = 1, prompts: bytes = b"held out") -> EvaluationSettings:
    """Greedy, unless there are several samples."""
    return EvaluationSettings(
        prompts=digest_bytes(prompts),
        num_prompts=num_prompts,
        samples_per_prompt=samples,
        temperature=0.0 if samples == 1 else 1.0,
        top_p=1.0,
        top_k=-1,
        max_new_tokens=8,
        stop=(),
        seed=0,
        reward=digest_bytes(b"reward"),
    )


def evaluate_version(
    layout: RunLayout,
    version: int,
    rewards: Sequence[float] = (0.0, 1.0),
    *,
    name: str = "recipe",
    settings: EvaluationSettings | None = None,
    weights_digest: str | None = None,
    started: datetime = START,
    **changes: Any,
) -> EvaluationRecord:
    """Commit an evaluation with one sample of each prompt, through the real writer; ``changes`` go into every sample.

    The weights are those that the run has published, or made-up ones.
    """
    manifest = read_manifest(layout, version)
    digest = weights_digest or (manifest.weights_digest if manifest else digest_bytes(f"weights {version}".encode()))
    rows = [
        make_trajectory(
            group,
            0,
            version,
            **{
                "reward": reward,
                "rewards": {"answer": reward},
                "weights_digest": digest,
                "worker": "evaluation-0",
                "started": started,
                "ended": started + timedelta(seconds=2),
                **changes,
            },
        )
        for group, reward in enumerate(rewards)
    ]
    subject = Subject(version, digest, name, settings or make_settings(len(rewards)))
    metadata = FileMetadata("run-1", digest_bytes(b"tokenizer"), digest_bytes(b"template"))
    return commit_evaluation(layout, subject, rows, metadata)


# -- incarnations ---------------------------------------------------------------------------------------------------


def make_incarnation(number: int, **changes: Any) -> IncarnationRecord:
    values: dict[str, Any] = {
        "incarnation": number,
        "host": "elsewhere",
        "pid": 1,
        "process_started": "another boot:1",
        "job_id": "local",
        "restart_count": 0,
        "cause": "first",
        "started_at": AT,
        "seal": Seal(last_batch=0, last_version=-1, checkpoints=(), trajectories=()),
    }
    return IncarnationRecord(**{**values, **changes})


def past_incarnation(layout: RunLayout) -> int:
    """A controller takes the run over and dies at once; returns its number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            take_over(layout, Claimant(), {})
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child could not take the run over"
    return max(int(path.stem) for path in layout.incarnations.glob("*.json"))


def grow(layout: RunLayout, steps: int, incarnation: int = 1, checkpoint_every: int = 2) -> None:
    """``steps`` whole steps of a bitwise run: trajectories, batch records, versions 0..steps, checkpoints."""
    publish(layout, range(steps + 1), incarnation)
    for step in range(1, steps + 1):
        refs: list[GroupRef] = []
        first = (step - 1) * GROUPS_PER_STEP
        for group in range(first, first + GROUPS_PER_STEP, GROUPS_PER_LEASE):
            block = range(group, group + GROUPS_PER_LEASE)
            refs += write_groups(layout, block, version=max(0, step - 2), incarnation=incarnation)
        commit_batch(layout, step, refs, incarnation)
        if step % checkpoint_every == 0:
            commit_checkpoint(layout, step, incarnation)


# -- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int = -1, bit: int = 0x10) -> None:
    """Flip one bit of a file in place."""
    data = bytearray(path.read_bytes())
    data[offset] ^= bit
    path.write_bytes(data)


def quarantined(layout: RunLayout) -> dict[str, str]:
    """Name of each quarantined artefact -> its reason."""
    found = {}
    for path in sorted(layout.quarantine.iterdir()):
        if not path.name.endswith(".reason.txt"):
            found[path.name] = path.with_name(path.name + ".reason.txt").read_text()
    return found
