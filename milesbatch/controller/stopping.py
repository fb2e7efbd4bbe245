"""Who may ask a run to stop, and why it stopped. Values, and the watch for a request in the run directory.

Owns: the reasons. Never: what happens next (``milesbatch.jobs`` decides whether a job is queued again). Invariant: asking
again is harmless, and a request is for one incarnation only, so that it never stops a later one.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from milesbatch.store.clock import utc_now
from milesbatch.store.durable import read_optional, replace_hint
from milesbatch.store.layout import RunLayout

_LOOK_S = 0.5


class StopCause(Enum):
    """Why a run stops before it is finished."""

    SIGNAL = "a signal"
    """Somebody's Ctrl-C, or Slurm: a warning, a preemption, `scancel`, a requeue."""
    CANCELLED = "cancelled"
    TIME_LIMIT = "the time limit"
    NODE_LOST = "a lost node"


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Stop now, with a checkpoint unless ``at_once``."""

    cause: StopCause
    text: str
    """For people: what happened."""
    at_once: bool = False
    nodes: tuple[str, ...] = ()
    """Nodes that were lost."""
    within_s: float | None = None
    """After so many seconds what is not saved is given up, so that there is time to queue the job again."""


class StopWatch(Protocol):
    """Something that may ask the run to stop; looked at several times a second, so it must be cheap."""

    def look_for_stop(self) -> StopRequest | None: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How one incarnation ended without an error: finished, or stopped for a reason."""

    stop: StopRequest | None = None

    @property
    def is_finished(self) -> bool:
        return self.stop is None


class CancelWatch:
    """``milesbatch cancel`` leaves a request for the newest incarnation in the run directory."""

    def __init__(self, layout: RunLayout, incarnation: int) -> None:
        self._path = layout.stop_request(incarnation)
        self._next_look_s = 0.0

    def look_for_stop(self) -> StopRequest | None:
        if time.monotonic() < self._next_look_s:  # a file on a shared filesystem is not looked for ten times a second
            return None
        self._next_look_s = time.monotonic() + _LOOK_S
        data = read_optional(self._path)
        if data is None:
            return None
        try:
            at_once = bool(json.loads(data)["now"])
        except (ValueError, KeyError, TypeError):
            at_once = False  # torn: it is not durable; that somebody asked is all that matters
        return StopRequest(StopCause.CANCELLED, "asked by `milesbatch cancel`", at_once)


def request_stop(layout: RunLayout, incarnation: int, *, now: bool) -> None:
    """Ask the living controller of ``incarnation`` to stop, from any host that sees the run directory.

    Raises:
        StorageError: the run directory cannot be written.
    """
    replace_hint(layout.stop_request(incarnation), json.dumps({"now": now, "at": utc_now()}).encode())
