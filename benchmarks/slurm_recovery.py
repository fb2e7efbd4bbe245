"""How long recovery takes on the development cluster, and what Slurm takes of it: ``python benchmarks/slurm_recovery.py``.

Each row is one fault in the middle of a run; the phases come from the run's event logs and from Slurm (one machine, one clock):
noticed, started again (process or job), ready (imports, model), replayed, first new train step. Needs the development cluster's
packages (`make cluster-up` once).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))

import psutil
from devcluster.cluster import Cluster, Settings

RECIPE = Path(__file__).parents[1] / "tests" / "end_to_end" / "quick.yaml"
STEPS = 4000
"""More than any case needs: each ends with `milesbatch cancel`."""


@dataclass
class Run:
    """A run on the cluster, and how to look at it."""

    cluster: Cluster
    directory: Path
    cache: Path
    marks: dict[str, float] = field(default_factory=dict)

    def milesbatch(self, *arguments: str | Path) -> None:
        environment = {**os.environ, **self.cluster.env, "MILESBATCH_CACHE": str(self.cache)}
        command = [sys.executable, "-m", "milesbatch.cli.main", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")

    def submit(self, *settings: str) -> None:
        options = [
            word for setting in (f"steps={STEPS}", "slurm.heartbeat_s=1", *settings) for word in ("--set", setting)
        ]
        self.mark("submitted")
        self.milesbatch("submit", RECIPE, "--site", "devcluster", "--run-dir", self.directory, *options)

    def mark(self, name: str) -> float:
        self.marks[name] = time.monotonic()
        return self.marks[name]

    def events(self) -> list[dict[str, Any]]:
        """All events so far, in order of time."""
        found = []
        for path in (self.directory / "events").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue
        return sorted(found, key=lambda event: event["mono_s"])

    def wait_event(self, wanted: Callable[[dict[str, Any]], bool], after_s: float = 0.0) -> dict[str, Any]:
        deadline_s = time.monotonic() + 300
        while time.monotonic() < deadline_s:
            for event in self.events():
                if event["mono_s"] > after_s and wanted(event):
                    return event
            time.sleep(0.2)
        raise SystemExit(f"waited in vain; see {self.directory}")

    def wait_steps(self, number: int) -> None:
        self.wait_event(lambda event: event["event"] == "train_step" and event["step"] >= number)

    def processes(self) -> Iterator[tuple[int, str]]:
        for process in psutil.process_iter():
            try:
                words, variables = process.cmdline(), process.environ()
            except (psutil.Error, OSError):
                continue
            if not words or "python" not in words[0]:
                continue
            if str(self.directory) in words and "milesbatch.jobs.control" in words:
                yield process.pid, "controller"
            elif variables.get("MILESBATCH_ROLE_RUN_DIRECTORY") == str(self.directory):
                yield process.pid, f"{variables['MILESBATCH_ROLE_ROLE']}-{variables['MILESBATCH_ROLE_INDEX']}"

    def kill(self, role: str) -> float:
        pid = next(pid for pid, name in self.processes() if name == role)
        at_s = self.mark("fault")
        os.kill(pid, signal.SIGKILL)
        return at_s

    def node_of(self, role: str) -> str:
        listing: str = self.cluster.run(["squeue", "--steps", "--noheader", "--format", "%j %N"]).stdout
        return next(line.split()[1] for line in listing.splitlines() if line.startswith(f"{role}-"))


def is_new_step(event: dict[str, Any]) -> bool:
    return event["event"] == "train_step" and not event["replayed"]


def phases(run: Run, at_s: float, end: dict[str, Any]) -> dict[str, float]:
    """Seconds after the fault at which each thing was first seen, up to the end."""
    found: dict[str, float] = {}
    for event in run.events():
        if not at_s < event["mono_s"] <= end["mono_s"]:
            continue
        name = {
            "process_ended": "noticed",
            "stopping": "noticed",
            "process_started": "started again",
            "incarnation_started": "taken over",
            "ready": "ready",
            "resume": "resumed",
        }.get(event["event"])
        if event["event"] == "train_step" and event["replayed"]:
            found["replayed"] = event["mono_s"] - at_s
        elif name and (name not in found or name == "ready"):
            found[name] = event["mono_s"] - at_s
    found["end"] = end["mono_s"] - at_s
    return {name: round(seconds, 2) for name, seconds in found.items()}


# -- the cases ------------------------------------------------------------------------------------------------------------


def first_step(run: Run) -> dict[str, float]:
    """sbatch to the first trained step; the model is made in between."""
    run.submit()
    end = run.wait_event(is_new_step)
    return phases(run, run.marks["submitted"], end)


def worker_killed(run: Run) -> dict[str, float]:
    """To the first group that the replacement finished; all of it but "ready" is ours."""
    run.submit()
    run.wait_steps(5)
    at_s = run.kill("rollout-0")
    started = run.wait_event(lambda e: e["event"] == "process_started" and e["name"] == "rollout-0", at_s)
    end = run.wait_event(
        lambda e: e["event"] == "trajectories_committed" and e["process"] == "rollout-0", started["mono_s"]
    )
    return phases(run, at_s, end)


def rank_killed(run: Run) -> dict[str, float]:
    run.submit()
    run.wait_steps(5)
    at_s = run.kill("trainer-1")
    noticed = run.wait_event(lambda e: e["event"] == "resume", at_s)
    return phases(run, at_s, run.wait_event(is_new_step, noticed["mono_s"]))


def _new_incarnation(run: Run, at_s: float) -> dict[str, float]:
    taken = run.wait_event(lambda e: e["event"] == "incarnation_started", at_s)
    return phases(run, at_s, run.wait_event(is_new_step, taken["mono_s"]))


def rollout_node_lost(run: Run) -> dict[str, float]:
    """A heterogeneous job: the whole job starts again; "taken over" less "noticed" is Slurm's part."""
    run.submit()
    run.wait_steps(5)
    node = run.node_of("rollout")
    at_s = run.mark("fault")
    run.cluster.kill_node(node)
    return _new_incarnation(run, at_s)


def trainer_node_lost(run: Run) -> dict[str, float]:
    """The controller's node: only Slurm can notice and start the job again."""
    run.submit()
    run.wait_steps(5)
    node = run.node_of("trainer")
    at_s = run.mark("fault")
    run.cluster.kill_node(node)
    return _new_incarnation(run, at_s)


def preempted(run: Run) -> dict[str, float]:
    run.submit("slurm.trainer.partition=rollout")
    run.wait_steps(5)
    at_s = run.mark("fault")
    run.cluster.run(["sbatch", "-p", "high", "-N", "8", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"])
    return _new_incarnation(run, at_s)


def requeued(run: Run) -> dict[str, float]:
    run.submit()
    run.wait_steps(5)
    leader = min(job.leader for job in run.cluster.jobs() if not job.has_ended)
    at_s = run.mark("fault")
    run.cluster.run(["scontrol", "requeue", str(leader)])
    return _new_incarnation(run, at_s)


def cancelled(run: Run) -> dict[str, float]:
    """From the command to the last node given back, with no process of the run left."""
    run.submit()
    run.wait_steps(5)
    at_s = run.mark("fault")
    run.milesbatch("cancel", run.directory)
    while any(not job.has_ended for job in run.cluster.jobs()) or any(run.processes()):
        time.sleep(0.1)
    return {"end": round(time.monotonic() - at_s, 2)}


def finished(run: Run) -> dict[str, float]:
    """From the controller's last word to the last node given back, with no process of the run left."""
    run.submit("steps=20")
    said = run.wait_event(lambda event: event["event"] == "finished")
    while any(not job.has_ended for job in run.cluster.jobs()) or any(run.processes()):
        time.sleep(0.1)
    return {"end": round(time.monotonic() - said["mono_s"], 2)}


def input_is_wrong(run: Run) -> dict[str, float]:
    """A fatal error on the compute node: from the start of the job to the release of its nodes."""
    run.submit("environment.reward=no_such_module:reward")
    while any(not job.has_ended for job in run.cluster.jobs()):
        time.sleep(0.1)
    return {"end": round(time.monotonic() - run.marks["submitted"], 2)}


CASES: dict[str, Callable[[Run], dict[str, float]]] = {
    "sbatch to first step": first_step,
    "worker SIGKILL": worker_killed,
    "rank SIGKILL": rank_killed,
    "rollout node lost": rollout_node_lost,
    "trainer node lost": trainer_node_lost,
    "preempted": preempted,
    "requeued": requeued,
    "cancel": cancelled,
    "finished": finished,
    "wrong input": input_is_wrong,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=sorted(CASES), help="only this case; may be repeated")
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="slurm-recovery-", dir="/tmp"))
    cluster = Cluster(place / "cluster")
    cluster.up(Settings())
    print(
        "case                    seconds after the fault (the last is the next new step, or the release of the nodes)"
    )
    try:
        for number, (name, case) in enumerate(CASES.items()):
            if arguments.only and name not in arguments.only:
                continue
            run = Run(cluster, place / f"run{number}", place / "cache")
            found = case(run)
            print(f"{name:22}  " + "  ".join(f"{phase} {seconds:.1f}" for phase, seconds in found.items()), flush=True)
            run.milesbatch("cancel", "--now", run.directory)
            cluster.clean(Settings())
    finally:
        cluster.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
