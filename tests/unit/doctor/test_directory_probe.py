"""The doctor on directories: sound ones, and ones whose filesystem breaks a promise."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from milesbatch.doctor import filesystem, guarantees, speed
from milesbatch.doctor.filesystem import filesystem_checks, is_soft_mount, place_check, room_checks
from milesbatch.doctor.verdict import Check, Level
from milesbatch.doctor.workplace import PREFIX, Effort, nearest, workplace
from milesbatch.errors import StorageError
from milesbatch.store.operations import Operations, installed

SMALL = Effort(races=3, writers=4, syncs=3, payload_bytes=2 << 20)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_sound_directory_is_sound_and_stays_clean(tmp_path: Path) -> None:
    found = by_name(filesystem_checks(tmp_path / "not" / "yet", SMALL))
    assert not [check for check in found.values() if check.level is Level.BAD]
    assert {"exclusive creation", "atomic link", "rename", "fsync", "listing", "throughput", "space"} <= set(found)
    assert "does not exist yet" in found["place"].found
    assert list(tmp_path.iterdir()) == []


def test_the_workplace_goes_away_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), workplace(tmp_path) as place:
        (place / "deep").mkdir()
        assert place.name.startswith(PREFIX)
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    assert nearest(tmp_path / "a" / "b") == tmp_path


class Broken(Operations):
    """A filesystem without one operation, or that performs it wrongly."""

    def __init__(self, broken: str, code: int = errno.EPERM) -> None:
        self._broken = broken
        self._code = code

    def _refuse(self, name: str) -> None:
        if name == self._broken:
            raise OSError(self._code, os.strerror(self._code))

    def link(self, source: Path, target: Path) -> None:
        self._refuse("link")
        if self._broken == "link overwrites" and target.exists():
            os.unlink(target)
        super().link(source, target)

    def create(self, path: Path) -> BinaryIO:
        return open(path, "wb") if self._broken == "create overwrites" else super().create(path)

    def sync_directory(self, path: Path) -> None:
        self._refuse("sync_directory")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._refuse("rename")
        super().rename(source, target)

    def make_directory(self, path: Path) -> None:
        self._refuse("make_directory")
        super().make_directory(path)


@pytest.mark.parametrize(
    ("broken", "bad"),
    [
        ("link", {"atomic link", "fsync"}),
        ("link overwrites", {"atomic link"}),
        ("create overwrites", {"exclusive creation"}),
        ("sync_directory", {"fsync"}),
        ("rename", {"rename"}),
    ],
)
def test_a_missing_guarantee_is_bad(tmp_path: Path, broken: str, bad: set[str]) -> None:
    with installed(Broken(broken)):
        checks = filesystem_checks(tmp_path, SMALL)
    found = {check.name for check in checks if check.level is Level.BAD}
    assert found == bad
    assert all(check.meaning and check.mend for check in checks if check.level is Level.BAD)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with installed(Broken("make_directory", errno.EROFS)):
        checks = filesystem_checks(tmp_path, SMALL)
    assert [check.level for check in checks if check.name == "writing"] == [Level.BAD]
    with installed(Broken("make_directory", errno.ENOSPC)), pytest.raises(StorageError), workplace(tmp_path):
        pass


def fake_statvfs(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    real = os.statvfs("/tmp")
    fields = dict(
        zip(
            (
                "f_bsize",
                "f_frsize",
                "f_blocks",
                "f_bfree",
                "f_bavail",
                "f_files",
                "f_ffree",
                "f_favail",
                "f_flag",
                "f_namemax",
            ),
            real,
            strict=False,
        )
    )
    made = type("Status", (), {**fields, "f_frsize": 4096, **changes})()
    monkeypatch.setattr(filesystem.os, "statvfs", lambda path: made)


@pytest.mark.parametrize(
    ("free_gib", "inodes", "levels"),
    [
        (100, 10**7, [Level.OK, Level.OK]),
        (10, 10**5, [Level.WARN, Level.WARN]),
        (0.5, 100, [Level.BAD, Level.BAD]),
    ],
)
def test_room(monkeypatch: pytest.MonkeyPatch, free_gib: float, inodes: int, levels: list[Level]) -> None:
    fake_statvfs(monkeypatch, f_bavail=int(free_gib * 2**18), f_files=10**8, f_favail=inodes)
    assert [check.level for check in room_checks(Path("/tmp"))] == levels


def test_a_filesystem_that_counts_no_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_statvfs(monkeypatch, f_bavail=10**8, f_files=0, f_favail=0)
    assert room_checks(Path("/tmp"))[1].level is Level.OK


@pytest.mark.parametrize(
    ("kind", "flag", "level"),
    [
        ("nfs4", 0, Level.OK),
        ("lustre", 0, Level.OK),
        ("tmpfs", 0, Level.WARN),
        ("overlay", 0, Level.WARN),
        ("nfs4", os.ST_NOEXEC, Level.WARN),
        ("nfs4", os.ST_RDONLY, Level.BAD),
    ],
)
def test_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, flag: int, level: Level) -> None:
    fake_statvfs(monkeypatch, f_flag=flag)
    monkeypatch.setattr(filesystem, "filesystem_kind", lambda path: kind)
    assert place_check(tmp_path, tmp_path).level is level


def test_soft_mounts(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 0:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:2 / /nfs rw - nfs4 server:/a rw,hard,vers=4.2\n"
        "3 2 0:3 / /nfs/soft rw - nfs4 server:/b rw,soft,vers=4.2\n"
    )
    assert [is_soft_mount(Path(path), mounts) for path in ("/home", "/nfs/x", "/nfs/soft/x")] == [False, False, True]
    assert is_soft_mount(Path("/"), tmp_path / "none") is False


def test_a_secret_that_others_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarantees, "write_secret", lambda path, data: path.write_bytes(data) and path.chmod(0o644))
    assert guarantees.secret_check(tmp_path, SMALL).level is Level.WARN


def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    real = time.time
    monkeypatch.setattr(speed.time, "time", lambda: real() + 90.0)
    found = speed.clock_check(tmp_path, SMALL)
    assert (found.level is Level.WARN and "differs by 8" in found.found) or "differs by 9" in found.found


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    class Slow(Operations):
        def sync_file(self, path: Path, stream: BinaryIO) -> None:
            time.sleep(0.1)
            super().sync_file(path, stream)

    with installed(Slow()):
        assert speed.sync_check(tmp_path, SMALL).level is Level.WARN
        assert speed.throughput_check(tmp_path, SMALL).level is Level.WARN
