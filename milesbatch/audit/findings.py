"""What an audit found: violations of a promise, and notes that break none.

Owns the collecting and the reading of files for it; never changes a run. Invariant: a file that cannot be proven is a
violation that names it, and the audit goes on with the next one. The page behind it is ``docs/audit.md``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from milesbatch.errors import CorruptArtefactError, StorageError
from milesbatch.records import FileRef, Record
from milesbatch.store.durable import read_optional, verify_file

R = TypeVar("R", bound=Record)

ViolationKind = Literal[
    "damaged",
    "missing",
    "unreadable",
    "mismatch",
    "chain",
    "retired",
    "fate",
    "lost",
    "version",
    "stale",
    "fenced",
    "seal",
]
_TROUBLE: tuple[ViolationKind, ...] = ("damaged", "missing", "mismatch", "unreadable")
NoteKind = Literal[
    "leftover", "orphan", "made-again", "fenced", "awaits-replay", "divergence", "stranger", "diagnosis", "changed"
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation or note; ``path`` is relative to the run directory."""

    kind: str
    path: str
    detail: str


@dataclass(slots=True)
class Findings:
    """Collects what one audit finds in the run directory ``root``."""

    root: Path
    violations: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    movable: dict[Path, str] = field(default_factory=dict)
    """Broken and orphaned artefacts that a repair moves to quarantine: path -> reason."""
    num_files: int = 0
    num_bytes: int = 0
    _known: set[Finding] = field(default_factory=set)
    _kinds: set[tuple[str, str]] = field(default_factory=set)

    def violate(self, kind: ViolationKind, path: Path, detail: str, *, move: Path | None = None) -> None:
        """Record a violation; ``move`` is what a repair takes out of the way for it."""
        finding = Finding(kind, self.relative(path), detail)
        if finding not in self._known and not (kind == "missing" and self.has("missing", path)):
            self.violations.append(finding)
        self._known.add(finding)
        self._kinds.add((kind, finding.path))
        if move is not None:
            self.movable.setdefault(move, detail)

    def note(self, kind: NoteKind, path: Path, detail: str, *, move: Path | None = None) -> None:
        self.notes.append(Finding(kind, self.relative(path), detail))
        if move is not None:
            self.movable.setdefault(move, detail)

    def has(self, kind: ViolationKind, path: Path) -> bool:
        return (kind, self.relative(path)) in self._kinds

    def has_trouble(self, path: Path) -> bool:
        """Is ``path`` itself known to be missing, or not what was committed?"""
        return any(self.has(kind, path) for kind in _TROUBLE)

    def relative(self, path: Path) -> str:
        return str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)

    def count(self, num_bytes: int) -> None:
        """One more committed file was read."""
        self.num_files += 1
        self.num_bytes += num_bytes

    def read(self, path: Path) -> bytes | None:
        """Content of a committed file; None when it does not exist or, with a violation, cannot be read."""
        try:
            data = read_optional(path)
        except StorageError as error:
            self.violate("unreadable", path, error.what)
            return None
        if data is not None:
            self.count(len(data))
        return data

    def read_record(self, kind: type[R], path: Path, *, move: Path | None = None) -> R | None:
        """A committed record; None when it does not exist or, with a violation, is not what was committed.

        Raises:
            FormatVersionError: it is of a newer format, about which nothing can be said.
        """
        data = self.read(path)
        if data is None:
            return None
        try:
            return kind.from_bytes(data, str(path))
        except CorruptArtefactError as error:
            self.violate("damaged", path, error.what, move=move)
            return None

    def verify(
        self, path: Path, ref: FileRef, *, move: Path | None = None, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Is a payload file what its record says? A violation when not, ``unless`` it was retired while the audit ran."""
        try:
            verify_file(path, ref)
        except CorruptArtefactError as error:
            if unless():
                return True
            self.violate("damaged" if path.exists() else "missing", path, error.what, move=move)
            return False
        except StorageError as error:
            self.violate("unreadable", path, error.what)
            return False
        self.count(ref.bytes)
        return True


def files_below(directory: Path) -> list[Path]:
    """Files in a directory and all below it, in order of their names; what goes away meanwhile is left out."""
    return sorted(Path(place) / name for place, _, names in os.walk(directory) for name in names)


def ranges(numbers: list[int]) -> str:
    """``[1, 2, 3, 7]`` as ``1..3, 7``."""
    runs: list[list[int]] = []
    for value in sorted(numbers):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
