"""Where the doctor may write: a directory of its own below the one that it was asked about.

Invariant: it is gone afterwards, whatever happened.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from milesbatch.store.durable import storage_error
from milesbatch.store.operations import current

PREFIX = ".milesbatch-doctor-"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to do; the defaults take a few seconds on a usual filesystem."""

    races: int = 20
    writers: int = 8
    syncs: int = 20
    payload_bytes: int = 64 << 20


@contextlib.contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """A new directory below ``directory`` (its nearest parent that exists), removed at the end.

    Raises:
        StorageError: it cannot be made.
    """
    place = nearest(directory) / f"{PREFIX}{secrets.token_hex(4)}"
    try:
        current().make_directory(place)
    except OSError as error:
        raise storage_error(place, error) from error
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def nearest(directory: Path) -> Path:
    """The directory, or the nearest of its parents that exists."""
    directory = directory.absolute()
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    return directory
