"""Weights by broadcast: the run ends as the one that used files only, also when members die or hang in the middle of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import QUICK, check_equal, digests, events, milesbatch, status

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
SMALL_BUCKETS = ("--set", "weights.broadcast_bucket_bytes=16384")
WORKERS = ("rollout-0", "rollout-1")


def sources(run: Path) -> list[str]:
    """Whence each activated version came."""
    return [event["source"] for name in WORKERS for event in events(run, name, "weights_activated")]


def fault_plan(path: Path, *faults: str) -> Path:
    path.write_text("faults:\n" + "".join(f"- {{{fault}}}\n" for fault in faults))
    return path


def groups(run: Path) -> list[list[str]]:
    return [event["members"] for event in events(run, "trainer-0", "broadcast_group")]


def has_fired(run: Path, *names: str) -> bool:
    return all((run / "events" / f"fault.{name}.fired").exists() for name in names)


def test_a_worker_and_the_trainer_killed_in_the_middle_of_broadcasts(
    unbroken: Path, cache: Path, tmp_path: Path
) -> None:
    """What was lost is started again, reads files, and is in a later group; all digests are those of files only."""
    run = tmp_path / "run"
    plan = fault_plan(
        tmp_path / "plan.yaml",
        "name: worker, role: rollout, point: broadcast.receiving, nth: 30, action: kill",
        "name: trainer, role: trainer-0, point: broadcast.sending, nth: 100, action: kill",
    )
    settings = ("--set", "weights.transport=broadcast", *SMALL_BUCKETS)
    ended = milesbatch("run", QUICK, "--run-dir", run, *settings, cache=cache, faults=plan)
    assert ended.code == 0, ended.err
    assert has_fired(run, "worker", "trainer")
    check_equal(run, unbroken)
    assert ended.err.count("died (killed by SIGKILL)") == 2, ended.err
    assert {"broadcast", "files"} <= set(sources(run))
    assert events(run, "trainer-0", "broadcast_failed")[0]["seconds"] < 20
    assert len(groups(run)) >= 2, "one with what was lost, and another one"
    told = [event["metrics"].get("broadcast_receivers", 0) for event in events(run, "trainer-0", "train_step")]
    assert max(told) >= 1
    body = status(run, cache)
    assert body["incarnation"] == 1
    assert "broadcast" in body


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_worker_that_hangs_in_the_middle_of_a_broadcast(unbroken: Path, cache: Path, tmp_path: Path) -> None:
    """With every broadcast compared, bit by bit, with the files."""
    run = tmp_path / "run"
    plan = fault_plan(
        tmp_path / "plan.yaml", "name: hangs, role: rollout, point: broadcast.receiving, nth: 40, action: stop"
    )
    settings = ("--set", "weights.transport=both", "--set", "weights.broadcast_timeout_s=3", *SMALL_BUCKETS)
    ended = milesbatch(
        "run", QUICK, "--run-dir", run, *settings, "--set", "slurm.heartbeat_s=1", cache=cache, faults=plan
    )
    assert ended.code == 0, ended.err
    assert has_fired(run, "hangs")
    check_equal(run, unbroken)
    assert {"broadcast", "files"} <= set(sources(run))
    assert all(event["seconds"] < 8 for event in events(run, "trainer-0", "broadcast_failed"))
    assert milesbatch("audit", run, cache=cache).code == 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_tiny_recipe_has_the_same_digests_with_either_transport(cache: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for transport in ("delta", "broadcast"):
        run = tmp_path / transport
        ended = milesbatch("run", TINY, "--run-dir", run, "--set", f"weights.transport={transport}", cache=cache)
        assert ended.code == 0, ended.err
        found[transport] = digests(run)
        assert {"delta": "files", "broadcast": "broadcast"}[transport] in sources(run)
    assert found["broadcast"] == found["delta"]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("role", "point", "nth"),
    [
        ("rollout-0", "broadcast.receiving", 50),
        ("rollout-0", "broadcast.received", 2),
        ("trainer-0", "broadcast.sending", 50),
    ],
)
@pytest.mark.parametrize("action", ["kill", "stop", "delay"])
def test_each_fault_at_each_point(
    unbroken: Path, cache: Path, tmp_path: Path, role: str, point: str, nth: int, action: str
) -> None:
    run = tmp_path / "run"
    plan = fault_plan(
        tmp_path / "plan.yaml", f"name: one, role: {role}, point: {point}, nth: {nth}, action: {action}, seconds: 9"
    )
    settings = ("--set", "weights.transport=both", "--set", "weights.broadcast_timeout_s=3", *SMALL_BUCKETS)
    ended = milesbatch(
        "run", QUICK, "--run-dir", run, *settings, "--set", "slurm.heartbeat_s=1", cache=cache, faults=plan
    )
    assert ended.code == 0, ended.err
    assert has_fired(run, "one")
    check_equal(run, unbroken)
