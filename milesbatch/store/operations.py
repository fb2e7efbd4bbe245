"""Every mutation of a run's files, one method each: what durable.py commits with, and what fault tests get between.

The one place that calls fsync, link, rename, unlink and mkdir. :mod:`milesbatch.faults` replaces the operations by ones that
fail on purpose, and the crash tests by ones that note each mutation; nothing else may.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class Operations:
    """The operating system's own operations. Every method raises ``OSError`` as the system does."""

    def create(self, path: Path) -> BinaryIO:
        """A new file, open for writing; fails when the name exists."""
        return open(path, "xb")

    def sync_file(self, path: Path, stream: BinaryIO) -> None:
        """Make what was written to ``stream`` (the open file ``path``) durable."""
        stream.flush()
        os.fsync(stream.fileno())

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file; fails when the name exists."""
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Rename over what is there. For hints only."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def remove_directory(self, path: Path) -> None:
        path.rmdir()


_current = Operations()


def current() -> Operations:
    """The operations in force in this process."""
    return _current


def install(operations: Operations) -> None:
    """Replace the operations of this process."""
    global _current
    _current = operations


@contextlib.contextmanager
def installed(operations: Operations) -> Iterator[None]:
    """Replace the operations for a while."""
    before = _current
    install(operations)
    try:
        yield
    finally:
        install(before)
