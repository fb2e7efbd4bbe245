"""Checkpoints: the manifest is last, the one before goes only after it, and a zombie's never counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from builders import (
    IMPATIENT,
    FileSaver,
    commit_batch,
    commit_checkpoint,
    flip,
    make_facts,
    make_layout,
    make_ref,
    past_incarnation,
    quarantined,
)

from milesbatch.errors import CorruptArtefactError, FencedError
from milesbatch.store.durable import AlreadyExistsError
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.trainer.checkpointing import Checkpointer, committed_checkpoints, read_checkpoint


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = make_layout(tmp_path / "run")
    past_incarnation(layout)
    return layout


def make(layout: RunLayout, incarnation: int = 1, rank: int = 0, keep: int = 2) -> Checkpointer:
    return Checkpointer(layout, Fence(layout, incarnation), FileSaver(), rank, 2, keep, IMPATIENT)


def take(checkpointer: Checkpointer, step: int, data: bytes = b"data") -> int | None:
    checkpointer.prepare(step)
    checkpointer.start({"shard": data}, make_facts(step, pending=(make_ref(9),), divergences=(1,)))
    return checkpointer.finish()


def test_it_counts_when_its_manifest_is_there(layout: RunLayout) -> None:
    checkpointer = make(layout)
    assert checkpointer.finish() is None
    checkpointer.prepare(4)
    checkpointer.start({"shard": b"data"}, make_facts(4, fates={"1": "trained(1)"}))
    assert committed_checkpoints(layout) == []
    with pytest.raises(CorruptArtefactError, match="is missing"):
        read_checkpoint(layout, 4)
    assert checkpointer.is_written
    assert not checkpointer.has(4)
    assert checkpointer.finish() == 4
    assert checkpointer.finish() is None
    assert not checkpointer.is_written
    assert checkpointer.has(4)
    manifest = read_checkpoint(layout, 4)
    assert (manifest.step, manifest.policy_version, manifest.world_size, manifest.incarnation) == (4, 4, 2, 1)
    assert [ref.path for ref in manifest.files] == ["shards.i000001/shard"]
    assert manifest.fates == {"1": "trained(1)"}


def test_only_rank_0_commits(layout: RunLayout) -> None:
    assert take(make(layout, rank=1), 2) == 2
    assert committed_checkpoints(layout) == []


def test_old_ones_go_after_the_new_one(layout: RunLayout) -> None:
    checkpointer = make(layout)
    for step in (2, 4, 6, 8):
        take(checkpointer, step)
    assert committed_checkpoints(layout) == [6, 8]
    assert sorted(path.name for path in layout.checkpoints.iterdir()) == ["000006", "000008"]


def test_every_mth_is_kept_for_ever(layout: RunLayout) -> None:
    checkpointer = Checkpointer(layout, Fence(layout, 1), FileSaver(), 0, 2, 2, IMPATIENT, keep_every=4)
    for step in (2, 4, 6, 8, 10, 11, 12, 14):
        take(checkpointer, step)
    assert committed_checkpoints(layout) == [4, 8, 12, 14]
    checkpointer.close()


class LazySaver(FileSaver):
    """Puts everything off until it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Callable[[], None]] = []

    def later(self, action: Callable[[], None]) -> None:
        self.actions.append(action)

    def wait(self) -> None:
        super().wait()
        actions, self.actions = self.actions, []
        for action in actions:
            action()


def test_deleting_old_ones_does_not_hold_up_the_trainer(layout: RunLayout) -> None:
    checkpointer = Checkpointer(layout, Fence(layout, 1), LazySaver(), 0, 2, 1, IMPATIENT)
    take(checkpointer, 2)
    take(checkpointer, 4)
    assert committed_checkpoints(layout) == [2, 4]
    checkpointer.close()
    assert committed_checkpoints(layout) == [4]


def test_half_a_checkpoint_is_made_again(layout: RunLayout) -> None:
    shards = layout.checkpoint_shards(2, 1)
    shards.mkdir(parents=True)
    (shards / "left").write_bytes(b"half")
    take(make(layout), 2)
    assert [ref.path for ref in read_checkpoint(layout, 2).files] == ["shards.i000001/shard"]


def test_a_fenced_trainer_commits_and_deletes_nothing(layout: RunLayout) -> None:
    for step in (1, 2):
        commit_batch(layout, step, [])
    checkpointer = make(layout, keep=1)
    take(checkpointer, 2)
    past_incarnation(layout)
    with pytest.raises(FencedError):
        take(checkpointer, 4)
    assert committed_checkpoints(layout) == [2]
    assert not checkpointer.is_written


@pytest.mark.parametrize("how", ["shard", "manifest", "missing"])
def test_damage_is_found(layout: RunLayout, how: str) -> None:
    commit_checkpoint(layout, 2)
    path = layout.checkpoint_shards(2, 1) / "model.distcp"
    if how == "missing":
        path.unlink()
    else:
        flip(path if how == "shard" else layout.checkpoint_manifest(2), 20)
    with pytest.raises(CorruptArtefactError, match="model" if how != "manifest" else "manifest"):
        read_checkpoint(layout, 2)


def zombie(layout: RunLayout, step: int) -> None:
    """Incarnation 1 passed its fence just before incarnation 2 began, and commits after it."""
    fence = layout.incarnation(2)
    hidden = fence.rename(fence.with_suffix(".hidden"))
    commit_checkpoint(layout, step, incarnation=1)
    hidden.rename(fence)


@pytest.mark.parametrize("asked", [True, False])
def test_a_zombies_checkpoint_of_the_same_step_makes_way(layout: RunLayout, asked: bool) -> None:
    past_incarnation(layout)
    zombie(layout, 2)
    if asked:
        assert not make(layout, 2).has(2)
    take(make(layout, 2), 2)
    assert read_checkpoint(layout, 2).incarnation == 2
    ((_, reason),) = quarantined(layout).items()
    assert ("sealed out" if asked else "after incarnation 2 had sealed the run") in reason


def test_a_sealed_checkpoint_never_makes_way(layout: RunLayout) -> None:
    for step in (1, 2):
        commit_batch(layout, step, [])
    commit_checkpoint(layout, 2)
    past_incarnation(layout)
    with pytest.raises(AlreadyExistsError):
        take(make(layout, 2), 2)
    assert read_checkpoint(layout, 2).incarnation == 1


def test_a_zombies_checkpoint_is_not_one_of_those_kept(layout: RunLayout) -> None:
    for step in (1, 2):
        commit_batch(layout, step, [])
    commit_checkpoint(layout, 2)
    past_incarnation(layout)
    zombie(layout, 3)
    take(make(layout, 2, keep=2), 4)
    assert layout.checkpoint_manifest(2).exists()
    read_checkpoint(layout, 2)
