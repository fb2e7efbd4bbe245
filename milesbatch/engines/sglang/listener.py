"""Who hears what happens to servers. Pure.

Invariant: a listener is called from the engine's own thread, and none of its parts waits for anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _ignore(text: str) -> None:
    """Nobody hears it."""


@dataclass(frozen=True, slots=True)
class FleetListener:
    """What a fleet says of its servers, by occasion."""

    tell: Callable[[str], None] = _ignore
    """Each thing that happens to a server, in words; perhaps several lines, in those of its log."""
    show: Callable[[str], None] = _ignore
    """Those servers that do not work and why, in one line, whenever that changes; empty: all of them work."""
    sign: Callable[[], None] = lambda: None
    """Signs of life: a start that gets on, a token that was generated when asked for. A long answer comes as a whole, and
    until then nothing else shows that it is being made."""
    room: Callable[[str], None] | None = None
    """Not of the fleet but of the weights for it: there is no space for them on this host, which is waited for. None: as
    ``tell``."""
