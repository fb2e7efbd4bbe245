"""Processes that are lost: what is left goes on, and what was lost comes back."""

from __future__ import annotations

from pathlib import Path

from broken_runs import check_sound
from command import QUICK, Command, digests, events, kill, wait_until


def test_a_lost_rollout_node_and_then_a_lost_controller(tmp_path: Path, unbroken: Path, cache: Path) -> None:
    """The trainer goes on with the worker that is left; the controller takes its roles with it, and no state.

    How such a run is continued is the same as after a loss of everything (``end_to_end/test_killed.py``).
    """
    run = tmp_path / "run"
    command = Command("run", QUICK, "--run-dir", run, cache=cache)
    wait_until((run / "batches" / "000002.json").exists, "step 2 is recorded")
    lost = command.child("rollout-1")
    kill(lost)
    wait_until((run / "batches" / "000006.json").exists, "step 6 is recorded")
    children = command.children()
    kill(command.process.pid)
    command.process.communicate()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "no role is left", timeout_s=10)

    ends = [event for event in events(run, "controller-0", "process_ended") if event["name"] == "rollout-1"]
    starts = [event for event in events(run, "controller-0", "process_started") if event["name"] == "rollout-1"]
    assert [event["pid"] for event in starts[:1]] == [lost]
    assert [event["attempt"] for event in starts] == [1, 2], "the lost capacity comes back"
    back = [e["mono_s"] for e in events(run, "rollout-1", "ready") if e["mono_s"] > ends[0]["mono_s"]]
    meanwhile = [
        event["step"]
        for event in events(run, "trainer-0", "train_step")
        if ends[0]["mono_s"] < event["mono_s"] < min(back, default=float("inf"))
    ]
    assert meanwhile, "the trainer did not wait for the worker to come back"

    trained = digests(run)
    assert len(trained) >= 4, "a batch is recorded two steps after the version that is surely published"
    assert trained == digests(unbroken)[: len(trained)]
    check_sound(run, cache)
