"""Numbers, sizes, times and durations as people read them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def figure(value: float | None) -> str:
    """Four significant digits; a dash when it is not known."""
    if value is None:
        return "–"  # noqa: RUF001 - a dash in a table of numbers
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def size(num_bytes: float) -> str:
    """Bytes with a decimal prefix."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def span(seconds: float) -> str:
    """A duration: two units at most."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def moment(at_s: float) -> str:
    """A time, UTC, to the second."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def short_moment(at_s: float) -> str:
    """Day and time, UTC, to the minute."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%d %b %H:%M")


def clock(at_s: float) -> str:
    """Only the time of day."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S")


def many(count: int, one: str, several: str | None = None) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def share(part: float, whole: float) -> str:
    """Per cent, with a digit where it matters."""
    if not whole:
        return "–"  # noqa: RUF001 - a dash in a table of numbers
    value = 100 * part / whole
    return f"{value:.1f} %" if 0 < value < 10 or 99 < value < 100 else f"{value:.0f} %"
