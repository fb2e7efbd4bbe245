"""Waiting for what others have committed to come into sight: for a set time, and only then it is missing.

On a shared filesystem a host may see a new file late, or first a beginning of it, or in another order than it was written, and
may go on for a while to find missing what was missing before (docs/protocol.md, assumptions). Owns that patience of
readers; never decides what is damaged: an error that may be of this kind says so itself (``MilesbatchError.unseen``).
Invariant: with ``wait_s`` 0 nothing waits and nothing is touched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from milesbatch.errors import MilesbatchError
from milesbatch.store.durable import TEMPORARY_PREFIX
from milesbatch.store.mounts import is_local
from milesbatch.store.operations import current

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_WORTH_TELLING_S = 1.0


@dataclass(frozen=True, slots=True)
class Sight:
    """How long a reader looks for what it was told of, and whom it tells meanwhile."""

    wait_s: float
    tell: Callable[[str], None]
    """Called each time before it waits for a second or longer."""

    def until_seen(self, look: Callable[[], T]) -> T:
        """Result of ``look``, which is repeated while its error says that something may not be visible yet.

        Raises:
            MilesbatchError: that of ``look``: another one at once, such a one after ``wait_s`` seconds.
        """

        def attempt() -> T | MilesbatchError:
            try:
                return look()
            except MilesbatchError as error:
                if error.unseen is None:
                    raise
                return error

        found = self.until_complete(attempt, _unseen)
        if not isinstance(found, MilesbatchError):
            return found
        if self.wait_s == 0:
            raise found
        raise type(found)(f"{found.what} (after {self.wait_s:g} s of looking for it)", mend=found.mend) from found

    def until_complete(self, look: Callable[[], T], unseen: Callable[[T], Iterable[Path]]) -> T:
        """Result of ``look``, repeated until ``unseen`` names nothing in it that may still appear, or the time is over."""
        deadline_s = time.monotonic() + self.wait_s
        pause_s = _FIRST_PAUSE_S
        while True:
            found = look()
            places = sorted(unseen(found))
            remaining_s = deadline_s - time.monotonic()
            if not places or remaining_s <= 0:
                return found
            if pause_s >= _WORTH_TELLING_S:
                self.tell(f"{places[0]} is not (wholly) visible yet; looking for {remaining_s:.0f} s more")
            # The directory itself may be another one by now, after a quarantine: its name is looked up in its parent.
            for directory in sorted({parent for place in places for parent in place.parents[:2]}):
                refresh(directory)
            time.sleep(min(pause_s, remaining_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


AT_ONCE = Sight(0.0, lambda text: None)
"""No waiting: what is not seen is missing."""
_OPENING_S = 90.0


def sight_of(place: Path, wait_s: float, tell: Callable[[str], None]) -> Sight:
    """The patience of a process whose run is at ``place``: ``wait_s``, but none where no other host can lag behind."""
    return Sight(0.0 if is_local(place) else wait_s, tell)


def first_sight(place: Path) -> Sight:
    """For a process that was told of the run at ``place``, and cannot have read its recipe yet."""
    return sight_of(place, _OPENING_S, lambda text: print(text, file=sys.stderr, flush=True))


def refresh(directory: Path) -> None:
    """Have this host forget what it remembers of ``directory``; where that is not seen, of its nearest parent first.

    NFS drops its cache of a directory, missing names included, when the host itself changes it and learns that others have
    too. So a temporary file is made and removed. Elsewhere that does nothing; where it is not allowed, neither.
    """
    hidden: list[Path] = []
    while not directory.is_dir() and directory != directory.parent:
        hidden.append(directory)
        directory = directory.parent
    _touch(directory)
    while hidden and hidden[-1].is_dir():
        _touch(hidden.pop())


def _touch(directory: Path) -> None:
    path = directory / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    with contextlib.suppress(OSError):
        current().create(path).close()
    with contextlib.suppress(OSError):
        current().unlink(path)


def _unseen(found: object) -> list[Path]:
    return [found.unseen] if isinstance(found, MilesbatchError) and found.unseen is not None else []
