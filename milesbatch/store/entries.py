"""What lies in a directory, by name. Never opens or changes anything.

Invariant: a directory that is not there is empty; what cannot be listed is an error, never taken for empty.
"""

from __future__ import annotations

from pathlib import Path

from milesbatch.ids import parse_number
from milesbatch.store.durable import SILLY_PREFIX, storage_error


def listed(directory: Path) -> list[Path]:
    """Entries of ``directory`` in order of their names, without what NFS keeps of deleted files.

    Raises:
        StorageError: it cannot be listed. What is not there, or is no directory, is empty.
    """
    try:
        return sorted(path for path in directory.iterdir() if not path.name.startswith(SILLY_PREFIX))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise storage_error(directory, error) from error


def numbered(directory: Path, suffix: str = "") -> list[tuple[int, Path]]:
    """Entries of ``directory`` that are named by a number and end in ``suffix``, ascending; others are ignored.

    Raises:
        StorageError: as :func:`listed`.
    """
    found: list[tuple[int, Path]] = []
    for path in listed(directory):
        if path.name.endswith(suffix):
            try:
                found.append((parse_number(path.name.removesuffix(suffix)), path))
            except ValueError:
                continue
    return sorted(found)
