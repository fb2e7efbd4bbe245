"""The directory on this host in which one start of a worker keeps a copy of the weights for its servers: ``memory_dir``.

Owns who may use it, that none is left for ever, and what becomes of one without room. Never: what is in it. Invariant: a
directory is removed only by who holds the lock on it (flock(2) on the directory itself), and whoever uses one holds it until
it ends: so one that was left by a process that was killed together with its guard goes when the next one of the same run
starts on that host, and no living one's does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from milesbatch.errors import InputError, LocalSpaceError, StorageError, StorageFullError, StorageReadOnlyError
from milesbatch.store.durable import make_directory, remove_tree, storage_error
from milesbatch.store.mounts import is_local
from milesbatch.store.patience import Patience

T = TypeVar("T")
SETTING = "rollout.sglang.memory_dir"
_CHOOSE = (
    f"name a directory of a local disk or tmpfs with room for the model in {SETTING}, or send weights by broadcast"
    " (weights.transport), which needs no copy there"
)


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """A directory of one start; nobody else's as long as it is open."""

    directory: Path
    _lock: int
    """An open descriptor of the directory."""

    @classmethod
    def take(cls, base: Path, run_id: str, owner: str, life: str) -> LocalMemory:
        """Make ``base/run_id.owner + life``, and remove what dead processes of the run left beside it.

        ``life`` begins with a dot, or is empty: then all lives of ``owner`` share one directory. On a shared filesystem a lock
        may not be seen from other hosts: there only earlier lives of ``owner`` go.

        Raises:
            InputError: ``base`` is no directory, or this user may not make or use it.
            StorageError: it cannot be made.
        """
        directory = base / f"{run_id}.{owner}{life}"
        _require_directories(base)
        lock = -1
        while lock < 0:  # another start may take one that is not locked yet for one that was left
            _make(directory)
            lock = _locked(directory)
        try:
            base.chmod(0o700)
            _remove_left(base, f"{run_id}." if is_local(base) else f"{run_id}.{owner}.", directory)
        except BaseException as error:
            os.close(lock)
            if isinstance(error, PermissionError):
                raise InputError(f"{SETTING}: {base} belongs to somebody else: {error}", mend=_CHOOSE) from error
            if isinstance(error, OSError):
                raise storage_error(base, error) from error
            raise
        return cls(directory, lock)

    def require_room(self, needed: int) -> None:
        """Accept the place for a copy of ``needed`` bytes; what is in the directory already makes room for it.

        Raises:
            InputError: the whole filesystem is smaller.
            StorageFullError: others have taken too much of it.
        """
        try:
            found = os.statvfs(self.directory)
            held = sum(path.lstat().st_blocks * 512 for path in self.directory.rglob("*"))
        except OSError as error:
            raise storage_error(self.directory, error) from error
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        need = f"{needed:,} bytes are needed for the copy of the model from which servers load weights"
        if 0 < total < needed:
            raise InputError(
                f"{SETTING}: {need}, and the filesystem of {self.directory} has {total:,} in all, {free:,} of them free",
                mend=_CHOOSE,
            )
        if total and free + held < needed:
            raise StorageFullError(f"no space left for {self.directory}: {need}, and {free:,} of {total:,} are free")

    def close(self) -> None:
        """Remove it, with all that is in it. What cannot be removed is told, and is no error: there may be one already."""
        try:
            remove_tree(self.directory)
        except StorageError as error:
            print(f"{self.directory} stays: {error.what}", file=sys.stderr, flush=True)
        finally:
            os.close(self._lock)


@dataclass(frozen=True, slots=True)
class Room:
    """How what is written there waits for space. It lasts as long as other writers' waiting; but no other process has this
    directory, so then only this one fails, and may be started again, here or elsewhere."""

    patience: Patience

    def until_there(self, action: Callable[[], T]) -> T:
        """Result of ``action``, repeated while there is no space; it must be safe to repeat.

        Raises:
            LocalSpaceError: there was none for too long.
        """
        patience = replace(self.patience, tell=lambda text: self.patience.tell(f"{SETTING}: {text}"))
        try:
            return patience.until_space(action)
        except StorageFullError as error:
            raise LocalSpaceError(
                f"{SETTING}: {error.what} (after waiting for space for {patience.wait_s:g} s)",
                mend=f"free space on that filesystem of this host, or {_CHOOSE}",
            ) from error


def _require_directories(base: Path) -> None:
    """Raises:
    InputError: ``base``, or what it is to be made in, is something else, or not to be looked into.
    """
    for path in (base, *base.parents):
        try:
            if path.is_dir():
                return
            if path.exists() or path.is_symlink():
                raise InputError(f"{SETTING}: {path} is not a directory", mend=_CHOOSE)
        except PermissionError as error:
            raise InputError(f"{SETTING}: {path} cannot be used: {os.strerror(errno.EACCES)}", mend=_CHOOSE) from error


def _make(directory: Path) -> None:
    try:
        make_directory(directory)
    except StorageReadOnlyError as error:
        if isinstance(error.__cause__, PermissionError):
            raise InputError(f"{SETTING}: {error.what}", mend=_CHOOSE) from error
        raise


def _locked(directory: Path) -> int:
    """A descriptor of ``directory`` with a lock, which waits for nobody but who removes it; -1: it is gone.

    Raises:
        StorageError: it cannot be opened.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise storage_error(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.path.samestat(os.fstat(descriptor), directory.stat()):
            return descriptor
    except FileNotFoundError:
        pass
    except OSError as error:
        os.close(descriptor)
        raise storage_error(directory, error) from error
    os.close(descriptor)
    return -1


def _remove_left(base: Path, prefix: str, own: Path) -> None:
    """Remove the directories of such names that no living process holds."""
    for entry in sorted(base.iterdir()):
        if entry == own or not entry.name.startswith(prefix) or entry.is_symlink() or not entry.is_dir():
            continue
        try:
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(
                os.fstat(descriptor), entry.stat()
            ):  # else another one removed it, and its owner is back
                remove_tree(entry)
        except (BlockingIOError, FileNotFoundError):
            pass  # it lives, or is gone
        finally:
            os.close(descriptor)
