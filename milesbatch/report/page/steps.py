"""The figures of each step as columns, made fewer when there are very many steps. Pure.

Owns: which event of a step counts (the first: a replay repeats it), and the reduction. Invariant: a figure that is missing or
no finite number is null, never 0. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from milesbatch.timeline.evidence import Evidence
from milesbatch.timeline.numbers import number, whole

MOST_POINTS = 1500
_DIGITS = 6

Column = list[float | None]


@dataclass(slots=True)
class Steps:
    """Figures by step; all columns have the length of ``step``."""

    step: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    """When the step was done, in seconds since 1970."""
    incarnation: list[int] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)
    """How often it was computed again."""
    figures: dict[str, Column] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)
    """Figures that were no finite numbers, in words."""
    width: int = 1
    """How many steps one entry stands for."""

    def column(self, name: str) -> Column:
        return self.figures.get(name, [None] * len(self.step))

    def names(self) -> list[str]:
        """Figures with at least one value."""
        return [name for name, column in self.figures.items() if any(value is not None for value in column)]


def collect_steps(evidence: Evidence) -> Steps:
    """All steps that the trainer's events tell of, ascending."""
    found: dict[int, tuple[float, int, dict[str, object]]] = {}
    replays: dict[int, int] = {}
    for log in evidence.of("trainer-0"):
        for event in log.events:
            step, figures = whole(event.body.get("step")), event.body.get("metrics")
            if event.name != "train_step" or step is None or not isinstance(figures, dict):
                continue
            if step not in found:
                found[step] = event.at_s, log.incarnation, figures
            if event.body.get("replayed") is True:
                replays[step] = replays.get(step, 0) + 1
    steps = Steps()
    names = dict.fromkeys(str(name) for _, _, figures in found.values() for name in figures if name != "step")
    steps.figures = {name: [] for name in names}
    for step, (at_s, incarnation, figures) in sorted(found.items()):
        steps.step.append(step)
        steps.at_s.append(at_s)
        steps.incarnation.append(incarnation)
        steps.replays.append(replays.get(step, 0))
        for name, column in steps.figures.items():
            value = number(figures.get(name))
            if value is None and name in figures:
                steps.odd.append(f"step {step}: {name} is {figures[name]!r}, no finite number")
            column.append(value)
    return steps


def fewer(steps: Steps, most: int = MOST_POINTS) -> Steps:
    """At most ``most`` entries: each is the mean over ``width`` steps in a row, and is named by its last step."""
    width = -(-len(steps.step) // most)
    if width <= 1:
        return steps
    cuts = [range(first, min(first + width, len(steps.step))) for first in range(0, len(steps.step), width)]
    return Steps(
        step=[steps.step[cut[-1]] for cut in cuts],
        at_s=[steps.at_s[cut[-1]] for cut in cuts],
        incarnation=[steps.incarnation[cut[-1]] for cut in cuts],
        replays=[sum(steps.replays[place] for place in cut) for cut in cuts],
        figures={name: [_mean([column[p] for p in cut]) for cut in cuts] for name, column in steps.figures.items()},
        odd=steps.odd,
        width=width,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def rounded(value: float | None) -> float | None:
    """Six significant digits: what a page needs of a figure."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")
