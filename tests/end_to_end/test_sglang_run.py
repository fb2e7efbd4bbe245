"""Whole runs with real SGLang servers on the CPU: they learn, are killed at random, go on, and audit clean."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from command import QUICK, Command, digests, events, fates, kill, milesbatch, wait_until

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "tiny-sglang.yaml"
PYTHON = f"rollout.sglang.python={ROOT / '.venv-sglang' / 'bin' / 'python'}"
pytestmark = pytest.mark.long


def processes_of(run: Path) -> dict[int, str]:
    """Living processes with the run's directory in their environment, and what they started: id -> command line.

    SGLang's processes write their title over their environment; they are found by their parents.
    """
    found, words, parents = {}, {}, {}
    wanted = f"MILESBATCH_ROLE_RUN_DIRECTORY={run}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                pid, line = int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if status[0] != "Z":
                    parents[pid], words[pid] = int(status[1]), line
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found[pid] = line
            except (OSError, IndexError):
                continue
    while more := {pid: words[pid] for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


def is_the_same(pid: int, line: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() == line != ""
    except OSError:
        return False


def steps(run: Path) -> int:
    return len(list((run / "batches").glob("[0-9]*.json")))


def rewards(run: Path) -> list[float]:
    return [event["metrics"]["reward_mean"] for event in events(run, "trainer-0", "train_step")]


def check_sound(run: Path, cache: Path, count: int) -> None:
    audited = milesbatch("audit", run, cache=cache)
    assert audited.code == 0, audited.out
    assert "sound: no violation" in audited.out
    assert len(digests(run)) == count + 1
    assert fates(run)
    for path in (run / "trajectories").glob("*.arrow"):
        with pa.OSFile(str(path)) as source:
            table = pa.ipc.open_file(source).read_all().to_pylist()
        for row in table:
            check_row(row)


def check_row(row: dict[str, Any]) -> None:
    assert row["finish_reason"] in ("stop", "length")
    assert row["response_tokens"] == len(row["tokens"]) - row["prompt_tokens"] > 0
    assert row["versions"][0]["start"] == row["prompt_tokens"]
    assert all(logprob < 0 for logprob in row["logprobs"][row["prompt_tokens"] :])


def check_nothing_left(run: Path, before: Mapping[int, str]) -> None:
    """``before``: processes of the run when it was still running."""
    wait_until(lambda: not processes_of(run), "no process of the run is left", timeout_s=60)
    wait_until(lambda: not [pid for pid in before if is_the_same(pid, before[pid])], "none of before is", timeout_s=60)
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    left = [path for path in Path("/dev/shm").glob(f"milesbatch-*/{run_id}.*")]
    assert left == []


@pytest.mark.timeout(3000)
def test_it_learns_though_killed_at_random(cache: Path, tmp_path: Path) -> None:
    """Everything by SIGKILL, then a server, a scheduler and a worker: it goes on, and the policy has learned in the end."""
    run = tmp_path / "run"
    moments = random.Random(4)
    arguments = ("run", TINY, "--run-dir", run, "--set", PYTHON, "--set", "steps=32")
    for _ in range(2):
        command = Command(*arguments, cache=cache)
        before = steps(run)
        wait_until(lambda before=before: steps(run) > before + 2, "some steps more", timeout_s=900)
        time.sleep(moments.uniform(0, 15))
        running = processes_of(run)
        command.kill_everything()
        check_nothing_left(run, running)
    command = Command(*arguments, cache=cache)
    for words in ("sglang::scheduler", "-m sglang.launch_server", "-m milesbatch.rollout"):
        before = steps(run)
        wait_until(lambda before=before: steps(run) > before + 2, "some steps more", timeout_s=900)
        time.sleep(moments.uniform(0, 10))
        victims = [pid for pid, line in processes_of(run).items() if words in line and "sglang.guard" not in line]
        assert victims, processes_of(run)
        kill(moments.choice(victims))
    running = processes_of(run)
    ended = command.wait(2000)
    assert ended.code == 0, ended.err
    check_nothing_left(run, running)
    check_sound(run, cache, 32)
    found = rewards(run)
    assert sum(found[-5:]) / 5 > sum(found[:5]) / 5 + 0.15, found
    told = [event["text"] for index in (0, 1) for event in events(run, f"rollout-{index}", "engine_server")]
    assert any("ended (killed by signal" in text or "generated nothing" in text for text in told), told


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("transport", ["delta", "both"])
def test_the_trainers_logprobs_are_the_servers(cache: Path, tmp_path: Path, transport: str) -> None:
    """A short run; the logprobs that the trainer computes under the version that drew a token are those of the server."""
    run = tmp_path / "run"
    ended = milesbatch(
        "run",
        QUICK,
        "--run-dir",
        run,
        *("--set", "determinism=relaxed", "--set", "rollout.engine=sglang", "--set", PYTHON),
        *("--set", "rollout.sglang.device=cpu", "--set", "rollout.sglang.max_total_tokens=4096"),
        *("--set", "rollout.workers=1", "--set", "rollout.staleness=0", "--set", f"weights.transport={transport}"),
        cache=cache,
    )
    assert ended.code == 0, ended.err
    check_nothing_left(run, {})
    check_sound(run, cache, 8)
    # Without staleness each step trains on what its own policy drew: whatever differs is the arithmetic of the two sides.
    steps_seen = events(run, "trainer-0", "train_step")
    assert len(steps_seen) == 8
    for event in steps_seen:
        assert event["metrics"]["lag_max"] == 0
        assert event["metrics"]["logprob_difference_max"] < 1e-5, event["metrics"]
        assert event["metrics"]["ratio_max"] == pytest.approx(1, abs=1e-5)
    sources = {event["source"] for event in events(run, "rollout-0", "weights_activated")}
    assert sources == ({"files"} if transport == "delta" else {"files", "broadcast"})


@pytest.mark.timeout(900)
def test_without_the_environment_nothing_starts(cache: Path, tmp_path: Path) -> None:
    ended = milesbatch(
        *("run", TINY, "--run-dir", tmp_path / "run", "--set", "rollout.sglang.python=/nowhere/python"), cache=cache
    )
    assert ended.code == 2
    assert "/nowhere/python cannot be run" in ended.err
    assert "make sglang-cpu" in ended.err
    assert not (tmp_path / "run" / "run.json").exists()
    assert not processes_of(tmp_path / "run")
