"""Numbers out of events that anybody may have written: finite, or not there. Pure."""

from __future__ import annotations

import math


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def duration(value: object) -> float:
    """Seconds that something took: 0 when it is not known, negative or absurd."""
    found = number(value)
    return found if found is not None and 0 <= found < 1e9 else 0.0


def whole(value: object) -> int | None:
    """An integer; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None
