"""Odd places: a run of another user, a cache or a tracking database that cannot be written, names that nobody expects."""

from __future__ import annotations

import errno
import os
import shlex
import sqlite3
from pathlib import Path

import pytest
from broken_runs import check_clear, check_sound, content, copied
from command import QUICK, digests, milesbatch

from milesbatch.errors import StorageError, StorageFullError
from milesbatch.models.cache import cached_directory
from milesbatch.tracking import mlflow_tracker
from milesbatch.tracking.mlflow_tracker import check_writable

NOBODY = 65534
# Root without the capabilities that look past permissions: an ordinary user, who can still read the interpreter.
AS_ANOTHER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner")
SMALL = ("--set", "trainer.ranks=1", "--set", "rollout.workers=1", "--set", "steps=2")


def give_away(path: Path) -> None:
    for entry in (path, *path.rglob("*")):
        os.chown(entry, NOBODY, NOBODY)


@pytest.fixture
def theirs(unbroken: Path, tmp_path: Path) -> Path:
    run = copied(unbroken, tmp_path / "run")
    give_away(run)
    return run


def test_a_run_of_another_user_can_be_looked_at_and_not_changed(theirs: Path, cache: Path) -> None:
    before = content(theirs)
    check_sound(theirs, cache, prefix=AS_ANOTHER)
    ended = milesbatch("run", QUICK, "--run-dir", theirs, "--set", "steps=9", cache=cache, prefix=AS_ANOTHER)
    check_clear(ended, 1, str(theirs / "incarnations" / "000002.json"), "Permission denied")
    assert content(theirs) == before


@pytest.mark.parametrize("command", [["status"], ["audit"], ["traj", "ls"], ["weights", "ls"]], ids="-".join)
def test_a_private_run_of_another_user_is_named(theirs: Path, cache: Path, command: list[str]) -> None:
    theirs.chmod(0o700)
    check_clear(milesbatch(*command, theirs, cache=cache, prefix=AS_ANOTHER), 1, str(theirs), "Permission denied")


def test_a_place_in_somebody_elses_directory(cache: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    give_away(home)
    command = ("run", QUICK, "--run-dir", home / "mine")
    check_clear(milesbatch(*command, cache=cache, prefix=AS_ANOTHER), 1, str(home / "mine"), "Permission denied")
    home.chmod(0o700)
    check_clear(milesbatch(*command, cache=cache, prefix=AS_ANOTHER), 1, str(home / "mine"), "Permission denied")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    give_away(cache)
    ended = milesbatch("run", QUICK, "--run-dir", tmp_path / "run", cache=cache, prefix=AS_ANOTHER)
    check_clear(ended, 1, f"cannot use {cache}/made/", "Permission denied", "MILESBATCH_CACHE")
    assert not (tmp_path / "run" / "run.json").exists(), "the same command begins it anew"


def test_a_cache_on_a_full_disk(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / "model.safetensors"))

    with pytest.raises(StorageFullError, match=str(tmp_path / "entry")):
        cached_directory(tmp_path / "entry", build, print)


def test_a_made_model_can_be_read_by_others(unbroken: Path, cache: Path) -> None:
    """``unbroken`` has filled the cache, which a group may share."""
    made = [path for path in (cache / "made").rglob("*") if path.is_file()]
    assert any(path.name == "model.safetensors" for path in made)
    assert [path for path in made if path.stat().st_mode & 0o044 != 0o044] == []


# -- tracking -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_training_goes_on_without_a_place_for_curves(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "tracking").mkdir(parents=True)
    give_away(run / "tracking")
    settings = (*SMALL, "--set", "tracking.kind=mlflow")
    ended = milesbatch("run", QUICK, "--run-dir", run, *settings, cache=cache, prefix=AS_ANOTHER)
    assert ended.code == 0, ended.err
    assert len(digests(run)) == 3
    assert f"the MLflow store {run}/tracking/mlflow.db cannot be used: unable to open database file" in ended.err
    assert "tracking is off for the rest of this start" in ended.err or "tracking has not logged all" in ended.err
    assert not list((run / "tracking").iterdir())


def test_a_locked_database_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "_LOCK_S", 0.1)
    path = tmp_path / "tracking" / "mlflow.db"
    check_writable(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StorageError, match=r"mlflow\.db cannot be used: database is locked"):
        check_writable(path)
    other.execute("ROLLBACK")
    other.close()
    check_writable(path)


# -- names ----------------------------------------------------------------------------------------------------------

STRANGE = "a  bé日本 %41#?&=';\"$(touch x)*\n\\[b]\t-"


@pytest.mark.long
def test_a_relative_place_behind_a_link_with_a_name_that_nobody_expects(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "-link").symlink_to("real")
    place = f"-link/{STRANGE}"
    settings = (*SMALL, "--set", "tracking.kind=mlflow")
    ended = milesbatch("run", QUICK, f"--run-dir={place}", *settings, cache=cache, cwd=tmp_path)
    assert ended.code == 0, ended.err
    run = tmp_path / "real" / STRANGE
    assert [path.name for path in (tmp_path / "real").iterdir()] == [STRANGE]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["-link", "real"]
    with sqlite3.connect(run / "tracking" / "mlflow.db") as database:
        assert database.execute("SELECT name FROM sqlite_master WHERE name = 'metrics'").fetchall()
    assert f"milesbatch status {shlex.quote('./' + place)}" in ended.err, "what it prints can be copied"
    check_sound(run, cache)


@pytest.mark.parametrize(
    ("name", "code", "cause"),
    [("y" * 256, 2, "the name is too long"), (os.fsdecode(b"latin-\xe9"), 2, "is not valid UTF-8")],
    ids=["long", "not-utf-8"],
)
def test_a_name_that_cannot_be(cache: Path, tmp_path: Path, name: str, code: int, cause: str) -> None:
    ended = milesbatch("run", QUICK, "--run-dir", name, cache=cache, cwd=tmp_path)
    check_clear(ended, code, cause)
    assert not list(tmp_path.iterdir())
