"""The end of a job's time, asked from Slurm itself. A thread asks; the controller's loop looks at what it found.

Owns: when it is time to stop. Never: what happens then. Slurm warns in several ways: SIGUSR1 to the batch script before the
time limit and, where the site has ``preempt_send_user_signal``, at a preemption; SIGTERM to the steps at a preemption
elsewhere, which the roles tell with their heartbeats. All of them only lead to a question. Invariant: an unanswered question
is never "there is time": the last answer goes on to count down.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from milesbatch.cluster import slurm
from milesbatch.controller.stopping import StopCause, StopRequest
from milesbatch.errors import SlurmError

_ASK_S = 15.0
_QUEUE_AGAIN_S = 10.0
"""What it takes to end all steps and have the job queued again."""


class DeadlineWatch:
    """Asks to stop when the time that is left is what a stop takes."""

    def __init__(
        self,
        needed_s: Callable[[], float],
        ask: Callable[[], float | None],
        *,
        num_warnings: Callable[[], int] = lambda: 0,
        ask_every_s: float = _ASK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``needed_s`` says what a stop takes now; ``ask`` gives the seconds left, None when there is no limit;
        ``num_warnings`` grows when somebody saw a sign of the end."""
        self._needed_s = needed_s
        self._ask = ask
        self._ask_every_s = ask_every_s
        self._clock = clock
        self._num_warnings = num_warnings
        self._warnings_seen = 0
        self._wake = threading.Event()
        self._ends_at_s: float | None = None
        self._thread = threading.Thread(target=self._ask_forever, name="deadline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """A warning came (a signal; safe in its handler): ask now. It is no order to stop: only the time that is left says."""
        self._wake.set()

    def look_for_stop(self) -> StopRequest | None:
        if (warnings := self._num_warnings()) > self._warnings_seen:
            self._warnings_seen = warnings
            self.wake()
        if self._ends_at_s is None:
            return None
        left_s, needed_s = self._ends_at_s - self._clock(), self._needed_s()
        if left_s > needed_s:
            return None
        text = f"Slurm ends the job in {left_s:.0f} s (time limit or preemption), and saving may take {needed_s:.0f} s"
        return StopRequest(StopCause.TIME_LIMIT, text, within_s=max(left_s - _QUEUE_AGAIN_S, left_s / 2))

    def ask_once(self) -> None:
        """Take over Slurm's answer; without one the last answer stands."""
        try:
            left_s = self._ask()
        except SlurmError:
            return
        if left_s is not None:
            self._ends_at_s = self._clock() + left_s

    def _ask_forever(self) -> None:
        while True:
            self.ask_once()
            self._wake.wait(self._ask_every_s)
            self._wake.clear()


def job_deadline(job_id: str, needed_s: Callable[[], float], num_warnings: Callable[[], int]) -> DeadlineWatch:
    """The watch for this job, started; Slurm's warning signal wakes it. From the main thread only."""
    watch = DeadlineWatch(needed_s, lambda: slurm.time_left_s(job_id), num_warnings=num_warnings)
    signal.signal(signal.SIGUSR1, lambda number, frame: watch.wake())
    watch.start()
    return watch
