"""Drills on a cluster: the run is submitted, and Slurm's own commands do to it what signals do on one machine.

Owns: one submission seen as a command that starts, runs and ends. Never looks into the run beyond whether it is finished. What
Slurm starts again by itself is one start here. A process of another node cannot be stopped and let go on from here, so
``zombie`` acts are left out on a site (``docs/drill.md``).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from milesbatch.cluster import slurm
from milesbatch.cluster.context import child_environment
from milesbatch.drill.plan import DrillPlan, DrillRun
from milesbatch.errors import EXIT_NOT_WELL, EXIT_TEMPFAIL, SlurmError
from milesbatch.jobs.submit import end_jobs, jobs_of
from milesbatch.report.status import is_finished, run_status
from milesbatch.store.layout import RunLayout

_ASK_S = 1.0
_GONE_S = 60.0
NOT_ON_A_SITE = frozenset({"zombie"})


@dataclass(slots=True)
class SubmittedRun:
    """A run on the cluster, from its submission until none of its jobs is queued or running."""

    layout: RunLayout
    steps: int
    log: Path
    submitted: subprocess.Popen[bytes]
    _code: int | None = None
    _next_look_s: float = field(default=0.0)

    def exit_code(self) -> int | None:
        """0 finished, 75 stopped before the end, 1 failed; that of ``submit`` when it refused."""
        if self._code is None and time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + _ASK_S
            self._code = self._look()
        return self._code

    def _look(self) -> int | None:
        refused = self.submitted.poll()
        if refused is None or refused:
            return refused
        try:
            if jobs_of(self.layout):
                return None
        except SlurmError:
            return None  # no answer is not the end
        if is_finished(self.layout, self.steps):
            return 0
        return EXIT_NOT_WELL if run_status(self.layout)["state"] == "failed" else EXIT_TEMPFAIL

    def wait(self, timeout_s: float) -> int | None:
        """Exit code; None when it still runs after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while self.exit_code() is None and time.monotonic() < deadline_s:
            time.sleep(0.2)
        return self._code

    def terminate(self) -> None:
        """SIGTERM to the controller, as a preemption gives it; the run goes on in the same job, started again."""
        for job_id in self._run_jobs():
            slurm.signal_batch(job_id, "TERM")

    def kill(self) -> None:
        """SIGKILL to the controller alone; Slurm then ends its job."""
        for job_id in self._run_jobs():
            slurm.signal_batch(job_id, "KILL")
        self._wait_until_gone()

    def children(self) -> list[int]:
        """None on this machine; what is left of a job is Slurm's to end."""
        return []

    def kill_everything(self, spare: Collection[int] = ()) -> list[int]:
        """SIGKILL to every process of the run's jobs, and the end of the jobs."""
        self.submitted.wait()
        for job in jobs_of(self.layout):
            slurm.kill(job.job_id)
        for role in ("run", "rollout"):
            end_jobs(self.layout, role)
        self._wait_until_gone()
        return []

    def _run_jobs(self) -> list[str]:
        return [job.job_id for job in jobs_of(self.layout) if job.role == "run"]

    def _wait_until_gone(self) -> None:
        deadline_s = time.monotonic() + _GONE_S
        while self._run_jobs() and time.monotonic() < deadline_s:
            time.sleep(_ASK_S)


def submit_run(
    recipe: Path, run: Path, site: str, overrides: Sequence[str], steps: int, log: Path, fault_plan: Path | None
) -> SubmittedRun:
    """``milesbatch submit RECIPE --site SITE --run-dir RUN --set ...``; what it says goes to ``log``."""
    flags = [word for override in overrides for word in ("--set", override)]
    words = ["submit", str(recipe), "--site", site, "--run-dir", str(run), *flags]
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "milesbatch.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=child_environment(1, {"MILESBATCH_FAULTS": str(fault_plan or "")}),
            start_new_session=True,
        )
    return SubmittedRun(RunLayout(run), steps, log, process)


def for_site(plan: DrillPlan) -> tuple[DrillPlan, list[str]]:
    """The part of a plan that can be done on a site, and the names of the acts that are left out."""
    left_out = [act.name for run in plan.runs for act in run.acts if act.act in NOT_ON_A_SITE]
    runs = [_without(run) for run in plan.runs]
    return plan.model_copy(update={"runs": tuple(run for run in runs if run.faults or run.acts)}), left_out


def _without(run: DrillRun) -> DrillRun:
    return run.model_copy(update={"acts": tuple(act for act in run.acts if act.act not in NOT_ON_A_SITE)})
