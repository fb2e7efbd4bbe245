"""Figures over the samples of an evaluation."""

from __future__ import annotations

import pytest
from builders import make_trajectory

from milesbatch.evaluation.figures import figures_of, metrics_of


def test_rewards_are_over_what_did_not_fail() -> None:
    samples = [
        make_trajectory(0, 0, reward=0.0, rewards={"a": 0.0, "b": 0.0}),
        make_trajectory(0, 1, reward=1.0, rewards={"a": 1.0, "b": 0.0}),
        make_trajectory(1, 0, reward=0.5, rewards={"a": 0.25, "b": 0.25}, finish_reason="length"),
        make_trajectory(1, 1, reward=0.0, rewards={}, error="no"),
    ]
    found = figures_of(samples)
    assert (found.samples, found.failed) == (4, 1)
    assert found.reward_mean == 0.5
    assert found.reward_std == pytest.approx((0.5 / 3) ** 0.5)
    assert found.reward_best_mean == 0.75
    assert found.rewards == {"a": pytest.approx(1.25 / 3), "b": pytest.approx(0.25 / 3)}
    assert found.finish_reasons == {"length": 1, "stop": 3}
    assert (found.length_mean, found.length_max) == (3.0, 3)
    assert figures_of(samples[::-1]) == found, "the order does not matter"
    metrics = metrics_of(found)
    assert metrics["eval/reward_mean"] == 0.5 and metrics["eval/reward/a"] == found.rewards["a"]
    assert metrics["eval/truncated_share"] == 0.25 and metrics["eval/failed"] == 1.0


def test_when_all_failed_no_reward_is_known() -> None:
    found = figures_of([make_trajectory(0, 0, error="no")])
    assert (found.reward_mean, found.reward_std, found.reward_best_mean, found.rewards) == (None, None, None, {})
    assert "eval/reward_mean" not in metrics_of(found)
    with pytest.raises(ValueError):
        figures_of([])
