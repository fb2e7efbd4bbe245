"""What a run takes of its disk: exact where there is little, an honest estimate where there is much, and rarely asked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from builders import grow, make_layout, make_run, past_incarnation

from milesbatch.report import disk_use as module
from milesbatch.report.disk_use import DiskUse, DiskUseReader
from milesbatch.report.status import StatusReader, run_status
from milesbatch.store.layout import RunLayout


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


class Sizes:
    """Counts how often a size is asked for; each question may take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock | None = None, each_s: float = 0.0) -> None:
        self.asked: list[str] = []
        real = module._size

        def size(path: Path) -> int:
            self.asked.append(path.name)
            if clock is not None:
                clock.now_s += each_s
            return real(path)

        monkeypatch.setattr(module, "_size", size)


def filled(root: Path, files: int, size: int = 100) -> RunLayout:
    layout = make_layout(root)
    for number in range(files):
        (layout.trajectories / f"{number:06d}.arrow").write_bytes(b"x" * size)
    return layout


def look(reader: DiskUseReader, clock: Clock) -> DiskUse:
    clock.now_s += 1e6
    found = reader.read()
    assert found is not None
    return found


def all_bytes(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def test_a_small_run_is_known_to_the_byte(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    past_incarnation(layout)
    grow(layout, 3)
    found = DiskUseReader(layout).read()
    assert found is not None and not found.is_estimate
    for kind in ("trajectories", "weights", "checkpoints"):
        assert found.by_kind[kind] == all_bytes(layout.root / kind) > 0
    assert found.total == all_bytes(layout.root)
    assert run_status(layout)["disk_bytes"] == found.to_json()


def test_a_large_run_is_estimated_within_the_budget_and_known_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sizes = Clock(monkeypatch), Sizes(monkeypatch)
    layout = filled(tmp_path / "run", 1000)
    for number in range(1000):  # later files are larger: an estimate from the first ones alone would be far off
        (layout.trajectories / f"{number:06d}.arrow").write_bytes(b"x" * number)
    reader = DiskUseReader(layout, budget=100)
    first = look(reader, clock)
    assert first.is_estimate and len(sizes.asked) <= 100
    assert first.by_kind["trajectories"] == pytest.approx(999 * 500, rel=0.03)
    for _ in range(9):
        sizes.asked.clear()
        last = look(reader, clock)
        assert len(sizes.asked) <= 100
    assert not last.is_estimate and last.by_kind["trajectories"] == 999 * 500


def test_new_and_deleted_and_changed_entries_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    layout = filled(tmp_path / "run", 10)
    reader = DiskUseReader(layout)
    assert look(reader, clock).by_kind["trajectories"] == 1000
    (layout.trajectories / "000000.arrow").unlink()
    (layout.trajectories / "new.arrow").write_bytes(b"x" * 7)
    version = layout.weights_version(3)
    version.mkdir()
    (version / "payload").write_bytes(b"x" * 5000)
    found = look(reader, clock)
    assert (found.by_kind["trajectories"], found.by_kind["weights"]) == (907, 5000)
    (version / "payload").unlink()  # as a retired version's
    assert look(reader, clock).by_kind["weights"] == 0


def test_what_changed_is_looked_at_again_also_where_the_budget_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    layout = filled(tmp_path / "run", 40)
    reader = DiskUseReader(layout, budget=10)
    for _ in range(8):
        look(reader, clock)
    for path in layout.trajectories.iterdir():
        path.write_bytes(b"x")
    for _ in range(8):
        found = look(reader, clock)
    assert found.by_kind["trajectories"] == 40


def test_looks_are_rare_and_a_slow_one_is_rarer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    sizes = Sizes(monkeypatch, clock, each_s=0.1)
    layout = filled(tmp_path / "run", 20)
    reader = DiskUseReader(layout)
    reader.read()
    spent_s, asked = clock.now_s - 1000.0, len(sizes.asked)
    assert asked == 20 and spent_s == pytest.approx(2.0)
    for _ in range(90):
        clock.now_s += 1.0
        reader.read()
    assert len(sizes.asked) == asked, "a look that took 2 s is not repeated for 100 s"
    clock.now_s += 11.0
    reader.read()
    assert len(sizes.asked) > asked


def test_one_reader_over_all_looks_of_a_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_run(tmp_path / "run")
    past_incarnation(layout)
    sizes = Sizes(monkeypatch)
    reader = StatusReader(layout)
    reader.read()
    asked = len(sizes.asked)
    reader.read()
    assert 0 < asked == len(sizes.asked)


def test_a_run_that_cannot_be_listed(tmp_path: Path) -> None:
    assert DiskUseReader(RunLayout(tmp_path / "none")).read() is None
