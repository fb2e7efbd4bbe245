"""A take-over tidies the files of unfinished episodes: what is done with goes, what may be continued stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from builders import (
    commit_batch,
    flip,
    make_layout,
    past_incarnation,
    quarantined,
    save_unfinished,
    write_groups,
)

from milesbatch.errors import StorageError
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations, installed
from milesbatch.store.takeover import Claimant, Incarnation, take_over
from milesbatch.store.unfinished import saved_blocks, take_up_unfinished


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = make_layout(tmp_path / "run")
    assert past_incarnation(layout) == 1
    return layout


def go_on(layout: RunLayout) -> Incarnation:
    return take_up_unfinished(layout, take_over(layout, Claimant(cause="lost"), {}))


def test_what_may_be_continued_stays_the_newest_first(layout: RunLayout) -> None:
    older, newer = (
        save_unfinished(layout, range(2, 4), incarnation=1),
        save_unfinished(layout, range(2, 4), incarnation=2),
    )
    other = save_unfinished(layout, range(2))
    taken = go_on(layout)
    assert taken.unfinished == (other, newer, older)
    assert saved_blocks(layout) == [other, newer, older]
    assert quarantined(layout) == {} and taken.quarantined == ()


def test_files_of_groups_that_are_done_go(layout: RunLayout) -> None:
    """Killed between the commit of a block's trajectories and the deletion of what was begun of it."""
    for first in range(0, 8, 2):
        save_unfinished(layout, range(first, first + 2))
    commit_batch(layout, 1, write_groups(layout, range(4)))  # blocks 0 and 1 are trained
    write_groups(layout, range(4, 6))  # block 2 is ready
    taken = go_on(layout)
    assert [(name.first_group, name.last_group) for name in taken.unfinished] == [(6, 7)]
    assert saved_blocks(layout) == list(taken.unfinished)
    assert quarantined(layout) == {}, "deleted, not kept"


def test_a_block_of_which_a_part_is_done_stays(layout: RunLayout) -> None:
    name = save_unfinished(layout, range(4))
    commit_batch(layout, 1, write_groups(layout, range(2)))
    assert go_on(layout).unfinished == (name,)


def test_a_damaged_trajectory_file_makes_its_block_pending_again(layout: RunLayout) -> None:
    name = save_unfinished(layout, range(2))
    (ref, _) = write_groups(layout, range(2))
    flip(layout.trajectory(ref.path), 200)
    assert go_on(layout).unfinished == (name,)


def test_what_is_no_such_file_is_put_away(layout: RunLayout) -> None:
    (layout.inflight / "notes.txt").write_text("mine")
    (layout.inflight / ".tmp-1-2").write_bytes(b"half")
    (layout.inflight / ".nfs0001").write_bytes(b"deleted")
    (layout.inflight / "000001").mkdir()
    taken = go_on(layout)
    assert {path for path, _ in taken.quarantined} == {"inflight/notes.txt", "inflight/000001"}
    assert sorted(name.rpartition(".")[0] for name in quarantined(layout)) == ["inflight.000001", "inflight.notes.txt"]
    assert [path.name for path in layout.inflight.iterdir()] == [".nfs0001"]


def test_a_file_that_cannot_be_deleted_stops_the_start_and_the_next_one_tidies(layout: RunLayout) -> None:
    class Stuck(Operations):
        def unlink(self, path: Path) -> None:
            if path.parent == layout.inflight:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            super().unlink(path)

    save_unfinished(layout, range(2))
    commit_batch(layout, 1, write_groups(layout, range(2)))
    with installed(Stuck()), pytest.raises(StorageError, match="inflight"):
        go_on(layout)
    layout.incarnation(2).unlink()  # this process lives, and would hold the run
    assert go_on(layout).unfinished == ()
    assert saved_blocks(layout) == []


def test_a_run_from_before_there_was_such_a_folder(layout: RunLayout) -> None:
    layout.inflight.rmdir()
    assert go_on(layout).unfinished == ()
    assert layout.inflight.is_dir()
