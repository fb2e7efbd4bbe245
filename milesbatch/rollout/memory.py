"""The directory on this host in which one start of a worker keeps a copy of the weights for its servers.

Owns who may use it, and that none is left for ever. Never: what is in it. Invariant: a directory is removed only by who
holds the lock on it (flock(2) on the directory itself), and whoever uses one holds it until it ends: so one that an
earlier start left, killed together with its guard, goes at the next start of the same name, and no living one's does.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from milesbatch.errors import StorageError
from milesbatch.store.durable import make_directory, remove_tree, storage_error


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """A directory of one start; nobody else's as long as it is open."""

    directory: Path
    _lock: int
    """An open descriptor of the directory."""

    @classmethod
    def take(cls, base: Path, owner: str, life: str) -> LocalMemory:
        """Make ``base/owner + life`` and remove what earlier lives of ``owner`` left beside it.

        ``life`` begins with a dot, or is empty: then all lives of ``owner`` share one directory, and none is removed.

        Raises:
            StorageError: it cannot be made, or belongs to somebody else.
        """
        directory = base / f"{owner}{life}"
        lock = -1
        while lock < 0:  # another start may take one that is not locked yet for one that was left
            make_directory(directory)
            lock = _locked(directory)
        try:
            base.chmod(0o700)
            if life:
                _remove_left(base, owner, directory)
        except OSError as error:
            os.close(lock)
            raise StorageError(
                f"{base} belongs to somebody else, or cannot be read: {error}",
                mend="choose another rollout.sglang.memory_dir",
            ) from error
        return cls(directory, lock)

    def close(self) -> None:
        """Remove it, with all that is in it."""
        remove_tree(self.directory)
        os.close(self._lock)


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


def _remove_left(base: Path, owner: str, own: Path) -> None:
    """Remove the directories of other lives of ``owner`` that no living process holds."""
    for entry in sorted(base.iterdir()):
        if entry == own or not entry.name.startswith(f"{owner}.") or entry.is_symlink() or not entry.is_dir():
            continue
        try:
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(entry)
        except BlockingIOError:
            pass  # it lives
        finally:
            os.close(descriptor)
