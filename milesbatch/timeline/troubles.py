"""What went wrong or was interrupted, with its cause and what came of it: the answers to "why did this restart?". Pure.

Owns: finding them in the event logs. Never: decides anything. Invariant: a process that was started more than once has a
trouble for each further start. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from milesbatch.timeline.evidence import Evidence, Fault, Log, Timed
from milesbatch.timeline.numbers import whole
from milesbatch.timeline.slices import Life, Story

Kind = Literal["died", "restarted", "lost", "failed", "stopping", "incarnation", "storage", "data", "kept", "fault"]
_FAULT_SHOWS_S = 120.0
"""An injected fault explains the death of its process when that is seen within this time."""
_MOST_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that a person asks about."""

    at_s: float
    incarnation: int
    who: str
    kind: Kind
    what: str
    """The cause, in words."""
    said: str = ""
    """Its last words."""
    then: str = ""
    """What came of it."""
    host: str = ""


def find_troubles(evidence: Evidence, story: Story) -> list[Trouble]:
    """All of them, in order of time."""
    found: list[Trouble] = []
    for log in evidence.logs:
        found += _of_controller(log, evidence, story) if log.process == "controller-0" else _of_role(log)
    found.sort(key=lambda trouble: (trouble.at_s, trouble.who))
    return _with_faults(found, evidence.faults)


def _of_controller(log: Log, evidence: Evidence, story: Story) -> Iterator[Trouble]:
    lives = [life for life in story.lives if life.incarnation == log.incarnation]
    is_stopping = False
    for event in log.events:
        body = event.body
        if event.name == "incarnation_started":
            yield from _incarnation(log, event)
        elif event.name == "process_ended" and body.get("exit_code") and not is_stopping:
            yield _died(log, event, lives, evidence)
        elif event.name == "process_started" and (whole(body.get("attempt")) or 1) > 1:
            yield from _collateral(log, event, lives, evidence)
        elif event.name == "guest_lost":
            text = "a worker of another job is silent; its work is handed out again"
            yield Trouble(event.at_s, log.incarnation, str(body.get("name")), "lost", text)
        elif event.name == "evaluation_off":
            said = str(body.get("said") or body.get("reason") or "")
            text = "evaluation died too often, or cannot work, and is off for the rest of this start"
            yield Trouble(
                event.at_s, log.incarnation, "evaluation-0", "lost", text, said, "training went on without it"
            )
        elif event.name == "stopping":
            is_stopping = True
            yield Trouble(event.at_s, log.incarnation, "run", "stopping", _stopping(body), then=_last_word(log))
        elif event.name == "failed":
            first, *rest = str(body.get("error", "")).splitlines() or [""]
            yield Trouble(event.at_s, log.incarnation, "run", "failed", first, "\n".join(rest), "the run stopped")


def _stopping(body: dict[str, Any]) -> str:
    nodes = body.get("nodes")
    text = f"the run was asked to stop: {body.get('text') or body.get('cause') or 'a signal'}"
    return text + (f" (nodes {', '.join(map(str, nodes))})" if isinstance(nodes, list) and nodes else "")


def _last_word(log: Log) -> str:
    for event in reversed(log.events):
        if event.name in ("stopped", "finished"):
            return f"{event.name} after step {event.body.get('step')}"
    return ""


def _incarnation(log: Log, event: Timed) -> Iterator[Trouble]:
    body = event.body
    if log.incarnation > 1:
        found = f"went on from {body.get('last_batch')} recorded steps, newest version {body.get('last_version')}"
        text = f"incarnation {log.incarnation} began: {body.get('cause')}"
        yield Trouble(event.at_s, log.incarnation, "run", "incarnation", text, then=found)
    quarantined = body.get("quarantined")
    for entry in quarantined if isinstance(quarantined, list) else ():
        path, reason = entry if isinstance(entry, list) and len(entry) == 2 else (entry, "")
        text = f"{path} did not count or was broken: {reason}"
        yield Trouble(event.at_s, log.incarnation, "run", "data", text, then="it was moved to quarantine")


def _died(log: Log, event: Timed, lives: list[Life], evidence: Evidence) -> Trouble:
    body = event.body
    name = str(body.get("name"))
    again = next((life for life in lives if life.process == name and life.start_s >= event.at_s), None)
    then = "it was not started again in this incarnation"
    if again is not None:
        then = f"started again after {again.start_s - event.at_s:.1f} s (start {again.attempt}), "
        then += _ready(evidence, log.incarnation, again, event.at_s)
    freed = body.get("leases_freed")
    if isinstance(freed, list) and freed:
        many = f"{', '.join(map(str, freed[:_MOST_GROUPS]))}{' …' if len(freed) > _MOST_GROUPS else ''}"
        then += f"; its work (block {many}) was handed out again"
    said, host = str(body.get("said") or ""), str(body.get("host") or "")
    return Trouble(event.at_s, log.incarnation, name, "died", str(body.get("reason") or "ended"), said, then, host)


def _ready(evidence: Evidence, incarnation: int, life: Life, since_s: float) -> str:
    """When a process that was started again could work, and from where a trainer went on."""
    own = [log for log in evidence.of(life.process) if log.incarnation == incarnation]
    events = [e for log in own for e in log.events if life.start_s <= e.at_s <= life.end_s + 1.0]
    ready = next((event for event in events if event.name == "ready"), None)
    if ready is None:
        return "not heard of since"
    resume = next((event.body for event in events if event.name == "resume"), None)
    text = f"ready after {ready.at_s - since_s:.1f} s"
    if resume is not None:
        checkpoint, replays = resume.get("checkpoint"), resume.get("replays")
        where = "the starting model" if checkpoint is None else f"checkpoint {checkpoint}"
        text += f"; went on from {where}, steps to replay: {replays}"
    return text


def _collateral(log: Log, event: Timed, lives: list[Life], evidence: Evidence) -> Iterator[Trouble]:
    """A further start without an end of its own: it was ended because a sibling had died."""
    name = str(event.body.get("name"))
    role = name.rpartition("-")[0]
    ended = [e for e in log.events if e.name == "process_ended" and e.at_s <= event.at_s]
    before = max((life.start_s for life in lives if life.process == name and life.start_s < event.at_s), default=0.0)
    if any(e.body.get("name") == name and e.at_s >= before for e in ended):
        return
    siblings = [e for e in ended if str(e.body.get("name")).rpartition("-")[0] == role and e.body.get("exit_code")]
    cause = f"with {siblings[-1].body['name']}, which had {_past(siblings[-1])}" if siblings else "for an unknown cause"
    own = next((life for life in lives if life.process == name and life.start_s == event.at_s), None)
    then = f"start {whole(event.body.get('attempt'))}"
    then += "" if own is None else f", {_ready(evidence, log.incarnation, own, event.at_s)}"
    yield Trouble(event.at_s, log.incarnation, name, "restarted", f"started again {cause}", then=then)


def _past(event: Timed) -> str:
    reason = str(event.body.get("reason") or "")
    return f"been {reason}" if reason.startswith("killed") else f"ended ({reason})" if reason else "ended"


_OF_ROLES: dict[str, Callable[[dict[str, Any]], tuple[Kind, str, str]]] = {
    "waiting_for_space": lambda e: ("storage", str(e.get("error")), "it waits"),
    "weights_unreachable": lambda e: (
        "data", f"policy version {e.get('version')} cannot be rebuilt: {e.get('error')}", "it waits for it",
    ),
    "broadcast_failed": lambda e: (
        "data", f"policy version {e.get('version')} was not broadcast: {e.get('error')}", "workers read it from files",
    ),
    "weights_mended": lambda e: (
        "data", f"policy versions {e.get('versions')} were asked for by a worker that could not rebuild them",
        "proven whole, or published again",
    ),
    "weights_unusual": lambda e: ("data", f"policy version {e.get('version')}: {e.get('text')}", "it was published"),
    "regenerating": lambda e: (
        "data", f"the trajectory file of groups {e.get('groups')} is lost", "they are generated again",
    ),
    "episodes_saved": lambda e: ("kept", f"unfinished episodes of block {e.get('block')} were saved", _amount(e)),
    "episodes_continued": lambda e: ("kept", f"saved episodes of block {e.get('block')} were continued", _amount(e)),
    "episodes_not_saved": lambda e: (
        "storage", f"unfinished episodes of block {e.get('block')} could not be saved: {e.get('error')}",
        "they are generated again",
    ),
    "evaluation_skipped": lambda e: (
        "data", f"policy version {e.get('version')} was not evaluated: {e.get('error')}", "the next start tries again",
    ),
    "inflight_ignored": lambda e: (
        "data", f"saved episodes in {e.get('path')} were not continued: {e.get('reason')}", "they are generated again",
    ),
}  # fmt: skip
"""What other processes than the controller tell: kind, what, and what came of it."""


def _amount(body: dict[str, Any]) -> str:
    return (
        f"{body.get('unfinished')} unfinished and {body.get('finished')} finished samples, {body.get('tokens')} tokens"
    )


def _of_role(log: Log) -> Iterator[Trouble]:
    for event in log.events:
        say = _OF_ROLES.get(event.name)
        if say is not None:
            kind, what, then = say(event.body)
            yield Trouble(event.at_s, log.incarnation, log.process, kind, what, then=then)


def _with_faults(troubles: list[Trouble], faults: tuple[Fault, ...]) -> list[Trouble]:
    """An injected fault is named beside the death that it caused, else it stands for itself."""
    found = list(troubles)
    for fault in faults:
        text = f"injected fault “{fault.name}”"
        for place, trouble in enumerate(found):
            late_s = trouble.at_s - fault.at_s
            if trouble.who == fault.process and trouble.kind == "died" and -1 <= late_s <= _FAULT_SHOWS_S:
                found[place] = replace(trouble, what=f"{trouble.what} ({text})")
                break
        else:
            found.append(Trouble(fault.at_s, 0, fault.process, "fault", f"{text} fired"))
    return sorted(found, key=lambda trouble: trouble.at_s)
