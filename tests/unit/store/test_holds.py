"""Holds: they count while their reader lives, and for a set time on the watcher's own clock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import make_layout, make_run, past_incarnation

from milesbatch.records import Hold
from milesbatch.store.holds import HoldWatch, holding
from milesbatch.store.layout import RunLayout


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_layout(tmp_path / "run")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def write(layout: RunLayout, name: str, version: int, count: int) -> None:
    record = Hold(version=version, reader="test", host="elsewhere", pid=1, count=count)
    layout.hold(name).write_bytes(record.to_bytes())


def test_a_hold_is_there_while_the_block_runs(layout: RunLayout) -> None:
    watch = HoldWatch(layout)
    assert watch.versions() == ()
    with holding(layout, 7, "one") as is_held, holding(layout, 5, "two"):
        assert is_held
        assert sorted(watch.versions() or ()) == [5, 7]
    assert watch.versions() == ()


def test_a_hold_goes_when_the_reader_fails(layout: RunLayout) -> None:
    with pytest.raises(ZeroDivisionError), holding(layout, 7, "one"):
        raise ZeroDivisionError
    assert list(layout.holds.iterdir()) == []


def test_a_living_reader_renews_its_hold(layout: RunLayout) -> None:
    with holding(layout, 7, "one", renew_s=0.01):
        (path,) = layout.holds.iterdir()
        first = Hold.from_bytes(path.read_bytes(), str(path)).count
        deadline_s = time.monotonic() + 10
        while Hold.from_bytes(path.read_bytes(), str(path)).count < first + 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_a_run_without_the_directory_can_be_held(layout: RunLayout) -> None:
    layout.holds.rmdir()
    with holding(layout, 7, "one") as is_held:
        assert is_held


def test_where_nothing_can_be_written_the_reader_goes_on_unprotected(layout: RunLayout) -> None:
    layout.holds.rmdir()
    layout.holds.touch()
    with holding(layout, 7, "one") as is_held:
        assert not is_held


def test_a_hold_that_stands_still_counts_for_a_set_time_and_is_removed(layout: RunLayout) -> None:
    clock = Clock()
    watch = HoldWatch(layout, stale_s=60.0, now_s=clock)
    write(layout, "a", 3, count=1)
    assert watch.versions() == (3,)
    clock.now_s += 59
    assert watch.versions() == (3,)
    write(layout, "a", 3, count=2)
    clock.now_s += 59
    assert watch.versions() == (3,)
    clock.now_s += 59
    assert watch.versions() == (3,), "it was seen anew 59 s ago"
    clock.now_s += 1
    assert watch.versions() == ()
    assert not layout.hold("a").exists()
    write(layout, "a", 3, count=3)
    assert watch.versions() == (3,), "the reader was only stopped for a while"


def test_clocks_of_hosts_are_not_compared(layout: RunLayout) -> None:
    """A hold that is old by its mtime counts in full when it is first seen."""
    write(layout, "a", 3, count=1)
    os.utime(layout.hold("a"), (0, 0))
    assert HoldWatch(layout).versions() == (3,)


@pytest.mark.parametrize("data", [b"", b'{"kind": "hold"}\n', b"\x00" * 80])
def test_a_hold_that_cannot_be_understood_stops_everything_for_a_set_time(layout: RunLayout, data: bytes) -> None:
    clock = Clock()
    watch = HoldWatch(layout, stale_s=60.0, now_s=clock)
    write(layout, "a", 3, count=1)
    layout.hold("b").write_bytes(data)
    assert watch.versions() is None
    write(layout, "a", 3, count=2)
    clock.now_s += 60
    assert watch.versions() == (3,)


def test_a_reader_that_is_killed_leaves_a_hold_that_goes_stale(layout: RunLayout) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from milesbatch.store.holds import holding; from milesbatch.store.layout import RunLayout\n"
        "with holding(RunLayout(Path(sys.argv[1])), 4, 'child'):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(layout.root)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        child.send_signal(signal.SIGKILL)
    clock = Clock()
    watch = HoldWatch(layout, stale_s=60.0, now_s=clock)
    assert watch.versions() == (4,)
    clock.now_s += 60
    assert watch.versions() == ()


def abandon(layout: RunLayout, name: str, host: str) -> None:
    """What a reader leaves that was killed."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    record = Hold(version=0, reader="test", host=host, pid=process.pid, count=3)
    layout.hold(name).write_bytes(record.to_bytes())


def test_the_next_reader_removes_what_killed_ones_on_its_host_left(layout: RunLayout) -> None:
    abandon(layout, "killed", socket.gethostname())
    abandon(layout, "elsewhere", "another-host")
    layout.hold("torn").write_bytes(b"{")
    living = Hold(version=0, reader="test", host=socket.gethostname(), pid=os.getppid(), count=1)
    layout.hold("living").write_bytes(living.to_bytes())
    with holding(layout, 7, "one"):
        assert len(list(layout.holds.iterdir())) == 4
    assert sorted(path.stem for path in layout.holds.iterdir()) == ["elsewhere", "living", "torn"]


def test_the_next_take_over_does_so_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    abandon(run, "killed", socket.gethostname())
    past_incarnation(run)
    assert list(run.holds.iterdir()) == []
