"""Distributions of a run by train step and over all: rewards, lengths, staleness, ends, failures, speed.

Owns: what the numbers mean (see :class:`StepStatistics`). Never: decides or changes anything. Invariants: a number is
null when nothing readable is behind it, never 0; memory grows with the steps, not with the trajectories. The page
behind it is ``docs/trajectories.md``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from milesbatch.analysis.counted import Counted
from milesbatch.analysis.history import NO_REASON, REASONS, Ints
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.analysis.tally import Tally

Floats = NDArray[np.float64]
_COLUMNS = (
    "fate", "step", "reward", "response_tokens", "finish_reason", "error", "cause", "staleness", "started", "ended",
)  # fmt: skip
_MOST_CAUSES = 1000
OTHER_CAUSES = "other causes"
_NONE = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """One train step. Rewards and lengths are over the trained samples whose episode did not fail."""

    step: int
    reward_mean: float | None
    reward_std: float | None
    """Population standard deviation."""
    reward_min: float | None
    reward_max: float | None
    length_mean: float | None
    """Mean response length in tokens."""
    length_max: int | None
    staleness_mean: float | None
    """Mean over trained groups of the oldest token's staleness, in versions: step k trains version k - 1."""
    staleness_max: int | None
    failed: int
    """Samples of the step's groups, trained or rejected, whose episode ended with an error."""
    trained: int
    """Groups trained on."""
    rejected: int
    """Groups rejected in this step's batch record."""
    rejected_by_reason: dict[str, int]
    samples: int
    """Samples of the step's groups, trained or rejected, that could be read."""
    finish_reasons: dict[str, int]
    """How these samples ended."""
    failed_by_cause: dict[str, int]
    response_tokens: int
    tokens_per_s: float | None
    """Response tokens of these samples by the time from the first one's start to the last one's end, clocks of all
    workers taken as they are."""


@dataclass(frozen=True, slots=True)
class Overall:
    """All counted trajectories together; rewards and lengths are over those whose episode did not fail."""

    trajectories: int
    groups: dict[str, int]
    """By fate."""
    failed: int
    reward: Tally
    length: Tally
    staleness: Tally
    """Of samples with a fate, in versions."""
    finish_reasons: dict[str, int]
    failed_by_cause: dict[str, int]
    response_tokens: int
    seconds: float | None
    """From the start of the first episode to the end of the last."""
    tokens_per_s: float | None


def run_statistics(scan: TrajectoryScan) -> tuple[list[StepStatistics], Overall]:
    """Read every counted trajectory once; what could not be read is in ``scan.errors`` afterwards."""
    sums = _Sums(scan.counted)
    for batch in scan.batches(_COLUMNS):
        sums.add(batch)
    return sums.steps(), sums.overall()


class _Moments:
    """Count, mean, spread and range of values by step."""

    def __init__(self, steps: int) -> None:
        self.count = np.zeros(steps)
        self.mean = np.zeros(steps)
        self.squares = np.zeros(steps)
        self.low = np.full(steps, np.inf)
        self.high = np.full(steps, -np.inf)

    def add(self, steps: Ints, values: Floats) -> None:
        """Merge in means and squared deviations of the new values, which is exact where sums of squares are not."""
        size = len(self.count)
        count = np.bincount(steps, minlength=size).astype(np.float64)
        has = np.maximum(count, 1)
        mean = np.bincount(steps, values, size) / has
        squares = np.bincount(steps, (values - mean[steps]) ** 2, size)
        total = np.maximum(self.count + count, 1)
        delta = mean - self.mean
        self.squares += squares + delta**2 * self.count * count / total
        self.mean += np.where(count > 0, delta * count / total, 0)
        self.count += count
        np.minimum.at(self.low, steps, values)
        np.maximum.at(self.high, steps, values)

    def of(self, step: int) -> tuple[float | None, float | None, float | None, float | None]:
        """Mean, population standard deviation, least and greatest value of a step."""
        count = self.count[step]
        if not count:
            return None, None, None, None
        spread = float(np.sqrt(self.squares[step] / count))
        return float(self.mean[step]), spread, float(self.low[step]), float(self.high[step])


class _Words:
    """How often each word came, by step."""

    def __init__(self, steps: int, most: int = _MOST_CAUSES) -> None:
        self._steps, self._most = steps, most
        self.counts: dict[str, Ints] = {}

    def add(self, steps: Ints, words: Any) -> None:
        encoded = words.dictionary_encode()
        places = np.asarray(encoded.indices)
        for index, word in enumerate(encoded.dictionary.to_pylist()):
            key = word if word in self.counts or len(self.counts) < self._most else OTHER_CAUSES
            now = np.bincount(steps[places == index], minlength=self._steps)
            self.counts[key] = self.counts.get(key, np.zeros(self._steps, np.int64)) + now

    def of(self, step: int) -> dict[str, int]:
        return dict(Counter({word: int(n[step]) for word, n in self.counts.items() if n[step]}).most_common())

    def all(self) -> dict[str, int]:
        return dict(Counter({word: int(n.sum()) for word, n in self.counts.items()}).most_common())


@dataclass
class _Sums:
    counted: Counted
    reward: _Moments = field(init=False)
    length: _Moments = field(init=False)

    def __post_init__(self) -> None:
        # Place 0 is for what has no fate.
        size = self.counted.last_step + 1
        self.reward, self.length = _Moments(size), _Moments(size)
        self.words, self.causes = _Words(size), _Words(size)
        self.samples, self.failed, self.tokens = (np.zeros(size, np.int64) for _ in range(3))
        self.began, self.ended = np.full(size, _NONE, np.int64), np.full(size, -_NONE, np.int64)
        self.rewards, self.lengths, self.staleness = Tally(), Tally(), Tally()

    def add(self, batch: Any) -> None:
        size = len(self.samples)
        steps = pc.fill_null(batch["step"], 0).to_numpy()
        reward = batch["reward"].to_numpy()
        length = batch["response_tokens"].to_numpy().astype(np.float64)
        is_failed = batch["error"].is_valid().to_numpy(zero_copy_only=False)
        is_trained = pc.equal(batch["fate"], "trained").to_numpy(zero_copy_only=False)
        good = is_trained & ~is_failed
        self.reward.add(steps[good], reward[good])
        self.length.add(steps[good], length[good])
        self.rewards.add(reward[~is_failed])
        self.lengths.add(length[~is_failed])
        self.staleness.add(batch["staleness"].drop_null().to_numpy())
        self.samples += np.bincount(steps, minlength=size)
        self.failed += np.bincount(steps[is_failed], minlength=size)
        self.tokens += np.bincount(steps, length, size).astype(np.int64)
        np.minimum.at(self.began, steps, batch["started"].cast("int64").to_numpy())
        np.maximum.at(self.ended, steps, batch["ended"].cast("int64").to_numpy())
        self.words.add(steps, batch["finish_reason"])
        self.causes.add(steps[is_failed], batch["cause"].filter(batch["error"].is_valid()))

    def steps(self) -> list[StepStatistics]:
        stale = self._staleness_of_groups()
        reasons = self._rejections()
        return [self._of(step.step, step.trained, step.rejected, stale, reasons) for step in self.counted.steps]

    def _of(self, step: int, trained: int, rejected: int, stale: _Moments, reasons: dict[str, Ints]) -> StepStatistics:
        reward_mean, reward_std, reward_min, reward_max = self.reward.of(step)
        length_mean, _, _, longest = self.length.of(step)
        staleness_mean, _, _, stalest = stale.of(step)
        return StepStatistics(
            step=step,
            reward_mean=reward_mean,
            reward_std=reward_std,
            reward_min=reward_min,
            reward_max=reward_max,
            length_mean=length_mean,
            length_max=None if longest is None else int(longest),
            staleness_mean=staleness_mean,
            staleness_max=None if stalest is None else int(stalest),
            failed=int(self.failed[step]),
            trained=trained,
            rejected=rejected,
            rejected_by_reason={reason: int(n[step]) for reason, n in reasons.items() if n[step]},
            samples=int(self.samples[step]),
            finish_reasons=self.words.of(step),
            failed_by_cause=self.causes.of(step),
            response_tokens=int(self.tokens[step]),
            tokens_per_s=_speed(int(self.tokens[step]), _seconds(self.began[step], self.ended[step])),
        )

    def _staleness_of_groups(self) -> _Moments:
        counted, moments = self.counted, _Moments(len(self.samples))
        known = (counted.version_min >= 0) & (counted.reason == NO_REASON) & (counted.step > 0)
        steps = counted.step[known]
        moments.add(steps, (steps - 1 - counted.version_min[known]).astype(np.float64))
        return moments

    def _rejections(self) -> dict[str, Ints]:
        counted, size = self.counted, len(self.samples)
        return {
            reason: np.bincount(counted.step[counted.reason == index], minlength=size)
            for index, reason in enumerate(REASONS)
        }

    def overall(self) -> Overall:
        codes = np.bincount(self.counted.fate_code, minlength=3)
        began = self.began.min(initial=_NONE)
        seconds = _seconds(began, self.ended.max(initial=-_NONE))
        tokens = int(self.tokens.sum())
        return Overall(
            trajectories=int(self.samples.sum()),
            groups={"trained": int(codes[1]), "rejected": int(codes[2]), "pending": int(codes[0])},
            failed=int(self.failed.sum()),
            reward=self.rewards,
            length=self.lengths,
            staleness=self.staleness,
            finish_reasons=self.words.all(),
            failed_by_cause=self.causes.all(),
            response_tokens=tokens,
            seconds=seconds,
            tokens_per_s=_speed(tokens, seconds),
        )


def _seconds(began: np.int64, ended: np.int64) -> float | None:
    return None if began == _NONE else max(float(ended - began) / 1e6, 0.0)


def _speed(tokens: int, seconds: float | None) -> float | None:
    return tokens / seconds if seconds else None
