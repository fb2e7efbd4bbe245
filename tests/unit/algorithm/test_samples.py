from __future__ import annotations

import math
from typing import Any

import pytest

from milesbatch.algorithm.samples import TrainSample


def sample(**changes: Any) -> TrainSample:
    values: dict[str, Any] = {
        "group_id": 7,
        "sample_index": 2,
        "tokens": (5, 6, 7),
        "loss_mask": (False, True, True),
        "rollout_logprobs": (0.0, -1.0, -0.5),
        "advantage": 0.5,
    }
    return TrainSample(**{**values, **changes})


def test_counts_and_key() -> None:
    assert (sample().key, sample().num_tokens, sample().num_loss_tokens) == ((7, 2), 3, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": (5, 6)}, r"\(2, 3, 3\)"),
        ({"tokens": (), "loss_mask": (), "rollout_logprobs": ()}, r"\(0, 0, 0\)"),
        ({"loss_mask": (True, True, True)}, "first token"),
        ({"advantage": math.nan}, "advantage is nan"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"rollout_logprobs": (0.0, -math.inf, 0.0)}, "position 1 is -inf"),
    ],
)
def test_what_cannot_be_trained_on_names_the_sample(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"group 7, sample 2: .*{words}"):
        sample(**changes)
