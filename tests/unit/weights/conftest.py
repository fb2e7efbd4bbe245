"""A run directory and a small model whose versions differ as optimizer steps make them differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from milesbatch.store.layout import RunLayout
from milesbatch.weights.publisher import Publisher

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    for directory in layout.directories():
        directory.mkdir(parents=True)
    return layout


@pytest.fixture
def version_tensors() -> Callable[[int], Tensors]:
    """Version -> tensors: a pure function; about 2 % of the large tensors' elements change from one to the next."""

    def make(version: int) -> Tensors:
        generator = torch.Generator().manual_seed(7)
        tensors = {
            "embed.weight": torch.randn(64, 32, generator=generator).bfloat16(),
            "layer.weight": torch.randn(128, 48, generator=generator),
            "half.weight": torch.randn(300, generator=generator).half(),
            "frozen": torch.randn(50, generator=generator),
            "scalar": torch.tensor(1.5),
            "empty": torch.empty(0, 4),
        }
        for step in range(1, version + 1):
            moves = torch.Generator().manual_seed(step)
            for name in ("embed.weight", "layer.weight", "half.weight"):
                flat = tensors[name].view(-1)
                where = torch.randperm(flat.numel(), generator=moves)[: max(1, flat.numel() // 50)]
                flat[where] += 0.25
            tensors["scalar"] += 1
        return tensors

    return make


@pytest.fixture
def publisher(layout: RunLayout) -> Publisher:
    return Publisher(layout, 1, keyframe_every=3, before_commit=lambda: None)


@pytest.fixture
def chain(publisher: Publisher, version_tensors: Callable[[int], Tensors]) -> Publisher:
    """Versions 0 to 6 published; 0, 3 and 6 are keyframes."""
    for version in range(7):
        publisher.publish(version, version_tensors(version).items(), {})
    return publisher


def flip(path: Path, offset: int = -1) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.fixture
def damage(layout: RunLayout) -> Callable[[int, str], Path]:
    """Flip a bit in the payload of ``kind`` of a version; returns the path."""

    def apply(version: int, kind: str) -> Path:
        (path,) = layout.weights_version(version).glob(f"{kind}.*")
        flip(path)
        return path

    return apply
