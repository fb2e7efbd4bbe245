"""What a person does with a run's jobs: cancel, resume, scale. Needs no torch; works from a login node.

Owns: the order of effects of each. Never: what the job itself does. Invariant: the run directory is asked first, and Slurm
second: a controller that lives saves its state before its job is taken away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milesbatch.cluster import slurm
from milesbatch.controller.stopping import request_stop
from milesbatch.decisions.going_on import BY_HAND
from milesbatch.errors import RunMismatchError, SlurmError
from milesbatch.jobs.order import Order, last_order, was_submitted
from milesbatch.jobs.submit import RunJob, end_jobs, jobs_of, rollout_job_script, scripts_of, submit
from milesbatch.report.status import is_finished
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import is_alive
from milesbatch.store.survey import read_incarnations

Say = Callable[[str], None]
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What was done."""

    jobs: tuple[str, ...]
    was_alive: bool
    ended_in_time: bool
    """The controller stopped by itself (with a checkpoint, unless it was to stop at once)."""


def cancel(layout: RunLayout, say: Say, *, now: bool, wait_s: float) -> Cancelled:
    """Stop a run for good: its controller saves and stops, then all its jobs are ended. It can be resumed later.

    ``wait_s`` is how long the controller may take; after that, and with ``now``, its job is ended under it. Nothing that was
    committed is lost either way.

    Slurm is not asked about a run that was never submitted.

    Raises:
        SlurmError: Slurm does not answer; the controller was asked to stop all the same.
    """
    incarnations = read_incarnations(layout)
    alive = bool(incarnations) and is_alive(layout, incarnations[-1], watch_s=3.0 * 5)
    in_time = True
    if alive:
        request_stop(layout, incarnations[-1].incarnation, now=now)
        say("the controller is asked to stop" + (" at once" if now else " after the current step, with a checkpoint"))
        in_time = _wait_until_gone(layout, wait_s)
        say("it has stopped" if in_time else f"it has not stopped within {wait_s:.0f} s")
    jobs = [*end_jobs(layout, "rollout"), *end_jobs(layout, "run")] if was_submitted(layout) else []
    return Cancelled(tuple(jobs), alive, in_time)


def _wait_until_gone(layout: RunLayout, wait_s: float) -> bool:
    """Until the run's job is out of Slurm's queue, or (a local run) its controller is no more."""
    deadline_s = time.monotonic() + wait_s
    while time.monotonic() < deadline_s:
        try:
            if not any(job.role == "run" for job in jobs_of(layout)):
                return True
        except SlurmError:
            pass  # no Slurm: the controller itself is looked at
        newest = read_incarnations(layout)[-1]
        if not is_alive(layout, newest, watch_s=4.0):
            return True
        time.sleep(_POLL_S)
    return False


def resume(layout: RunLayout) -> dict[str, str]:
    """Submit a run again as it was submitted last; returns job ids by role. Rollout jobs that still wait for it are kept.

    Raises:
        RunMismatchError: it was never submitted. SlurmError: sbatch refuses.
    """
    order = submitted_order(layout)
    scripts = scripts_of(order, cause=f"{BY_HAND}: `milesbatch resume`")
    if any(job.role == "rollout" for job in jobs_of(layout)):  # they outlived the run's own job, and wait for it
        scripts = scripts[:1]
    return submit(order, scripts)


def submitted_order(layout: RunLayout) -> Order:
    """How the run was submitted last.

    Raises:
        RunMismatchError: it was never submitted.
    """
    order = last_order(layout)
    if order is None:
        raise RunMismatchError(
            f"{layout.root} was never submitted to Slurm",
            mend="`milesbatch submit RECIPE --run-dir ...`, or `milesbatch run` without Slurm",
        )
    return order


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rollout jobs after scaling."""

    submitted: tuple[str, ...]
    ended: tuple[str, ...]
    workers: int
    """Workers that the run has or will have when all its jobs run."""


def scale(layout: RunLayout, workers: int) -> Scaled:
    """Have ``workers`` rollout workers in all, by rollout jobs that join or leave.

    Each rollout job is as large as the recipe's rollout group. The workers inside the run's own job always stay.

    Raises:
        InputError: the number cannot be reached with whole jobs. SlurmError: Slurm does not answer, or refuses.
    """
    order = submitted_order(layout)
    per_job = order.recipe.rollout.workers
    own = 0 if order.recipe.slurm.shape == "separate" else per_job
    wanted = _jobs_for(workers, own, per_job)
    jobs = jobs_of(layout)
    _refuse_over(layout, order, jobs)
    running = [job for job in jobs if job.role == "rollout"]
    leaving = _least_useful(running)[: max(len(running) - wanted, 0)]
    for job in leaving:
        slurm.cancel(job.job_id)
    script = rollout_job_script(order)
    joining = [submit(order, (script,))["rollout"] for _ in range(wanted - len(running))]
    return Scaled(tuple(joining), tuple(job.job_id for job in leaving), own + wanted * per_job)


def _refuse_over(layout: RunLayout, order: Order, jobs: Sequence[RunJob]) -> None:
    """Workers of a run that nothing runs, and nothing is to run, would hold nodes for nobody."""
    if is_finished(layout, order.recipe.steps):
        raise RunMismatchError(f"{layout.root} is finished; nothing was queued", mend="nothing")
    if not any(job.role == "run" for job in jobs):
        raise RunMismatchError(
            f"no job of {layout.root} is queued or running that rollout workers could join; nothing was queued",
            mend=f"`milesbatch resume {layout.root}` first",
        )


def _jobs_for(workers: int, own: int, per_job: int) -> int:
    if workers < own or (workers - own) % per_job:
        possible = ", ".join(str(own + count * per_job) for count in range(4))
        raise RunMismatchError(
            f"{workers} rollout workers cannot be reached: the run's own job has {own}, each rollout job {per_job}",
            mend=f"choose one of {possible}, ...",
        )
    return (workers - own) // per_job


def _least_useful(jobs: list[RunJob]) -> list[RunJob]:
    """Jobs that wait first, then the youngest."""
    return sorted(jobs, key=lambda job: (job.state.value != "pending", -int(job.job_id)))
