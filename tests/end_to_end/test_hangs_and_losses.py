"""Processes that hang, and files that are lost between two starts: the run ends as the unbroken one did."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from command import QUICK, Command, check_equal, events, kill, milesbatch, wait_until

from milesbatch.wire import messages as wire


@pytest.mark.parametrize("role", ["trainer-1", pytest.param("rollout-1", marks=pytest.mark.long)])
def test_a_process_that_hangs_is_found_by_its_heartbeat(unbroken: Path, cache: Path, tmp_path: Path, role: str) -> None:
    run = tmp_path / "run"
    slow = None
    if role == "rollout-1":  # the other worker can finish the run alone, before the silence is long enough
        slow = tmp_path / "plan.yaml"
        slow.write_text(
            "faults: [{name: slow, role: trainer-0, point: trainer.recorded, nth: 4, action: delay, seconds: 12}]"
        )
    command = Command("run", QUICK, "--run-dir", run, "--set", "slurm.heartbeat_s=1", cache=cache, faults=slow)
    wait_until((run / "batches" / "000002.json").exists, "step 2 is recorded")
    kill(command.child(role), signal.SIGSTOP)
    ended = command.wait()
    assert ended.code == 0, ended.err
    assert f"{role} died (no heartbeat" in ended.err
    check_equal(run, unbroken)


@pytest.mark.parametrize("how", [pytest.param("flipped", marks=pytest.mark.long), "deleted"])
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


def test_weights_damaged_while_the_run_is_live_are_published_again(
    unbroken: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers say what they cannot rebuild; the trainer still holds it and publishes it again; nothing stops."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults: [{name: flip, role: trainer-0, point: 'link:weights', nth: 7, action: flip}]")
    monkeypatch.setenv("MILESBATCH_FAULTS", str(plan))
    run = tmp_path / "run"
    ended = milesbatch("run", QUICK, "--run-dir", run, cache=cache)
    assert ended.code == 0, ended.err
    assert len(list((run / "incarnations").glob("*.json"))) == 1
    assert [event for name in ("rollout-0", "rollout-1") for event in events(run, name, "weights_unreachable")]
    assert events(run, "trainer-0", "weights_mended")
    assert list((run / "quarantine").glob("*"))
    assert milesbatch("audit", run, cache=cache).code == 0
    check_equal(run, unbroken)


@pytest.mark.long
def test_damaged_weights_that_the_trainer_has_left_behind_come_out_of_a_replay(
    unbroken: Path, cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = Command("run", QUICK, "--run-dir", run, "--set", "checkpoint.every=7", cache=cache)
    wait_until((run / "batches" / "000004.json").exists, "step 4 is recorded")
    for victim in (run / "weights" / "000002").glob("*.safetensors"):  # its delta, and a full copy where it has one
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    _report(command.child("rollout-0"), version=2)
    ended = command.wait()
    assert ended.code == 0, ended.err
    assert [event["last_version"] for event in events(run, "trainer-0", "resume")] == [-1, 1]
    assert len(list((run / "incarnations").glob("*.json"))) == 1
    assert milesbatch("audit", run, cache=cache).code == 0
    check_equal(run, unbroken)


def _report(worker: int, version: int) -> None:
    """Say what a worker would say that needs ``version`` now."""
    words = Path(f"/proc/{worker}/environ").read_bytes().decode().split("\0")
    told = dict(word.split("=", 1) for word in words if "=" in word)
    message = wire.Unreachable(name="rollout-0", version=version, what="a flipped bit", wait_s=0.0)
    httpx.post(
        told["MILESBATCH_ROLE_CONTROLLER_URL"] + "/v1/unreachable",
        content=message.model_dump_json(),
        headers={
            "x-milesbatch-token": told["MILESBATCH_ROLE_TOKEN"],
            "x-milesbatch-incarnation": told["MILESBATCH_ROLE_INCARNATION"],
        },
        trust_env=False,
    ).raise_for_status()
