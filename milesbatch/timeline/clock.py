"""One clock for a run: the wall clock, smoothed by each process's monotonic one. Pure.

Owns: the time of an event. Never: compares clocks of two hosts; those are as equal as the site keeps them. Invariant: within a
log, times never go back, whatever was done to the host's clock. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

SAME_CLOCK_S = 2.0
"""Wall and monotonic clock that drift further apart than this belong to another boot, another host, or a clock that was set."""


def unix_seconds(at: object) -> float | None:
    """Seconds since 1970 of a time as records and events have it; None for anything else."""
    if not isinstance(at, str):
        return None
    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def times_of(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds since 1970 of each event of one log, in its order. Each must have a usable ``at`` and ``mono_s``."""
    walls = [unix_seconds(event["at"]) or 0.0 for event in events]
    monos = [float(event["mono_s"]) for event in events]
    times: list[float] = []
    for first, last in _segments(walls, monos):
        offset = statistics.median(wall - mono for wall, mono in zip(walls[first:last], monos[first:last], strict=True))
        if times:
            offset = max(offset, times[-1] - monos[first])
        times += [mono + offset for mono in monos[first:last]]
    return times


def _segments(walls: Sequence[float], monos: Sequence[float]) -> list[tuple[int, int]]:
    """Ranges of events within which both clocks run alike."""
    if not walls:
        return []
    starts = [0]
    for place in range(1, len(walls)):
        drift = (walls[place] - monos[place]) - (walls[starts[-1]] - monos[starts[-1]])
        if abs(drift) > SAME_CLOCK_S or monos[place] < monos[place - 1]:
            starts.append(place)
    return list(zip(starts, [*starts[1:], len(walls)], strict=True))
