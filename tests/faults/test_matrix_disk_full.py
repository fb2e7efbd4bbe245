"""No space left, in real runs: told, waited out by the same processes, and nothing is lost."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from broken_runs import check_clear, check_sound, copied, fired, plan
from command import QUICK, Command, check_equal, events, kill, milesbatch, status, wait_until
from disks import fill, small_disk

FULL = "no space or quota left for"


@pytest.mark.long
def test_a_disk_that_is_full_for_a_while_is_waited_out(tmp_path: Path, unbroken: Path, cache: Path) -> None:
    """Once while the worker writes trajectories, once while the trainer is at work; logs cannot be written either."""
    faults = plan(tmp_path / "plan.yaml", {"role": "rollout", "point": "rollout.generated", "action": "stop"})
    settings = ("--set", "rollout.workers=1", "--set", "slurm.heartbeat_s=1")
    with small_disk(tmp_path / "disk", "64m") as place:
        run = place / "run"
        said = tmp_path / "stderr.txt"
        with open(said, "w") as stream:
            command = Command("run", QUICK, "--run-dir", run, *settings, cache=cache, faults=faults, stderr=stream)
        held = wait_until(lambda: stopped_process(run), "the worker is held before it writes")
        ballast = fill(place)
        kill(held, signal.SIGCONT)
        before = command.children()
        wait_for_words(said, f"rollout-0: {FULL} {run / 'trajectories'} (about ")
        assert FULL in status(run, cache)["waiting_for"]
        assert not list((run / "trajectories").glob("*.arrow"))
        ballast.unlink()
        wait_until((run / "batches" / "000003.json").exists, "step 3 is recorded")
        ballast = fill(place)
        wait_for_words(said, f"trainer-0: {FULL} {run}")
        ballast.unlink()
        ended = command.wait()
        err = said.read_text()
        assert ended.code == 0, err
        assert " died " not in err
        assert len(before) == 3
        started = [event["pid"] for event in events(run, "controller-0", "process_started")]
        assert sorted(started) == sorted(before), "no process may have been replaced"
        assert "goes on: there is space again" in err
        check_equal(run, unbroken)
        check_sound(run, cache)


def stopped_process(run: Path) -> int | None:
    """The process that a fault has stopped, once it stands still."""
    pids = [record["pid"] for record in fired(run).values()]
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]
    return int(pids[0]) if states == ["T"] else None


def wait_for_words(said: Path, text: str) -> None:
    wait_until(lambda: text in said.read_text(), f"the terminal says: {text}", 60)


# Each fault hits the operation of its kind whose turn it is, or the first one after it. Spread over the run, for a second
# failure of the same writer is waited out for longer.
POINTS = {
    "trainer-0": {
        "make_directory:weights": 1,
        "create:weights": 4,
        "write:weights": 30,
        "sync_file:weights": 8,
        "link:weights": 11,
        "create:batches": 1,
        "write:batches": 3,
        "sync_file:batches": 5,
        "link:batches": 7,
        "make_directory:checkpoints": 1,
        "create:checkpoints": 1,
        "write:checkpoints": 1,
        "sync_file:checkpoints": 7,
        "link:checkpoints": 2,
    },
    "rollout-1": {
        "create:trajectories": 1,
        "write:trajectories": 4,
        "sync_file:trajectories": 3,
        "link:trajectories": 4,
    },
}


def test_a_writer_that_finds_no_space_at_any_point_tries_again(tmp_path: Path, unbroken: Path, cache: Path) -> None:
    """One target of many is full: writes fail although the filesystem shows free space. Every named point, in one run."""
    faults = [
        {"role": role, "point": point, "nth": nth, "action": "enospc"}
        for role, points in POINTS.items()
        for point, nth in points.items()
    ]
    late = {"role": "controller", "point": "create:incarnations", "nth": 3, "action": "enospc"}  # a hint
    written = plan(tmp_path / "plan.yaml", *faults, late)
    run = tmp_path / "run"
    ended = milesbatch("run", QUICK, "--run-dir", run, cache=cache, faults=written)
    assert ended.code == 0, ended.err
    assert len(fired(run)) == len(faults) + 1, "every fault must have happened"
    assert " died " not in ended.err
    free = os.statvfs(run)
    assert free.f_bavail * free.f_frsize > 64 << 20
    for process, points in POINTS.items():
        told = [event["error"].removeprefix(f"{FULL} {run}/") for event in events(run, process, "waiting_for_space")]
        assert {re.split(r"\W", text)[0] for text in told} == {point.split(":")[1] for point in points}
    check_equal(run, unbroken)
    check_sound(run, cache)


@pytest.mark.parametrize("point", ["create:incarnations", "link:incarnations"])
def test_a_take_over_that_finds_no_space_stops_and_is_given_again(
    tmp_path: Path, unbroken: Path, cache: Path, point: str
) -> None:
    faults = plan(tmp_path / "plan.yaml", {"role": "controller", "point": point, "action": "enospc"})
    run = copied(unbroken, tmp_path / "run")
    command = ("run", QUICK, "--run-dir", run, "--set", "steps=9")
    check_clear(milesbatch(*command, cache=cache, faults=faults), 1, FULL, str(run / "incarnations" / "000002.json"))
    assert len(fired(run)) == 1
    assert [path.name for path in (run / "incarnations").glob("*.json")] == ["000001.json"]
    check_sound(run, cache)
