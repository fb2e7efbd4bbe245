"""From events to figures: when a fault was noticed, when training went on, how much was repeated. Pure.

Times are differences of one machine's monotonic clock. Invariant: what cannot be told is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from milesbatch.drill.evidence import Event, Fired, Outcome

Sign = Callable[[Event], bool]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What followed a fault."""

    detected_s: float | None
    """Until the run noticed; None when nothing had to be noticed (a lost connection that was borne)."""
    resumed_s: float | None
    """Until the next train step that was no replay was done, in the next incarnation when the fault ended this one; None when
    all steps were done before."""
    steps_replayed: int
    """Between the two."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A broken run beside the unbroken one."""

    groups_lost: int
    groups_repeated: int
    digest_equal: bool | None
    """None when the recipe is not bitwise: then nobody promises it."""
    differences: tuple[str, ...]
    """In words, what breaks a promise."""


def measure(fired: Fired, action: str, role: str, events: Sequence[Event]) -> Recovery:
    """What ``events`` (in order of time) say after the fault; ``action`` and ``role`` are those of the plan."""
    later = [event for event in events if event["mono_s"] > fired.mono_s]
    is_sign = sign_of(fired, action, role)
    noticed = next((event for event in later if is_sign(event)), None)
    steps = [event for event in _resuming(action, later) if event["event"] == "train_step"]
    steps = [event for event in steps if event["process"] == "trainer-0"]
    resumed = next((event for event in steps if not event["replayed"]), None)
    replayed = [e for e in steps if e["replayed"] and (resumed is None or e["mono_s"] < resumed["mono_s"])]
    return Recovery(_since(fired, noticed), _since(fired, resumed), len(replayed))


def _resuming(action: str, later: Sequence[Event]) -> Sequence[Event]:
    """Events that can be a resumption: when a run ends because of a fault, the step that it was in is none."""
    starts = [number for number, event in enumerate(later) if event["event"] == "incarnation_started"]
    return later[starts[0] :] if starts and action in ("preempt", "flip", "truncate") else later


def sign_of(fired: Fired, action: str, role: str) -> Sign:
    """By which event one sees that a fault was noticed."""
    if action in ("flip", "truncate"):
        place = "/".join((fired.path or "").split("/")[:2])
        return lambda event: _names(event, place)
    if action == "preempt":
        return lambda event: bool(event["event"] == "stopping")
    if action == "enospc":
        signs = ("waiting_for_space", "process_ended")
        return lambda event: event["event"] in signs and fired.process in (event["process"], event.get("name"))
    if action == "delay":
        # The other worker's file is the late one when it was the slower of the two.
        return lambda event: event.get("accepted") is False
    if action == "partition":
        return lambda event: _has_died(event) and bool(event["name"] == fired.process)
    if action in ("power_cut", "kill_controller", "zombie", "outlive") or role.startswith("controller"):
        return lambda event: bool(event["event"] == "incarnation_started")
    # A rank that lost its peer may be seen to die before the peer.
    kind = fired.process.rpartition("-")[0]
    return lambda event: _has_died(event) and event["name"].rpartition("-")[0] == kind


def _names(event: Event, place: str) -> bool:
    """Is the artefact at ``place`` (``checkpoints/000003``) named as damaged: quarantined, or as why a process died?"""
    if not place or event["event"] not in _NAMING:
        return False
    return _has_died(event) or place in _text(event)


_NAMING = ("incarnation_started", "quarantined", "damaged", "weights_unreachable", "process_ended", "failed")
"""Events that name damaged artefacts."""


def _has_died(event: Event) -> bool:
    return bool(event["event"] == "process_ended" and event["exit_code"] != 0)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(_text(part) for part in value.values())
    return " ".join(_text(part) for part in value) if isinstance(value, list | tuple) else str(value)


def _since(fired: Fired, event: Event | None) -> float | None:
    return None if event is None else round(float(event["mono_s"]) - fired.mono_s, 2)


def compare(outcome: Outcome, unbroken: Outcome, is_bitwise: bool) -> Comparison:
    """Whether a run ended as the unbroken one did; without bitwise determinism only that no group has two fates."""
    differences = list(outcome.damaged)
    if outcome.repeated:
        differences.append(f"{outcome.repeated} groups have more than one fate")
    if not is_bitwise:
        return Comparison(0, outcome.repeated, None, tuple(differences))
    lost = [group for group in unbroken.fates if group not in outcome.fates]
    other = [g for g, fate in outcome.fates.items() if g not in lost and unbroken.fates.get(g) != fate]
    if lost:
        differences.append(f"{len(lost)} groups have no fate, the first is {min(lost)}")
    if other:
        group = min(other)
        differences.append(
            f"{len(other)} groups have another fate than in the unbroken run; the first: group {group} is"
            f" {outcome.fates[group]}, and was {unbroken.fates.get(group, 'without one')}"
        )
    versions = sorted(outcome.digests.keys() | unbroken.digests.keys())
    unequal = [v for v in versions if outcome.digests.get(v) != unbroken.digests.get(v)]
    if unequal:
        differences.append(
            f"the weights of version {unequal[0]} are {outcome.digests.get(unequal[0])},"
            f" those of the unbroken run {unbroken.digests.get(unequal[0])}"
        )
    return Comparison(len(lost), outcome.repeated, not unequal, tuple(differences))
