"""Counts of values, in memory that does not grow with how many there are.

Owns exact counts while the values are few, and counts on a grid afterwards. Invariant: the sum of the counts is the
number of values that were added, and a counted value differs from the true one by at most half of ``width``. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MOST = 4096


@dataclass(slots=True)
class Tally:
    """Distinct values, ascending, and how often each came."""

    values: Floats = field(default_factory=lambda: np.array([], np.float64))
    counts: NDArray[np.int64] = field(default_factory=lambda: np.array([], np.int64))
    width: float = 0.0
    """Distance of the grid's points; 0 while the values are exact."""

    def add(self, new: Any) -> None:
        """Count finite numbers."""
        values, counts = np.unique(self._on_grid(np.asarray(new, np.float64)), return_counts=True)
        self._merge(values, counts.astype(np.int64))
        while len(self.values) > _MOST:
            spread = float(self.values[-1] - self.values[0])
            self.width = max(self.width * 2, 2.0 ** math.ceil(math.log2(spread / _MOST)))
            self.values, inverse = np.unique(self._on_grid(self.values), return_inverse=True)
            self.counts = np.bincount(inverse, weights=self.counts).astype(np.int64)

    def _on_grid(self, values: Floats) -> Floats:
        return np.round(values / self.width) * self.width if self.width else values

    def _merge(self, values: Floats, counts: NDArray[np.int64]) -> None:
        merged, inverse = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        self.counts = np.bincount(inverse, weights=np.concatenate([self.counts, counts])).astype(np.int64)
        self.values = merged

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def quantile(self, share: float) -> float | None:
        """The smallest value that at least ``share`` of all are not above; None without values."""
        if not self.count:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), share * self.count))
        return float(self.values[min(place, len(self.values) - 1)])

    def bins(self, most: int = 20) -> list[tuple[float, float, int]]:
        """(from, to, count) of at most ``most`` bins of equal width; each value by itself when that is not more."""
        if len(self.values) <= min(most, 8):
            return [(float(v), float(v), int(c)) for v, c in zip(self.values, self.counts, strict=True)]
        low, high = float(self.values[0]), float(self.values[-1])
        is_whole = not self.width and bool((self.values == np.round(self.values)).all())
        step = (high - low) / most
        if is_whole:
            step = float(max(1, math.ceil((high - low + 1) / most)))
        number = max(1, math.ceil((high - low + is_whole) / step))
        places = np.minimum(((self.values - low) / step).astype(np.int64), number - 1)
        counts = np.bincount(places, weights=self.counts, minlength=number).astype(np.int64).tolist()
        last = step - 1 if is_whole else step
        return [(low + i * step, low + i * step + last, counts[i]) for i in range(number)]
