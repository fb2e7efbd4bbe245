"""Taking a run over: the next incarnation, its seal, and the sweep. Only the controller calls this.

The protocol and its crash states:

1. read all incarnation records; refuse when the newest one's controller is alive (``RunHeldError``);
2. survey what counts, make it durable (``store/settle.py``), write the seal into ``incarnations/N+1.json`` and create
   it exclusively: *this is the take-over*. Killed before: nothing happened. Two at once: one creation succeeds, the other
   controller stops with exit code 75.
3. move what does not count to ``quarantine/`` and remove temporary files. Killed midway: the seal already says that they
   do not count, and the next take-over sweeps again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milesbatch.errors import MilesbatchError, RunHeldError, StorageError
from milesbatch.records import IncarnationRecord
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import create_exclusively, move_to_quarantine, read_optional, sweep_temporary
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import is_alive, process_started
from milesbatch.store.settle import settle
from milesbatch.store.survey import Survey, read_incarnations, survey


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who takes over: the attempt (job id and restart count; the local launcher has none) and why."""

    job_id: str = "local"
    restart_count: int = 0
    cause: str = "continued"


@dataclass(frozen=True, slots=True)
class Incarnation:
    """A run in the hands of this controller."""

    record: IncarnationRecord
    found: Survey
    """What was accepted at the take-over."""
    quarantined: tuple[tuple[str, str], ...]
    """What was moved out of the way, and why."""

    @property
    def number(self) -> int:
        return self.record.incarnation


def take_over(layout: RunLayout, claimant: Claimant, recipe_changes: Mapping[str, Any]) -> Incarnation:
    """Become the run's newest incarnation.

    Raises:
        RunHeldError: another controller is alive, or won the race; says who.
        CorruptArtefactError: an incarnation record is damaged.
        StorageError: the run directory cannot be read or written; nothing was taken over.
    """
    earlier = read_incarnations(layout)
    if earlier and is_alive(layout, earlier[-1]):
        raise _held(layout, earlier[-1])
    found = survey(layout, earlier)
    settle(layout, earlier, found)
    number = len(earlier) + 1
    record = IncarnationRecord(
        incarnation=number,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_started=process_started() or "unknown",
        job_id=claimant.job_id,
        restart_count=claimant.restart_count,
        cause=claimant.cause if earlier else "first",
        started_at=utc_now(),
        recipe_changes=dict(recipe_changes),
        seal=found.seal(),
    )
    path = layout.incarnation(number)
    try:
        create_exclusively(path, record.to_bytes())
    except StorageError:
        # Exists already, or the winner's sweep took the temporary file away: either way its record is there.
        data = read_optional(path)
        if data is None or data == record.to_bytes():
            raise
        raise _held(layout, IncarnationRecord.from_bytes(data, str(path))) from None
    return Incarnation(record, found, _sweep(layout, found))


def _held(layout: RunLayout, record: IncarnationRecord) -> MilesbatchError:
    return RunHeldError(
        f"{layout.root} is held by incarnation {record.incarnation}: process {record.pid} on {record.host}"
        f" (job {record.job_id}), which is alive",
        mend="watch it with `milesbatch status`, or end it first; then give the same command again",
    )


def _sweep(layout: RunLayout, found: Survey) -> tuple[tuple[str, str], ...]:
    moved = []
    for path, reason in found.broken:
        if path.exists():
            move_to_quarantine(path, layout.quarantine, reason)
            moved.append((str(path.relative_to(layout.root)), reason))
    for directory in (layout.root, *layout.directories()):
        sweep_temporary(directory)
    for parent in (layout.weights, layout.checkpoints):
        for directory in parent.iterdir():
            if directory.is_dir():
                sweep_temporary(directory)
    return tuple(moved)
