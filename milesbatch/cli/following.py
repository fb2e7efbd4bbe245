"""Following a run from the command line: when to look for what is new, and when to stop looking.

Owns the pauses, and the question whether the run is over. Never looks itself. Invariant: after the run was found to be over,
one more look is asked for, so that nothing that came just before its end is missed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from milesbatch.report.status import StatusReader
from milesbatch.store.layout import RunLayout

LOOK_S = 1.0
_OVER_S = 5.0
"""Seconds between two questions whether the run is over, which cost more than a look."""


def looks(layout: RunLayout, *, follow: bool, pause_s: float | None = None) -> Iterator[bool]:
    """Yields whenever it is time to look, with whether this is the last time: at once without ``follow``, else when the run
    is over. ``pause_s`` seconds lie between two looks, ``LOOK_S`` by default."""
    status, next_s, is_last = StatusReader(layout), 0.0, not follow
    while True:
        yield is_last
        if is_last:
            return
        if time.monotonic() >= next_s:
            is_last = status.condition().is_over
            next_s = time.monotonic() + _OVER_S
        if not is_last:
            time.sleep(LOOK_S if pause_s is None else pause_s)
