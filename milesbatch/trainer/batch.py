"""From recorded groups to what the loss needs: read the trajectories, judge the groups, compute advantages. No torch.

Which groups a step trains on is decided once, by rank 0, and written into the batch record; every rank (and every replay)
then reads the same files, verified by digest, and computes the same samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from milesbatch.algorithm.advantages import group_advantages, has_zero_variance
from milesbatch.algorithm.samples import TrainSample
from milesbatch.errors import CorruptArtefactError
from milesbatch.recipe.models import Algorithm
from milesbatch.records import BatchRecord, GroupRef, Rejection
from milesbatch.store.layout import RunLayout
from milesbatch.store.sight import AT_ONCE, Sight
from milesbatch.trajectories.reader import read_trajectories
from milesbatch.trajectories.trajectory import Trajectory
from milesbatch.trajectories.vocabulary import check_vocabulary, vocabulary_of


@dataclass(frozen=True, slots=True)
class StepData:
    """The content of a step: samples for the loss, and figures for people."""

    samples: tuple[TrainSample, ...]
    metrics: dict[str, float]


def read_groups(layout: RunLayout, groups: Iterable[GroupRef], sight: Sight = AT_ONCE) -> dict[int, list[Trajectory]]:
    """Trajectories of each group, verified by digest; each file is read once. ``sight``: how long to look for each.

    Raises:
        CorruptArtefactError: a file is missing or damaged, or has a token that the run's model has not.
    """
    vocabulary = vocabulary_of(layout.model)
    by_file: dict[tuple[str, str], list[int]] = {}
    for group in groups:
        by_file.setdefault((group.path, group.digest), []).append(group.group_id)
    found: dict[int, list[Trajectory]] = {}
    for (name, digest), group_ids in sorted(by_file.items()):
        path = layout.trajectory(name)
        rows = sight.until_seen(partial(read_trajectories, path, group_ids, digest))
        try:
            check_vocabulary(rows, vocabulary)
        except ValueError as error:
            raise CorruptArtefactError(
                f"{path} cannot be trained on: {error}",
                mend="what drew it is not to be trusted: fork the run before this step, with another engine or server",
            ) from error
        for trajectory in rows:
            found.setdefault(trajectory.group_id, []).append(trajectory)
    return found


def sift(
    candidates: Sequence[GroupRef], trajectories: dict[int, list[Trajectory]], algorithm: Algorithm
) -> tuple[tuple[GroupRef, ...], tuple[Rejection, ...]]:
    """Which of the chosen groups can be trained on; the others are rejected with their reason.

    A group with fewer than two samples that ended without an error cannot be compared with itself: ``failed``.
    """
    trained, rejected = [], []
    for group in candidates:
        rewards = _rewards(trajectories[group.group_id])
        if sum(reward is not None for reward in rewards) < 2:
            rejected.append(Rejection(group_id=group.group_id, reason="failed", path=group.path, digest=group.digest))
        elif algorithm.group_filter == "zero_variance" and has_zero_variance(rewards):
            rejected.append(
                Rejection(group_id=group.group_id, reason="zero_variance", path=group.path, digest=group.digest)
            )
        else:
            trained.append(group)
    return tuple(trained), tuple(rejected)


def step_data(
    record: BatchRecord, trajectories: dict[int, list[Trajectory]], algorithm: Algorithm, temperature: float
) -> StepData:
    """Samples and figures of a recorded step; a pure function of the record and the files it names."""
    samples: list[TrainSample] = []
    for group in record.trained:
        siblings = trajectories[group.group_id]
        advantages = group_advantages(_rewards(siblings), normalize=algorithm.normalize_advantage)
        samples.extend(
            TrainSample(
                group_id=trajectory.group_id,
                sample_index=trajectory.sample_index,
                tokens=trajectory.tokens,
                loss_mask=trajectory.loss_mask,
                rollout_logprobs=trajectory.logprobs,
                advantage=advantage,
                temperature=temperature,
            )
            for trajectory, advantage in zip(siblings, advantages, strict=True)
            if advantage is not None and trajectory.policy_tokens
        )
    rows = [trajectory for group in record.trained for trajectory in trajectories[group.group_id]]
    return StepData(tuple(samples), _figures(record, rows))


def _rewards(siblings: Sequence[Trajectory]) -> list[float | None]:
    return [None if trajectory.error is not None else trajectory.reward for trajectory in siblings]


def _figures(record: BatchRecord, rows: Sequence[Trajectory]) -> dict[str, float]:
    whole = [row for row in rows if row.error is None]
    rewards = [row.reward for row in whole]
    metrics = {
        "reward_mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward_std": statistics.pstdev(rewards) if rewards else 0.0,
        "length_mean": statistics.fmean([row.response_tokens for row in whole]) if whole else 0.0,
        "truncated_share": sum(row.finish_reason == "length" for row in rows) / max(len(rows), 1),
        "failed": float(len(rows) - len(whole)),
        "groups_trained": float(len(record.trained)),
        "groups_rejected": float(len(record.rejected)),
    }
    lags = _token_lags(record.step - 1, rows)
    metrics["lag_mean"] = sum(lag * count for lag, count in lags.items()) / max(sum(lags.values()), 1)
    metrics["lag_max"] = float(max(lags, default=0))
    parts = sorted({name for row in whole for name in row.rewards})
    for name in parts:
        metrics[f"reward/{name}"] = statistics.fmean([row.rewards.get(name, 0.0) for row in whole])
    return metrics


def _token_lags(trainer_version: int, rows: Sequence[Trajectory]) -> dict[int, int]:
    """How many policy tokens lag by how many versions behind the version that the step starts from."""
    lags: dict[int, int] = {}
    for row in rows:
        ends = [span.start for span in row.versions[1:]] + [len(row.tokens)]
        for span, end in zip(row.versions, ends, strict=True):
            lag = trainer_version - span.version
            lags[lag] = lags.get(lag, 0) + sum(row.loss_mask[span.start : end])
    return lags
