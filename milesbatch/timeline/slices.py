"""From events to slices: who did what from when to when. Pure.

    controller log ─> lives of processes (attempts)      trainer log ─> waiting, training, replaying, publishing, saving
                                                         worker log  ─> fetching weights, generating, waiting
                                                     evaluator's log ─> evaluating

Owns: what an event says about the time before it (events are written when something has ended, and say how long it took).
Invariant: slices of one process and track never overlap, but for ``generating``, where several leases may be open. The page
behind it is ``docs/report.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from milesbatch.report.endings import CONTROLLER
from milesbatch.timeline.evidence import Evidence, Log, Timed
from milesbatch.timeline.numbers import duration, number, whole

Activity = Literal[
    "starting",
    "generating",
    "evaluating",
    "weights",
    "waiting",
    "training",
    "replaying",
    "publishing",
    "checkpoint",
    "saving",
    "stopping",
]
ACTIVITIES: tuple[Activity, ...] = (
    "training", "replaying", "publishing", "generating", "evaluating",
    "weights", "checkpoint", "saving", "waiting", "starting", "stopping",
)  # fmt: skip
Track = Literal["work", "weights", "saving", "life"]
_SHORTEST_WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class Slice:
    """One process was busy with one thing from ``start_s`` to ``end_s`` (seconds since 1970)."""

    process: str
    incarnation: int
    track: Track
    activity: Activity
    start_s: float
    end_s: float
    text: str
    version: int | None = None
    """Policy version that was published or activated."""


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a process, as the controller saw it."""

    process: str
    incarnation: int
    attempt: int
    start_s: float
    end_s: float
    host: str
    ended: str
    """How, in words; empty when nobody saw it."""


@dataclass(frozen=True, slots=True)
class Story:
    """All that is known about who did what when."""

    slices: tuple[Slice, ...]
    lives: tuple[Life, ...]
    incarnations: tuple[tuple[int, float, float], ...]
    """Number, first and last sign of life."""


def tell(evidence: Evidence) -> Story:
    """The story of a run, in order of time."""
    spans = _incarnations(evidence)
    ends = {number: end_s for number, _, end_s in spans}
    lives = [life for log in evidence.controllers() for life in _lives(log, ends[log.incarnation])]
    slices: list[Slice] = []
    for log in evidence.logs:
        own = [life for life in lives if (life.process, life.incarnation) == (log.process, log.incarnation)]
        if log.process == CONTROLLER:
            slices += _controller(log, ends[log.incarnation])
        elif log.process.startswith("rollout-"):
            slices += _worker(log, own)
        elif log.process.startswith("evaluation-"):
            slices += _evaluator(log, own)
        else:
            slices += _trainer(log, own)
    slices.sort(key=lambda piece: (piece.start_s, piece.process, piece.end_s))
    return Story(tuple(slices), tuple(sorted(lives, key=lambda life: (life.start_s, life.process))), tuple(spans))


def _incarnations(evidence: Evidence) -> list[tuple[int, float, float]]:
    found: dict[int, tuple[float, float]] = {}
    for log in evidence.logs:
        if log.events:
            first, last = found.get(log.incarnation, (log.events[0].at_s, log.events[-1].at_s))
            found[log.incarnation] = min(first, log.events[0].at_s), max(last, log.events[-1].at_s)
        else:
            found.setdefault(log.incarnation, (0.0, 0.0))
    return [(number, *span) for number, span in sorted(found.items()) if span != (0.0, 0.0)]


def _lives(log: Log, end_s: float) -> list[Life]:
    found: list[Life] = []
    running: dict[str, tuple[float, int]] = {}

    def close(name: str, at_s: float, host: str, ended: str) -> None:
        start_s, attempt = running.pop(name)
        found.append(Life(name, log.incarnation, attempt, start_s, max(at_s, start_s), host, ended))

    for event in log.events:
        name = str(event.body.get("name", ""))
        if event.name == "process_started":
            if name in running:  # ended with another one, which is why it was started again
                close(name, event.at_s, "", "")
            running[name] = event.at_s, whole(event.body.get("attempt")) or 1
        elif event.name == "process_ended" and name in running:
            close(name, event.at_s, str(event.body.get("host") or ""), str(event.body.get("reason") or ""))
    for name in list(running):
        close(name, end_s, "", "")
    return found


class _Line:
    """Puts slices of one process and track one behind the other: what would overlap begins later."""

    def __init__(self, log: Log, track: Track) -> None:
        self._log = log
        self._track: Track = track
        self.slices: list[Slice] = []
        self.free_s = float("-inf")

    def add(self, activity: Activity, start_s: float, end_s: float, text: str, version: int | None = None) -> None:
        start_s = max(start_s, self.free_s)
        if end_s > start_s:
            place = self._log.process, self._log.incarnation
            self.slices.append(Slice(*place, self._track, activity, start_s, end_s, text, version))
            self.free_s = end_s


def _controller(log: Log, end_s: float) -> list[Slice]:
    asked = next((event for event in log.events if event.name == "stopping"), None)
    if asked is None:
        return []
    line = _Line(log, "work")
    line.add("stopping", asked.at_s, end_s, f"stopping: {asked.body.get('text', '')}")
    return line.slices


def _starting(event: Timed, lives: Sequence[Life]) -> float:
    """When the process that is ready now was started."""
    starts = [life.start_s for life in lives if life.start_s <= event.at_s]
    return max(starts) if starts else event.at_s - duration(event.body.get("seconds"))


def _trainer(log: Log, lives: Sequence[Life]) -> list[Slice]:
    work, weights, saving = _Line(log, "work"), _Line(log, "weights"), _Line(log, "saving")
    begun: dict[int, float] = {}
    ready_s: float | None = None
    for event in log.events:
        step = whole(event.body.get("step"))
        if event.name == "ready":
            work.add("starting", _starting(event, lives), event.at_s, "from its start until it could work")
            ready_s = event.at_s
            begun.clear()
        elif event.name == "train_step":
            _step(work, weights, event, step, ready_s)
            ready_s = None
        elif event.name == "checkpoint_started":
            stall_s = duration(event.body.get("stall_s"))
            work.add("checkpoint", event.at_s - stall_s, event.at_s, f"training stood still for checkpoint {step}")
            begun[step or 0] = event.at_s
        elif event.name == "checkpoint_committed" and step in begun:
            saving.add("saving", begun[step], event.at_s, f"checkpoint {step} written in the background")
    return work.slices + weights.slices + saving.slices


def _step(line: _Line, weights: _Line, event: Timed, step: int | None, ready_s: float | None) -> None:
    """``ready_s`` for the first step after a start: until it began, the state was loaded."""
    figures = event.body.get("metrics")
    figures = figures if isinstance(figures, dict) else {}
    wait_s, train_s, publish_s = (duration(figures.get(name)) for name in ("wait_s", "train_s", "publish_s"))
    # The event is written when the version is committed: what was done beside the next step is behind the step's own end.
    end_s = event.at_s - duration(figures.get("publish_overlap_s"))
    trained_s = end_s - publish_s
    begun_s = trained_s - train_s
    if ready_s is not None:
        line.add("starting", ready_s, begun_s - wait_s, "loaded its state")
    line.add("waiting", begun_s - wait_s, begun_s, f"step {step}: waited for groups")
    if event.body.get("replayed") is True:
        line.add("replaying", begun_s, end_s, f"step {step} computed again")
    else:
        line.add("training", begun_s, trained_s, f"step {step}")
        beside = event.at_s > end_s
        line.add("publishing", trained_s, end_s, f"policy version {step}", version=None if beside else step)
        weights.add("publishing", end_s, event.at_s, f"policy version {step}, beside the next step", version=step)


def _worker(log: Log, lives: Sequence[Life]) -> list[Slice]:
    start, weights = _Line(log, "work"), _Line(log, "weights")
    generating: list[Slice] = []
    bounds: list[tuple[float, float]] = []
    for event in log.events:
        if event.name == "ready":
            start.add("starting", _starting(event, lives), event.at_s, "from its start until it could work")
            ends = [life.end_s for life in lives if life.start_s <= event.at_s <= life.end_s]
            bounds.append((event.at_s, min(ends, default=log.events[-1].at_s)))
        elif event.name == "weights_activated":
            took_s = duration(event.body.get("prepared_s")) + duration(event.body.get("paused_s"))
            version = whole(event.body.get("version"))
            text = f"policy version {version} fetched, verified and activated"
            weights.add("weights", event.at_s - took_s, event.at_s, text, version)
        elif event.name == "trajectories_committed":
            begun_s = event.at_s - duration(event.body.get("generated_s"))
            text = f"block {event.body.get('block')}, {event.body.get('tokens')} tokens"
            failed = whole(event.body.get("failed")) or 0
            text += f", {failed} episodes failed" if failed else ""
            text += "" if event.body.get("accepted", True) else "; another worker was first"
            generating.append(Slice(log.process, log.incarnation, "work", "generating", begun_s, event.at_s, text))
    busy = [(piece.start_s, piece.end_s) for piece in [*weights.slices, *generating]]
    idle = [gap for bound in bounds for gap in gaps_between(busy, *bound)]
    waits = [
        Slice(log.process, log.incarnation, "work", "waiting", begin_s, end_s, "had no work") for begin_s, end_s in idle
    ]
    return start.slices + weights.slices + generating + waits


def _evaluator(log: Log, lives: Sequence[Life]) -> list[Slice]:
    line = _Line(log, "work")
    for event in log.events:
        if event.name == "ready":
            line.add("starting", _starting(event, lives), event.at_s, "from its start until it could work")
        elif event.name == "evaluation_committed":
            begun_s = event.at_s - duration(event.body.get("seconds"))
            figures = event.body.get("metrics")
            reward = number(figures.get("eval/reward_mean")) if isinstance(figures, dict) else None
            text = f"policy version {event.body.get('version')}" + ("" if reward is None else f": reward {reward:.3f}")
            line.add("evaluating", begun_s, event.at_s, text)
    return line.slices


def gaps_between(busy: Iterable[tuple[float, float]], start_s: float, end_s: float) -> list[tuple[float, float]]:
    """What of ``start_s .. end_s`` none of the ``busy`` ranges covers, in order."""
    found: list[tuple[float, float]] = []
    free_s = start_s
    for begin_s, stop_s in sorted(busy):
        if begin_s - free_s > _SHORTEST_WAIT_S and begin_s <= end_s:
            found.append((free_s, begin_s))
        free_s = max(free_s, stop_s)
    if end_s - free_s > _SHORTEST_WAIT_S:
        found.append((free_s, end_s))
    return found
