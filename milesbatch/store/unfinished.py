"""The files of unfinished episodes in ``inflight/``: which there are, and which of them are done with (relaxed mode).

Owns: listing them, and the tidying just after a take-over. Never: reads one. Invariant: only what nobody needs is deleted; a
file that an old listing lacks costs time (its block is generated from the start), never correctness. The pages behind it
are ``docs/protocol.md`` and ``docs/format-inflight.md``; the crash states are in ``trajectories/inflight_writer.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from milesbatch.store.durable import is_residue, remove_files, storage_error
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.store.removal import take_away
from milesbatch.store.sight import AT_ONCE, Sight, refresh
from milesbatch.store.takeover import Incarnation

_STRANGE = "not a file of unfinished episodes"


def saved_blocks(layout: RunLayout) -> list[TrajectoryName]:
    """Names of the files, by their groups; of one block the newest incarnation's first.

    Raises:
        StorageError: the directory cannot be listed. One that does not exist is empty.
    """
    names = [name for path in _listed(layout) if (name := _parse(path)) is not None]
    return sorted(names, key=lambda n: (n.first_group, n.last_group, -n.incarnation, n.worker, n.tag))


def take_up_unfinished(layout: RunLayout, taken: Incarnation, sight: Sight = AT_ONCE) -> Incarnation:
    """``taken``, which has just taken over, with the files that it may continue. Those whose groups are all decided or ready
    are deleted, and what is no such file goes to quarantine. Files that appear later are for the incarnation after it.

    Crash state: some of what is to go is left; the next one tidies again.

    Raises:
        FencedError: a newer incarnation has taken over.
        StorageError: a file can be neither deleted nor moved.
    """
    if sight.wait_s:  # the last files of the one before may have been saved just now
        refresh(layout.inflight)
    moved = []
    for path in _listed(layout):
        if _parse(path) is None:
            take_away(layout, taken.number, path, _STRANGE)
            moved.append((str(path.relative_to(layout.root)), _STRANGE))
    found, names = taken.found, saved_blocks(layout)
    ready = {group for name in found.ready_files for group in range(name.first_group, name.last_group + 1)}
    fates = found.fates
    left = tuple(
        name
        for name in names
        if any(fates.is_pending(group) and group not in ready for group in range(name.first_group, name.last_group + 1))
    )
    done = [str(name) for name in names if name not in left]
    if done:
        remove_files(layout.inflight, done)
    return replace(taken, unfinished=left, quarantined=(*taken.quarantined, *moved))


def _listed(layout: RunLayout) -> list[Path]:
    try:
        found = list(layout.inflight.iterdir()) if layout.inflight.is_dir() else []
    except OSError as error:
        raise storage_error(layout.inflight, error) from error
    return sorted(path for path in found if not is_residue(path.name))


def _parse(path: Path) -> TrajectoryName | None:
    try:
        return TrajectoryName.parse(path.name)
    except ValueError:
        return None
