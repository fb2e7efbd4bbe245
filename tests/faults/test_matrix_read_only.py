"""A filesystem that turns read-only under a living run: a clear stop, and afterwards the same command goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from broken_runs import check_clear, check_sound
from command import QUICK, Command, check_equal, milesbatch, wait_until
from disks import BoundDisk, Ext4Disk

STOPPED_WITHIN_S = 60.0


@pytest.fixture(params=[Ext4Disk, pytest.param(BoundDisk, marks=pytest.mark.long)], ids=["error", "mount"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ext4Disk | BoundDisk]:
    made = request.param(tmp_path)
    yield made
    made.remove()


def test_a_disk_that_turns_read_only_in_the_middle(disk: Ext4Disk | BoundDisk, unbroken: Path, cache: Path) -> None:
    run = disk.place / "run"
    start = ("run", QUICK, "--run-dir", run, "--set", "rollout.workers=1")
    command = Command(*start, cache=cache)
    wait_until((run / "batches" / "000003.json").exists, "step 3 is recorded")
    roles = command.children()
    disk.break_down()
    broken_s = time.monotonic()
    ended = command.wait(STOPPED_WITHIN_S)
    print(f"stopped after {time.monotonic() - broken_s:.1f} s")
    check_clear(ended, 1, str(disk.place), "Read-only file system")
    assert len(roles) == 3 and not any(Path(f"/proc/{pid}").exists() for pid in roles)
    before = {path.name for path in (run / "incarnations").iterdir()}
    check_clear(milesbatch(*start, cache=cache), 1, str(disk.place), "Read-only file system")
    assert {path.name for path in (run / "incarnations").iterdir()} == before
    disk.mend()
    ended = milesbatch(*start, cache=cache)
    assert ended.code == 0, ended.err
    check_equal(run, unbroken)
    check_sound(run, cache)
