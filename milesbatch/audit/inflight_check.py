"""Files of unfinished episodes: whole, or a note. Nothing that counts depends on them, so they break no promise.

Owns the notes; never counts what they hold as trajectories or groups. Invariant: a whole file of a block that is still to be
made is not mentioned, as it is what a stop should leave. The page behind it is ``docs/audit.md``.
"""

from __future__ import annotations

from milesbatch.audit.findings import Findings
from milesbatch.audit.records_check import History
from milesbatch.errors import CorruptArtefactError, StorageError
from milesbatch.store.durable import TEMPORARY_PREFIX
from milesbatch.store.entries import listed
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.inflight_reader import read_inflight


def check_inflight(layout: RunLayout, history: History, findings: Findings) -> None:
    """Read every file in ``inflight/``.

    Raises:
        FormatVersionError: one is of a newer format.
    """
    for path in listed(layout.inflight):
        if path.name.startswith(TEMPORARY_PREFIX):
            continue
        try:
            name = TrajectoryName.parse(path.name)
        except ValueError:
            findings.note("stranger", path, "it is not a file of unfinished episodes", move=path)
            continue
        try:
            found = read_inflight(path)
        except CorruptArtefactError as error:
            if path.exists():  # else its block was committed while the audit ran
                detail = f"{error.what}; nothing depends on it: its episodes are generated from the start"
                findings.note("leftover", path, detail, move=path)
            continue
        except StorageError as error:
            findings.note("leftover", path, error.what)
            continue
        findings.count(found.num_bytes)
        if all(history.is_decided(group) for group in range(name.first_group, name.last_group + 1)):
            findings.note(
                "leftover", path, "unfinished episodes of groups that were decided; the next start removes it"
            )
