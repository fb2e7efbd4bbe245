"""Where a trainer starts: which checkpoint, which recorded steps are replayed, where new steps begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """Load the state after ``checkpoint_step`` (0 is the starting model when ``from_checkpoint`` is False), replay
    ``checkpoint_step + 1 .. last_batch`` with the recorded batches, then go on."""

    checkpoint_step: int
    from_checkpoint: bool
    last_batch: int

    @property
    def replayed(self) -> range:
        return range(self.checkpoint_step + 1, self.last_batch + 1)


def plan_resume(checkpoints: Sequence[int], last_batch: int, last_version: int) -> ResumePlan:
    """Choose the newest checkpoint from which every policy version that is missing can be made again.

    A checkpoint above ``last_version`` cannot be used, because the versions between would stay unpublished; every
    batch record is kept, so the starting model is always a way back.
    """
    usable = [step for step in checkpoints if step <= min(last_batch, last_version)]
    if not usable:
        return ResumePlan(0, False, last_batch)
    return ResumePlan(max(usable), True, last_batch)
