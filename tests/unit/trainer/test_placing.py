"""A rank computes where the recipe says, or says why it cannot."""

from __future__ import annotations

import pytest
import torch
from builders import make_recipe

from milesbatch.errors import InputError
from milesbatch.trainer.placing import group_backend, rank_device

ON_GPUS = {"slurm": {"trainer": {"gpus_per_task": 1}}}


def test_without_gpus_in_the_recipe_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert rank_device(make_recipe(), 3) == torch.device("cpu")
    assert group_backend(torch.device("cpu")) == "gloo"


@pytest.mark.parametrize(
    ("visible", "wanted"), [(1, 0), (8, 3), (2, 1)], ids=["its own only", "a whole host", "in turn"]
)
def test_each_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch, visible: int, wanted: int) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    device = rank_device(make_recipe(**ON_GPUS), 3)
    assert device == torch.device("cuda", wanted) and current == [device]
    assert group_backend(device) == "cpu:gloo,cuda:nccl"


def test_gpus_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match=r"slurm\.trainer\.gpus_per_task is 1, and rank 0 sees no GPU") as caught:
        rank_device(make_recipe(**ON_GPUS), 0)
    assert "gpus_per_task=0" in caught.value.mend
