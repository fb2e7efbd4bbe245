"""What a job does when its controller has stopped: nothing, start again, or be replaced by another job. Pure.

Invariant: a finished run, a cancelled one, and wrong input are never queued again (promise 7: it stops rather than burns).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from milesbatch.decisions.job_states import JobState
from milesbatch.records import IncarnationRecord

BY_HAND = "by hand"
"""Cause of a start that a person asked for: it gives the run all its tries back."""


class Next(Enum):
    """What becomes of the run after this job."""

    END = "end"
    LEAVE = "Slurm starts this job again"
    REQUEUE = "requeue"
    """The same job again."""
    REPLACE = "replace"
    """Another job, without the lost nodes: it need not wait until Slurm has noticed that they are lost."""


def what_next(
    *, cancelled: bool, nodes_lost: bool, may_requeue: bool, own_state: JobState, is_requeued: bool = False
) -> Next:
    """Decide after a controller that was stopped (not one that finished or failed).

    ``own_state`` is what Slurm says of this very job. While it runs, only this process knows that it should start again.
    Otherwise Slurm is ending it already: for a preemption or a requeue, which start it again anyway (``is_requeued``: Slurm
    counts another start of it already), or for somebody's ``scancel``, which looks the same to the processes and must not be
    undone. At a time limit that was not seen coming nobody starts it again, and a job that is over cannot be requeued.
    """
    if is_requeued and not cancelled:
        return Next.LEAVE
    if own_state is JobState.TIMED_OUT and may_requeue and not cancelled:
        return Next.REPLACE
    if cancelled or not may_requeue or own_state not in (JobState.LIVE, JobState.UNKNOWN):
        return Next.END
    return Next.REPLACE if nodes_lost else Next.REQUEUE


def starts_without_progress(incarnations: Sequence[IncarnationRecord]) -> int:
    """How many of the last starts recorded no new step, counted back to one that a person asked for.

    Starts after a preemption or a time limit count too: a run that cannot make one step in a whole job makes none ever.
    """
    count = 0
    for later, earlier in zip(reversed(incarnations), reversed(incarnations[:-1]), strict=False):
        if later.seal.last_batch > earlier.seal.last_batch or later.cause.startswith(BY_HAND):
            break
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Nodes that a run avoids, the oldest first, at most ``limit``."""

    nodes: tuple[str, ...]
    limit: int

    def plus(self, lost: Sequence[str]) -> tuple[str, ...]:
        """With ``lost`` added; the oldest are given another chance when there are too many."""
        kept = [node for node in self.nodes if node not in lost]
        return tuple([*kept, *dict.fromkeys(lost)][-self.limit :] if self.limit else ())
