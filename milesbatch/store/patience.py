"""Waiting for space: a full disk is told, waited out for a set time, and only then an error. Nothing is lost either way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from milesbatch.errors import StorageFullError

T = TypeVar("T")
_LONGEST_PAUSE_S = 15.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a writer waits for space, and whom it tells."""

    wait_s: float
    tell: Callable[[str], None]
    """Called with the path and the need each time before it waits."""

    def until_space(self, action: Callable[[], T]) -> T:
        """Result of ``action``, which is repeated while the filesystem is full; it must be safe to repeat.

        Raises:
            StorageFullError: still no space after ``wait_s`` seconds.
        """
        deadline_s = time.monotonic() + self.wait_s
        pause_s = 0.5
        while True:
            try:
                return action()
            except StorageFullError as error:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise
                self.tell(f"{error.what}; waiting for space for {remaining_s:.0f} s more")
                time.sleep(min(pause_s, remaining_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


AT_ONCE = Patience(0.0, lambda text: None)
"""No waiting: the error comes at once."""
