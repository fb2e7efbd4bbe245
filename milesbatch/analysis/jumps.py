"""Where a curve jumped: the steps at which the level after differs most from the level before. Pure.

Method: for each step, the mean over a window from it on less the mean over the window before it. The noise of a single step is
taken from the median difference of neighbours, which a few jumps do not move. Invariant: jumps that are reported are at least
two windows apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_WINDOW_SHARE = 0.03
_LARGEST_WINDOW = 15
_MOST = 5
_MOST_UNCLEAR = 3
_CLEAR = 4.5
_MEDIAN_TO_DEVIATION = 0.954
"""Median absolute difference of two normal values, in standard deviations of one."""


@dataclass(frozen=True, slots=True)
class Jump:
    """The level of a curve changed at ``step``: from ``before`` to ``after``, means over ``window`` steps each."""

    step: int
    before: float
    after: float
    window: int
    is_clear: bool
    """More than noise explains: over four and a half standard errors, for it is the largest of very many."""

    @property
    def change(self) -> float:
        return self.after - self.before


def find_jumps(steps: Sequence[int], values: Sequence[float | None]) -> list[Jump]:
    """The clear jumps, at most five, the largest first; or, where none is clear, the three largest. Missing values are left
    out."""
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    window = max(1, min(_LARGEST_WINDOW, round(len(known) * _WINDOW_SHARE)))
    figures = [value for _, value in known]
    sums = [0.0, *accumulate(figures)]
    error = _noise(figures) * math.sqrt(2 / window)
    changes = [
        (abs(sums[place + window] - 2 * sums[place] + sums[place - window]) / window, place)
        for place in range(window, len(known) - window + 1)
    ]
    chosen: list[tuple[float, int]] = []
    for size, place in sorted(changes, key=lambda item: (-item[0], item[1])):
        if len(chosen) == _MOST:
            break
        if size > 1e-12 and all(abs(place - other) >= 2 * window for _, other in chosen):
            chosen.append((size, place))
    found = [_jump(known, place, window, window > 1 and size > _CLEAR * error) for size, place in chosen]
    return [jump for jump in found if jump.is_clear] or found[:_MOST_UNCLEAR]


def _noise(figures: Sequence[float]) -> float:
    """Standard deviation of one value around its level."""
    apart = [abs(second - first) for first, second in pairwise(figures)]
    return statistics.median(apart) / _MEDIAN_TO_DEVIATION if apart else 0.0


def _jump(known: Sequence[tuple[int, float]], place: int, window: int, is_clear: bool) -> Jump:
    before = statistics.fmean(value for _, value in known[place - window : place])
    after = statistics.fmean(value for _, value in known[place : place + window])
    return Jump(known[place][0], before, after, window, is_clear)
