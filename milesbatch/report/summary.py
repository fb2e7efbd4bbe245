"""The curve of a run in a few lines: how the reward went, from the trainer's event logs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from milesbatch.evaluation.reader import main_curve
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import read_incarnations

_TAIL_BYTES = 256 << 10
_FEW = 5
_LOGS = 8
"""How many of the newest logs are looked into for the last steps."""


def trained_in(layout: RunLayout, incarnation: int, offset: int = 0) -> list[dict[str, Any]]:
    """``train_step`` events that one incarnation's trainer logged (replays too), from ``offset`` of its log on."""
    events = read_events(layout.event_log("trainer-0", incarnation), offset)
    return [event for event, _ in events if event["event"] == "train_step"]


def first_of_each(events: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The first event of each step, ascending by step: a replay repeats a step, and the first one counts."""
    steps: dict[int, dict[str, Any]] = {}
    for event in events:
        steps.setdefault(int(event["step"]), event)
    return dict(sorted(steps.items()))


def step_events(layout: RunLayout) -> dict[int, dict[str, Any]]:
    """The first ``train_step`` event of each step, over all incarnations."""
    return first_of_each(
        event for record in read_incarnations(layout) for event in trained_in(layout, record.incarnation)
    )


def recent_steps(layout: RunLayout, most: int = 60) -> list[dict[str, Any]]:
    """``train_step`` events of the last steps, at most ``most``, ascending; from the ends of the trainer's event logs."""
    events: list[dict[str, Any]] = []
    for record in read_incarnations(layout)[-_LOGS:]:
        path = layout.event_log("trainer-0", record.incarnation)
        events += trained_in(layout, record.incarnation, _offset_of_tail(path))
    return list(first_of_each(events).values())[-most:]


def first_and_last(rewards: Sequence[float]) -> tuple[int, float, float]:
    """How the reward went: over how many steps at either end (at most five), and the mean there.

    Raises:
        statistics.StatisticsError: there is no step.
    """
    few = max(1, min(_FEW, len(rewards) // 2))
    return few, statistics.fmean(rewards[:few]), statistics.fmean(rewards[-few:])


def seconds_left(events: Sequence[Mapping[str, Any]], steps: int) -> float | None:
    """Until the last of ``steps`` at the pace of ``events`` (recent steps); None when that is not known.

    The median pause between two steps counts, so that a restart among them does not.
    """
    times = [datetime.fromisoformat(str(event["at"])).timestamp() for event in events]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times) if later > earlier]
    return None if not pauses else statistics.median(pauses) * max(steps - int(events[-1]["step"]), 0)


def _offset_of_tail(path: Path) -> int:
    """Where to begin so that the last events are read; the first line from there may be cut, which readers skip."""
    try:
        return max(0, path.stat().st_size - _TAIL_BYTES)
    except OSError:
        return 0


def summary_lines(layout: RunLayout) -> list[str]:
    """Reward at the beginning and at the end, lag, and the newest weights digest."""
    events = list(step_events(layout).values())
    if not events:
        return ["no step was trained yet"]
    rewards = [event["metrics"]["reward_mean"] for event in events]
    few, first, last = first_and_last(rewards)
    return [
        f"steps trained: {events[-1]['step']}",
        f"mean reward: {first:.3f} over the first {few} steps, {last:.3f} over the last {few}",
        *_evaluation_line(layout),
        f"weights digest of version {events[-1]['step']}: {events[-1]['weights_digest']}",
    ]


def _evaluation_line(layout: RunLayout) -> list[str]:
    curve = main_curve(layout)
    if curve is None or curve.last.figures.reward_mean is None or curve.best.figures.reward_mean is None:
        return []
    first, last, best = curve.points[0], curve.last, curve.best
    began = "" if first.figures.reward_mean is None else f"{first.figures.reward_mean:.3f} at version {first.version}, "
    said = f"{began}{last.figures.reward_mean:.3f} at version {last.version}"
    return [f"held-out reward: {said}; best {best.figures.reward_mean:.3f} at version {best.version}"]
