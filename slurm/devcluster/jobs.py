"""Jobs as Slurm reports them.

Owns: reading ``squeue --json``. Never: decides anything. Invariant: one value for each component of a heterogeneous job, with
the leader's id in all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
)


@dataclass(frozen=True)
class Job:
    """One job, or one component of a heterogeneous job.

    ``leader`` is the id that users know (the own id of a plain job), ``component`` the offset in it (0 for a plain job).
    ``restarts`` counts requeues; ``exit_code`` is the batch script's (128 + signal when a signal ended it).
    """

    id: int
    leader: int
    component: int
    name: str
    partition: str
    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: int

    @property
    def has_ended(self) -> bool:
        """Whether Slurm will not run it any more."""
        return self.state in ENDED


def read_jobs(text: str) -> list[Job]:
    """All jobs in the output of ``squeue --json``, by id."""
    return sorted((_job(entry) for entry in json.loads(text)["jobs"]), key=lambda job: job.id)


def _job(entry: dict[str, Any]) -> Job:
    leader = int(entry["het_job_id"]) if entry["het_job_id"] else int(entry["job_id"])
    status = int(entry["exit_code"])
    return Job(
        id=int(entry["job_id"]),
        leader=leader,
        component=int(entry["het_job_offset"]) if entry["het_job_id"] else 0,
        name=entry["name"],
        partition=entry["partition"],
        state=entry["job_state"],
        reason=entry["state_reason"],
        nodes=entry["nodes"],
        restarts=int(entry["restart_cnt"]),
        exit_code=128 + (status & 127) if status & 127 else status >> 8,
    )
