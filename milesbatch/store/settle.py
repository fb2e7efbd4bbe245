"""Making durable what was found before anything is built on it.

A writer that is killed between the commit of a name and the sync of its directory leaves an artefact that is visible, whole,
and not durable. Whoever goes on from it (a take-over, which seals it; a trainer that was started again, which replays it)
would lose its base when the power fails later. Owns these syncs; never writes a byte. Invariant: on return, the names of
everything that a survey accepted are durable; their content was before their commit. The page behind it is
``docs/crash-points.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from milesbatch.records import IncarnationRecord
from milesbatch.store.durable import storage_error
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import current
from milesbatch.store.survey import Survey


def settle(layout: RunLayout, incarnations: Sequence[IncarnationRecord], found: Survey) -> None:
    """Make what ``found`` accepts durable.

    Only the newest incarnation's versions are synced one by one: its own seal settled those before.

    Raises:
        StorageError: a directory cannot be synced; nothing may be built on it.
    """
    since = incarnations[-1].seal.last_version if incarnations else -1
    directory = layout.root
    try:
        for directory in _directories(layout, since, found):
            current().sync_directory(directory)
    except OSError as error:
        raise storage_error(directory, error) from error


def _directories(layout: RunLayout, since: int, found: Survey) -> Iterator[Path]:
    """Inner ones first."""
    for version in range(max(since + 1, found.origin.first_version), found.last_version + 1):
        yield layout.weights_version(version)
    # All that are there: a manifest that retention has just removed must not come back after the seal.
    yield from (entry for entry in sorted(layout.checkpoints.iterdir()) if entry.is_dir())
    yield from (directory for directory in layout.directories() if directory.is_dir())
    yield layout.root
