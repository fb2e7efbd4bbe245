"""Where a trainer starts: which checkpoint, which recorded steps are replayed, where new steps begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from milesbatch.errors import CorruptArtefactError


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """Load the state after ``checkpoint_step`` (0 is the starting model when ``from_checkpoint`` is False), replay
    ``checkpoint_step + 1 .. last_batch`` with the recorded batches, then go on."""

    checkpoint_step: int
    from_checkpoint: bool
    last_batch: int
    is_published: bool = True
    """Is the policy version of that checkpoint published? False only at the origin of a fork whose copy of it is damaged."""

    @property
    def replayed(self) -> range:
        return range(self.checkpoint_step + 1, self.last_batch + 1)


def plan_resume(checkpoints: Sequence[int], last_batch: int, last_version: int, origin_step: int = 0) -> ResumePlan:
    """Choose the newest checkpoint from which every policy version that is missing can be made again.

    A checkpoint above ``last_version`` cannot be used, because the versions between would stay unpublished; every
    batch record is kept, so the starting model is always a way back; for a fork, which has none of the records before,
    the checkpoint of ``origin_step`` with which it began is that.

    Raises:
        CorruptArtefactError: the fork's first checkpoint does not count any more, and no other one can be used.
    """
    usable = [step for step in checkpoints if step <= min(last_batch, last_version)]
    if not usable and origin_step:
        if origin_step not in checkpoints:
            raise CorruptArtefactError(
                f"checkpoint {origin_step}, with which this fork began, is damaged or missing, and no later one can be used",
                mend="put it back from a copy of the run, or fork the parent again with --fork",
            )
        return ResumePlan(origin_step, True, last_batch, is_published=last_version >= origin_step)
    if not usable:
        return ResumePlan(0, False, last_batch)
    return ResumePlan(max(usable), True, last_batch)
