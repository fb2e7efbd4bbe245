"""Reads the event logs of a run, all processes and incarnations, and the faults that were injected.

Owns: reading, with what is missing or damaged told beside the rest. Never: what events mean (``slices.py``, ``troubles.py``).
Invariant: one damaged log costs its own events only. The page behind it is ``docs/format.md``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milesbatch.errors import MilesbatchError
from milesbatch.report.endings import CONTROLLER
from milesbatch.report.sources import list_sources
from milesbatch.store.durable import read_optional
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout
from milesbatch.timeline.clock import times_of, unix_seconds


@dataclass(frozen=True, slots=True)
class Timed:
    """One event and when it happened, in seconds since 1970 on the run's clock."""

    at_s: float
    name: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Log:
    """The events of one process in one incarnation, in order."""

    process: str
    incarnation: int
    events: tuple[Timed, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was injected on purpose, and fired."""

    name: str
    process: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the run's processes wrote down."""

    logs: tuple[Log, ...]
    """By incarnation, then process."""
    faults: tuple[Fault, ...]
    """In order of time."""
    gaps: tuple[str, ...]
    """What could not be read, in words."""

    def of(self, process: str) -> list[Log]:
        """Logs of one process, by incarnation."""
        return [log for log in self.logs if log.process == process]

    def controllers(self) -> list[Log]:
        return self.of(CONTROLLER)

    @property
    def first_s(self) -> float | None:
        """When the first event happened; None without events."""
        return min((log.events[0].at_s for log in self.logs if log.events), default=None)

    @property
    def last_s(self) -> float | None:
        return max((log.events[-1].at_s for log in self.logs if log.events), default=None)


def read_evidence(layout: RunLayout, incarnations: int) -> Evidence:
    """Everything under ``events/``; ``incarnations`` are known to exist, so that a missing controller's log is told."""
    gaps: list[str] = []
    logs: list[Log] = []
    try:
        sources = [source for source in list_sources(layout, all_events=True) if source.is_events]
    except MilesbatchError as error:
        sources = []
        gaps.append(error.what)
    for source in sources:
        events = _read(layout, source.path, gaps)
        logs.append(Log(source.name, source.incarnation or 0, events))
    heard = {log.incarnation for log in logs if log.process == CONTROLLER and log.events}
    for number in range(1, incarnations + 1):
        if number not in heard:
            path = layout.event_log(CONTROLLER, number).relative_to(layout.root)
            gaps.append(f"{path} is missing or empty: what incarnation {number} did is only partly known")
    logs.sort(key=lambda log: (log.incarnation, log.process))
    return Evidence(tuple(logs), tuple(_faults(layout, gaps)), tuple(gaps))


def _read(layout: RunLayout, path: Path, gaps: list[str]) -> tuple[Timed, ...]:
    events: list[dict[str, Any]] = []
    strange = 0
    try:
        for event, _ in read_events(path):
            if _is_usable(event):
                events.append(event)
            else:
                strange += 1
    except (OSError, RecursionError) as error:
        gaps.append(f"{path.relative_to(layout.root)} cannot be read to its end ({error})")
    if strange:
        gaps.append(f"{path.relative_to(layout.root)}: {strange} lines are not events of this format")
    return tuple(Timed(at_s, event["event"], event) for at_s, event in zip(times_of(events), events, strict=True))


def _is_usable(event: dict[str, Any]) -> bool:
    mono_s = event.get("mono_s")
    has_mono = isinstance(mono_s, int | float) and not isinstance(mono_s, bool) and math.isfinite(mono_s)
    return has_mono and isinstance(event.get("event"), str) and unix_seconds(event.get("at")) is not None


def _faults(layout: RunLayout, gaps: list[str]) -> list[Fault]:
    found: list[Fault] = []
    for path in sorted(layout.events.glob("fault.*.fired")):
        try:
            body = json.loads(read_optional(path) or b"")
            at_s = unix_seconds(body["at"])
            if at_s is None:
                raise ValueError("no time")
            found.append(Fault(str(body["fault"]), str(body["process"]), at_s))
        except (MilesbatchError, ValueError, KeyError, TypeError) as error:
            gaps.append(f"{path.relative_to(layout.root)} cannot be read ({error})")
    return sorted(found, key=lambda fault: fault.at_s)
