"""The artefact store over a directory: keys are paths below it, commits are those of ``store/durable.py``.

Owns the way from key to path and what to conclude from an error of a commit. Never commits in a way of its own: links
and renames are durable's. Invariant: an error after the link was asked for is never taken for failure before
the contents were compared (network filesystems lose replies). The page behind it is ``docs/storage.md``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from milesbatch.errors import StorageError
from milesbatch.records import FileRef
from milesbatch.store import durable
from milesbatch.store.operations import current
from milesbatch.store.port import (
    MANIFEST,
    QUARANTINE,
    AlreadyExistsError,
    Check,
    MissingArtefactError,
    OutcomeUnknownError,
    Write,
    check_directory,
    check_key,
    check_name,
    check_range,
    join,
)


class PosixStore:
    """An :class:`~milesbatch.store.port.ArtefactStore` in the directory ``root``; see there for every promise.

    Relied on: what ``store/durable.py`` relies on. Safe to use from several threads, processes and machines at once.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def url(self) -> str:
        return str(self.root)

    # -- commits ------------------------------------------------------------------------------------------------------

    def create_exclusively(self, key: str, data: bytes, before_commit: Check | None = None) -> FileRef:
        directory, _, name = check_key(key).rpartition("/")
        return self.publish(directory, name, lambda stream: stream.write(data), before_commit)

    def publish(
        self, directory: str, name: str | Callable[[str], str], write: Write, before_commit: Check | None = None
    ) -> FileRef:
        parent = self.root / check_directory(directory)
        if isinstance(name, str):
            check_name(name)
        durable.make_directory(parent)
        asked = False

        def checked() -> None:
            nonlocal asked
            if before_commit is not None:
                before_commit()
            asked = True

        try:
            with durable.publishing(parent, _checked_name(name), checked) as file:
                write(file.stream)
        except AlreadyExistsError:
            raise
        except StorageError as error:
            if not asked:
                raise
            assert file.ref is not None
            self._settle(join(directory, file.ref.path), file.ref, error)
        assert file.ref is not None
        return file.ref

    def _settle(self, key: str, ref: FileRef, error: StorageError) -> None:
        """Return when the commit landed although the system reported ``error``; else raise what is true instead."""
        path = self._path(key)
        try:
            if not self.exists(key):
                raise error
            there = durable.file_ref(path)
            if (there.bytes, there.digest) == (ref.bytes, ref.digest):
                current().sync_directory(path.parent)  # it may have been this that failed
                return
        except (StorageError, OSError) as looking:
            if looking is error:
                raise
            raise OutcomeUnknownError(
                f"whether {path} was committed is not known: {error.what}; looking gave: {looking}",
                mend="check the filesystem, then give the same command again: it finds out",
            ) from error
        raise AlreadyExistsError(f"{path} was already committed by another writer") from error

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes | None:
        return durable.read_optional(self._path(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        path = self._path(key)
        try:
            with open(path, "rb") as stream:
                stream.seek(start)
                return stream.read(length)
        except FileNotFoundError:
            raise self._missing(key) from None
        except OSError as error:
            raise durable.storage_error(path, error) from error

    def read_verified(self, key: str, ref: FileRef) -> bytes:
        return durable.read_verified(self._path(key), ref.digest)

    def digest(self, key: str) -> FileRef:
        if not self.exists(key):
            raise self._missing(key)
        return durable.file_ref(self._path(key))

    def verify(self, key: str, ref: FileRef) -> None:
        durable.verify_file(self._path(key), ref)

    def exists(self, key: str) -> bool:
        path = self._path(key)
        try:
            return stat.S_ISREG(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise durable.storage_error(path, error) from error

    def list_keys(self, prefix: str = "") -> list[str]:
        base = self.root / check_directory(prefix)
        keys = (path.relative_to(self.root).as_posix() for path in self._files(base))
        return sorted(key for key in keys if prefix or not key.startswith(f"{QUARANTINE}/"))

    # -- taking away --------------------------------------------------------------------------------------------------

    def delete(self, key: str) -> None:
        durable.remove_file(self._path(key))

    def delete_tree(self, prefix: str) -> None:
        base = self._path(prefix)
        if not base.is_dir():
            return
        for path in self._files(base):
            if path.name == MANIFEST and path.parent != base:
                durable.remove_tree(path.parent)
        durable.remove_tree(base)

    def quarantine(self, key: str, reason: str) -> str:
        if not self.exists(key):
            raise self._missing(key)
        kept = durable.move_to_quarantine(self._path(key), self.root / QUARANTINE, reason)
        return kept.relative_to(self.root).as_posix()

    def sweep_unfinished(self, prefix: str = "") -> int:
        base = self.root / check_directory(prefix)
        return sum(durable.sweep_temporary(directory) for directory in {base, *_directories(base)})

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _missing(self, key: str) -> MissingArtefactError:
        return MissingArtefactError(f"{self._path(key)} is not there", mend="run `milesbatch audit` on the run")

    def _files(self, base: Path) -> list[Path]:
        found = []
        for directory in (base, *_directories(base)):
            found += [path for path in _entries(directory) if path.is_file() and not _is_temporary(path)]
        return found


def _checked_name(name: str | Callable[[str], str]) -> str | Callable[[str], str]:
    return name if isinstance(name, str) else lambda digest: check_name(name(digest))


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(durable.TEMPORARY_PREFIX)


def _entries(directory: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []  # gone since it was named
    except OSError as error:
        raise durable.storage_error(directory, error) from error


def _directories(base: Path) -> Iterator[Path]:
    """All directories below ``base``; links are not followed."""
    for path in _entries(base):
        if path.is_dir() and not path.is_symlink():
            yield path
            yield from _directories(path)
