"""Distributions by train step: rewards, lengths and staleness of what each batch record trains on.

Owns: what the numbers mean (see :class:`StepStatistics`). Never: decides or changes anything. Invariant: a number is
null when nothing readable is behind it, never 0. The page behind it is ``docs/format-trajectories.md``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from milesbatch.errors import MilesbatchError
from milesbatch.records import BatchRecord
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.reader import read_table


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """One train step. Rewards and lengths are over the trained samples whose episode did not fail."""

    step: int
    reward_mean: float | None
    reward_std: float | None
    """Population standard deviation."""
    length_mean: float | None
    """Mean response length in tokens."""
    staleness_mean: float | None
    """Mean over trained groups of the oldest token's staleness, in versions: step k trains version k - 1."""
    failed: int
    """Samples of the step's groups, trained or rejected, whose episode ended with an error."""
    trained: int
    """Groups trained on."""
    rejected: int
    """Groups rejected in this step's batch record."""


@dataclass(frozen=True, slots=True)
class _Sample:
    reward: float
    length: int
    failed: bool


@dataclass(slots=True)
class _Files:
    """Samples by group of each file, read once; a damaged file is reported once and then has no groups."""

    layout: RunLayout
    known: dict[tuple[str, str], dict[int, list[_Sample]]] = field(default_factory=dict)
    errors: list[MilesbatchError] = field(default_factory=list)

    def samples(self, group_id: int, name: str, digest: str) -> list[_Sample]:
        key = (name, digest)
        if key not in self.known:
            try:
                self.known[key] = _read(self.layout.trajectory(name), digest)
            except MilesbatchError as error:
                self.known[key] = {}
                self.errors.append(error)
        return self.known[key].get(group_id, [])


def step_statistics(
    layout: RunLayout, records: Sequence[BatchRecord]
) -> tuple[list[StepStatistics], list[MilesbatchError]]:
    """Statistics of each record's step, and an error for each trajectory file that could not be read."""
    files = _Files(layout)
    return [_of_step(record, files) for record in records], files.errors


def _of_step(record: BatchRecord, files: _Files) -> StepStatistics:
    trained = [s for group in record.trained for s in files.samples(group.group_id, group.path, group.digest)]
    rejected = [s for group in record.rejected for s in files.samples(group.group_id, group.path, group.digest)]
    good = [sample for sample in trained if not sample.failed]
    rewards = [sample.reward for sample in good]
    return StepStatistics(
        step=record.step,
        reward_mean=_mean(rewards),
        reward_std=statistics.pstdev(rewards) if rewards else None,
        length_mean=_mean(sample.length for sample in good),
        staleness_mean=_mean(record.step - 1 - g.version_min for g in record.trained if g.version_min >= 0),
        failed=sum(sample.failed for sample in (*trained, *rejected)),
        trained=len(record.trained),
        rejected=len(record.rejected),
    )


def _read(path: Path, digest: str) -> dict[int, list[_Sample]]:
    table = read_table(path, digest=digest)
    columns = (table[name].to_pylist() for name in ("group_id", "reward", "response_tokens", "error"))
    groups: dict[int, list[_Sample]] = {}
    for group_id, reward, length, error in zip(*columns, strict=True):
        groups.setdefault(group_id, []).append(_Sample(reward, length, error is not None))
    return groups


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return statistics.fmean(numbers) if numbers else None
