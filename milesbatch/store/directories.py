"""Directories that a person asked for: committed whole by one rename, or filled file by file and emptied again on errors.

For what is handed to other tools, which know nothing of manifests. Invariant: nothing that was there before is deleted.
Artefacts of a run are not made this way (``store/durable.py``): a rename of a directory is one step on a POSIX filesystem, and
perhaps not on a mounted object store.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from milesbatch.errors import InputError, StorageError
from milesbatch.store.durable import (
    TEMPORARY_PREFIX,
    AlreadyExistsError,
    is_residue,
    make_directory,
    remove_file,
    storage_error,
    sync_tree,
)
from milesbatch.store.liveness import process_started
from milesbatch.store.operations import current

_UNFINISHED = re.compile(re.escape(TEMPORARY_PREFIX) + r"(\d+)-[0-9a-f]{12}")
"""Files that ``store/durable.py`` has not given their name yet, and the process that writes them."""
_MOST_NAMES = 5


def publish_directory(staged: Path, final: Path) -> None:
    """Commit a directory that was written beside ``final``, on the same filesystem: it appears whole, or not at all.

    Durability: on return it is durable and visible under ``final``. If killed midway it is in one of the two places.

    Raises:
        AlreadyExistsError: something of that name is there; ``staged`` stays where it is.
        StorageError: nothing was committed.
    """
    sync_tree(staged)
    try:
        if final.exists():  # an empty directory would be replaced without an error
            raise AlreadyExistsError(f"{final} was already committed by another writer")
        try:
            current().rename(staged, final)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise AlreadyExistsError(f"{final} was already committed by another writer") from None
            if staged.exists() or not final.exists():  # else only the reply was lost
                raise
        current().sync_directory(final.parent)
    except OSError as error:
        raise storage_error(final, error) from error


def held_names(directory: Path) -> list[str]:
    """What a directory holds, sorted, without what nobody owns; nothing when it does not exist.

    Raises:
        StorageError: it cannot be listed.
    """
    try:
        return sorted(path.name for path in directory.iterdir() if not is_residue(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(directory, error) from error


def require_made_by(directory: Path, command: str, marker: str) -> bool:
    """Accept a directory that is new, empty, or has the file ``marker`` of that command; returns whether it has.

    Raises:
        InputError: it holds other things; names them.
        StorageError: it cannot be listed.
    """
    held = held_names(directory)
    if held and marker not in held:
        raise InputError(
            f"{directory} is not empty and was not made by {command}: it holds {listed(held)}",
            mend="give a new or empty directory",
        )
    return marker in held


def listed(names: list[str]) -> str:
    """Names in words, the first of many."""
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")


def require_free(directory: Path, files: Mapping[Path, bytes | None]) -> None:
    """Accept a directory that is to be filled: new, empty, or with some of ``files`` from a call that did not come to its end.

    ``files`` have relative paths; of None any content will do.

    Raises:
        InputError: it holds anything else; names it.
        StorageError: it cannot be read.
    """
    if not directory.is_dir() and (directory.exists() or directory.is_symlink()):
        raise InputError(f"{directory} exists and is not an empty directory", mend="choose a new directory")
    folders = {folder for path in files for folder in path.parents}
    strange = []
    try:
        for path in sorted(directory.rglob("*")) if directory.is_dir() else ():
            relative = path.relative_to(directory)
            if path.is_symlink():
                is_ours = False
            elif path.is_dir():
                is_ours = relative in folders
            else:
                is_ours = _UNFINISHED.fullmatch(path.name) is not None or _is_one_of(files, relative, path)
            if not is_ours:
                strange.append(str(relative))
    except OSError as error:
        raise storage_error(directory, error) from error
    if strange:
        raise InputError(
            f"{directory} exists and is not an empty directory: it holds {listed(strange)}",
            mend="choose a new directory, or remove this one first",
        )


def _is_one_of(files: Mapping[Path, bytes | None], relative: Path, path: Path) -> bool:
    if relative not in files:
        return False
    expected = files[relative]
    return expected is None or (path.stat().st_size == len(expected) and path.read_bytes() == expected)


@contextmanager
def filling(directory: Path, files: Collection[Path]) -> Iterator[None]:
    """Make ``directory``, which :func:`require_free` accepted. When the block ends with an error, those of ``files`` that were
    not there before go again, and the directories that were made; killed, they stay, and the next call goes on from them.

    Raises:
        StorageError: it cannot be made.
    """
    made = missing(directory)
    new = [directory / path for path in files if not (directory / path).exists()]
    folders = {folder for path in new for folder in path.parents if directory in folder.parents and not folder.exists()}
    try:
        make_directory(directory)
        for folder in {directory, *(path.parent for path in new)}:
            _sweep_unfinished(folder)
        yield
    except BaseException:
        with suppress(StorageError):
            for path in new:
                remove_file(path)
            take_back([*sorted(folders, reverse=True), *made])
        raise


def missing(directory: Path) -> list[Path]:
    """The directories that are to be made for this one, itself first."""
    return [path for path in (directory, *directory.parents) if not path.exists()]


def take_back(directories: list[Path]) -> None:
    """Remove directories as far as they are empty, in this order."""
    for path in directories:
        with suppress(OSError):
            current().remove_directory(path)


def _sweep_unfinished(directory: Path) -> None:
    """Remove files of writers of this machine that are gone."""
    for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
        match = _UNFINISHED.fullmatch(path.name)
        if match and not path.is_dir() and process_started(match[1]) is None:
            remove_file(path)
