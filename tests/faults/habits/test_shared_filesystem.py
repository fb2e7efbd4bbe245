"""The instrument itself: each habit shows, only where it should, and the same seed gives the same story."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from shared_filesystem import PROFILES, Habits, SharedFilesystem

from milesbatch.store.operations import current

SURE = Habits(at_once=0.0)


def write(path: Path, data: bytes = b"0123456789") -> Path:
    """A committed file, in the simplest way."""
    temporary = path.with_name(f".tmp-{path.name}")
    with current().create(temporary) as stream:
        stream.write(data)
    current().link(temporary, path)
    current().unlink(temporary)
    return path


def listed(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def outcome(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def test_without_habits_all_hosts_see_the_same(tmp_path: Path) -> None:
    with SharedFilesystem(tmp_path / "fs", Habits(), 1).mounted() as shared:
        a, b = shared.mount("a"), shared.mount("b")
        current().make_directory(a / "d")
        write(a / "d" / "x")
        assert outcome(b / "d" / "x") == "0123456789"
        assert listed(b / "d") == ["x"]
        assert [path.name for path in (b / "d").glob("*")] == ["x"]
        assert (b / "d" / "x").stat().st_size == 10
        assert (b / "d").is_dir() and not (b / "d" / "y").exists()
        current().rename(b / "d", b / "e")
        assert outcome(a / "e" / "x") == "0123456789" and outcome(a / "d" / "x") == "ENOENT"
        with pytest.raises(FileExistsError):
            current().make_directory(a / "e")
        with pytest.raises(OSError, match="not empty"):
            current().remove_directory(a / "e")
        current().unlink(a / "e" / "x")
        current().remove_directory(a / "e")
        assert listed(b) == []
    assert shared.mishaps == {}
    assert not shared.mount("a").exists(), "only while it is mounted"


def test_a_name_is_seen_late(tmp_path: Path) -> None:
    with SharedFilesystem(tmp_path / "fs", replace(SURE, seen_s=10.0), 1).mounted() as shared:
        a, b = shared.mount("a"), shared.mount("b")
        write(a / "x")
        assert outcome(a / "x") == "0123456789" and outcome(shared.truth / "x") == "0123456789"
        assert outcome(b / "x") == "ENOENT"
        shared.clock.sleep(10.0)
        assert outcome(b / "x") == "0123456789"
    assert shared.mishaps["seen late"]


def test_a_later_name_may_be_seen_earlier(tmp_path: Path) -> None:
    reordered = 0
    for seed in range(20):
        with SharedFilesystem(tmp_path / str(seed), replace(SURE, seen_s=10.0), seed).mounted() as shared:
            write(shared.mount("a") / "payload")
            write(shared.mount("a") / "manifest")
            for _ in range(20):
                shared.clock.sleep(0.5)
                if (shared.mount("b") / "manifest").exists():
                    reordered += not (shared.mount("b") / "payload").exists()
                    break
    assert reordered > 4


def test_what_was_missing_stays_missing_for_a_while(tmp_path: Path) -> None:
    with SharedFilesystem(tmp_path / "fs", Habits(missing_s=10.0), 1).mounted() as shared:
        a, b, c = shared.mount("a"), shared.mount("b"), shared.mount("c")
        assert outcome(b / "x") == "ENOENT"
        write(a / "x")
        assert outcome(b / "x") == "ENOENT" and outcome(c / "x") == "0123456789"
        shared.clock.sleep(10.0)
        assert outcome(b / "x") == "0123456789"
    assert shared.mishaps == {"kept missing": 1}


@pytest.mark.parametrize("refreshes", [True, False])
def test_an_own_change_may_refresh_the_directory(tmp_path: Path, refreshes: bool) -> None:
    habits = replace(SURE, seen_s=10.0, missing_s=10.0, listed_s=10.0, own_change_refreshes=refreshes)
    with SharedFilesystem(tmp_path / "fs", habits, 1).mounted() as shared:
        a, b = shared.mount("a"), shared.mount("b")
        assert outcome(b / "x") == "ENOENT" and listed(b) == []
        write(a / "x")
        current().create(b / "y").close()
        assert outcome(b / "x") == ("0123456789" if refreshes else "ENOENT")
        assert listed(b) == (["x", "y"] if refreshes else ["y"])


def test_a_host_that_never_looked_may_see_the_truth(tmp_path: Path) -> None:
    habits = replace(SURE, seen_s=10.0, listed_s=10.0, first_look_is_fresh=True)
    with SharedFilesystem(tmp_path / "fs", habits, 1).mounted() as shared:
        write(shared.mount("a") / "x")
        assert outcome(shared.mount("b") / "x") == "0123456789" and listed(shared.mount("b")) == ["x"]
        current().unlink(shared.mount("a") / "x")
        assert outcome(shared.mount("b") / "x") == "0123456789" and listed(shared.mount("b")) == ["x"]
        assert outcome(shared.mount("c") / "x") == "ENOENT" and listed(shared.mount("c")) == []


def test_listings_are_old(tmp_path: Path) -> None:
    with SharedFilesystem(tmp_path / "fs", replace(SURE, listed_s=10.0), 1).mounted() as shared:
        a, b = shared.mount("a"), shared.mount("b")
        write(a / "x")
        assert outcome(b / "x") == "0123456789" and listed(b) == []
        shared.settle()
        current().unlink(a / "x")
        assert outcome(b / "x") == "ENOENT" and [path.name for path in b.iterdir()] == ["x"]
        shared.settle()
        assert listed(b) == []
    assert shared.mishaps["old listing"]


def test_content_and_size_come_late(tmp_path: Path) -> None:
    shown: set[int] = set()
    for seed in range(20):
        habits = replace(SURE, whole_s=10.0, sized_s=10.0)
        with SharedFilesystem(tmp_path / str(seed), habits, seed).mounted() as shared:
            a, b = write(shared.mount("a") / "x"), shared.mount("b") / "x"
            assert len(a.read_bytes()) == a.stat().st_size == 10
            assert b"0123456789".startswith(b.read_bytes())
            assert b.stat().st_size == len(b.read_bytes())
            with open(b, "rb") as stream:
                assert os.fstat(stream.fileno()).st_size == len(b.read_bytes())
            shown.add(b.stat().st_size)
            shared.clock.sleep(10.0)
            assert len(b.read_bytes()) == b.stat().st_size == 10
    assert 0 in shown and len(shown) > 3 and 10 not in shown


def test_replies_are_lost(tmp_path: Path) -> None:
    errors: set[str] = set()
    for seed in range(30):
        with SharedFilesystem(tmp_path / str(seed), Habits(), seed).mounted() as shared:
            a = shared.mount("a")
            current().create(a / "t").close()
            current().make_directory(a / "full")
            current().create(a / "full" / "x").close()
            shared.with_habits(lost_replies=1.0)
            for name, move in {
                "link": lambda a=a: current().link(a / "t", a / "linked"),
                "rename": lambda a=a: current().rename(a / "t", a / "moved"),
                "unlink": lambda a=a: current().unlink(a / "linked"),
                "mkdir": lambda a=a: current().make_directory(a / "d"),
                "create": lambda a=a: current().create(a / "new"),
            }.items():
                with pytest.raises(OSError) as caught:
                    move()
                errors.add(f"{name} {errno.errorcode[caught.value.errno]}")
            assert listed(a) == ["d", "full", "moved", "new"], "all of it took effect"
    repeated = {"link EEXIST", "rename ENOENT", "unlink ENOENT", "mkdir EEXIST", "create EEXIST"}
    assert errors == repeated | {f"{name} EIO" for name in ("link", "rename", "unlink", "mkdir", "create")}


def test_a_refusal_has_no_effect(tmp_path: Path) -> None:
    with SharedFilesystem(tmp_path / "fs", Habits(refused=1.0), 1).mounted() as shared:
        with pytest.raises(OSError, match="Input/output"):
            current().create(shared.mount("a") / "x")
        assert listed(shared.truth) == []


def test_a_replaced_file_is_stale(tmp_path: Path) -> None:
    habits = replace(SURE, seen_s=10.0, stale_handles=1.0)
    with SharedFilesystem(tmp_path / "fs", habits, 1).mounted() as shared:
        a, b = shared.mount("a"), shared.mount("b")
        write(a / "hint", b"old")
        shared.settle()
        assert outcome(b / "hint") == "old"
        current().replace(write(a / "t", b"new"), a / "hint")
        assert outcome(b / "hint") == "ESTALE" and outcome(b / "hint") == "new"
    assert shared.mishaps["stale_handles"] == 1


def test_a_host_may_work_in_a_directory_that_was_moved(tmp_path: Path) -> None:
    with SharedFilesystem(tmp_path / "fs", replace(SURE, seen_s=10.0), 1).mounted() as shared:
        a, b = shared.mount("a"), shared.mount("b")
        current().make_directory(a / "d")
        write(a / "d" / "x", b"old")
        shared.settle()
        assert outcome(b / "d" / "x") == "old"
        current().rename(a / "d", a / "away")
        current().make_directory(a / "d")
        write(a / "d" / "x", b"new")
        assert outcome(b / "d" / "x") == "old"
        write(b / "d" / "y")
        assert listed(shared.truth / "away") == ["x", "y"]
        shared.settle()
        assert outcome(b / "d" / "x") == "new"


def test_removed_files_leave_silly_names(tmp_path: Path) -> None:
    with SharedFilesystem(tmp_path / "fs", Habits(silly_names=1.0), 1).mounted() as shared:
        a = shared.mount("a")
        current().create(a / "x").close()
        current().unlink(a / "x")
        (name,) = listed(a)
        assert name.startswith(".nfs")
        shared.clock.sleep(10.0)
        assert listed(a) == []


def test_one_target_is_full(tmp_path: Path) -> None:
    full = 0
    with SharedFilesystem(tmp_path / "fs", Habits(full_targets=2), 1).mounted() as shared:
        for number in range(80):
            try:
                with current().create(shared.mount("a") / str(number)) as stream:
                    stream.write(b"x")
                    current().sync_file(shared.mount("a") / str(number), stream)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                full += 1
    assert 5 < full < 40


@pytest.mark.parametrize("habits", PROFILES.values(), ids=PROFILES)
def test_a_seed_is_a_story(tmp_path: Path, habits: Habits) -> None:
    def story(name: str, seed: int) -> list[str]:
        told = []
        with SharedFilesystem(tmp_path / name, replace(habits, lost_replies=0.3), seed).mounted() as shared:
            for number in range(30):
                try:
                    write(shared.mount("a") / str(number))
                except OSError as error:
                    told.append(f"{number} {error.errno}")
                told.append(outcome(shared.mount("b") / str(number // 2)) + str(listed(shared.mount("b"))))
        return [*told, str(shared.clock.now_s), str(shared.mishaps)]

    assert story("one", 7) == story("two", 7) != story("three", 8)
