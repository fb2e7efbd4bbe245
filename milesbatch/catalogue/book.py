"""The catalogue's file: entries of all runs that were ever seen, kept in step with the run directories.

Owns: ``catalogue.jsonl`` (one entry per line, under the cache directory) and when an entry is read again. Never writes into a
run. Invariant: the file is a cache. It can be deleted or rebuilt at any time, and is replaced as a whole, so that of two who
refresh it at once the later one counts. A run whose directory is gone stays remembered, as ``gone``, until a rebuild.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from milesbatch.catalogue.entry import Entry, entry_from_json, read_entry
from milesbatch.records import digest_bytes
from milesbatch.store.durable import make_directory, read_optional, replace_hint
from milesbatch.store.layout import RunLayout

_MOVING = frozenset({"running", "queued"})
"""States that change without a change of the run's files, or whose files change at any moment."""


@dataclass(frozen=True, slots=True)
class _Line:
    """An entry, and what the run's folders looked like when it was read."""

    stamp: str
    entry: Entry


class Catalogue:
    """All runs that are remembered."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def refresh(self, roots: Sequence[Path], *, rebuild: bool = False) -> list[Entry]:
        """Look at every run below ``roots`` and at those remembered, and write what changed; the newest run first.

        With ``rebuild`` nothing is remembered: only runs that are there now, each read again.

        Raises:
            StorageError: the catalogue's file cannot be written.
        """
        known = {} if rebuild else self._read()
        lines: dict[str, _Line] = {}
        for path in sorted({*_runs_below(roots), *(Path(text) for text in known)}):
            lines[str(path)] = _look(path, known.get(str(path)))
        if lines != known or rebuild:
            make_directory(self._file.parent)
            text = "".join(
                json.dumps({"stamp": line.stamp, "entry": line.entry.to_json()}) + "\n" for line in lines.values()
            )
            replace_hint(self._file, text.encode())
        return sorted((line.entry for line in lines.values()), key=lambda entry: entry.created_at or "", reverse=True)

    def _read(self) -> dict[str, _Line]:
        """What the file holds; a line that is torn or of another version is left out, and its run read again."""
        found: dict[str, _Line] = {}
        for text in (read_optional(self._file) or b"").decode(errors="replace").splitlines():
            try:
                document = json.loads(text)
                line = _Line(str(document["stamp"]), entry_from_json(document["entry"]))
            except (ValueError, KeyError, TypeError):
                continue
            found[line.entry.path] = line
        return found


def _runs_below(roots: Iterable[Path]) -> list[Path]:
    """Run directories that are a root, or directly below one."""
    found = []
    for root in roots:
        for path in (root, *sorted(path for path in _listed(root) if path.is_dir())):
            if any((path / name).is_file() for name in ("run.json", "fork.json")) or (path / "jobs").is_dir():
                found.append(path.resolve())
    return found


def _listed(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except OSError:
        return []


def _look(path: Path, known: _Line | None) -> _Line:
    if not path.is_dir():
        assert known is not None, "only a remembered run can be gone"
        return _Line(known.stamp, replace(known.entry, state="gone"))
    stamp = _stamp(path)
    if known is not None and known.stamp == stamp and known.entry.state not in (*_MOVING, "gone"):
        return known
    return _Line(stamp, read_entry(RunLayout(path)))


def _stamp(path: Path) -> str:
    """Changes with everything that an entry is read from."""
    layout = RunLayout(path)
    seen = []
    looked_into = (layout.events, layout.evaluations)
    for place in (layout.root, layout.incarnations, layout.checkpoints, layout.jobs, *looked_into):
        for item in (place, *(_listed(place) if place in looked_into else ())):
            try:
                found = item.stat()
            except OSError:
                continue
            seen.append((item.name, found.st_mtime_ns, found.st_size))
    return digest_bytes(json.dumps(sorted(seen)).encode())
