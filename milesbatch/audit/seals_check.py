"""Incarnations: an unbroken chain, and seals that agree with themselves and with what exists.

Owns the question "does this count?"; never reads other artefacts. Invariant: an artefact of incarnation i counts only when
the seal of every later incarnation covers it (a damaged record's seal is unknown: it is reported, and left out). The pages
behind it are ``docs/format.md`` and ``docs/protocol.md``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from milesbatch.audit.findings import Findings
from milesbatch.decisions.origin import BEGINNING, Origin
from milesbatch.records import FORKED, IncarnationRecord, Seal
from milesbatch.store.entries import numbered
from milesbatch.store.layout import RunLayout, TrajectoryName

_NOTHING = Seal(last_batch=0, last_version=-1, checkpoints=(), trajectories=())


class Lives:
    """The incarnations of a run, asked what of them counts."""

    def __init__(
        self, layout: RunLayout, records: Mapping[int, IncarnationRecord], newest: int, origin: Origin = BEGINNING
    ) -> None:
        self._layout = layout
        self.origin = origin
        self.records = records
        self.newest = newest
        """Number of the newest incarnation, its record being whole or not; 0 before the first start."""
        self._files = {number: frozenset(record.seal.trajectories) for number, record in records.items()}

    def seal(self, incarnation: int) -> Seal:
        """The seal of an incarnation; an empty one when its record is not there or damaged, and of what a fork was given."""
        record = self.records.get(incarnation)
        return _NOTHING if record is None else record.seal

    def accept(self, incarnation: int, covers: Callable[[Seal], bool]) -> bool:
        """Do all seals later than ``incarnation`` cover something of it?"""
        return all(covers(record.seal) for number, record in self.records.items() if number > incarnation)

    def accept_file(self, name: TrajectoryName, until: int | None = None) -> bool:
        """Is an unconsumed trajectory file covered by all later seals (up to that of incarnation ``until``)?"""
        last = self.newest if until is None else until
        text = str(name)
        return all(text in files for n, files in self._files.items() if name.incarnation < n <= last)

    def sealed_files(self) -> list[TrajectoryName]:
        """Unconsumed trajectory files that the newest incarnation accepted."""
        names = []
        for text in self.seal(self.newest).trajectories:
            with contextlib.suppress(ValueError):  # reported with the seal
                names.append(TrajectoryName.parse(text))
        return names

    def check_writer(self, incarnation: int, path: Path, findings: Findings) -> None:
        """Did the incarnation that says it wrote ``path`` exist?"""
        if incarnation == FORKED and self.origin != BEGINNING:
            return  # what a fork was given; fork_check proves that
        record = self._layout.incarnation(incarnation)
        if not 1 <= incarnation <= self.newest and not record.exists():  # it may have begun since
            name = findings.relative(path)
            findings.violate("missing", record, f"{record} is missing, but {name} was written by that incarnation")


def check_lives(layout: RunLayout, findings: Findings, origin: Origin = BEGINNING) -> Lives:
    """Read all incarnation records; check their chain and each seal by itself."""
    entries = dict(numbered(layout.incarnations, ".json"))
    newest = max(entries, default=0)
    records: dict[int, IncarnationRecord] = {}
    for number in range(1, newest + 1):
        path = layout.incarnation(number)
        if number not in entries:
            findings.violate("missing", path, f"{path} is missing, but incarnation {newest} exists")
            continue
        record = findings.read_record(IncarnationRecord, path)
        if record is None:
            continue
        if record.incarnation != number:
            findings.violate("mismatch", path, f"it is the record of incarnation {record.incarnation}")
            continue
        records[number] = record
        _check_seal(path, record, origin, findings)
    for number, path in numbered(layout.incarnations, ".alive"):
        if number > newest:
            findings.note("diagnosis", path, f"a hint of incarnation {number}, of which there is no record")
    _note_lowered(layout, records, findings)
    return Lives(layout, records, newest, origin)


def _check_seal(path: Path, record: IncarnationRecord, origin: Origin, findings: Findings) -> None:
    seal = record.seal
    if record.incarnation == 1 and not _is_first(seal, origin):
        findings.violate("seal", path, "the first incarnation seals artefacts of earlier ones, which do not exist")
    if seal.last_batch < origin.step or seal.last_version < -1 or seal.last_version > seal.last_batch:
        detail = f"its seal accepts policy version {seal.last_version} with {seal.last_batch} batch records"
        findings.violate("seal", path, detail)
    if list(seal.checkpoints) != sorted({s for s in seal.checkpoints if 0 < s <= seal.last_batch}):
        detail = f"its seal accepts checkpoints {list(seal.checkpoints)} with {seal.last_batch} batch records"
        findings.violate("seal", path, detail)
    for text in seal.trajectories:
        try:
            name = TrajectoryName.parse(text)
        except ValueError as error:
            findings.violate("seal", path, f"its seal: {error}")
            continue
        if name.incarnation >= record.incarnation:
            findings.violate("seal", path, f"its seal accepts {text}, which is not of an earlier incarnation")


def _is_first(seal: Seal, origin: Origin) -> bool:
    """May the first incarnation of a run seal this? Of a fork it finds what was taken over, or less where that is damaged."""
    given = (origin.step,) if origin.step else ()
    return (
        seal.last_batch == origin.step
        and seal.last_version <= (origin.step if origin.step else -1)
        and set(seal.checkpoints) <= set(given)
        and not seal.trajectories
    )


def _note_lowered(layout: RunLayout, records: Mapping[int, IncarnationRecord], findings: Findings) -> None:
    highest = 0
    for number, record in sorted(records.items()):
        if record.seal.last_batch < highest:
            detail = (
                f"its seal accepts {record.seal.last_batch} batch records, an earlier one accepted {highest}:"
                " damage was found, and those steps were decided again"
            )
            findings.note("changed", layout.incarnation(number), detail)
        highest = max(highest, record.seal.last_batch)
