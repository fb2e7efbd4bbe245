"""The directory for weights on a node is a real memory filesystem: full, or with room for one copy and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from disks import fill, small_disk
from safetensors.torch import load_file

from milesbatch.errors import InputError, LocalSpaceError
from milesbatch.rollout.memory import LocalMemory, Room
from milesbatch.rollout.staged import StagedFollower
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import Patience
from milesbatch.store.sight import AT_ONCE
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import accept_all
from milesbatch.weights.staging import Staging

MIB = 1 << 20


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """4 MiB, of which every element changes: what a patch of a tensor writes first is three times the tensor."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(1 << 19, generator=generator) for name in ("a", "b")}


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    layout = RunLayout(tmp_path_factory.mktemp("weights") / "run")
    for directory in layout.directories():
        directory.mkdir(parents=True)
    (layout.model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    publisher = Publisher(layout, 1, keyframe_every=10, before_commit=lambda: None)
    for version in range(4):
        publisher.publish(version, tensors_of(version).items(), {})
    return layout


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "5m") as place:
        yield place


def follower_on(disk: Path, layout: RunLayout, patience: Patience) -> StagedFollower:
    room = Room(patience)
    staging = room.until_there(lambda: Staging(disk / "staged", layout))
    return StagedFollower(staging, layout, accept_all, AT_ONCE, room)


def check(follower: StagedFollower, version: int) -> None:
    weights = follower.advance_to(version)
    with follower.held(weights) as directory:
        held = load_file(directory / "model.safetensors")
        assert all(torch.equal(held[name], tensor) for name, tensor in tensors_of(version).items())
        del held


def test_room_for_one_copy_is_enough(disk: Path, layout: RunLayout) -> None:
    told: list[str] = []
    follower = follower_on(disk, layout, Patience(5, told.append))
    for version in (0, 1, 2, 3, 1):
        check(follower, version)
    assert told == []
    follower.close()


def test_a_full_one_is_waited_for_at_the_first_copy_and_at_later_ones(disk: Path, layout: RunLayout) -> None:
    ballast = fill(disk)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        ballast.unlink(missing_ok=True)

    with pytest.raises(LocalSpaceError, match=r"rollout.sglang.memory_dir"):
        follower_on(disk, layout, Patience(0, tell)).advance_to(0)
    follower = follower_on(disk, layout, Patience(60, tell))
    check(follower, 0)
    assert len(told) == 1
    for version in (1, 2):
        ballast = fill(disk)
        check(follower, version)
        ballast.unlink(missing_ok=True)
    follower.close()


def test_one_that_is_too_small_is_told_with_what_is_needed_and_what_is_there(disk: Path) -> None:
    memory = LocalMemory.take(disk, "run", "rollout-0", "")
    memory.require_room(4 * MIB)
    with pytest.raises(InputError, match=r"memory_dir: 6,291,456 bytes are needed .* has 5,242,880 in all"):
        memory.require_room(6 * MIB)
    memory.close()
