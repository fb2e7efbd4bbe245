"""Which curves the page shows, and their data. Pure.

Owns: the list of panels. Invariant: a figure that no panel names gets a panel of its own, so that nothing is hidden by a gap
here. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milesbatch.analysis.jumps import Jump
from milesbatch.report.page.charts import SERIES_COLOURS, curve
from milesbatch.report.page.steps import Column, Steps, rounded

_DOTS_BELOW = 60
_MANY = 250
_SMOOTH_ABOVE = 40
_SMOOTH_SHARE = 0.02
_HEIGHT = 132
_TALL = 230
_MOST_SERIES = 6


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart over steps. ``names`` are figures; one that ends with ``*`` stands for all that begin so."""

    title: str
    names: tuple[str, ...]
    unit: str = ""
    has_zero: bool = False


PANELS = (
    Panel("Evaluation", ("eval*",)),
    Panel("Loss", ("loss",)),
    Panel("KL to the reference", ("kl",), "nats"),
    Panel("Entropy", ("entropy",), "nats"),
    Panel("Importance ratio", ("ratio_*",)),
    Panel("Logprob, trainer and engine", ("logprob_difference_*",), "nats"),
    Panel("Response length", ("length_*",), "tokens"),
    Panel("Gradient norm", ("grad_norm",)),
    Panel("Shares", ("clip_share", "truncated_share", "weights_changed_share")),
    Panel("Lag of trained tokens", ("lag_*",), "versions", True),
    Panel("Reward by part", ("reward/*",)),
    Panel("Reward spread", ("reward_std",)),
    Panel("Seconds per step", ("train_s", "wait_s", "publish_s"), "s", True),
    Panel("Groups", ("groups_trained", "groups_rejected"), "groups", True),
    Panel("Failed samples", ("failed",), "samples", True),
    Panel("Tokens per step", ("tokens", "loss_tokens"), "tokens", True),
    Panel("Learning rate", ("learning_rate",)),
)
_ELSEWHERE = frozenset(
    {"reward_mean", "weights_bytes", "weights_publish_s", "seconds", "microbatches", "samples", "step"}
)


def chosen_panels(steps: Steps) -> list[tuple[Panel, list[str]]]:
    """Panels that have data, each with its figures; what no panel names comes last."""
    names = steps.names()
    found: list[tuple[Panel, list[str]]] = []
    taken = set(_ELSEWHERE)
    for panel in PANELS:
        own = [name for name in names if name not in taken and any(_matches(name, form) for form in panel.names)]
        taken |= set(own)
        if own:
            found.append((panel, own[:_MOST_SERIES]))
            found += [(Panel(name, (name,), panel.unit, panel.has_zero), [name]) for name in own[_MOST_SERIES:]]
    found += [(Panel(name, (name,)), [name]) for name in names if name not in taken]
    return found


def _matches(name: str, form: str) -> bool:
    return name.startswith(form[:-1]) if form.endswith("*") else name == form


def steps_table(steps: Steps) -> dict[str, list[Any]]:
    """Columns for the charts."""
    columns: dict[str, list[Any]] = {"step": list(steps.step)}
    for name in steps.names():
        columns[name] = [rounded(value) for value in steps.column(name)]
    if is_smoothed(steps):
        columns["reward_smooth"] = [rounded(value) for value in smooth(steps.column("reward_mean"))]
    return columns


def is_smoothed(steps: Steps) -> bool:
    return len(steps.step) > _SMOOTH_ABOVE


def smooth(values: Sequence[float | None]) -> Column:
    """Mean over a centred window of two per cent of the steps, at least three on each side."""
    reach = max(3, round(len(values) * _SMOOTH_SHARE / 2))
    found: Column = []
    for place in range(len(values)):
        near = [v for v in values[max(0, place - reach) : place + reach + 1] if v is not None]
        found.append(statistics.fmean(near) if near and values[place] is not None else None)
    return found


def panel_chart(element: str, panel: Panel, names: Sequence[str], steps: Steps) -> dict[str, Any]:
    """A chart over steps as the page's script takes it."""
    has_dots = len(steps.step) <= _DOTS_BELOW
    series = [
        {
            "column": name,
            "label": label_of(name, names),
            "width": 1.5 if len(steps.step) < _MANY else 1.2,
            "colour": SERIES_COLOURS[place],
        }
        for place, name in enumerate(names)
    ]
    spec = curve(height=_HEIGHT, has_dots=has_dots, has_zero=panel.has_zero, x_title="step")
    return {"element": element, "kind": "curve", "table": "steps", "x": "step", "series": series, "spec": spec}


def reward_chart(element: str, steps: Steps, jumps: Sequence[Jump]) -> dict[str, Any]:
    """The reward, with its jumps marked by their rank."""
    level: Sequence[float | None] = steps.column("reward_mean")
    series = [{"column": "reward_mean", "label": "reward", "width": 2.0, "colour": "@c1"}]
    if is_smoothed(steps):
        series = [
            {"column": "reward_mean", "label": "each step", "width": 0.9, "colour": "@c1"},
            {"column": "reward_smooth", "label": "moving mean", "width": 2.2, "colour": "@c1"},
        ]
        level = smooth(level)
    at = {step: value for step, value in zip(steps.step, level, strict=True) if value is not None}
    marks = [
        {"x": near, "value": rounded(at[near]), "label": str(rank)}
        for rank, jump in enumerate(jumps, 1)
        if (near := next((step for step in steps.step if step >= jump.step and step in at), None)) is not None
    ]
    spec = curve(height=_TALL, has_dots=len(steps.step) <= _DOTS_BELOW, has_zero=False, x_title="step", has_jumps=True)
    return {
        "element": element, "kind": "curve", "table": "steps", "x": "step", "series": series, "jumps": marks, "spec": spec,
    }  # fmt: skip


def label_of(name: str, names: Sequence[str]) -> str:
    """A figure's name without what all names of the panel begin with."""
    for mark in ("/", "_"):
        begins = {other.partition(mark)[0] for other in names}
        if len(names) > 1 and len(begins) == 1 and all(mark in other for other in names):
            return name.partition(mark)[2].replace("_", " ")
    return name.replace("_", " ")
