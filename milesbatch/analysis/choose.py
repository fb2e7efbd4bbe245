"""Which samples to look at: the best, the worst, the middle, the odd.

Owns the order and the reasons, for ``traj show`` and the report alike. Never reads a text: only a few columns of the scan.
Invariant: the same run gives the same choice, and no sample is chosen twice. The page behind it is ``docs/trajectories.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from milesbatch.analysis.counted import PENDING
from milesbatch.analysis.scan import TrajectoryScan

CANDIDATE_COLUMNS = (
    "group_id", "sample_index", "step", "fate", "reward", "response_tokens", "finish_reason", "error",
)  # fmt: skip
LATE_SHARE = 0.25
"""For a report the best of a run are of the last quarter of its steps: else they would tell when, not what, it learned."""
_FEWEST_SIBLINGS = 3
"""In a smaller group nobody is alone."""

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample, and why it was chosen."""

    group_id: int
    sample_index: int
    step: int | None
    reward: float
    response_tokens: int
    kind: str
    """``best``, ``worst``, ``median`` or ``odd``."""
    why: str
    """For people."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """A few numbers of each sample, as columns of equal length: about 45 bytes for each."""

    group: Ints
    sample: Ints
    step: Ints
    """``PENDING`` without a fate."""
    reward: NDArray[np.float64]
    length: Ints
    """Response tokens."""
    is_trained: Flags
    is_failed: Flags
    is_cut: Flags
    """Ended because there was no room for more tokens."""

    @classmethod
    def of(cls, batch: Any) -> Candidates:
        """From a record batch that has ``CANDIDATE_COLUMNS``."""

        def numbers(values: Any, kind: Any = np.int64) -> NDArray[Any]:
            return np.asarray(values.to_numpy(zero_copy_only=False), kind)

        return cls(
            group=numbers(batch["group_id"]),
            sample=numbers(batch["sample_index"]),
            step=numbers(pc.fill_null(batch["step"], PENDING)),
            reward=numbers(batch["reward"], np.float64),
            length=numbers(batch["response_tokens"]),
            is_trained=numbers(pc.equal(batch["fate"], "trained"), bool),
            is_failed=numbers(batch["error"].is_valid(), bool),
            is_cut=numbers(pc.equal(batch["finish_reason"], "length"), bool),
        )

    @classmethod
    def join(cls, parts: Iterable[Candidates]) -> Candidates:
        """One after the other; of no parts, no candidates."""
        kinds = {"reward": np.float64, "is_trained": bool, "is_failed": bool, "is_cut": bool}
        found = list(parts)
        return cls(
            *(
                np.concatenate([np.zeros(0, kinds.get(f.name, np.int64)), *(getattr(part, f.name) for part in found)])
                for f in fields(cls)
            )
        )

    def of_rows(self, chosen: Flags | Ints) -> Candidates:
        return Candidates(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.group)


def choose_samples(
    scan: TrajectoryScan,
    *,
    step: int | None = None,
    best: int = 0,
    worst: int = 0,
    median: int = 0,
    odd: int = 0,
) -> list[Choice]:
    """Samples of a step (of the whole run without one), as :func:`choose` does it."""
    counted = scan.counted
    files = None if step is None else counted.files_of(counted.step == step)
    found = Candidates.join(Candidates.of(batch) for batch in scan.batches(CANDIDATE_COLUMNS, files))
    if step is not None:
        found = found.of_rows(found.step == step)
    return choose(found, best=best, worst=worst, median=median, odd=odd)


def choose(
    found: Candidates,
    *,
    best: int = 0,
    worst: int = 0,
    median: int = 0,
    odd: int = 0,
    is_late: bool = False,
    early: int = 0,
) -> list[Choice]:
    """Samples by reward; failed episodes, and rewards that are no finite number, are chosen as odd ones only.

    With equal rewards the later step comes first, then the lower group and sample. ``is_late``: best, worst and median are
    trained samples of the last quarter of the steps, and the odd ones have a fate. ``early``: as many of the first step, to
    see where the run came from: the best, the worst, the one in the middle. Odd are, in this order: the last failed
    episode, the longest and the shortest response, the highest reward that was cut off at the length limit, and who is
    furthest below and above the other samples of its group.
    """
    if is_late:
        found = found.of_rows(found.step != PENDING)
    good = ~found.is_failed & np.isfinite(found.reward) & (found.is_trained | (not is_late))
    pool, where = _late(found, good) if is_late else (np.flatnonzero(good), "")
    falling = _ordered(found, pool, -found.reward)
    rising = _ordered(found, pool, found.reward)
    middle = max((len(rising) - median) // 2, 0)
    chosen: dict[int, tuple[str, str]] = {}
    for kind, rows, why in (
        ("best", falling[:best], "highest reward"),
        ("median", rising[middle : middle + median], "reward in the middle"),
        ("worst", rising[:worst], "lowest reward"),
    ):
        for row in rows.tolist():
            chosen.setdefault(row, (kind, why + where))
    for row, why in _early(found, good, early):
        chosen.setdefault(row, ("early", why))
    for row, why in _oddities(found, good) if odd else ():
        if odd and row not in chosen:
            chosen[row] = "odd", why
            odd -= 1
    return [_choice(found, row, kind, why) for row, (kind, why) in chosen.items()]


def _late(found: Candidates, good: Flags) -> tuple[Ints, str]:
    """Rows of the last quarter of the steps, and which steps these are, in words."""
    if not good.any():
        return np.zeros(0, np.int64), ""
    last = int(found.step[good].max())
    since = last - max(1, round(LATE_SHARE * last)) + 1
    where = f" of steps {since} to {last}" if since < last else f" of step {last}"
    return np.flatnonzero(good & (found.step >= since)), where


def _early(found: Candidates, good: Flags, number: int) -> Iterator[tuple[int, str]]:
    """Rows of the first step that was trained, at most ``number``."""
    trained = good & (found.step != PENDING)
    if not number or not trained.any():
        return
    first = int(found.step[trained].min())
    rising = _ordered(found, np.flatnonzero(trained & (found.step == first)), found.reward).tolist()
    picked = ((rising[-1], "highest"), (rising[0], "lowest"), (rising[len(rising) // 2], "middle"))
    for row, word in picked[:number]:
        yield row, f"{word} reward of step {first}, the first one"


def _ordered(found: Candidates, rows: Ints, values: NDArray[Any]) -> Ints:
    """``rows`` with the least of ``values`` first."""
    return rows[np.lexsort((found.sample[rows], found.group[rows], -found.step[rows], values[rows]))]


def _first(found: Candidates, rows: Ints, values: NDArray[Any]) -> Ints:
    """The row with the least value, if there is any: without sorting all of them."""
    if not len(rows):
        return rows
    return _ordered(found, rows[values[rows] == values[rows].min()], values)[:1]


def _choice(found: Candidates, row: int, kind: str, why: str) -> Choice:
    step = int(found.step[row])
    return Choice(
        group_id=int(found.group[row]),
        sample_index=int(found.sample[row]),
        step=None if step == PENDING else step,
        reward=float(found.reward[row]),
        response_tokens=int(found.length[row]),
        kind=kind,
        why=why,
    )


def _oddities(found: Candidates, good: Flags) -> Iterator[tuple[int, str]]:
    rows = np.flatnonzero(good)
    cut, failed = np.flatnonzero(good & found.is_cut), np.flatnonzero(found.is_failed)
    some = rows if len(rows) and found.length[rows].min() < found.length[rows].max() else rows[:0]
    for first, why in (
        (_first(found, failed, -found.step), "the last episode that failed"),
        (_first(found, some, -found.length), "longest response"),
        (_first(found, some, found.length), "shortest response"),
        (_first(found, cut, -found.reward), "cut off at the length limit; the highest reward of those"),
        (_alone(found, rows, found.reward), "alone in failing: furthest below the other samples of its group"),
        (_alone(found, rows, -found.reward), "alone in succeeding: furthest above the other samples of its group"),
    ):
        for row in first.tolist():
            yield row, why


def _alone(found: Candidates, rows: Ints, values: NDArray[np.float64]) -> Ints:
    """The row whose value is furthest below the next one of its group, if any is."""
    order = rows[np.lexsort((values[rows], found.group[rows]))]
    starts = np.flatnonzero(np.append(True, np.diff(found.group[order]) != 0)) if len(order) else order
    sizes = np.diff(np.append(starts, len(order)))
    starts = starts[sizes >= _FEWEST_SIBLINGS]
    leads = values[order[starts + 1]] - values[order[starts]] if len(starts) else np.zeros(0)
    if not len(leads) or leads.max() <= 0:
        return rows[:0]
    furthest = order[starts[leads == leads.max()]]
    return _first(found, furthest, np.zeros(len(found)))
