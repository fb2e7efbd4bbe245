"""What is said of checkpoints that a fork does not begin with: damaged, deleted, never saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_runs import begin_run, make_fork, spoil

from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import read_incarnations


@pytest.fixture
def parent(original: RunLayout, tmp_path: Path) -> RunLayout:
    return RunLayout(Path(shutil.copytree(original.root, tmp_path / "old")))


def shard(layout: RunLayout, step: int) -> Path:
    (found,) = layout.checkpoint(step).glob("shards.*/model.distcp")
    return found


def keyframe(layout: RunLayout, version: int) -> Path:
    (found,) = layout.weights_version(version).glob("keyframe.*")
    return found


DAMAGED: dict[str, Callable[[RunLayout], Path]] = {
    "shard": lambda layout: shard(layout, 6),
    "manifest": lambda layout: layout.checkpoint_manifest(6),
    "batch": lambda layout: layout.batch(6),
    "version": lambda layout: keyframe(layout, 6),
    "version's manifest": lambda layout: layout.weights_manifest(6),
}


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("what", DAMAGED)
def test_a_newer_checkpoint_that_cannot_be_used_is_said_with_its_cause(
    parent: RunLayout, tmp_path: Path, what: str, is_gone: bool
) -> None:
    path = DAMAGED[what](parent)
    if is_gone:
        path.unlink()
        log = EventLog(parent, "trainer-0", len(read_incarnations(parent)))
        log.write("checkpoint_committed", step=6)
    else:
        spoil(path)
    said: list[str] = []
    assert make_fork(parent, tmp_path / "new", said=said).step == 4
    told = [line for line in said if line.startswith(f"checkpoint 6 of {parent.root} cannot be used: ")]
    assert len(told) == 1 and str(path) in told[0] and ("missing" in told[0]) == is_gone, said
    assert "begins with step 4" in said[-1]
    with pytest.raises(InputError, match="no checkpoint of step 6 that can be used: ") as refused:
        make_fork(parent, tmp_path / "other", step=6)
    assert str(path) in refused.value.what


def test_nothing_is_said_of_a_sound_parent(original: RunLayout, tmp_path: Path) -> None:
    said: list[str] = []
    make_fork(original, tmp_path / "new", said=said)
    assert len(said) == 1


def test_the_starting_model_is_no_silent_substitute(parent: RunLayout, tmp_path: Path) -> None:
    for step in (4, 6):
        spoil(shard(parent, step))
    with pytest.raises(CorruptArtefactError, match=r"000006.*model\.distcp is damaged.*\n.*--fork-step 0"):
        make_fork(parent, tmp_path / "new")
    assert make_fork(parent, tmp_path / "new", step=0).step == 0


def test_a_step_without_a_checkpoint_says_why(parent: RunLayout, tmp_path: Path) -> None:
    log = EventLog(parent, "trainer-0", 1)
    for step in (2, 4):
        log.write("checkpoint_committed", step=step)
    for step, reason in ((2, "it was deleted"), (3, "none is there"), (9, "6 steps are trained")):
        with pytest.raises(InputError, match=f"step {step} that can be used: {reason}"):
            make_fork(parent, tmp_path / "new", step=step)
    make_fork(parent, tmp_path / "new", step=4)
    begin_run(RunLayout(tmp_path / "new"))
    with pytest.raises(InputError, match="a fork itself, which began behind step 4"):
        make_fork(RunLayout(tmp_path / "new"), tmp_path / "second", step=2)
