"""The curve of a run in a few lines: how the reward went, from the trainer's event logs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import read_incarnations

_TAIL_BYTES = 256 << 10


def step_events(layout: RunLayout) -> dict[int, dict[str, Any]]:
    """The first ``train_step`` event of each step, over all incarnations (a replay repeats a step; the first one counts)."""
    steps: dict[int, dict[str, Any]] = {}
    for record in read_incarnations(layout):
        for event, _ in read_events(layout.event_log("trainer-0", record.incarnation)):
            if event["event"] == "train_step":
                steps.setdefault(int(event["step"]), event)
    return dict(sorted(steps.items()))


def last_figures(layout: RunLayout) -> dict[str, float]:
    """Figures of the last step that was trained, from the ends of the trainer's event logs; empty before the first step."""
    best: dict[str, Any] = {"step": 0, "metrics": {}}
    for record in read_incarnations(layout):
        path = layout.event_log("trainer-0", record.incarnation)
        for event, _ in read_events(path, _offset_of_tail(path)):
            if event["event"] == "train_step" and int(event["step"]) > int(best["step"]):
                best = event
    figures: dict[str, float] = best["metrics"]
    return figures


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
    few = max(1, min(5, len(rewards) // 2))
    first, last = statistics.fmean(rewards[:few]), statistics.fmean(rewards[-few:])
    return [
        f"steps trained: {events[-1]['step']}",
        f"mean reward: {first:.3f} over the first {few} steps, {last:.3f} over the last {few}",
        f"weights digest of version {events[-1]['step']}: {events[-1]['weights_digest']}",
    ]
