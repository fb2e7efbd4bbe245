from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.algorithm.advantages import group_advantages, has_zero_variance


def test_normalised_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize=True) == (1.0, -1.0, -1.0, 1.0)
    assert group_advantages([4.0, 0.0, 0.0, 0.0], normalize=True) == pytest.approx(
        [math.sqrt(3)] + [-1 / math.sqrt(3)] * 3
    )


def test_dr_grpo_keeps_the_scale() -> None:
    assert group_advantages([4.0, 0.0, 0.0, 0.0], normalize=False) == (3.0, -1.0, -1.0, -1.0)


@pytest.mark.parametrize("normalize", [True, False])
def test_failed_samples_are_left_out(normalize: bool) -> None:
    with_failure = group_advantages([1.0, None, 0.0, 0.0], normalize=normalize)
    without = group_advantages([1.0, 0.0, 0.0], normalize=normalize)
    assert with_failure[1] is None
    assert (with_failure[0], *with_failure[2:]) == without


@pytest.mark.parametrize("rewards", [[0.3, 0.1 + 0.2], [2.0] * 5, [1.0, None, None], [0.0, 0.0]])
@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_teach_nothing(rewards: list[float | None], normalize: bool) -> None:
    assert has_zero_variance(rewards)
    expected = tuple(None if reward is None else 0.0 for reward in rewards)
    assert group_advantages(rewards, normalize=normalize) == expected


def test_a_group_in_which_all_failed() -> None:
    assert group_advantages([None, None], normalize=True) == (None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_no_numbers(bad: float) -> None:
    with pytest.raises(ValueError, match="only finite"):
        group_advantages([1.0, bad], normalize=True)


@given(st.lists(st.integers(-50, 50).map(lambda n: n / 4), min_size=2, max_size=16), st.randoms())
def test_centred_unit_variance_and_independent_of_the_order(rewards: list[float], shuffler: object) -> None:
    found = group_advantages(rewards, normalize=True)
    assert np.mean(found) == pytest.approx(0.0, abs=1e-9)
    if not has_zero_variance(rewards):
        assert np.std(found) == pytest.approx(1.0)
    order = list(range(len(rewards)))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    assert group_advantages([rewards[i] for i in order], normalize=True) == tuple(found[i] for i in order)
