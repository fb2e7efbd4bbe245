"""Which samples the page shows, and their texts.

Owns: the choice (best, worst, median, odd) and reading the chosen few. Never: colours or layout. Invariant: the choice is a
function of the run's files alone: the same run gives the same samples. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milesbatch.errors import MilesbatchError
from milesbatch.report.page.experience import Experience, Rows
from milesbatch.trajectories.reader import read_trajectories
from milesbatch.trajectories.trajectory import Trajectory

LATE_SHARE = 0.25
"""Best, median and worst come from the last quarter of the steps: else they would tell when, not what, the run learned."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A row, and why it is shown."""

    row: int
    title: str
    why: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample with its texts."""

    title: str
    why: str
    step: int
    is_trained: bool
    trajectory: Trajectory

    @property
    def lag_text(self) -> str:
        """Policy versions that wrote it."""
        versions = [span.version for span in self.trajectory.versions]
        if not versions:
            return "no policy version"
        return f"version {versions[0]}" if versions[0] == versions[-1] else f"versions {versions[0]} to {versions[-1]}"


def choose(rows: Rows) -> list[Chosen]:
    """At most nine different rows; fewer when there is nothing odd."""
    chosen: list[Chosen] = []
    for candidate in _candidates(rows):
        if all(candidate.row != other.row for other in chosen):
            chosen.append(candidate)
    return chosen


def _candidates(rows: Rows) -> Iterator[Chosen]:
    good = rows.is_trained & ~rows.is_failed & np.isfinite(rows.reward)
    if good.any():
        last = int(rows.step[good].max())
        since = last - max(1, round(LATE_SHARE * last)) + 1
        late = np.flatnonzero(good & (rows.step >= since))
        late = late[np.lexsort((rows.sample[late], rows.group[late], -rows.step[late]))]
        rewards = rows.reward[late]
        where = f"of steps {since} to {last}" if since < last else f"of step {last}"
        yield Chosen(int(late[np.argmax(rewards)]), "best", f"highest reward {where}")
        middle = float(np.median(rewards))
        yield Chosen(int(late[np.argmin(np.abs(rewards - middle))]), "median", f"nearest to the median reward {where}")
        yield Chosen(int(late[np.argmin(rewards)]), "worst", f"lowest reward {where}")
    yield from _odd(rows, good)


def _odd(rows: Rows, good: NDArray[np.bool_]) -> Iterator[Chosen]:
    failed = np.flatnonzero(rows.is_failed)
    if len(failed):
        yield Chosen(int(failed[-1]), "odd: failed", "the last episode that failed")
    cut = np.flatnonzero(rows.is_cut & good)
    if len(cut):
        yield Chosen(int(cut[np.argmax(rows.reward[cut])]), "odd: cut off", "ended for want of tokens; best of those")
    lone = _lone(rows, good, sign=1.0)
    if lone is not None:
        yield Chosen(lone, "odd: alone in succeeding", "furthest above the other samples of its prompt")
    lone = _lone(rows, good, sign=-1.0)
    if lone is not None:
        yield Chosen(lone, "odd: alone in failing", "furthest below the other samples of its prompt")
    where = np.flatnonzero(good)
    if len(where) > 1 and rows.length[where].min() < rows.length[where].max():
        yield Chosen(int(where[np.argmax(rows.length[where])]), "odd: longest", "more response tokens than any other")
        yield Chosen(int(where[np.argmin(rows.length[where])]), "odd: shortest", "fewer response tokens than any other")


def _lone(rows: Rows, good: NDArray[np.bool_], sign: float) -> int | None:
    """The row that is furthest above (``sign`` 1) or below (-1) the next one of its group; the latest of equals."""
    where = np.flatnonzero(good)
    if len(where) < 3:
        return None
    order = where[np.lexsort((-sign * rows.reward[where], rows.group[where]))]
    groups, rewards = rows.group[order], sign * rows.reward[order]
    starts = np.flatnonzero(np.append(True, np.diff(groups) != 0))
    sizes = np.diff(np.append(starts, len(order)))
    starts = starts[sizes >= 3]
    if not len(starts):
        return None
    leads = rewards[starts] - rewards[starts + 1]
    best = len(leads) - 1 - int(np.argmax(leads[::-1]))
    return int(order[starts[best]]) if leads[best] > 0 else None


def read_chosen(experience: Experience, gaps: list[str]) -> list[Shown]:
    """The chosen samples with their texts; what cannot be read is told in ``gaps`` and left out."""
    rows = experience.rows
    found: list[Shown] = []
    for chosen in choose(rows):
        path = experience.files[int(rows.file[chosen.row])]
        group, sample = int(rows.group[chosen.row]), int(rows.sample[chosen.row])
        try:
            read: list[Any] = read_trajectories(path, [group])
        except MilesbatchError as error:
            gaps.append(error.what)
            continue
        for trajectory in read:
            if trajectory.sample_index == sample:
                step, is_trained = int(rows.step[chosen.row]), bool(rows.is_trained[chosen.row])
                found.append(Shown(chosen.title, chosen.why, step, is_trained, trajectory))
    return found
