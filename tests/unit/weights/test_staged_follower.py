"""The rollout worker's follower on local disk: whoever reads the directory holds it still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milesbatch.engines.sglang.weights import SupersededError
from milesbatch.errors import LocalSpaceError, StorageError, StorageFullError
from milesbatch.rollout.memory import Room
from milesbatch.rollout.staged import StagedFollower
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import Patience
from milesbatch.store.sight import AT_ONCE
from milesbatch.weights import staging
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import accept_all
from milesbatch.weights.staging import Staging

Make = Callable[[int], dict[str, torch.Tensor]]


@pytest.fixture
def follower(layout: RunLayout, chain: Publisher, tmp_path: Path) -> Iterator[StagedFollower]:
    (layout.model / "config.json").write_text("{}")
    follower = StagedFollower(Staging(tmp_path / "stage", layout), layout, accept_all, AT_ONCE)
    yield follower
    follower.close()


def test_what_is_given_out_is_the_version_that_was_asked_for(
    follower: StagedFollower, version_tensors: Make, tmp_path: Path
) -> None:
    for version in (1, 2, 5):
        weights = follower.advance_to(version)
        assert (weights.version, weights.weights_digest) == (version, follower.published_digest(version))
        expected = version_tensors(version)
        with follower.held(weights) as directory:
            held = load_file(directory / "model.safetensors")
        found = weights.tensors()
        weights.write_model(tmp_path / f"copy-{version}")
        copied = load_file(tmp_path / f"copy-{version}" / "model.safetensors")
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor) and torch.equal(held[name], tensor), name
            assert torch.equal(copied[name], tensor), name
    assert follower.published_digest(99) is None
    with pytest.raises(StorageError, match="policy version 99"):
        follower.advance_to(99)


def test_tensors_that_were_given_out_stay_what_they_were(follower: StagedFollower, version_tensors: Make) -> None:
    """The file is patched in place: nothing may be left that looks into it."""
    given = follower.advance_to(1).tensors()
    follower.advance_to(5)
    assert all(torch.equal(given[name], tensor) for name, tensor in version_tensors(1).items())


def test_the_directory_does_not_move_on_while_it_is_held(follower: StagedFollower, version_tensors: Make) -> None:
    weights = follower.advance_to(1)
    done = threading.Event()

    def move_on() -> None:
        follower.advance_to(2)
        done.set()

    with follower.held(weights) as directory:
        thread = threading.Thread(target=move_on)
        thread.start()
        time.sleep(0.3)
        assert not done.is_set()
        held = load_file(directory / "model.safetensors")
        assert all(torch.equal(held[name], tensor) for name, tensor in version_tensors(1).items())
    thread.join(20)
    assert done.is_set()


def test_one_that_holds_the_directory_for_long_does_not_keep_others_from_it(follower: StagedFollower) -> None:
    weights = follower.advance_to(1)
    found: list[Path] = []

    def look() -> None:
        with follower.held(weights) as directory:
            found.append(directory)

    with follower.held(weights) as directory:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(10)
        assert found == [directory], "a server that hangs must not stop those beside it"
    thread.join(10)


def test_a_version_that_is_not_there_any_more_is_not_given_out(follower: StagedFollower) -> None:
    older = follower.advance_to(1)
    follower.advance_to(2)
    with pytest.raises(SupersededError, match="version 1 is not staged any more"), follower.held(older):
        pass
    with pytest.raises(SupersededError):
        older.tensors()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """While it is not empty, nothing can be written to the directory."""
    full = ["full"]
    real = staging.replace_hint

    def replace_hint(path: Path, data: bytes) -> None:
        if full:
            raise StorageFullError(f"no space or quota left for {path}")
        real(path, data)

    monkeypatch.setattr(staging, "replace_hint", replace_hint)
    monkeypatch.setattr(Staging, "make_way", lambda self, version: False)
    return full


def test_it_waits_for_space_and_meanwhile_the_version_before_is_given_out(
    layout: RunLayout, chain: Publisher, tmp_path: Path, version_tensors: Make, full: list[str]
) -> None:
    (layout.model / "config.json").write_text("{}")
    told: list[str] = []
    read: list[bool] = []

    def tell(text: str) -> None:
        told.append(text)
        looking = threading.Thread(target=look)  # as a server that was started again meanwhile
        looking.start()
        looking.join(10)
        full.clear()

    def look() -> None:
        with follower.held(older) as directory:
            held = load_file(directory / "model.safetensors")
            read.append(all(torch.equal(held[name], tensor) for name, tensor in version_tensors(1).items()))

    room = Room(Patience(60, tell))
    follower = StagedFollower(Staging(tmp_path / "stage", layout), layout, accept_all, AT_ONCE, room)
    full.clear()
    older = follower.advance_to(1)
    full.append("full")
    newer = follower.advance_to(2)
    assert read == [True]
    assert [text.partition(";")[0] for text in told] == [
        f"rollout.sglang.memory_dir: no space or quota left for {tmp_path}/stage/state.json"
    ]
    found = newer.tensors()
    assert all(torch.equal(found[name], tensor) for name, tensor in version_tensors(2).items())
    follower.close()


def test_space_that_does_not_come_fails_this_process_and_not_the_run(
    layout: RunLayout, chain: Publisher, tmp_path: Path, full: list[str]
) -> None:
    (layout.model / "config.json").write_text("{}")
    room = Room(Patience(0.2, lambda text: None))
    follower = StagedFollower(Staging(tmp_path / "stage", layout), layout, accept_all, AT_ONCE, room)
    with pytest.raises(
        LocalSpaceError, match=r"rollout.sglang.memory_dir: no space .*after waiting .* 0.2 s"
    ) as caught:
        follower.advance_to(1)
    assert caught.value.may_restart
    follower.close()
