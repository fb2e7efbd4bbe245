"""Processes that hang, and files that are lost between two starts: the run ends as the unbroken one did."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from command import QUICK, Command, check_equal, events, kill, milesbatch, wait_until


@pytest.mark.parametrize("role", ["rollout-1", "trainer-1"])
def test_a_process_that_hangs_is_found_by_its_heartbeat(unbroken: Path, cache: Path, tmp_path: Path, role: str) -> None:
    run = tmp_path / "run"
    command = Command("run", QUICK, "--run-dir", run, "--set", "slurm.heartbeat_s=1", cache=cache)
    wait_until((run / "batches" / "000002.json").exists, "step 2 is recorded")
    kill(command.child(role), signal.SIGSTOP)
    ended = command.wait()
    assert ended.code == 0, ended.err
    assert f"{role} died (no heartbeat" in ended.err
    check_equal(run, unbroken)


@pytest.mark.parametrize("how", ["flipped", "deleted"])
def test_a_lost_trajectory_file_of_a_recorded_step_is_generated_again(
    unbroken: Path, cache: Path, tmp_path: Path, how: str
) -> None:
    """The replay needs what was trained on; bitwise mode can make it again, and the batch record proves that it is the same."""
    run = tmp_path / "run"
    command = Command("run", QUICK, "--run-dir", run, "--set", "checkpoint.every=7", cache=cache)
    wait_until((run / "batches" / "000005.json").exists, "step 5 is recorded")
    command.kill_everything()
    (victim,) = (run / "trajectories").glob("000024-000027.*")
    if how == "flipped":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    else:
        victim.unlink()
    ended = milesbatch("run", QUICK, "--run-dir", run, cache=cache)
    assert ended.code == 0, ended.err
    check_equal(run, unbroken)
    assert events(run, "trainer-0", "regenerating")[0]["groups"] == [24, 25, 26, 27]
    assert bool(list((run / "quarantine").glob(f"*{victim.name}*"))) == (how == "flipped")
