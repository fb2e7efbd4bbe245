"""Trajectories of many kinds, for questions to be asked of them."""

from __future__ import annotations

from typing import Any

from builders import make_rejection, make_trajectory, unfenced

from milesbatch.records import GroupRef, Rejection, digest_bytes
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.groups import group_refs
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.trajectories.trajectory import Message, Trajectory
from milesbatch.trajectories.writer import write_trajectories

METADATA = FileMetadata("run-1", digest_bytes(b"tokenizer"), digest_bytes(b"template"))


def write_file(layout: RunLayout, samples: list[Trajectory], incarnation: int = 1) -> TrajectoryName:
    """Commit a file of any trajectories of whole groups."""
    name, _ = write_trajectories(
        layout,
        samples,
        incarnation=incarnation,
        worker=samples[0].worker,
        metadata=METADATA,
        before_commit=unfenced,
    )
    return name


def write_samples(layout: RunLayout, samples: list[Trajectory], incarnation: int = 1) -> tuple[GroupRef, ...]:
    """The same; gives the references that a batch record holds."""
    return group_refs(layout.trajectory(write_file(layout, samples, incarnation)))


def reject(ref: GroupRef, reason: str) -> Rejection:
    return make_rejection(ref.group_id, reason).model_copy(update={"path": ref.path, "digest": ref.digest})


def varied_sample(group: int, index: int, **changes: Any) -> Trajectory:
    """Sample ``index`` of ``group``: response of ``1 + group + index`` tokens; the last one of odd groups failed."""
    length = 1 + group + index
    failed = index == 3 and group % 2 == 1
    place = f"(/home/a/rewards.py:1{index})"
    error = f"reward function rewards:exact failed on prompt p{group}: ValueError: {group} is no 'num{index}' {place}"
    return make_trajectory(
        group,
        index,
        prompt_id=f"p{group % 3}",
        messages=(Message("user", f"{group}+{index}="), Message("assistant", f"it is {group + index}")),
        tokens=(5, 6, *range(10, 10 + length)),
        loss_mask=(False, False) + (True,) * length,
        logprobs=(0.0, 0.0) + (-0.5,) * length,
        response_tokens=length,
        reward=0.0 if failed else index / 4,
        rewards={"answer": index / 4},
        finish_reason="length" if index == 2 else "stop",
        error=error if failed else None,
        env={"answer": str(group + index)},
        **changes,
    )
