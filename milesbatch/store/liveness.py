"""Is the controller of an incarnation alive? Hints only: the truth is the exclusive creation of the next record.

On the same host the answer is exact (process id together with the kernel's start time and boot id). From another host the
liveness hint is watched: a living controller rewrites it every few seconds with a growing counter; clocks of two hosts
are never compared.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milesbatch.records import IncarnationRecord
from milesbatch.store.durable import read_optional, replace_hint
from milesbatch.store.layout import RunLayout


def process_started(pid: int | str = "self") -> str | None:
    """Boot id and start time of a process as the kernel counts it; None when it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None  # a zombie process: it has ended and only waits to be collected
    return f"{boot}:{fields[19]}"


@dataclass(slots=True)
class LivenessHint:
    """Rewrites the hint of a living controller."""

    layout: RunLayout
    incarnation: int
    address: str
    _count: int = 0

    def beat(self) -> None:
        self._count += 1
        body = {"host": socket.gethostname(), "address": self.address, "count": self._count}
        replace_hint(self.layout.liveness(self.incarnation), json.dumps(body).encode())


def read_hint(layout: RunLayout, incarnation: int) -> dict[str, Any] | None:
    """The newest hint, or None when there is none or it cannot be parsed (it may be torn: it is not durable)."""
    data = read_optional(layout.liveness(incarnation))
    try:
        hint = json.loads(data) if data else None
    except ValueError:
        return None
    return hint if isinstance(hint, dict) else None


def is_alive(layout: RunLayout, record: IncarnationRecord, watch_s: float = 16.0) -> bool:
    """Does the controller of ``record`` still run? Watches for up to ``watch_s`` seconds when it is on another host."""
    if record.host == socket.gethostname():
        return process_started(record.pid) == record.process_started
    first = read_hint(layout, record.incarnation)
    deadline = time.monotonic() + watch_s
    while (
        time.monotonic() < deadline
    ):  # without a hint as well: a controller that has just begun writes its first one soon
        time.sleep(0.5)
        if read_hint(layout, record.incarnation) != first:
            return True
    return False
