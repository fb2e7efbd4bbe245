"""Killed runs: the same command continues, and ends with the weights that an unbroken run ends with (promise 3)."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from command import QUICK, Command, check_equal, events, kill, milesbatch, status, wait_until


def run_until_killed(run: Path, cache: Path, seconds: float) -> bool:
    """Start the run and cut its power after ``seconds``; True when it had finished before."""
    command = Command("run", QUICK, "--run-dir", run, *LONGER, cache=cache)
    try:
        ended = command.process.wait(timeout=seconds)
    except Exception:  # noqa: BLE001 - subprocess.TimeoutExpired: it still runs
        command.kill_everything()
        return False
    assert ended == 0, command.wait().err
    return True


def test_killed_after_a_few_steps_and_continued(unbroken: Path, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 5):
        command = Command("run", QUICK, "--run-dir", run, cache=cache)
        wait_until((run / "batches" / f"{step:06d}.json").exists, f"step {step} is recorded")
        command.kill_everything()
    ended = milesbatch("run", QUICK, "--run-dir", run, cache=cache)
    assert ended.code == 0, ended.err
    check_equal(run, unbroken)
    body = status(run, cache)
    assert body["incarnation"] == 3
    assert any(event["replays"] > 0 for event in events(run, "trainer-0", "resume"))


LONGER = ("--set", "steps=60")


@pytest.fixture(scope="module")
def longer_unbroken(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("longer") / "run"
    ended = milesbatch("run", QUICK, "--run-dir", run, *LONGER, cache=cache)
    assert ended.code == 0, ended.err
    return run


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_moments(longer_unbroken: Path, cache: Path, tmp_path: Path, seed: int) -> None:
    """Five power cuts at any moment from the first import on."""
    moments = random.Random(seed)
    run = tmp_path / "run"
    for _ in range(5):
        assert not run_until_killed(run, cache, moments.uniform(2.0, 11.0)), "it was too quick for five kills"
    ended = milesbatch("run", QUICK, "--run-dir", run, *LONGER, cache=cache)
    assert ended.code == 0, ended.err
    check_equal(run, longer_unbroken)


def test_a_killed_worker_and_a_killed_rank_are_replaced(unbroken: Path, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = Command("run", QUICK, "--run-dir", run, cache=cache)
    wait_until((run / "batches" / "000002.json").exists, "step 2 is recorded")
    kill(command.child("rollout-0"))
    wait_until((run / "batches" / "000005.json").exists, "step 5 is recorded")
    kill(command.child("trainer-1"))
    ended = command.wait()
    assert ended.code == 0, ended.err
    assert "rollout-0 died (killed by SIGKILL)" in ended.err
    assert "trainer-1 died (killed by SIGKILL)" in ended.err
    check_equal(run, unbroken)
    assert status(run, cache)["incarnation"] == 1, "neither needs a new start of the whole run"


def test_stopped_by_a_signal_it_checkpoints_and_exits_with_75(unbroken: Path, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = Command("run", QUICK, "--run-dir", run, cache=cache)
    wait_until((run / "batches" / "000004.json").exists, "step 4 is recorded")
    kill(command.process.pid, signal.SIGTERM)
    ended = command.wait()
    assert ended.code == 75, ended.err
    body = status(run, cache)
    assert body["state"] == "stopped"
    assert body["last_checkpoint_step"] == body["step"], "a checkpoint is taken before it stops"
    assert milesbatch("run", QUICK, "--run-dir", run, cache=cache).code == 0
    check_equal(run, unbroken)


def test_a_role_that_keeps_dying_stops_the_run_and_says_why(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text("import os\n\ndef score(prompt, response):\n    os._exit(7)\n")
    settings = ["--set", "environment.reward=dying:score", "--set", "slurm.max_restarts_without_progress=1"]
    run = tmp_path / "run"
    ended = milesbatch("run", QUICK, "--run-dir", run, *settings, cache=cache, path=tmp_path)
    assert ended.code == 1
    assert "died 2 times without a new train step" in ended.err
    assert "exit status 7" in ended.err
    assert status(run, cache)["state"] == "failed"
    assert "died 2 times" in status(run, cache)["cause"]


def test_a_killed_controller_takes_its_roles_with_it(cache: Path, tmp_path: Path) -> None:
    command = Command("run", QUICK, "--run-dir", tmp_path / "run", cache=cache)
    command.child("rollout-1")
    children = command.children()
    assert len(children) == 4
    kill(command.process.pid)
    command.process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "no orphan is left", timeout_s=10)
