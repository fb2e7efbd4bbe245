"""Which samples to look at: the best, the worst, the middle, the odd.

Owns the order and the reasons. Never reads a text: only a few columns of the scan. Invariant: the same run gives the
same choice, and no sample is chosen twice. The page behind it is ``docs/trajectories.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from milesbatch.analysis.scan import TrajectoryScan

_COLUMNS = ("group_id", "sample_index", "step", "reward", "response_tokens", "finish_reason", "error")


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample, and why it was chosen."""

    group_id: int
    sample_index: int
    step: int | None
    reward: float
    response_tokens: int
    finish_reason: str
    kind: str
    """``best``, ``worst``, ``median`` or ``odd``."""
    why: str
    """For people."""


def choose_samples(
    scan: TrajectoryScan,
    *,
    step: int | None = None,
    best: int = 0,
    worst: int = 0,
    median: int = 0,
    odd: int = 0,
) -> list[Choice]:
    """Samples of a step (of the whole run without one), by reward; failed episodes are chosen as odd ones only.

    With equal rewards the lower group and sample comes first. Odd are, in this order: a failed episode, the longest
    and the shortest response, the highest reward that was cut off at the length limit, and the lowest reward of a
    group that the others solved.
    """
    table = _rows(scan, step)
    good = table.filter(pc.is_null(table["error"]))
    by_reward = good.sort_by([("reward", "descending"), ("group_id", "ascending"), ("sample_index", "ascending")])
    rising = good.sort_by([("reward", "ascending"), ("group_id", "ascending"), ("sample_index", "ascending")])
    middle = max((rising.num_rows - median) // 2, 0)
    chosen = [_choice(row, "best", "highest reward") for row in by_reward.slice(0, best).to_pylist()]
    chosen += [_choice(row, "worst", "lowest reward") for row in rising.slice(0, worst).to_pylist()]
    chosen += [_choice(row, "median", "reward in the middle") for row in rising.slice(middle, median).to_pylist()]
    taken = {(one.group_id, one.sample_index) for one in chosen}
    unique: dict[tuple[int, int], Choice] = {}
    for one in chosen:
        unique.setdefault((one.group_id, one.sample_index), one)
    for row, why in _oddities(table, good) if odd else ():
        key = (row["group_id"], row["sample_index"])
        if odd and key not in taken:
            taken.add(key)
            unique[key] = _choice(row, "odd", why)
            odd -= 1
    return list(unique.values())


def _rows(scan: TrajectoryScan, step: int | None) -> Any:
    counted = scan.counted
    if step is None:
        return scan.table(_COLUMNS)
    table = scan.table(_COLUMNS, counted.files_of(counted.step == step))
    return table.filter(pc.equal(table["step"], step))


def _choice(row: dict[str, Any], kind: str, why: str) -> Choice:
    kept = ("group_id", "sample_index", "step", "reward", "response_tokens", "finish_reason")
    return Choice(**{name: row[name] for name in kept}, kind=kind, why=why)


def _oddities(table: Any, good: Any) -> Iterator[tuple[dict[str, Any], str]]:
    ends: Sequence[tuple[Any, str, str, str]] = (
        (table.filter(pc.is_valid(table["error"])), "response_tokens", "descending", "its episode failed"),
        (good, "response_tokens", "descending", "longest response"),
        (good, "response_tokens", "ascending", "shortest response"),
        (good.filter(pc.equal(good["finish_reason"], "length")), "reward", "descending", "cut off, with a high reward"),
    )
    for rows, column, order, why in ends:
        for row in (
            rows.sort_by([(column, order), ("group_id", "ascending"), ("sample_index", "ascending")])
            .slice(0, 1)
            .to_pylist()
        ):
            yield row, why
    yield from _outliers(good)


def _outliers(good: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The sample that is furthest below the mean of its group."""
    if not good.num_rows:
        return
    groups, reward = good["group_id"].to_numpy(), good["reward"].to_numpy()
    _, place = np.unique(groups, return_inverse=True)
    mean = np.bincount(place, reward) / np.bincount(place)
    below = mean[place] - reward
    at = int(np.argmax(below))
    if below[at] > 0:
        row = good.take(pa.array([at])).to_pylist()[0]
        yield row, f"its group has {mean[place[at]]:.3g} on average"
