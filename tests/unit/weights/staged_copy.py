"""What a staged model must be, for the tests of staging."""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors.torch import load_file

from milesbatch.weights.staging import Staging

Make = Callable[[int], dict[str, torch.Tensor]]


def assert_holds(staging: Staging, version: int, make: Make) -> None:
    assert staging.current == version
    found, expected = load_file(staging.model / "model.safetensors"), make(version)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert (staging.model / "config.json").exists()
