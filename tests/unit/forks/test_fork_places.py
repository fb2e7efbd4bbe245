"""Where a fork may lie, and what it may be called: symbolic links, names, a parent that is not there."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from audit_runs import read
from forked_runs import make_fork, tree

from milesbatch.cli.main import main
from milesbatch.errors import EXIT_USAGE, InputError
from milesbatch.forks import make as making
from milesbatch.jobs.marks import mark
from milesbatch.records import ForkRecord
from milesbatch.store.layout import RunLayout
from milesbatch.store.mounts import filesystem_kind
from milesbatch.store.run import read_fork


@pytest.mark.parametrize("is_there", [True, False])
def test_a_symbolic_link_is_followed(original: RunLayout, tmp_path: Path, is_there: bool) -> None:
    """To an empty directory, and to one that is not there yet."""
    disk = tmp_path / "disk"
    if is_there:
        (disk / "new").mkdir(parents=True)
    (tmp_path / "new").symlink_to(disk / "new")
    told = make_fork(original, tmp_path / "new")
    assert (tmp_path / "new").is_symlink() and read_fork(RunLayout(disk / "new")) is not None
    assert [path.name for path in disk.iterdir()] == ["new"]
    assert make_fork(original, tmp_path / "new") == make_fork(original, disk / "new") == told


def test_a_link_into_the_parent_is_inside_it(original: RunLayout, tmp_path: Path) -> None:
    (tmp_path / "new").symlink_to(original.root / "inside")
    with pytest.raises(InputError, match="inside it"):
        make_fork(original, tmp_path / "new")


def test_links_in_a_circle_are_named(original: RunLayout, tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    wanted = re.escape(f"{circle}") + r".* leads nowhere"
    for place in (circle, circle / "new"):
        with pytest.raises(InputError, match=wanted):
            make_fork(original, place)
    with pytest.raises(InputError, match=wanted):
        make_fork(RunLayout(circle), tmp_path / "new")
    with pytest.raises(InputError, match=wanted):
        filesystem_kind(circle)
    with pytest.raises(InputError, match=wanted):
        mark(RunLayout(circle), "run")


def test_without_a_parent_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run"):
        make_fork(RunLayout(tmp_path / "none"), tmp_path / "runs" / "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="is not a run"):
        make_fork(RunLayout(tmp_path / "empty"), tmp_path / "runs" / "new")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["empty"]


def test_the_parent_is_recorded_by_a_path_that_means_the_same_everywhere(
    original: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(original.root.parent)
    told = make_fork(RunLayout(Path(original.root.name)), tmp_path / "new")
    assert told.path == str(original.root.resolve()) and Path(told.path).is_absolute()
    assert read(ForkRecord, RunLayout(tmp_path / "new").fork).forked_from.path == told.path


@pytest.mark.parametrize("length", [240, 256, 5000])
def test_a_name_that_is_too_long_is_said_to_be(original: RunLayout, tmp_path: Path, length: int) -> None:
    before = tree(original.root)
    with pytest.raises(InputError, match=rf"is too long: it has {length} bytes, and may have at most \d+ here"):
        make_fork(original, tmp_path / ("n" * length))
    assert not list(tmp_path.iterdir()) and tree(original.root) == before


def test_the_longest_name_that_is_allowed_can_be_made(original: RunLayout, tmp_path: Path) -> None:
    place = tmp_path / "n"
    most = 255 - (len(os.fsencode(making._building(place).name)) - 1)
    assert make_fork(original, tmp_path / ("n" * most)).step == 6
    with pytest.raises(InputError, match=f"at most {most} here"):
        make_fork(original, tmp_path / ("n" * (most + 1)))


@pytest.mark.parametrize("command", ["audit", "status", "weights ls", "traj stats", "runs compare"])
def test_a_command_that_is_given_too_long_a_name_says_so(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["n" * 300] * (2 if command == "runs compare" else 1)
    monkeypatch.setattr(sys, "argv", ["milesbatch", *command.split(), *names])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_USAGE
    assert re.search(r"nnn(/run\.json)?: the name is too long", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["two\nlines", "a\ttab", "bell\a", "escape\x1b[1m", "delete\x7f"])
def test_a_name_with_a_control_character_is_refused(original: RunLayout, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="has a control character"):
        make_fork(original, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_no_text_is_refused_before_anything_is_made(original: RunLayout, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not valid UTF-8\n.*--fork"):
        make_fork(original, tmp_path / os.fsdecode(b"new\xff"))
    assert not list(tmp_path.iterdir())


def test_what_a_killed_maker_of_a_strange_name_left_is_still_recognized(tmp_path: Path) -> None:
    """Names of more than one line could be given once."""
    left = tmp_path / making._building(tmp_path / "two\nlines").name.replace(
        making._maker(), f"{making._maker()[:-8]}00000000"
    )
    left.mkdir()
    making._remove_left(tmp_path / "two\nlines", [].append)
    assert not left.exists()
