"""Submitting a run, and finding its jobs again. Needs no torch: a login node does this.

Owns: which scripts a run's shape needs, and the mark by which Slurm tells which jobs are a run's. Never: what a job does.
Invariant: Slurm is the only memory of jobs; nothing in the run directory says which are queued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from milesbatch.cluster import slurm
from milesbatch.cluster.job_plan import plan_jobs
from milesbatch.cluster.script import JobBody, Script, rollout_script, run_script
from milesbatch.cluster.submission import submit_script
from milesbatch.controller.opening import check_beginning, check_same_recipe
from milesbatch.decisions.job_states import JobState
from milesbatch.engines.sglang.key import check_key
from milesbatch.errors import RunMismatchError
from milesbatch.jobs.marks import mark
from milesbatch.jobs.order import Order, write_order
from milesbatch.store.durable import make_directory
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_run_record


@dataclass(frozen=True, slots=True)
class RunJob:
    """A job of a run, as Slurm tells."""

    job_id: str
    role: str
    """``run`` (it holds the controller) or ``rollout`` (workers that join)."""
    state: JobState
    reason: str


def scripts_of(order: Order, *, excluded: tuple[str, ...] = (), after: str = "", cause: str = "") -> tuple[Script, ...]:
    """The batch scripts that a run's shape needs, the controller's first.

    ``excluded`` are nodes that the run was lost on, the oldest first; ``after`` is a job that this one takes over from.

    Raises:
        SiteError: the site cannot run what the recipe asks for.
    """
    plan = plan_jobs(order.recipe, order.site).without(excluded)
    options = {"excluded": ",".join(excluded), "after": after, "cause": cause}
    main = run_script(plan, order.site, _body(order, "run", "control", options), order.recipe.slurm.requeue)
    if plan.shape != "separate":
        return (main,)
    return (main, rollout_job_script(order, excluded))


def rollout_job_script(order: Order, excluded: tuple[str, ...] = ()) -> Script:
    """A job of workers that join the run."""
    plan = plan_jobs(order.recipe, order.site).without(excluded)
    return rollout_script(plan, order.site, _body(order, "rollout", "join", {}))


def _body(order: Order, role: str, module: str, options: Mapping[str, str]) -> JobBody:
    return JobBody(order.layout.root, order.directory, order.command(module, options), mark(order.layout, role))


def check_order(order: Order) -> None:
    """Refuse now what the job would refuse after hours in the queue.

    Raises:
        RunMismatchError: the directory is a run of another recipe, a fork that this recipe cannot go on with, or no directory.
        InputError: the file with the servers' key is here, and holds none.
    """
    if order.layout.root.exists() and not order.layout.root.is_dir():
        raise RunMismatchError(f"{order.layout.root} is a file", mend="give a directory with --run-dir")
    check_key(order.recipe, may_be_elsewhere=True)
    record = read_run_record(order.layout)
    if record is not None:
        check_same_recipe(order.layout, record, order.recipe)
    else:
        check_beginning(order.layout, order.recipe)


def submit(order: Order, scripts: tuple[Script, ...]) -> dict[str, str]:
    """Queue the scripts; returns job ids by role. When a later one is refused, the earlier ones are taken back.

    Raises:
        SlurmError: sbatch refuses; nothing of this call is left in the queue.
        StorageError: the run directory cannot be written.
    """
    for directory in (order.layout.root, order.layout.jobs, order.layout.logs):
        make_directory(directory)
    write_order(order)
    queued: dict[str, str] = {}
    try:
        for script in scripts:
            queued[script.role] = submit_script(script.text, order.layout.jobs)
    except BaseException:
        for job_id in queued.values():
            slurm.cancel(job_id)
        raise
    return queued


def jobs_of(layout: RunLayout) -> list[RunJob]:
    """The run's jobs that Slurm still has in its queue (pending, running or ending), ascending.

    Raises:
        SlurmError: Slurm does not answer.
    """
    marks = {mark(layout, role): role for role in ("run", "rollout")}
    found: dict[str, RunJob] = {}
    for job in slurm.my_jobs():
        if job.comment in marks and job.job_id not in found:
            found[job.job_id] = RunJob(job.job_id, marks[job.comment], job.state, job.reason)
    return sorted(found.values(), key=lambda job: int(job.job_id))


def end_jobs(layout: RunLayout, role: str) -> list[str]:
    """Cancel the run's jobs of one role, whatever they are in; returns their ids.

    Raises:
        SlurmError: Slurm does not answer, or refuses.
    """
    ended = [job.job_id for job in jobs_of(layout) if job.role == role]
    for job_id in ended:
        slurm.cancel(job_id)
    return ended
