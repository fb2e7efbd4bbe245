"""Patience of readers: bounded, only for what may still appear, and nothing where nothing can lag behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from milesbatch.errors import CorruptArtefactError, StorageError
from milesbatch.store import sight
from milesbatch.store.durable import read_verified, verify_file
from milesbatch.store.sight import AT_ONCE, Sight, first_sight, refresh, sight_of


@dataclass
class Clock:
    now_s: float = 0.0
    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sight, "time", clock)
    return clock


def unseen(path: Path) -> CorruptArtefactError:
    return CorruptArtefactError(f"{path} is missing", mend="look", unseen=path)


def test_what_appears_is_returned(clock: Clock, tmp_path: Path) -> None:
    told: list[str] = []

    def look() -> str:
        if clock.now_s < 8.0:
            raise unseen(tmp_path / "x")
        return "seen"

    assert Sight(60.0, told.append).until_seen(look) == "seen"
    assert 8.0 <= clock.now_s < 13.0
    assert clock.slept[:3] == [0.05, 0.1, 0.2] and max(clock.slept) == 5.0
    assert told == [f"{tmp_path}/x is not (wholly) visible yet; looking for {left} s more" for left in (58, 57, 54)]
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing behind"


def test_the_error_says_how_long_was_looked(clock: Clock, tmp_path: Path) -> None:
    def look() -> None:
        raise unseen(tmp_path / "x")

    with pytest.raises(CorruptArtefactError, match=r"x is missing \(after 7.5 s of looking for it\)") as caught:
        Sight(7.5, lambda text: None).until_seen(look)
    assert clock.now_s == 7.5
    assert (caught.value.mend, caught.value.unseen) == ("look", None), "nobody looks again for what was looked for"


def test_other_errors_come_at_once(clock: Clock) -> None:
    def look() -> None:
        raise StorageError("broken")

    with pytest.raises(StorageError, match=r"^broken$"):
        Sight(60.0, lambda text: None).until_seen(look)
    assert clock.slept == []


def test_without_patience_nothing_is_touched(clock: Clock, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    error = unseen(tmp_path / "x")

    def look() -> None:
        raise error

    with pytest.raises(CorruptArtefactError) as caught:
        AT_ONCE.until_seen(look)
    assert caught.value is error and clock.slept == []


def test_an_incomplete_result_is_the_result_when_the_time_is_over(clock: Clock, tmp_path: Path) -> None:
    looks: list[int] = []

    def look() -> int:
        looks.append(1)
        return len(looks)

    found = Sight(1.0, lambda text: None).until_complete(look, lambda count: [tmp_path / "x"] if count < 99 else [])
    assert found == len(looks) > 3 and clock.now_s == 1.0


def test_nothing_waits_on_a_filesystem_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sight, "is_local", lambda place: place == tmp_path)
    assert sight_of(tmp_path, 90.0, print).wait_s == 0.0
    assert sight_of(tmp_path / "elsewhere", 90.0, print).wait_s == 90.0
    assert first_sight(tmp_path / "elsewhere").wait_s == 90.0


def test_refreshing_goes_down_to_what_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[Path] = []

    def touch(directory: Path) -> None:
        touched.append(directory)
        if directory == tmp_path:
            (tmp_path / "a").mkdir()

    monkeypatch.setattr(sight, "_touch", touch)
    refresh(tmp_path / "a" / "b")
    assert touched == [tmp_path, tmp_path / "a"]


def test_refreshing_is_never_an_error(tmp_path: Path) -> None:
    refresh(tmp_path)
    refresh(Path("/proc/self"))
    assert list(tmp_path.iterdir()) == []


def test_missing_and_cut_short_may_appear_and_damage_may_not(tmp_path: Path) -> None:
    from milesbatch.store.durable import publish_file

    path = tmp_path / "x"
    ref = publish_file(path, b"0123456789")
    for content, may_appear in ((b"01234", True), (b"", True), (b"012345678X", False), (b"0123456789X", False)):
        path.write_bytes(content)
        with pytest.raises(CorruptArtefactError) as caught:
            verify_file(path, ref)
        assert (caught.value.unseen == path) is may_appear, content
    path.unlink()
    for read in (lambda: verify_file(path, ref), lambda: read_verified(path, ref.digest)):
        with pytest.raises(CorruptArtefactError) as caught:
            read()
        assert caught.value.unseen == path
