"""Two nodes that examine a directory: here two processes of a prepared sbatch and srun; and what their figures mean."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prepared_slurm import PreparedSlurm

from milesbatch.doctor import pair, trial
from milesbatch.doctor.judgement import judge_pair
from milesbatch.doctor.link import Link, LinkError, accept_offer, offer
from milesbatch.doctor.pair import Patience, pair_checks
from milesbatch.doctor.servant import Servant
from milesbatch.doctor.trial import Ask, pair_script, trial_checks
from milesbatch.doctor.verdict import Check, Level
from milesbatch.errors import StoppedToContinue
from milesbatch.recipe.site import Site

_SBATCH = """#!/bin/sh
echo sbatch "$@" >> {calls}
out=$(sed -n 's/^#SBATCH --output=//p' "$1" | sed 's/%j/101/')
cp "$1" {calls}.sh
ONE_MACHINE={calls} setsid bash {calls}.sh > "$out" 2>&1 < /dev/null &
echo $! > {pid}
echo "Submitted batch job 101"
"""
_SRUN = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do case "$1" in *=0) part=1;; *=1) part=2;; esac; [ -n "$first" ] || first=$part; shift; done
export SLURM_JOB_ID=101 SLURM_JOB_NODELIST=n1 SLURMD_NODENAME=$(eval echo "$NODES" | cut -d' ' -f$first)
exec "$@"
"""
_SCONTROL = """#!/bin/sh
case "$*" in
  *"show job"*) state=COMPLETED
    grep -qv ') Z' "/proc/$(cat {pid})/stat" 2>/dev/null && state=RUNNING
    echo "JobId=101 JobState=$state Reason=None Restarts=0 NodeList=n1";;
  *"show node"*) echo "NodeName=n1 NodeAddr=127.0.0.1 State=IDLE";;
esac
"""
_SCANCEL = """#!/bin/bash
echo scancel "$@" >> {calls}
pid=$(cat {pid} 2>/dev/null)
# Only the job itself, which leads a group of its own: a wrong number here would end processes of others.
[ "${pid:-0}" -gt 1 ] && grep -qaF 'ONE_MACHINE={calls}' "/proc/$pid/environ" && kill -9 -- "-$pid" 2>/dev/null
exit 0
"""


class OneMachine:
    """A Slurm of one machine that runs what it is given at once."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls_file = folder / "calls"
        folder.mkdir()
        self.calls_file.touch()
        fill = {"calls": str(self.calls_file), "pid": str(folder / "pid")}
        scripts = {"sbatch": _SBATCH, "srun": _SRUN, "scontrol": _SCONTROL, "scancel": _SCANCEL}
        for name, text in scripts.items():
            for key, value in fill.items():
                text = text.replace("{" + key + "}", value)
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("NODES", "n1 n2")

    def processes(self) -> list[str]:
        """Those of the job that still live."""
        group = (self.calls_file.parent / "pid").read_text().strip()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[2] == group and fields[0] != "Z":
                    found.append(entry.name)
        return found

    def calls(self, command: str) -> list[str]:
        return [line for line in self.calls_file.read_text().splitlines() if line.startswith(command)]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneMachine:
    monkeypatch.setattr(pair, "_LOOK_S", 0.1)
    monkeypatch.setattr(pair, "_LATE_S", 0.5)
    monkeypatch.setattr(pair, "_ENDING_S", 0.5)
    return OneMachine(tmp_path / "bin", monkeypatch)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Its nodes have no torch, so that this test need not wait for it."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "torch.py").write_text("raise ImportError('none here')\n")
    python = tmp_path / "python"
    paths = ":".join([str(tmp_path / "none"), *filter(None, sys.path)])
    python.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return Site.model_validate({"name": "here", "python": str(python), "environment": {"NODES": "n1 n2"}})


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def silent(text: str) -> None:
    pass


def examine(site: Site, directory: Path) -> dict[str, Check]:
    directory.mkdir(exist_ok=True)
    return by_name(pair_checks(Ask(site), directory, Patience(5.0), silent))


def test_two_processes_examine_a_directory(tmp_path: Path, slurm: OneMachine, site: Site) -> None:
    found = examine(site, tmp_path / "shared")
    bad = {name for name, check in found.items() if check.level is Level.BAD}
    assert bad == {"torch on n1", "torch on n2"}
    assert found["a sum over both nodes"].level is Level.UNCHECKED
    ok = {name for name, check in found.items() if check.level is Level.OK}
    assert ok >= {
        "two nodes",
        "reaching a node",
        "clocks",
        "exclusive creation from two nodes",
        "a new file seen from the other node",
        "a rename seen from the other node",
        "a replaced file seen from the other node",
        "a listing on the other node",
        "packages on the nodes",
    }
    assert "n1" in found["two nodes"].found and "n2" in found["two nodes"].found
    assert "30 races" in found["exclusive creation from two nodes"].found
    assert slurm.calls("scancel") == ["scancel 101"]
    assert list((tmp_path / "shared").iterdir()) == []


def test_one_node_for_both_parts(tmp_path: Path, slurm: OneMachine, site: Site) -> None:
    same = site.model_copy(update={"environment": {"NODES": "n1 n1"}})
    found = examine(same, tmp_path / "shared")
    assert list(found) == ["two nodes"] and found["two nodes"].level is Level.UNCHECKED


def test_a_python_without_milesbatch(tmp_path: Path, slurm: OneMachine, site: Site) -> None:
    python = tmp_path / "other"
    python.write_text("#!/bin/sh\necho 'No module named milesbatch' >&2\nexit 1\n")
    python.chmod(0o755)
    found = examine(site.model_copy(update={"python": str(python)}), tmp_path / "shared")["two nodes"]
    assert found.level is Level.BAD and "No module named milesbatch" in found.found and "`python`" in found.mend
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_directory_that_nodes_do_not_see(tmp_path: Path, slurm: OneMachine, site: Site) -> None:
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 101\n")
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho JobId=101 JobState=FAILED Reason=NonZeroExitCode\n")
    found = examine(site, tmp_path / "shared")["two nodes"]
    assert found.level is Level.BAD and "without a log" in found.found and "do not see this directory" in found.meaning


def test_a_job_that_does_not_start_is_taken_back(tmp_path: Path, slurm: OneMachine, site: Site) -> None:
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 101\n")
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho JobId=101 JobState=PENDING Reason=Priority\n")
    (tmp_path / "shared").mkdir()
    checks = pair_checks(Ask(site), tmp_path / "shared", Patience(0.3), silent)
    assert [check.level for check in checks] == [Level.UNCHECKED] and "(Priority)" in checks[0].found
    assert slurm.calls("scancel") == ["scancel 101"]


def test_an_interruption_ends_the_job(tmp_path: Path, slurm: OneMachine, site: Site) -> None:
    def interrupt(text: str) -> None:
        if "it runs" in text:
            raise StoppedToContinue("stopped by SIGTERM")

    (tmp_path / "shared").mkdir()
    with pytest.raises(StoppedToContinue):
        pair_checks(Ask(site), tmp_path / "shared", Patience(5.0), interrupt)
    assert slurm.calls("scancel") == ["scancel 101"]
    assert list((tmp_path / "shared").iterdir()) == []
    assert not slurm.processes(), "they are ended"


def test_sbatch_refuses(tmp_path: Path, slurm: OneMachine, site: Site) -> None:
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
    found = examine(site, tmp_path / "shared")["two nodes"]
    assert found.level is Level.BAD and "Invalid account" in found.found


# -- scripts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["#SBATCH hetjob", "--het-group=0", "--het-group=1"]),
        ({"shapes": ["single"]}, ["#SBATCH --nodes=2", "--relative=0", "--relative=1"]),
        ({"shapes": ["separate"]}, ["#SBATCH --nodes=2", "--relative=1"]),
        ({"warning_s": 600}, ["#SBATCH --time=13", "trap"]),
        ({"container": {"runtime": "apptainer", "image": "/x.sif"}}, ["apptainer exec --bind", "/x.sif python3 -m"]),
    ],
)
def test_the_script_of_the_pair(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    text = pair_script(Ask(Site.model_validate({"name": "here", **changes})), tmp_path).text
    assert not [word for word in words if word not in text]
    assert "--no-requeue" in text and "--comment=milesbatch:doctor" in text


def test_gpus_are_asked_for(tmp_path: Path) -> None:
    text = pair_script(
        Ask(Site.model_validate({"name": "here", "gpu_option": "--gres=gpu:h100:{count}"}), gpus=2), tmp_path
    ).text
    assert text.count("#SBATCH --gres=gpu:h100:2") == 2


def test_each_shape_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = PreparedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(fake.path))
    fake.answer("sbatch", err="sbatch: Job 7 to start at noon\n", when="--test-only")
    checks = by_name(trial_checks(Ask(Site(name="here")), tmp_path))
    assert {name: check.level for name, check in checks.items()} == {
        f"jobs of shape {s}": Level.OK for s in ("het", "single", "separate")
    }
    assert "Job 7 to start at noon" in checks["jobs of shape het"].found
    fake.answer("sbatch", err="sbatch: error: Invalid qos specification\n", status=1, when="--test-only")
    refused = trial_checks(Ask(Site(name="here", shapes=("het",))), tmp_path)
    assert [check.level for check in refused] == [Level.BAD] and "Invalid qos" in refused[0].found
    fake.answer("sbatch", err="sbatch: error: Unable to contact slurm controller\n", status=1, when="--test-only")
    assert [check.level for check in trial_checks(Ask(Site(name="here", shapes=("het",))), tmp_path)] == [
        Level.UNCHECKED
    ]
    fake.answer(
        "sbatch",
        err="allocation failure: Requested node configuration is not available\n",
        status=1,
        when="--test-only",
    )
    assert [check.level for check in trial_checks(Ask(Site(name="here", shapes=("het",))), tmp_path)] == [Level.WARN]
    assert not fake.submitted()
    assert trial.ask_recipe(Ask(Site(name="here"), minutes=7), "single").slurm.time_limit_minutes == 7


# -- the line between the nodes -------------------------------------------------------------------------------------------


def test_a_line_needs_the_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:

        def listen() -> str:
            with offer(tmp_path, ["127.0.0.1"], 10.0) as link:
                return str(link.receive(5.0)["word"])

        heard = pool.submit(listen)
        while not (tmp_path / "address.json").exists():
            time.sleep(0.01)
        body = json.loads((tmp_path / "address.json").read_text())
        for said in (b'{"token": "wrong"}\n', b"noise\n", b""):
            with socket.create_connection(("127.0.0.1", body["port"])) as stranger:
                stranger.sendall(said)
        with accept_offer(tmp_path, 5.0) as link:
            link.send({"word": "hello"})
            assert heard.result() == "hello"


def test_no_address_works(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "address.json").write_text(json.dumps({"addresses": ["127.0.0.1"], "port": port, "token": "x"}))
    with (
        pytest.raises(LinkError, match=r"no address of the other node works \(127\.0\.0\.1"),
        accept_offer(tmp_path, 1.0),
    ):
        pass


def test_nobody_comes(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="did not connect"), offer(tmp_path / ".", ["127.0.0.1"], 0.1):
        pass
    with pytest.raises(LinkError, match="was not visible"), accept_offer(tmp_path / "none", 0.1):
        pass


def test_the_other_end_goes_away() -> None:
    one, other = socket.socketpair()
    link = Link(one, "")
    with pytest.raises(LinkError, match="did not answer"):
        link.receive(0.05)
    other.close()
    with pytest.raises(LinkError, match="gone"):
        link.ask("clock")
    one.close()


def test_a_file_that_comes_late_is_timed(tmp_path: Path) -> None:
    from milesbatch.records import digest_bytes

    thread = threading.Timer(0.3, lambda: (tmp_path / "x").write_bytes(b"data"))
    thread.start()
    servant = Servant(tmp_path, "")
    assert servant.do_is_missing("x") == {"is_missing": True}
    seconds = servant.do_wait_for("x", digest_bytes(b"data"), 5.0)["seconds"]
    assert 0.2 < seconds < 2.0
    assert servant.do_wait_for("x", digest_bytes(b"other"), 0.1) == {"seconds": None}
    assert servant.do_wait_gone("x", 0.1) == {"seconds": None} and servant.do_wait_gone("y", 0.1)["seconds"] < 0.1
    assert servant.do_create("x", "late") == {"won": False} and servant.do_read("x") == {"content": "data"}


# -- what figures mean ----------------------------------------------------------------------------------------------------


def measured(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two healthy nodes."""
    versions = {"python": "3.11.7", "milesbatch": "1.0"}
    gpus = {"torch": "2.9", "cuda": None, "devices": []}
    facts = {
        part: {"node": node, "host": node, "memory": "8 GiB", "versions": dict(versions), "gpus": dict(gpus)}
        for part, node in (("examiner", "n1"), ("servant", "n2"))
    }
    examiner = {
        "node": "n1",
        "addresses": ["10.0.0.1", "n1"],
        "clock": {"round_trip_s": 1e-4, "skew_s": -0.01},
        "race": {"races": 30, "won_here": 14, "wrong": []},
        "new_file": {"seconds": [0.01, 0.02]},
        "rename": {"there_s": 0.01, "gone_s": 0.02},
        "hint": {"seconds": [0.01]},
        "listing": {"seconds": 0.01},
        "throughput": {"bytes": 64 << 20, "written_s": 0.1, "read_s": 0.1},
        "facts": facts,
        "collective": {
            "kind": "gloo",
            "here": {"bytes_per_s": 1e9, "error": None},
            "there": {"bytes_per_s": 1e9, "error": None},
        },
        **changes,
    }
    return examiner, {"node": "n2", "address": "10.0.0.1"}


def test_two_healthy_nodes() -> None:
    assert {check.level for check in judge_pair(*measured(), "1.0")} == {Level.OK}


@pytest.mark.parametrize(
    ("change", "name", "level"),
    [
        ({"clock": {"round_trip_s": 1e-4, "skew_s": 30.0}}, "clocks", Level.WARN),
        (
            {"race": {"races": 30, "won_here": 30, "wrong": [{"turn": 3}]}},
            "exclusive creation from two nodes",
            Level.BAD,
        ),
        ({"new_file": {"seconds": [0.1, 8.0]}}, "a new file seen from the other node", Level.WARN),
        ({"new_file": {"seconds": [64.0]}}, "a new file seen from the other node", Level.BAD),
        ({"new_file": {"seconds": [None]}}, "a new file seen from the other node", Level.BAD),
        ({"rename": {"there_s": 0.1, "gone_s": None}}, "a rename seen from the other node", Level.WARN),
        ({"rename": {"there_s": None, "gone_s": None}}, "a rename seen from the other node", Level.BAD),
        ({"hint": {"seconds": [0.1, 3.0]}}, "a replaced file seen from the other node", Level.WARN),
        ({"hint": {"seconds": [0.1, 30.0]}}, "a replaced file seen from the other node", Level.BAD),
        ({"hint": {"seconds": [None]}}, "a replaced file seen from the other node", Level.BAD),
        ({"listing": {"seconds": None}}, "a listing on the other node", Level.OK),
        (
            {"throughput": {"bytes": 64 << 20, "written_s": 0.1, "read_s": 30.0}},
            "throughput from node to node",
            Level.WARN,
        ),
        (
            {"throughput": {"bytes": 64 << 20, "written_s": 0.1, "read_s": None}},
            "throughput from node to node",
            Level.BAD,
        ),
        ({"collective": {"skipped": "torch is not on both nodes"}}, "a sum over both nodes", Level.UNCHECKED),
        (
            {"collective": {"kind": "nccl", "here": {"error": "no route"}, "there": {"error": None}}},
            "a sum over both nodes",
            Level.BAD,
        ),
        ({"addresses": ["n1.hidden", "10.0.0.1"]}, "reaching a node", Level.BAD),
        ({"race": {"error": "no hard links"}}, "exclusive creation from two nodes", Level.BAD),
        ({"hint": None}, "a replaced file seen from the other node", Level.UNCHECKED),
    ],
)
def test_figures_that_are_not_well(change: dict[str, Any], name: str, level: Level) -> None:
    checks = by_name(judge_pair(*measured(**change), "1.0"))
    assert checks[name].level is level
    assert {other for other, check in checks.items() if check.level is not Level.OK} <= {name}


def test_nodes_that_cannot_talk() -> None:
    examiner, _ = measured()
    checks = judge_pair(examiner, {"node": "n2", "error": "no address works"}, "1.0")
    assert [check.level for check in checks] == [Level.BAD] and "second node says: no address works" in checks[0].found


def test_packages_that_differ() -> None:
    examiner, servant = measured()
    assert by_name(judge_pair(examiner, servant, "2.0"))["packages on the nodes"].level is Level.BAD
    examiner["facts"]["servant"]["versions"]["torch"] = "2.8"
    found = by_name(judge_pair(examiner, servant, "1.0"))["packages on the nodes"]
    assert found.level is Level.BAD and "torch: None on n1, 2.8 on n2" in found.found


def test_nodes_with_broken_gpus_or_without_torch() -> None:
    examiner, servant = measured()
    broken = {"name": "H100", "memory_bytes": 80 << 30, "error": "Xid 79"}
    examiner["facts"]["examiner"]["gpus"]["devices"] = [broken]
    examiner["facts"]["servant"]["gpus"] = {"torch": None, "error": "No module named torch", "devices": []}
    checks = by_name(judge_pair(examiner, servant, "1.0"))
    assert checks["torch on n1"].level is checks["torch on n2"].level is Level.BAD
