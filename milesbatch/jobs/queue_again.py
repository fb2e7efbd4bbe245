"""Having Slurm start this very job again, from inside it. Slurm ends the process that asks soon after it did."""

from __future__ import annotations

import time

from milesbatch.cluster import slurm
from milesbatch.errors import SlurmError

_PATIENCE_S = 120.0
"""For how long a Slurm that does not answer (a restart of its controller) is asked again."""


def queue_again(job_id: str, patience_s: float = _PATIENCE_S) -> None:
    """Requeue the job, to start as soon as there are nodes.

    Raises:
        SlurmError: Slurm refuses, or did not answer for ``patience_s`` seconds; the job ends without another start.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            slurm.requeue(job_id)
            break
        except SlurmError as error:
            if not error.may_be_asked_again or time.monotonic() > deadline_s:
                raise
            time.sleep(2.0)
    try:
        slurm.start_soon(job_id)
    except SlurmError:
        return  # it is queued; Slurm's own delay before the start is all that is lost
