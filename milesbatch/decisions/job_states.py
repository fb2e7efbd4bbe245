"""What a Slurm job state means for a run. A table; pure. Every state of the man page of squeue has its line.

Invariant: a state that is not in the table is UNKNOWN, and UNKNOWN is never taken for success or for an end.
Source: "JOB STATE CODES" in squeue(1), Slurm 22.05 to 24.11.
"""

from __future__ import annotations

from enum import Enum


class JobState(Enum):
    """What is left of a job."""

    PENDING = "pending"
    """It waits to be started (again)."""
    LIVE = "live"
    """Its processes may be running."""
    ENDING = "ending"
    """Slurm is ending it; its processes may still be running."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    PREEMPTED = "preempted"
    NODE_FAILED = "node failed"
    UNKNOWN = "unknown"

    @property
    def is_over(self) -> bool:
        """Slurm says that the job has ended and does not start again by itself."""
        return self in _OVER

    @property
    def may_run(self) -> bool:
        """Its processes may be running, or come to run."""
        return self in (JobState.PENDING, JobState.LIVE, JobState.ENDING)


_OVER = frozenset(
    {
        JobState.SUCCEEDED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.TIMED_OUT,
        JobState.PREEMPTED,
        JobState.NODE_FAILED,
    }
)

STATES: dict[str, JobState] = {
    "BOOT_FAIL": JobState.NODE_FAILED,
    "CANCELLED": JobState.CANCELLED,
    "COMPLETED": JobState.SUCCEEDED,
    "COMPLETING": JobState.ENDING,
    "CONFIGURING": JobState.PENDING,
    "DEADLINE": JobState.TIMED_OUT,
    "FAILED": JobState.FAILED,
    "LAUNCH_FAILED": JobState.NODE_FAILED,
    "NODE_FAIL": JobState.NODE_FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "PENDING": JobState.PENDING,
    "PREEMPTED": JobState.PREEMPTED,
    "RECONFIG_FAIL": JobState.NODE_FAILED,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESIZING": JobState.LIVE,
    "RESV_DEL_HOLD": JobState.PENDING,
    "REVOKED": JobState.CANCELLED,
    "RUNNING": JobState.LIVE,
    "SIGNALING": JobState.LIVE,
    "SPECIAL_EXIT": JobState.PENDING,
    "STAGE_OUT": JobState.ENDING,
    "STOPPED": JobState.LIVE,
    "SUSPENDED": JobState.LIVE,
    "TIMEOUT": JobState.TIMED_OUT,
    "POWER_UP_NODE": JobState.PENDING,
    "UPDATE_DB": JobState.ENDING,
}


def state_of(text: str) -> JobState:
    """The state that Slurm's word stands for (``CANCELLED by 1000`` and ``CANCELLED+`` too)."""
    words = text.strip().split()
    return STATES.get(words[0].rstrip("+").upper(), JobState.UNKNOWN) if words else JobState.UNKNOWN
