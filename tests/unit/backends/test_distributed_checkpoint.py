"""Random states as tensors; saving and loading itself is in test_fsdp.py, with real ranks."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
import torch

from milesbatch.backends.distributed_checkpoint import AsyncSaver, _Staging, random_state, restore_random_state
from milesbatch.errors import RunFailedError

CPU = torch.device("cpu")


def draws() -> list[float]:
    return [random.random(), random.gauss(), float(np.random.standard_normal()), torch.randn(()).item()]


@pytest.mark.parametrize("warm", [0, 1, 2, 700])
def test_random_state_comes_back_exactly(warm: int) -> None:
    # After an odd number of normal draws, Python and numpy hold the second half of a pair.
    for _ in range(warm):
        draws()
    state = {name: tensor.clone() for name, tensor in random_state(CPU).items()}
    expected = [draws() for _ in range(3)]
    restore_random_state(state, CPU)
    assert [draws() for _ in range(3)] == expected


def test_random_state_has_fixed_shapes() -> None:
    shapes = {name: tensor.shape for name, tensor in random_state(CPU).items()}
    draws()
    assert {name: tensor.shape for name, tensor in random_state(CPU).items()} == shapes


def test_copies_are_made_into_memory_that_is_kept() -> None:
    staging, state = _Staging(), {"a": torch.ones(8), "b": torch.zeros(2, dtype=torch.int64), "text": ["x"]}
    first = staging.copy(state)
    assert {key: value is state[key] for key, value in first.items()} == {"a": False, "b": False, "text": False}
    state["a"].fill_(2.0)
    assert first["a"].sum() == 8
    second = staging.copy(state)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert (second["a"].sum(), second["text"]) == (16, ["x"])
    third = staging.copy({"a": torch.ones(4)})
    assert third["a"].shape == (4,)
    assert set(staging._buffers) == {"a"}, "what is not saved any more takes no memory"


def test_missing_psutil_is_said_before_a_save_can_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunFailedError, match="psutil"):
        AsyncSaver()
