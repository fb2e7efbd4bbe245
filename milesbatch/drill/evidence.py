"""What a run's files say about it: events in order of time, fates, digests, fired faults. Reads only; decides nothing.

Event logs are diagnosis: they time the recovery, and what was lost is counted from batch records and manifests alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from milesbatch.errors import CorruptArtefactError
from milesbatch.faults.injector import fired_path
from milesbatch.records import BatchRecord, WeightsManifest
from milesbatch.store.durable import read_optional
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault or act that really happened."""

    process: str
    """``trainer-0``, or ``drill``."""
    pid: int
    mono_s: float
    """Monotonic clock of this machine, as in the event logs; on a site of several machines, seconds since 1970."""
    path: str | None = None
    """The file that was damaged, relative to the run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has come to."""

    fates: dict[int, str]
    """Group id -> ``trained(step)`` or ``rejected(reason, step)``; the first one when it has two."""
    repeated: int
    """Groups with more than one fate."""
    digests: dict[int, str]
    """Policy version -> weights digest."""
    damaged: tuple[str, ...] = ()
    """Records that cannot be read."""


def read_fired(layout: RunLayout, name: str, by_wall_clock: bool = False) -> Fired | None:
    """The injector's record of the fault ``name``; None when it has not fired (or is just being recorded)."""
    data = read_optional(fired_path(layout, name))
    try:
        body = json.loads(data) if data else None
    except ValueError:
        return None
    if body is None:
        return None
    path = body.get("path")
    if path is not None:
        path = str(Path(path).relative_to(layout.root.resolve()))
    return Fired(body["process"], body["pid"], _wall_s(body) if by_wall_clock else body["mono_s"], path)


def events_of(layout: RunLayout, by_wall_clock: bool = False) -> list[Event]:
    """All events of all processes and incarnations, in order of time. ``by_wall_clock``: the processes ran on several
    machines, whose monotonic clocks cannot be compared; ``mono_s`` is then ``at`` in seconds."""
    events = [event for path in layout.events.glob("*.jsonl") for event, _ in read_events(path) if "mono_s" in event]
    if by_wall_clock:
        events = [{**event, "mono_s": _wall_s(event)} for event in events]
    return sorted(events, key=lambda event: float(event["mono_s"]))


def _wall_s(event: Event) -> float:
    return datetime.fromisoformat(event["at"].replace("Z", "+00:00")).timestamp()


def outcome_of(layout: RunLayout, steps: int) -> Outcome:
    """Fates and versions of a run of ``steps`` steps, from its records."""
    damaged: list[str] = []
    told = [fate for step in range(1, steps + 1) for fate in _fates(layout, step, damaged)]
    counts = Counter(group for group, _ in told)
    digests = {}
    for version in range(steps + 1):
        path = layout.weights_manifest(version)
        data = read_optional(path)
        if data is not None:
            try:
                digests[version] = WeightsManifest.from_bytes(data, str(path)).weights_digest
            except CorruptArtefactError as error:
                damaged.append(error.what)
    repeated = sum(count > 1 for count in counts.values())
    return Outcome(dict(reversed(told)), repeated, digests, tuple(damaged))


def _fates(layout: RunLayout, step: int, damaged: list[str]) -> Iterator[tuple[int, str]]:
    path = layout.batch(step)
    data = read_optional(path)
    if data is None:
        return
    try:
        record = BatchRecord.from_bytes(data, str(path))
    except CorruptArtefactError as error:
        damaged.append(error.what)
        return
    yield from ((group.group_id, f"trained({step})") for group in record.trained)
    yield from ((group.group_id, f"rejected({group.reason}, {step})") for group in record.rejected)


def unconsumed_files(layout: RunLayout) -> list[Path]:
    """Committed trajectory files that no batch record names yet, in order of their names."""
    used: set[str] = set()
    step = 1
    while (data := read_optional(layout.batch(step))) is not None:
        record = BatchRecord.from_bytes(data, str(layout.batch(step)))
        used |= {group.path for group in record.trained} | {group.path for group in record.rejected}
        step += 1
    return [path for path in sorted(layout.trajectories.glob("*.arrow")) if path.name not in used]


def newest_incarnation(layout: RunLayout) -> int:
    number = 0
    while layout.incarnation(number + 1).exists():
        number += 1
    return number
