"""A directory of copies of what was read from an object store, by digest. Never trusted: verified at each use.

Owns its directory and nothing else. Invariant: what it returns has the digest that was asked for; a full or broken cache
costs a download and nothing else. Several processes may share one.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from milesbatch.errors import StorageError
from milesbatch.records import FileRef, digest_bytes
from milesbatch.store.durable import TEMPORARY_PREFIX, make_directory, read_optional, remove_file, replace_hint


@dataclass(frozen=True, slots=True)
class VerifiedCache:
    """Copies below ``directory``, at most ``limit_bytes`` of them; the oldest go first."""

    directory: Path
    limit_bytes: int

    def get(self, ref: FileRef) -> bytes | None:
        """The bytes that ``ref`` describes, or None; a damaged copy is removed."""
        path = self._path(ref)
        with contextlib.suppress(StorageError):
            data = read_optional(path)
            if data is not None and digest_bytes(data) == ref.digest:
                return data
            if data is not None:
                remove_file(path)
        return None

    def put(self, ref: FileRef, data: bytes) -> None:
        """Keep a copy if there is room for it."""
        if len(data) > self.limit_bytes:
            return
        with contextlib.suppress(StorageError, OSError):
            make_directory(self.directory)
            self._make_room(len(data))
            replace_hint(self._path(ref), data)

    def _make_room(self, needed_bytes: int) -> None:
        entries = []
        for entry in os.scandir(self.directory):
            if not entry.name.startswith(TEMPORARY_PREFIX):
                with contextlib.suppress(FileNotFoundError):  # another process made room
                    entries.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        held_bytes = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if held_bytes + needed_bytes <= self.limit_bytes:
                return
            remove_file(Path(path))
            held_bytes -= size

    def _path(self, ref: FileRef) -> Path:
        return self.directory / ref.digest.replace(":", "-")
