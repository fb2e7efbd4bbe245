"""Following a run from the command line: when to look for what is new, when to stop looking, and what to say then.

Owns the pauses, and the question whether the run is over. Never looks itself. Invariant: after the run was found to be over,
one more look is asked for, so that nothing that came just before its end is missed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from milesbatch.report.condition import Condition
from milesbatch.report.status import StatusReader
from milesbatch.store.layout import RunLayout

LOOK_S = 1.0
_OVER_S = 5.0
"""Seconds between two questions whether the run is over, which cost more than a look."""


@dataclass(slots=True)
class End:
    """How a run that was followed ended; nothing while it goes on."""

    condition: Condition | None = None

    def tell(self) -> int:
        """Say it, and return the exit code of a command that waited for it: 0 when the run finished or goes on."""
        if self.condition is None:
            return 0
        cause = f": {self.condition.cause.splitlines()[0]}" if self.condition.cause else ""
        print(f"the run has ended: {self.condition.state}{cause}", file=sys.stderr, flush=True)
        return self.condition.exit_code


def looks(layout: RunLayout, *, follow: bool, pause_s: float | None = None, end: End | None = None) -> Iterator[bool]:
    """Yields whenever it is time to look, with whether this is the last time: at once without ``follow``, else when the run
    is over, which ``end`` then knows. ``pause_s`` seconds lie between two looks, ``LOOK_S`` by default."""
    status, next_s, is_last = StatusReader(layout), 0.0, not follow
    while True:
        yield is_last
        if is_last:
            return
        if time.monotonic() >= next_s:
            condition = status.condition()
            is_last = condition.is_over
            if is_last and end is not None:
                end.condition = condition
            next_s = time.monotonic() + _OVER_S
        if not is_last:
            time.sleep(LOOK_S if pause_s is None else pause_s)
