"""``milesbatch drill`` as a user gives it: real runs, really broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

QUICK = Path(__file__).parents[1] / "end_to_end" / "quick.yaml"
KILL = "{name: rank0, role: trainer-0, point: trainer.recorded, nth: 3, action: kill}"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drill-cache")


def start(cwd: Path, cache: Path, plan: str, *flags: str) -> subprocess.Popen[str]:
    (cwd / "plan.yaml").write_text(plan)
    return subprocess.Popen(
        [sys.executable, "-m", "milesbatch.cli.main", "drill", str(QUICK), "--faults", "plan.yaml", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "MILESBATCH_CACHE": str(cache)},
    )


def drilled(cwd: Path, cache: Path, plan: str, *flags: str, code: int) -> dict[str, Any]:
    process = start(cwd, cache, plan, "--json", *flags)
    out, err = process.communicate()
    assert process.returncode == code, err + out
    body: dict[str, Any] = json.loads(out)
    assert body["ok"] == (code == 0)
    return body


def runs_left(directory: Path) -> list[str]:
    """Processes whose command or environment names ``directory``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if str(directory).encode() in said and entry.name != str(os.getpid()):
            found.append(entry.name)
    return found


@pytest.mark.long
def test_one_fault(tmp_path: Path, cache: Path) -> None:
    """One fault that is survived, and one that never fires: the table says so, and the drill is not well."""
    never = "  - {name: never, role: rollout-0, point: rollout.leased, nth: 100000, action: kill}\n"
    plan = f"runs:\n- name: both\n  faults:\n  - {KILL}\n{never}"
    flags = ("--set", "steps=5", "--keep", "kept", "--report", "report.html")
    body = drilled(tmp_path, cache, plan, *flags, code=1)
    killed, silent = body["faults"]
    assert (killed["fault"], killed["fired"], killed["ok"], killed["problems"]) == ("rank0", True, True, [])
    assert 0 < killed["detected_s"] < killed["resumed_s"]
    assert (killed["groups_lost"], killed["groups_repeated"], killed["digest_equal"]) == (0, 0, True)
    assert killed["steps_replayed"] == 3
    assert (silent["fired"], silent["ok"], silent["problems"]) == (False, False, ["did not fire"])
    fired = json.loads((tmp_path / "kept" / "both" / "run" / "events" / "fault.rank0.fired").read_text())
    assert fired["process"] == "trainer-0"
    page = (tmp_path / "report.html").read_text()
    assert "rank0" in page and "did not fire" in page
    assert runs_left(tmp_path / "kept") == []


def test_a_drill_that_is_ended_leaves_no_run_behind(tmp_path: Path, cache: Path) -> None:
    process = start(tmp_path, cache, f"faults:\n- {KILL}\n", "--keep", "kept")
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "kept" / "unbroken" / "start-1.log").exists():
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the runs are in kept" in err
    assert runs_left(tmp_path / "kept") == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_acts_from_outside(tmp_path: Path, cache: Path) -> None:
    """Everything that only the drill can do: signals, damage between two starts, a late zombie."""
    plan = """
runs:
- name: scheduler
  acts:
  - {name: second, act: second_controller, nth: 2, hold_s: 30}
  - {name: preempted, act: preempt, nth: 4, hold_s: 1}
- name: damage
  acts:
  - {name: weights, act: flip, artefact: weights, nth: 7}
  - {name: checkpoint, act: truncate, artefact: checkpoint, nth: 7}
  - {name: trajectory, act: flip, artefact: trajectory, nth: 7}
- name: zombies
  acts:
  - {name: late-record, act: zombie, role: trainer-0, point: "link:batches", nth: 3}
  - {name: late-trajectories, act: zombie, role: rollout-1, point: "link:trajectories", nth: 2}
"""
    body = drilled(tmp_path, cache, plan, "--keep", "kept", code=0)
    faults = {fault["fault"]: fault for fault in body["faults"]}
    assert len(faults) == 7 and all(fault["ok"] and fault["digest_equal"] for fault in faults.values())
    for name in ("weights", "checkpoint", "trajectory"):
        assert faults[name]["detected_s"] is not None, f"nobody noticed the damage of {name}"
    assert faults["preempted"]["starts"] == 2
    assert faults["late-record"]["starts"] == 3
    run = tmp_path / "kept" / "zombies" / "run"
    record = json.loads((run / "events" / "fault.hold-late-trajectories.fired").read_text())
    assert record["process"] == "rollout-1"
    late = [path.name for path in (run / "quarantine").iterdir() if path.name.startswith("batches.000003.json")]
    assert late, "the zombie's record of step 3 came after the seal and was not moved away"
    seal = json.loads((run / "incarnations" / "000003.json").read_text())["seal"]["trajectories"]
    files = [path.name for path in (run / "trajectories").iterdir() if ".i000002." in path.name]
    used = "".join(path.read_text() for path in (run / "batches").iterdir())
    assert [name for name in files if name not in seal and name not in used], "the zombie's file did not come late"
    assert runs_left(tmp_path / "kept") == []
