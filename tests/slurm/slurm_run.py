"""One run on the development cluster, as a user sees it: submitted, watched, broken, and compared with an unbroken one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from command import QUICK, Ended, check_equal, kill, wait_until
from devcluster.cluster import Cluster

STEPS = 40
SETTINGS = (f"steps={STEPS}", "slurm.heartbeat_s=1", "checkpoint.every=4")
SHAPES = ("het", "single", "separate")
HET_AND_MORE = ("het", *(pytest.param(shape, marks=pytest.mark.long) for shape in SHAPES[1:]))
"""All shapes pass the same tests; where a test takes long, `make test` runs it in one of them and `make test-long` in all."""


@dataclass
class SlurmRun:
    """A run directory and the cluster that it runs on."""

    cluster: Cluster
    directory: Path
    cache: Path
    started_s: float = field(default_factory=time.monotonic)

    def milesbatch(self, *arguments: str | Path, timeout_s: float = 200.0) -> Ended:
        command = [sys.executable, "-m", "milesbatch.cli.main", *map(str, arguments)]
        environment = {**os.environ, **self.cluster.env, "MILESBATCH_CACHE": str(self.cache)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s)
        return Ended(done.returncode, done.stdout, done.stderr)

    def submit(self, *settings: str, site: str | Path = "devcluster") -> None:
        options = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
        ended = self.milesbatch("submit", QUICK, "--site", site, "--run-dir", self.directory, *options)
        assert ended.code == 0, ended.err

    def job_ids(self) -> list[int]:
        """Jobs that Slurm has in its queue, pending or running."""
        return sorted({job.leader for job in self.cluster.jobs() if not job.has_ended})

    def steps(self) -> int:
        return len(list((self.directory / "batches").glob("[0-9]*.json")))

    def wait_steps(self, number: int, timeout_s: float = 240.0) -> None:
        self.wait(lambda: self.steps() >= number, f"step {number} is recorded", timeout_s)

    def wait(self, look: Callable[[], Any], what: str, timeout_s: float) -> Any:
        """As ``wait_until``; in vain, it shows what the batch scripts said."""
        try:
            return wait_until(look, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.steps()} steps\n{self.log()}") from None

    def wait_new_steps(self, number: int = 2) -> None:
        self.wait_steps(min(self.steps() + number, STEPS))

    def finish(self, unbroken: Path) -> None:
        """Wait for the end of the run and of all its jobs, then compare with the run that nothing happened to."""
        self.wait(lambda: not self.job_ids(), "all jobs end", 300.0)
        assert (self.directory / "checkpoints" / f"{STEPS:06d}" / "manifest.json").exists(), self.log()
        self.check_no_process_is_left()
        check_equal(self.directory, unbroken)
        audit = self.milesbatch("audit", self.directory, "--json")
        assert audit.code == 0, audit.out
        groups = json.loads(audit.out)["groups"]
        assert (groups["lost"], groups["repeated"]) == (0, 0)

    def check_no_process_is_left(self) -> None:
        wait_until(lambda: not self.processes(), "no process of the run is left", 30.0)

    def incarnations(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.directory / "incarnations").glob("[0-9]*.json"))]

    def log(self) -> str:
        """What the batch scripts said, without the steps' lines."""
        lines = [
            f"{path.name}: {line}"
            for path in sorted((self.directory / "logs").glob("slurm-*.log"))
            for line in path.read_text(errors="replace").splitlines()
            if "tokens/s" not in line
        ]
        return "\n".join(lines[-40:])

    def processes(self) -> dict[int, str]:
        """Living processes of the run: pid -> role name, ``controller`` or ``join``."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (name := self._role_of(entry)):
                found[int(entry.name)] = name
        return found

    def _role_of(self, entry: Path) -> str | None:
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "python" not in Path(words[0]).name:
                return None
            variables = dict(w.split("=", 1) for w in (entry / "environ").read_bytes().decode().split("\0") if "=" in w)
        except OSError:
            return None
        if str(self.directory) in words and "milesbatch.jobs.control" in words:
            return "controller" if self._is_guarded(entry) else "guard"
        if str(self.directory) in words and "milesbatch.jobs.join" in words:
            return "join"
        if variables.get("MILESBATCH_ROLE_RUN_DIRECTORY") != str(self.directory):
            return None
        return f"{variables['MILESBATCH_ROLE_ROLE']}-{variables['MILESBATCH_ROLE_INDEX']}"

    def _is_guarded(self, entry: Path) -> bool:
        """The controller is the child of a process with the same command line."""
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            return b"milesbatch.jobs.control" in Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            return False

    def process(self, wanted: Callable[[str], bool] | str) -> int:
        """Process id of a role; waits until there is one."""
        is_wanted = wanted if callable(wanted) else lambda name: name == wanted
        return wait_until(
            lambda: next((pid for pid, name in sorted(self.processes().items()) if is_wanted(name)), None),
            f"{wanted} runs",
        )

    def strike(self, wanted: Callable[[str], bool] | str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.process(wanted)
        kill(pid, number)
        return pid

    def node_of(self, role: str) -> str:
        """Node of the first step of a role's processes, as Slurm tells."""
        listing = self.cluster.run(["squeue", "--steps", "--noheader", "--format", "%j %N"]).stdout
        nodes = [line.split()[1] for line in listing.splitlines() if line.startswith(f"{role}-")]
        assert nodes, listing
        return nodes[0]


def is_worker(name: str) -> bool:
    return name.startswith("rollout-")
