"""What a run takes of its disk, by kind; cheap enough to be looked at again and again while a run goes on.

Owns: a budget of calls for each look, and an estimate of what was not looked at yet. Never: what may be deleted. Invariants:
one look asks for the sizes of at most ``_BUDGET`` entries, and looks are so rare that they cost at most a fiftieth of the
time; an estimate says that it is one. The page behind it is ``docs/operations.md``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milesbatch.store.layout import RunLayout

KINDS = ("trajectories", "weights", "checkpoints", "other")
_BUDGET = 2000
"""Entries of which the size is asked in one look: about 20 ms here, half a second on a slow network filesystem."""
_REST_S = 10.0
_REST_SHARE = 50.0


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes of files, as far as they are known."""

    by_kind: dict[str, int]
    """For each of ``KINDS``."""
    is_estimate: bool
    """Some entries were not looked at yet: those of their kind stand for them."""

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())

    def to_json(self) -> dict[str, Any]:
        return {"total": self.total, **self.by_kind, "is_estimate": self.is_estimate}


@dataclass(slots=True)
class _Folder:
    """One directory of the run; an entry of it is a file, or a directory with all that is in it."""

    path: Path
    kind: str
    sizes: dict[str, int] = field(default_factory=dict)
    """Entry -> bytes when it was last looked at, the longest ago first."""
    entries: list[str] = field(default_factory=list)
    """All that are there, ascending."""

    def refresh(self) -> None:
        """See which entries there are now."""
        self.entries = sorted(_names(self.path))
        if len(self.sizes) > len(self.entries) or not self.sizes.keys() <= set(self.entries):
            there = set(self.entries)
            self.sizes = {name: size for name, size in self.sizes.items() if name in there}

    @property
    def unknown(self) -> list[str]:
        return [name for name in self.entries if name not in self.sizes]

    def look_at(self, names: Sequence[str]) -> None:
        for name in names:
            self.sizes.pop(name, None)  # so that it is the last one in order
            self.sizes[name] = _size(self.path / name)

    @property
    def bytes(self) -> int:
        known = sum(self.sizes.values())
        missing = len(self.entries) - len(self.sizes)
        return known + (round(known / len(self.sizes) * missing) if missing and self.sizes else 0)


class DiskUseReader:
    """Knows what a run takes, a little better with each look."""

    def __init__(self, layout: RunLayout, budget: int = _BUDGET) -> None:
        self._layout = layout
        self._budget = budget
        self._folders: dict[str, _Folder] = {}
        self._found: DiskUse | None = None
        self._rests_until_s = 0.0

    def read(self) -> DiskUse | None:
        """What was found lately, or what is found now; None when the run's directory cannot be listed."""
        began_s = time.monotonic()
        if began_s >= self._rests_until_s:
            self._found = self._look()
            ended_s = time.monotonic()
            self._rests_until_s = ended_s + max(_REST_S, _REST_SHARE * (ended_s - began_s))
        return self._found

    def _look(self) -> DiskUse | None:
        names = _names(self._layout.root)
        if not names:
            return None
        self._folders = {name: self._folders.get(name) or self._folder(name) for name in names}
        for folder in self._folders.values():
            folder.refresh()
        self._spend()
        by_kind = dict.fromkeys(KINDS, 0)
        for folder in self._folders.values():
            by_kind[folder.kind] += folder.bytes
        return DiskUse(by_kind, any(folder.unknown for folder in self._folders.values()))

    def _folder(self, name: str) -> _Folder:
        path = self._layout.root / name
        return _Folder(path, name if name in KINDS[:-1] else "other")

    def _spend(self) -> None:
        """First what was never looked at, spread over all of it; what is left of the budget for the oldest figures."""
        left = self._budget
        new: dict[str, int] = {}
        # Folders with few entries first: what they leave is for the large ones.
        for name, folder in sorted(self._folders.items(), key=lambda item: len(item[1].unknown)):
            chosen = _spread(folder.unknown, left)
            folder.look_at(chosen)
            new[name] = len(chosen)
            left -= len(chosen)
        for name, folder in sorted(self._folders.items(), key=lambda item: len(item[1].sizes)):
            oldest = list(folder.sizes)[: min(left, len(folder.sizes) - new[name])]
            folder.look_at(oldest)
            left -= len(oldest)


def _spread(names: Sequence[str], most: int) -> Sequence[str]:
    """At most ``most`` of them, at equal distances: early and late entries differ, in a run whose responses grow."""
    if len(names) <= most:
        return names
    return [names[place * len(names) // most] for place in range(most)]


def _names(directory: Path) -> list[str]:
    """Entries of a directory; the name of a file stands for itself. Nothing when it cannot be listed."""
    try:
        return [path.name for path in directory.iterdir()]
    except NotADirectoryError:
        return [""]
    except OSError:
        return []


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory; what goes away meanwhile counts nothing."""
    try:
        with os.scandir(path) as entries:
            return sum(
                _size(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else _own(entry) for entry in entries
            )
    except NotADirectoryError:
        return _stat_size(path)
    except OSError:
        return 0


def _own(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0


def _stat_size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
