"""What faults and restarts cost: the time in which the run did not get on, by cause. Pure.

Owns the sums; what happened is in :mod:`milesbatch.timeline.slices`. Invariant: the causes of the run's own time do not
overlap, so that their sum is time that a run without faults would not have taken; that of workers is apart, for others went on
meanwhile.
The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from milesbatch.timeline.slices import Life, Story

_TRAINER = "trainer-0"


@dataclass(frozen=True, slots=True)
class Losses:
    """Seconds. The first three are the run's, ``workers_s`` is summed over workers."""

    between_s: float
    """No process of the run lived: from the last sign of life of an incarnation to the first of the next."""
    starting_s: float
    """The trainer was started again: from its end, or the begin of a later incarnation, until it could work."""
    replaying_s: float
    """It computed recorded steps again."""
    workers_s: float
    """Rollout workers were started again, in the same way."""
    whole_s: float
    """From the run's first sign of life to its last."""

    @property
    def total_s(self) -> float:
        return self.between_s + self.starting_s + self.replaying_s


def add_up_losses(story: Story) -> Losses:
    """Sum up a run; all 0 for one without a restart."""
    spans = story.incarnations
    between_s = sum(max(later[1] - earlier[2], 0.0) for earlier, later in itertools.pairwise(spans))
    lives: dict[str, list[Life]] = {}
    for life in story.lives:
        lives.setdefault(life.process, []).append(life)
    begins = {number: start_s for number, start_s, _ in spans}
    starting = {name: _starting_s(name, own, begins, story) for name, own in lives.items()}
    workers = [seconds for name, seconds in starting.items() if name.startswith("rollout-")]
    replaying_s = sum(
        piece.end_s - piece.start_s
        for piece in story.slices
        if piece.process == _TRAINER and piece.activity == "replaying"
    )
    whole_s = spans[-1][2] - spans[0][1] if spans else 0.0
    return Losses(between_s, starting.get(_TRAINER, 0.0), replaying_s, sum(workers), whole_s)


def _starting_s(name: str, lives: list[Life], begins: dict[int, float], story: Story) -> float:
    """Of the lives after the first: how long the process was away, and how long it then needed until it could work."""
    total_s = 0.0
    for earlier, life in itertools.pairwise(lives):
        is_same = earlier.incarnation == life.incarnation
        since_s = earlier.end_s if is_same else begins.get(life.incarnation, life.start_s)
        total_s += max(life.start_s - since_s, 0.0)
        total_s += sum(
            piece.end_s - piece.start_s
            for piece in story.slices
            if piece.process == name and piece.activity == "starting" and life.start_s <= piece.start_s <= life.end_s
        )
    return total_s
