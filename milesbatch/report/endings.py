"""How incarnations and role processes ended, in words, from event logs and text logs. For people: nothing is decided by it.

Owns: finding the decisive lines. Never: restarts. Invariant: what cannot be known is said to be unknown, never guessed to
be well.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from milesbatch.cluster.last_words import without_servers_words, without_slurms_words
from milesbatch.cluster.local import log_tail
from milesbatch.cluster.stamps import since_last_start, split_stamp
from milesbatch.decisions.first_cause import what_to_try
from milesbatch.decisions.going_on import BY_HAND, Exclusions
from milesbatch.records import IncarnationRecord
from milesbatch.report.sources import Source, batch_logs, read_tail
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout

CONTROLLER = "controller-0"
VANISHED = "the controller was lost without a word (killed, or its node died)"
_LAST_WORDS = ("finished", "stopped", "failed", "controller_killed")
_TAIL_BYTES = 32 << 10
_MOST_LINES = 12
_UNSURE_LINES = 3
_MOST_ENDS = 10
_SAID_AT_ONCE_S = 0.5
_DECISIVE = tuple(
    re.compile(pattern)
    for pattern in ("error: ", r"(\[rank\d+\]: )?Traceback \(most recent call last\)", "Fatal Python error")
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Who ended a run badly, and what was said."""

    name: str
    """The role process (``trainer-1``), or ``controller-0``."""
    host: str
    """Node or host that it ran on; empty when it was never heard of."""
    exit_code: int | None
    """Exit status; negative: the signal; null when nobody could see it."""
    reason: str
    log: str
    """Relative to the run directory; empty when it has none."""
    lines: tuple[str, ...]
    """The decisive ones of its log."""

    @property
    def try_this(self) -> str:
        """What a person can try; empty when nothing is known that helps."""
        return what_to_try(self.reason, *self.lines)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"lines": list(self.lines), "try": self.try_this}


def last_word(layout: RunLayout, record: IncarnationRecord | None) -> dict[str, Any]:
    """The event with which an incarnation's controller ended; empty when it said none."""
    last: dict[str, Any] = {}
    for event in controller_events(layout, record):
        if event["event"] in _LAST_WORDS:
            last = event
    return last


def controller_events(layout: RunLayout, record: IncarnationRecord | None) -> list[dict[str, Any]]:
    if record is None:
        return []
    return [event for event, _ in read_events(layout.event_log(CONTROLLER, record.incarnation))]


def stop_in_words(layout: RunLayout, record: IncarnationRecord) -> str:
    """Why an incarnation that ended by itself, before the run was finished, did so."""
    asked = [event for event in controller_events(layout, record) if event["event"] == "stopping"]
    cause, text = (asked[-1].get("cause", "signal"), asked[-1].get("text", "")) if asked else ("signal", "")
    if cause == "signal":
        return f"it was stopped by a signal ({text})" if text else "it was stopped by a signal"
    return f"it was stopped: {text}"


def killed_in_words(word: dict[str, Any]) -> str:
    """What its guard said of a controller that was killed."""
    return f"the controller was killed by {word.get('signal', 'a signal')}"


def process_ends(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last role processes of an incarnation that died and were not asked to."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "stopping":
            break
        if event["event"] == "process_ended" and event.get("exit_code"):
            keys = ("at", "name", "host", "exit_code", "reason", "said")
            found.append({key: event.get(key) for key in keys})
    return found[-_MOST_ENDS:]


def excluded_nodes(layout: RunLayout, records: Sequence[IncarnationRecord], limit: int) -> list[dict[str, Any]]:
    """Nodes that the run avoids since it was last submitted by hand, the oldest first, each with when and why."""
    kept: tuple[str, ...] = ()
    why: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.cause.startswith(BY_HAND):
            kept = ()
        for event in controller_events(layout, record):
            nodes = event.get("nodes") if event["event"] == "stopping" else None
            if nodes and event.get("cause") == "node_lost":
                kept = Exclusions(kept, limit).plus(nodes)
                said = {"reason": event.get("text", ""), "at": event["at"], "incarnation": record.incarnation}
                why |= {node: said for node in nodes}
    return [{"node": node, **why[node]} for node in kept]


# -- a bad end ------------------------------------------------------------------------------------------------------------


def failure_of(layout: RunLayout, record: IncarnationRecord) -> Failure:
    """Who made the incarnation fail: the role process whose death came last before that, else the controller itself."""
    events = controller_events(layout, record)
    fatal = max((place for place, event in enumerate(events) if event["event"] == "failed"), default=len(events))
    word = events[fatal] if fatal < len(events) else {}
    before = events[fatal - 1] if fatal else {}
    if before.get("event") == "process_ended" and before.get("exit_code"):
        name = str(before["name"])
        log = layout.log(name, record.incarnation)
        return Failure(
            name=name,
            host=str(before.get("host") or ""),
            exit_code=int(before["exit_code"]),
            reason=str(before.get("reason", "")),
            log=str(log.relative_to(layout.root)),
            lines=decisive_lines(since_last_start(log_tail(log, _TAIL_BYTES))),
        )
    said = str(word.get("error", "")).splitlines()
    return Failure(
        CONTROLLER, record.host, word.get("exit_code"), said[0] if said else "", "", tuple(said[:_MOST_LINES])
    )


def lost_controller(layout: RunLayout, record: IncarnationRecord, slurms_word: str) -> Failure:
    """A controller that ended without a word; ``slurms_word`` is what Slurm says of its job, empty for nothing."""
    log = next((source for source in batch_logs(layout) if source.job_id == record.job_id), None)
    reason = VANISHED + (f"; Slurm says of its job: {slurms_word}" if slurms_word else "")
    if log is None:
        return Failure(CONTROLLER, record.host, None, reason, "", ())
    lines = decisive_lines(log_tail(log.path, _TAIL_BYTES))
    return Failure(CONTROLLER, record.host, None, reason, str(log.path.relative_to(layout.root)), lines)


def killed_controller(layout: RunLayout, record: IncarnationRecord, word: dict[str, Any]) -> Failure:
    """A controller whose guard saw it killed."""
    log = next((source for source in batch_logs(layout) if source.job_id == record.job_id), None)
    place = "" if log is None else str(log.path.relative_to(layout.root))
    number = getattr(signal, str(word.get("signal")), None)
    code = None if number is None else -int(number)
    return Failure(CONTROLLER, record.host, code, killed_in_words(word), place, ())


def ended_before(layout: RunLayout, slurms_word: Callable[[str], str]) -> Failure | None:
    """A newest batch job that ended before any controller began; ``slurms_word`` tells how a job ended, empty for unknown."""
    logs = batch_logs(layout)
    if not logs:
        return None
    word = slurms_word(logs[-1].job_id)
    if word.startswith("CANCELLED"):
        return None
    lines = decisive_lines(log_tail(logs[-1].path, _TAIL_BYTES))
    reason = f"job {logs[-1].job_id} ended before it had a controller" + (f"; Slurm says: {word}" if word else "")
    return Failure(CONTROLLER, "", None, reason, str(logs[-1].path.relative_to(layout.root)), lines)


def batch_error(layout: RunLayout, after: str) -> Failure | None:
    """The error with which the newest batch job ended outside of an incarnation (before one began), if later than ``after``."""
    logs = batch_logs(layout)
    found = _last_error(logs[-1]) if logs else None
    if found is None or found[0] <= after:
        return None
    lines = found[1]
    return Failure(CONTROLLER, "", None, lines[0], str(logs[-1].path.relative_to(layout.root)), lines)


def _last_error(source: Source) -> tuple[str, tuple[str, ...]] | None:
    """Time and lines of the last ``error: ...`` that a batch job printed, unless it printed more later."""
    text = read_tail(source.path, _TAIL_BYTES)
    lines = [split_stamp(line) for line in without_slurms_words(text.splitlines())]
    starts = [place for place, (at, line) in enumerate(lines) if at is not None and line.startswith("error: ")]
    if not starts:
        return None
    at = str(lines[starts[-1]][0])
    said = lines[starts[-1] :]
    if _seconds(at, max(other for other, _ in said if other is not None)) > _SAID_AT_ONCE_S:
        return None  # it went on
    return at, tuple([said[0][1].removeprefix("error: "), *(line for _, line in said[1:])][:_MOST_LINES])


def _seconds(first: str, second: str) -> float:
    return (datetime.fromisoformat(second) - datetime.fromisoformat(first)).total_seconds()


def decisive_lines(text: str) -> tuple[str, ...]:
    """What a log (without times) ends in: the last ``error: ...``, else the end of the last traceback, else the last lines."""
    lines = without_servers_words(line.rstrip() for line in text.splitlines() if line.strip())
    lines = without_slurms_words(lines) or lines
    for begins in _DECISIVE:
        places = [place for place, line in enumerate(lines) if begins.match(line)]
        if places:
            tail = lines[places[-1] :]
            return tuple(tail if len(tail) <= _MOST_LINES else [tail[0], *tail[-_MOST_LINES + 1 :]])
    return tuple(lines[-_UNSURE_LINES:])
