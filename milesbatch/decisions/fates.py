"""The fate of every prompt group, rebuilt from batch records alone.

Invariant (promise 1, exactly once): a group has at most one fate, and it never changes. A group that is named by no batch
record is pending.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from milesbatch.decisions.origin import BEGINNING, Origin
from milesbatch.errors import CorruptArtefactError
from milesbatch.records import BatchRecord


@dataclass(frozen=True, slots=True)
class Fate:
    """``trained(step)`` when ``reason`` is None, else ``rejected(reason, step)``."""

    step: int
    reason: str | None = None

    def __str__(self) -> str:
        return f"trained({self.step})" if self.reason is None else f"rejected({self.reason}, {self.step})"


@dataclass(slots=True)
class FateTable:
    """Fates of groups in the batch records up to ``last_step``, which begin behind the run's origin."""

    fates: dict[int, Fate] = field(default_factory=dict)
    last_step: int = 0
    origin: Origin = BEGINNING

    @classmethod
    def beginning_at(cls, origin: Origin) -> FateTable:
        """A table without records, of a run that begins at ``origin``."""
        return cls(last_step=origin.step, origin=origin)

    @classmethod
    def of(cls, records: Iterable[BatchRecord], origin: Origin = BEGINNING) -> FateTable:
        table = cls.beginning_at(origin)
        for record in records:
            table.add(record)
        return table

    def add(self, record: BatchRecord) -> None:
        """Take in the next batch record.

        Raises:
            CorruptArtefactError: the record is not the next one, or gives a group a second fate.
        """
        if record.step != self.last_step + 1:
            raise CorruptArtefactError(f"batch record {record.step} follows record {self.last_step}: one is missing")
        new = {group.group_id: Fate(record.step) for group in record.trained}
        for rejection in record.rejected:
            if rejection.group_id in new:
                raise CorruptArtefactError(
                    f"batch record {record.step} both trains and rejects group {rejection.group_id}"
                )
            new[rejection.group_id] = Fate(record.step, rejection.reason)
        if len(new) != len(record.trained) + len(record.rejected):
            raise CorruptArtefactError(f"batch record {record.step} names a group twice")
        for group_id, fate in new.items():
            if group_id in self.fates:
                raise CorruptArtefactError(
                    f"group {group_id} is {self.fates[group_id]} and, in batch {record.step}, {fate}"
                )
            if self.origin.has_decided(group_id):
                raise CorruptArtefactError(
                    f"group {group_id} is {fate} in batch {record.step}; the run that this one was forked from had decided it"
                )
        self.fates.update(new)
        self.last_step = record.step

    def is_pending(self, group_id: int) -> bool:
        return group_id not in self.fates and not self.origin.has_decided(group_id)

    @property
    def stream_position(self) -> int:
        """Smallest group id above which (itself included) no group has a fate."""
        return max(self.origin.stream_position, max(self.fates, default=-1) + 1)
