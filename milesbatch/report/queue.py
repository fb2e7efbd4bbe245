"""What Slurm says of a run's jobs, for people. Reads the queue, changes nothing.

Owns: telling "not asked", "does not answer" and "has no job" apart. Never: decisions. Invariant: a run that was never
submitted costs no call of a Slurm command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milesbatch.cluster import slurm
from milesbatch.decisions.job_states import JobState
from milesbatch.errors import SlurmError
from milesbatch.jobs.marks import mark
from milesbatch.jobs.order import was_submitted
from milesbatch.store.layout import RunLayout

_ASK_S = 15.0
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job of the run that is pending, running or ending."""

    job_id: str
    role: str
    """``run`` or ``rollout``."""
    state: JobState
    reason: str
    nodes: str
    """Of all its components, in Slurm's short form; empty while it is pending."""
    time_left_s: float | None
    starts_at: str
    """When it started, or is expected to, in the cluster's local time; empty when Slurm cannot tell."""

    def to_json(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "role": self.role,
            "state": self.state.value,
            "reason": self.reason,
            "nodes": self.nodes,
            "time_left_s": self.time_left_s,
            "starts_at": self.starts_at,
        }


@dataclass(frozen=True, slots=True)
class QueueView:
    """Slurm's answer, or why there is none."""

    was_asked: bool
    error: str | None = None
    jobs: tuple[QueuedJob, ...] = ()

    @property
    def word(self) -> str | None:
        """None when there was nothing to ask; else ``answers``, or ``unreachable: ...``."""
        if not self.was_asked:
            return None
        return "answers" if self.error is None else f"unreachable: {self.error}"

    def of_role(self, role: str) -> tuple[QueuedJob, ...]:
        return tuple(job for job in self.jobs if job.role == role)


def ask_queue(layout: RunLayout) -> QueueView:
    """The run's jobs as Slurm has them now; never raises for a Slurm that does not answer."""
    if not was_submitted(layout):
        return QueueView(was_asked=False)
    marks = {mark(layout, role): role for role in ("run", "rollout")}
    try:
        found = slurm.queue(_ASK_S)
    except SlurmError as error:
        said = error.what.partition("exit status")[2].partition(": ")[2] or error.what
        return QueueView(was_asked=True, error=" ".join(said.split())[:_MOST_CHARACTERS])
    roles = {part.job.job_id: marks[part.job.comment] for part in found if part.job.comment in marks}
    jobs = [_job(role, [part for part in found if part.job.job_id == job_id]) for job_id, role in roles.items()]
    return QueueView(was_asked=True, jobs=tuple(sorted(jobs, key=lambda job: int(job.job_id))))


def _job(role: str, parts: list[slurm.QueueFacts]) -> QueuedJob:
    parts = sorted(parts, key=lambda part: part.job.het_offset)
    leader = parts[0]
    return QueuedJob(
        job_id=leader.job.job_id,
        role=role,
        state=leader.job.state,
        reason=leader.job.reason,
        nodes=",".join(part.job.nodes for part in parts if part.job.nodes),
        time_left_s=leader.time_left_s,
        starts_at=leader.starts_at,
    )
