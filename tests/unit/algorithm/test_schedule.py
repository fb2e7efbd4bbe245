from __future__ import annotations

from typing import Any

import pytest

from milesbatch.algorithm.schedule import learning_rate
from milesbatch.recipe.models import Optimizer


def rates(steps: int, **options: Any) -> list[float]:
    optimizer = Optimizer.model_validate({"learning_rate": 1.0, **options})
    return [learning_rate(step, steps, optimizer) for step in range(1, steps + 1)]


def test_warmup_then_constant() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_goes_evenly_towards_the_minimum() -> None:
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, schedule="linear", min_learning_rate=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_is_halfway_in_the_middle() -> None:
    found = rates(12, schedule="cosine", warmup_steps=2, min_learning_rate=0.5)
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[7] == pytest.approx(0.75)
    assert found[2:] == sorted(found[2:], reverse=True)
    assert 0.5 < found[-1] < 0.52


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 5), (5, 5), (50, 7)])
def test_no_step_is_lost_and_none_is_above_the_peak(schedule: str, steps: int, warmup: int) -> None:
    assert all(0 < rate <= 1.0 for rate in rates(steps, schedule=schedule, warmup_steps=warmup))


@pytest.mark.parametrize("step", [-1, 0, 6])
def test_steps_outside_the_run(step: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} is not one of 1..5"):
        learning_rate(step, 5, Optimizer())
