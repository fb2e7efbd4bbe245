"""Committing a batch record: the moment at which groups get their fates (protocol rule 4).

Crash states: killed before the exclusive creation, no group has a fate and the next start chooses again; killed after it, the
step is replayed with exactly these groups. A record of the same step that a fenced incarnation managed to write after
the seal does not count: it is moved to quarantine, and this one is committed.
"""

from __future__ import annotations

from milesbatch.errors import FencedError
from milesbatch.records import BatchRecord
from milesbatch.store.durable import AlreadyExistsError, create_exclusively, read_optional
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.removal import take_away
from milesbatch.store.sight import AT_ONCE, Sight
from milesbatch.store.survey import Seals, read_incarnations


def commit_batch_record(layout: RunLayout, record: BatchRecord, fence: Fence, sight: Sight = AT_ONCE) -> None:
    """Commit ``record``; on return the fates in it are durable and visible.

    ``sight``: how long a record that is there already is looked at until all of it is seen.

    Raises:
        FencedError: a newer incarnation has taken over.
        AlreadyExistsError: the step is recorded otherwise by this incarnation (two trainers at once: a bug) or in a record
            of an earlier one that counts.
        StorageError: nothing was committed.
    """
    path = layout.batch(record.step)
    try:
        create_exclusively(path, record.to_bytes(), fence.check)
    except AlreadyExistsError:
        if read_optional(path) is None:
            fence.check()  # a newer incarnation has just moved it away
            raise
        other = sight.until_seen(lambda: BatchRecord.from_bytes(read_optional(path) or b"", str(path)))
        if other.incarnation > record.incarnation:
            raise FencedError(f"incarnation {other.incarnation} has recorded step {record.step}") from None
        if other.incarnation == record.incarnation:
            raise
        if Seals(read_incarnations(layout, at_least=record.incarnation)).accept_batch(other):
            raise  # it is within the seal: its fates stand, and whoever calls has not looked at it
        reason = f"incarnation {other.incarnation} wrote it after incarnation {record.incarnation} had sealed the run"
        take_away(layout, record.incarnation, path, reason)
        create_exclusively(path, record.to_bytes(), fence.check)
