"""The curve of a run in a few lines: how the reward went, from the trainer's event logs."""

from __future__ import annotations

import statistics
from typing import Any

from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import read_incarnations


def step_events(layout: RunLayout) -> dict[int, dict[str, Any]]:
    """The first ``train_step`` event of each step, over all incarnations (a replay repeats a step; the first one counts)."""
    steps: dict[int, dict[str, Any]] = {}
    for record in read_incarnations(layout):
        for event, _ in read_events(layout.event_log("trainer-0", record.incarnation)):
            if event["event"] == "train_step":
                steps.setdefault(int(event["step"]), event)
    return dict(sorted(steps.items()))


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
