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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from milesbatch.errors import MilesbatchError, RunHeldError, StorageError
from milesbatch.records import IncarnationRecord
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import create_exclusively, make_directory, read_optional, sweep_temporary
from milesbatch.store.holds import remove_abandoned
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.store.liveness import is_alive, process_started
from milesbatch.store.removal import take_away
from milesbatch.store.run import read_origin
from milesbatch.store.settle import settle
from milesbatch.store.sight import AT_ONCE, Sight, refresh
from milesbatch.store.survey import Survey, read_incarnations, survey

_SETTLE_S = 5.0
"""Longer than Lustre and BeeGFS keep what they remember; NFS is asked anew (:func:`milesbatch.store.sight.refresh`)."""


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
    unfinished: tuple[TrajectoryName, ...] = ()
    """Files of unfinished episodes that may be continued, see :func:`milesbatch.store.unfinished.take_up_unfinished`."""

    @property
    def number(self) -> int:
        return self.record.incarnation


def take_over(
    layout: RunLayout,
    claimant: Claimant,
    recipe_changes: Mapping[str, Any],
    holder_is_gone: Callable[[IncarnationRecord], bool] = lambda record: False,
    sight: Sight = AT_ONCE,
) -> Incarnation:
    """Become the run's newest incarnation.

    ``holder_is_gone`` may know, without watching, that the last controller has ended (the scheduler says so). ``sight`` is
    how long to look for what must be there and cannot be seen, before it counts as lost.

    Raises:
        RunHeldError: another controller is alive, or won the race; says who.
        FencedError: another one took over while this one swept.
        CorruptArtefactError: an incarnation record is damaged.
        StorageError: the run directory cannot be read or written; nothing was taken over.
    """
    for directory in layout.directories():
        make_directory(directory)  # of a run from before there was one; or this host does not see it
    if sight.wait_s:
        time.sleep(min(_SETTLE_S, sight.wait_s))  # the last commits of the one before may have been just now
        refresh(layout.incarnations)
    origin = sight.until_seen(lambda: read_origin(layout))
    earlier = sight.until_seen(lambda: read_incarnations(layout))
    if earlier and not holder_is_gone(earlier[-1]) and is_alive(layout, earlier[-1]):
        raise _held(layout, earlier[-1])
    if sight.wait_s:  # what this host remembers of them may be from a time before the last commits
        for directory in (layout.batches, layout.weights, layout.checkpoints, layout.trajectories):
            refresh(directory)
    found = sight.until_complete(lambda: survey(layout, earlier, origin=origin), lambda found: found.unseen)
    if (
        sight.wait_s and found.broken
    ):  # before anything is taken away: under these names there may be something else by now
        for directory in sorted({path.parent for path, _ in found.broken}):
            refresh(directory)
        found = sight.until_complete(lambda: survey(layout, earlier, origin=origin), lambda found: found.unseen)
    if not all(layout.checkpoint_manifest(step).exists() for step in found.checkpoints):
        found = survey(
            layout, earlier, origin=origin
        )  # a trainer that still lives has gone on, and retired what was just found
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
        winner = sight.until_seen(lambda: IncarnationRecord.from_bytes(read_optional(path) or b"", str(path)))
        raise _held(layout, winner) from None
    return Incarnation(record, found, _sweep(layout, number, found))


def _held(layout: RunLayout, record: IncarnationRecord) -> MilesbatchError:
    return RunHeldError(
        f"{layout.root} is held by incarnation {record.incarnation}: process {record.pid} on {record.host}"
        f" (job {record.job_id}), which is alive",
        mend="watch it with `milesbatch status`, or end it first; then give the same command again",
    )


def _sweep(layout: RunLayout, incarnation: int, found: Survey) -> tuple[tuple[str, str], ...]:
    moved = []
    for path, reason in found.broken:
        if path.exists():
            try:
                take_away(layout, incarnation, path, reason)
            except StorageError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    continue  # seen here for a while longer, and gone where it lies: a network filesystem's cache
                raise
            moved.append((str(path.relative_to(layout.root)), reason))
    for directory in (layout.root, *layout.directories()):
        sweep_temporary(directory)
    remove_abandoned(layout)
    for parent in (layout.weights, layout.checkpoints, layout.evaluations):
        for directory in parent.iterdir() if parent.is_dir() else ():
            if directory.is_dir():
                sweep_temporary(directory)
    return tuple(moved)
