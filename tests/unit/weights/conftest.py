"""A run directory and a small model whose versions differ as optimizer steps make them differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from miles_made import make_tensors, publish
from safetensors.torch import save_file

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


@pytest.fixture
def small_run(layout: RunLayout) -> RunLayout:
    """Versions 0 to 5; 0 and 4 have keyframes."""
    (layout.model / "config.json").write_text('{"model_type": "made"}')
    (layout.model / "tokenizer.json").write_text('{"any": 1}')
    publish(layout, range(6))
    return layout


@pytest.fixture
def whole(small_run: RunLayout) -> RunLayout:
    """As far as ``find_run`` looks."""
    small_run.run_record.write_text("{}")
    return small_run


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The model that Miles' engines were started with, in two files."""
    tensors = make_tensors(1, 0)
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "made"}')
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:3]}, directory / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, directory / "model-00002-of-00002.safetensors")
    return directory
