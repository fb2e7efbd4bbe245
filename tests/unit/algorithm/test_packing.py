from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.algorithm.packing import EMPTY, Microbatch, plan_microbatches, to_tensors
from milesbatch.algorithm.samples import TrainSample

CPU = torch.device("cpu")


def sample(key: int, length: int, *, trained: bool = True, temperature: float = 1.0) -> TrainSample:
    return TrainSample(
        group_id=key // 4,
        sample_index=key % 4,
        tokens=tuple(100 * key + position for position in range(length)),
        loss_mask=tuple(trained and position >= length // 2 and position > 0 for position in range(length)),
        rollout_logprobs=tuple(-0.01 * position for position in range(length)),
        advantage=float(key),
        temperature=temperature,
    )


@given(
    lengths=st.lists(st.integers(1, 40), max_size=24),
    ranks=st.integers(1, 5),
    max_tokens=st.integers(1, 64),
    seed=st.integers(0, 9),
)
def test_plan_keeps_its_promises(lengths: list[int], ranks: int, max_tokens: int, seed: int) -> None:
    samples = [sample(key, length) for key, length in enumerate(lengths)]
    plan = plan_microbatches(samples, ranks, max_tokens)
    assert len(plan) == ranks
    assert len({len(microbatches) for microbatches in plan}) == 1
    assert len(plan[0]) >= 1
    placed = [one.key for microbatches in plan for microbatch in microbatches for one in microbatch.samples]
    assert sorted(placed) == sorted(one.key for one in samples)
    for microbatch in (microbatch for microbatches in plan for microbatch in microbatches):
        assert all(sum(one.num_tokens for one in row) <= microbatch.row_tokens for row in microbatch.rows)
        assert microbatch.num_tokens <= max_tokens or len(microbatch.samples) == 1
    shuffled = list(samples)
    random.Random(seed).shuffle(shuffled)
    assert plan_microbatches(shuffled, ranks, max_tokens) == plan
    # Longest first to the least loaded: no two ranks differ by more than one longest sample.
    loads = [sum(one.num_tokens for microbatch in share for one in microbatch.samples) for share in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_no_samples_is_one_empty_pass_each() -> None:
    assert plan_microbatches([], 3, 100) == ((EMPTY,), (EMPTY,), (EMPTY,))


def test_fewer_samples_than_ranks_pads_with_empty_passes() -> None:
    plan = plan_microbatches([sample(0, 9), sample(1, 9), sample(2, 9)], 2, 10)
    assert [[len(microbatch.samples) for microbatch in share] for share in plan] == [[1, 1], [1, 0]]


def test_short_samples_share_the_rows_of_a_long_one() -> None:
    (share,) = plan_microbatches([sample(key, length) for key, length in enumerate([10, 6, 5, 4, 3])], 1, 30)
    assert [[[one.num_tokens for one in row] for row in microbatch.rows] for microbatch in share] == [
        [[10], [6, 4], [5, 3]]
    ]


@pytest.mark.parametrize(("ranks", "max_tokens"), [(0, 10), (1, 0)])
def test_limits_below_one(ranks: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_microbatches([], ranks, max_tokens)


def test_the_same_sample_twice() -> None:
    with pytest.raises(ValueError, match="2 samples have only 1"):
        plan_microbatches([sample(3, 4), sample(3, 5)], 1, 10)


def test_tensors_of_packed_rows() -> None:
    tensors = to_tensors(Microbatch(5, ((sample(1, 3), sample(2, 2)), (sample(3, 4, temperature=0.0),))), CPU)
    assert tensors.input_ids.tolist() == [[100, 101, 102, 200, 201], [300, 301, 302, 303, 0]]
    assert tensors.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert tensors.segment_ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    assert tensors.loss_mask.int().tolist() == [[0, 1, 1, 0, 1], [0, 0, 1, 1, 0]]
    assert tensors.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    # Padding sees itself, so that no row of the softmax is empty.
    assert tensors.attention_mask[1, 0, 4].int().tolist() == [0, 0, 0, 0, 1]
    assert tensors.columns.tolist() == [0, 1, 2, 3]
    assert tensors.targets.tolist() == [101, 102, 201, 302, 303]
    predicted_at = tensors.columns[tensors.predict_column]
    assert list(zip(tensors.predict_row.tolist(), predicted_at.tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (0, 3),
        (1, 1),
        (1, 2),
    ]
    assert tensors.rollout_logprobs.tolist() == pytest.approx([-0.01, -0.02, -0.01, -0.02, -0.03])
    assert tensors.advantages.tolist() == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert tensors.temperatures.tolist() == [1.0] * 5


@pytest.mark.parametrize("microbatch", [EMPTY, Microbatch(3, ((sample(1, 3, trained=False),),))])
def test_tensors_without_loss_tokens(microbatch: Microbatch) -> None:
    tensors = to_tensors(microbatch, CPU)
    assert tensors.columns.tolist() == [0]
    assert len(tensors.targets) == len(tensors.predict_row) == len(tensors.predict_column) == 0
    assert tensors.attention_mask.any(-1).all()
