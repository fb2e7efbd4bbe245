"""Batch records: an unbroken chain in which every group has exactly one fate.

Owns the history of fates; never reads trajectories. Invariant: only records that count (see :mod:`.seals_check`) make fates.
The page behind it is ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from milesbatch.audit.findings import Findings, ranges
from milesbatch.audit.rules import Rules
from milesbatch.audit.seals_check import Lives
from milesbatch.decisions.fates import Fate
from milesbatch.decisions.origin import BEGINNING, Origin
from milesbatch.records import BatchRecord, GroupRef, Rejection
from milesbatch.store.entries import numbered
from milesbatch.store.layout import RunLayout


@dataclass(frozen=True, slots=True)
class Use:
    """A batch record names a group of a trajectory file."""

    step: int
    incarnation: int
    group: GroupRef | Rejection


@dataclass(slots=True)
class History:
    """The batch records that count, and the fates that they give."""

    records: dict[int, BatchRecord] = field(default_factory=dict)
    fates: dict[int, Fate] = field(default_factory=dict)
    uses: dict[str, list[Use]] = field(default_factory=dict)
    """Trajectory file name -> the groups of it that have a fate."""
    repeated: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    origin: Origin = BEGINNING

    @property
    def last_step(self) -> int:
        return max(self.records, default=self.origin.step)

    @property
    def stream_position(self) -> int:
        return max(self.origin.stream_position, max(self.fates, default=-1) + 1)

    def is_decided(self, group_id: int) -> bool:
        """Has the group a fate, of this run or of the one that it was forked from?"""
        return group_id in self.fates or self.origin.has_decided(group_id)

    def fates_between(self, since: int, step: int) -> Mapping[str, str] | None:
        """``group id -> fate`` of steps ``since + 1 .. step``; None when one of their records is not whole."""
        if any(number not in self.records for number in range(since + 1, step + 1)):
            return None
        return {str(group): str(fate) for group, fate in self.fates.items() if since < fate.step <= step}


def check_batches(layout: RunLayout, lives: Lives, rules: Rules | None, findings: Findings) -> History:
    """Read every batch record and check the chain and the fates."""
    history = History(origin=lives.origin)
    fenced: set[int] = set()
    for step, path in numbered(layout.batches, ".json"):
        if step <= history.origin.step:
            findings.violate("fate", path, f"this run was forked behind step {history.origin.step}", move=path)
            continue
        record = findings.read_record(BatchRecord, path, move=path)
        if record is None:
            continue
        if record.step != step:
            findings.violate("mismatch", path, f"it is the batch record of step {record.step}", move=path)
            continue
        if not lives.accept(record.incarnation, lambda seal, step=step: seal.last_batch >= step):  # type: ignore[misc]
            fenced.add(step)
            detail = f"written by incarnation {record.incarnation} after it had been sealed; it does not count"
            findings.note("fenced", path, detail, move=path)
            continue
        lives.check_writer(record.incarnation, path, findings)
        if step <= lives.seal(record.incarnation).last_batch:
            detail = f"written by incarnation {record.incarnation}, whose seal says that it existed before"
            findings.violate("seal", path, detail)
        history.records[step] = record
    _check_chain(layout, lives, history, fenced, findings)
    position = 0
    for step, record in sorted(history.records.items()):
        _take_fates(layout, record, history, findings)
        position = max(position, history.stream_position)
        _check_record(layout.batch(step), record, position, rules, findings)
    _count_lost(layout, history, rules, findings)
    return history


def _check_chain(layout: RunLayout, lives: Lives, history: History, fenced: set[int], findings: Findings) -> None:
    last = max(history.last_step, lives.seal(lives.newest).last_batch)
    for step in range(history.origin.step + 1, last + 1):
        path = layout.batch(step)
        if step in history.records or findings.has_trouble(path):
            continue
        if step in fenced:
            findings.violate("fenced", path, f"it does not count, but records up to {last} that count follow it")
        elif not path.exists():
            findings.violate("missing", path, f"{path} is missing; records up to {last} exist or are sealed")


def _take_fates(layout: RunLayout, record: BatchRecord, history: History, findings: Findings) -> None:
    path = layout.batch(record.step)
    named: list[tuple[GroupRef | Rejection, Fate]] = [(group, Fate(record.step)) for group in record.trained]
    named += [(rejection, Fate(record.step, rejection.reason)) for rejection in record.rejected]
    for group, fate in named:
        earlier = history.fates.get(group.group_id)
        if earlier is not None:
            history.repeated.add(group.group_id)
            findings.violate("fate", path, f"group {group.group_id} is {earlier} and, in this record, {fate}")
        elif history.origin.has_decided(group.group_id):
            history.repeated.add(group.group_id)
            findings.violate(
                "fate", path, f"group {group.group_id} had its fate before the run was forked, and is {fate}"
            )
        else:
            history.fates[group.group_id] = fate
        history.uses.setdefault(group.path, []).append(Use(record.step, record.incarnation, group))


def _check_record(path: Path, record: BatchRecord, position: int, rules: Rules | None, findings: Findings) -> None:
    if record.stream_position != position:
        detail = f"it states stream position {record.stream_position}, the fates so far give {position}"
        findings.violate("mismatch", path, detail)
    order = [group.group_id for group in record.trained]
    if order != sorted(order):
        findings.violate("mismatch", path, "its groups are not in the order of their ids")
    if rules is None:
        return
    for group in record.trained:
        if group.samples != rules.samples_per_group:
            detail = f"group {group.group_id} has {group.samples} samples; the recipe says {rules.samples_per_group}"
            findings.violate("mismatch", path, detail)
    if rules.batching.bitwise:
        wanted = set(rules.batching.groups_of_step(record.step))
        named = {group.group_id for group in record.trained} | {group.group_id for group in record.rejected}
        odd = sorted(named - wanted)
        if odd:
            detail = f"groups {ranges(odd)} do not belong to step {record.step} in bitwise mode"
            findings.violate("fate", path, detail)


def _count_lost(layout: RunLayout, history: History, rules: Rules | None, findings: Findings) -> None:
    """In bitwise mode a recorded step accounts for all groups of its range; in relaxed mode a gap is still pending."""
    if rules is None or not rules.batching.bitwise:
        return
    for step in range(history.origin.step + 1, history.last_step + 1):
        skipped = [group for group in rules.batching.groups_of_step(step) if group not in history.fates]
        history.lost.update(skipped)
        if skipped and step in history.records:
            detail = f"groups {ranges(skipped)} belong to step {step}, but have no fate"
            findings.violate("lost", layout.batch(step), detail)
