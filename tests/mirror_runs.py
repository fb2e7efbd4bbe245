"""A small run with policy versions, to be pushed and pulled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from builders import make_recipe

from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.layout import RunLayout
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.rebuild import rebuild

Tensors = dict[str, torch.Tensor]
KEYFRAME_EVERY = 4


def make_tensors(version: int, rows: int = 64) -> Tensors:
    """About 1 % of the elements differ from one version to the next."""
    tensors = {
        "embed.weight": torch.randn(rows, 64, generator=torch.Generator().manual_seed(7)).bfloat16(),
        "norm.weight": torch.ones(64),
    }
    for step in range(1, version + 1):
        moves = torch.Generator().manual_seed(step)
        flat = tensors["embed.weight"].view(-1)
        flat[torch.randint(0, flat.numel(), (flat.numel() // 100,), generator=moves)] += 0.25
        tensors["norm.weight"][step % 64] += 1
    return tensors


def make_weights_run(root: Path, versions: Iterable[int] = range(7), rows: int = 64) -> RunLayout:
    """Versions with keyframes at 0, 4, 8, and so on; the model that it began with is recorded too."""
    layout, recipe = RunLayout(root), make_recipe()
    lay_out(layout, recipe)
    (layout.model / "config.json").write_text('{"model_type": "qwen3"}')
    (layout.model / "tokenizer").mkdir()
    (layout.model / "tokenizer" / "vocab.json").write_text("{}")
    (layout.model / "model.safetensors").write_bytes(b"starting weights")
    commit_run(layout, recipe, {})
    publish(layout, versions, rows)
    return layout


def publish(layout: RunLayout, versions: Iterable[int], rows: int = 64) -> None:
    versions = list(versions)
    publisher = Publisher(layout, 1, keyframe_every=KEYFRAME_EVERY, before_commit=lambda: None)
    for version in range(versions[-1] + 1):  # what is there already is compared
        publisher.publish(version, make_tensors(version, rows).items(), {})


def assert_holds(directory: Path, version: int, rows: int = 64) -> None:
    """The version can be rebuilt from what is in ``directory``, and is the one that was published."""
    found, expected = rebuild(RunLayout(directory), version).tensors, make_tensors(version, rows)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].data.tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name
