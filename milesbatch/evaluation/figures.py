"""What came out of an evaluation, in figures. Pure.

Invariant: a pure function of the trajectories, in whatever order, so that an audit can compute the figures of a record
again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from milesbatch.records import EvaluationFigures
from milesbatch.trajectories.trajectory import Trajectory


def figures_of(trajectories: Sequence[Trajectory]) -> EvaluationFigures:
    """Figures over all samples of one evaluation; rewards over those whose episode did not fail.

    Raises:
        ValueError: there are no trajectories.
    """
    if not trajectories:
        raise ValueError("an evaluation has at least one sample")
    good = [trajectory for trajectory in trajectories if trajectory.error is None]
    rewards = [trajectory.reward for trajectory in good]
    best: dict[int, float] = {}
    for trajectory in good:
        best[trajectory.group_id] = max(trajectory.reward, best.get(trajectory.group_id, -math.inf))
    parts: dict[str, list[float]] = {}
    for trajectory in good:
        for name, value in trajectory.rewards.items():
            parts.setdefault(name, []).append(value)
    lengths = [trajectory.response_tokens for trajectory in trajectories]
    mean = _mean(rewards)
    return EvaluationFigures(
        samples=len(trajectories),
        failed=len(trajectories) - len(good),
        reward_mean=mean,
        reward_std=None if mean is None else math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)),
        reward_best_mean=_mean(list(best.values())),
        rewards={name: math.fsum(values) / len(values) for name, values in sorted(parts.items())},
        length_mean=math.fsum(lengths) / len(lengths),
        length_max=max(lengths),
        finish_reasons=dict(sorted(Counter(trajectory.finish_reason for trajectory in trajectories).items())),
    )


def _mean(values: Sequence[float]) -> float | None:
    """Sums without rounding, so that the order does not matter."""
    return math.fsum(values) / len(values) if values else None


def metrics_of(figures: EvaluationFigures) -> dict[str, float]:
    """The figures by name, as curves take them: ``eval/reward_mean``, ``eval/reward/PART``, …; without what is not known."""
    plain = {
        "reward_mean": figures.reward_mean,
        "reward_std": figures.reward_std,
        "reward_best_mean": figures.reward_best_mean,
        "length_mean": figures.length_mean,
        "failed": float(figures.failed),
        "truncated_share": figures.finish_reasons.get("length", 0) / figures.samples,
    }
    named = {f"eval/{name}": value for name, value in plain.items() if value is not None}
    return {**named, **{f"eval/reward/{name}": value for name, value in figures.rewards.items()}}
