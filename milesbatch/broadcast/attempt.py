"""Work that may hang, in a thread that can be given up.

A collective whose peer stopped answering may hang for as long as its library likes. Whoever waits here waits until a
deadline and then goes on; the thread keeps what it holds and is never joined (roles end with ``os._exit``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, TypeVar

from milesbatch.errors import BroadcastError, MilesbatchError

T = TypeVar("T")


class Attempt(Generic[T]):
    """One piece of work, begun at once."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._name = name
        self._future: Future[T] = Future()
        self._began_s, self._ended_s = time.monotonic(), 0.0
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._future.done()

    @property
    def seconds(self) -> float:
        """From its begin to its end, or until now."""
        return (self._ended_s or time.monotonic()) - self._began_s

    def wait(self, seconds: float) -> None:
        """Until it is over, but no longer than that."""
        wait([self._future], timeout=max(seconds, 0.0))

    def result(self, deadline_s: float) -> T:
        """What the work gives; waits until ``deadline_s`` (monotonic).

        Raises:
            BroadcastError: it is not over by then, and was given up; or what the work itself raised.
        """
        try:
            return self._future.result(max(deadline_s - time.monotonic(), 0.0))
        except FutureTimeoutError:
            raise BroadcastError(f"{self._name} did not end within {self.seconds:.1f} s and was given up") from None

    def _run(self, work: Callable[[], T]) -> None:
        try:
            result = work()
        except MilesbatchError as error:
            self._ended_s = time.monotonic()
            self._future.set_exception(error)
        except BaseException as error:
            self._future.set_exception(error)
            raise
        else:
            self._ended_s = time.monotonic()
            self._future.set_result(result)
