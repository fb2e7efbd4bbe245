"""``milesbatch cancel``, ``resume`` and ``scale``: a run's jobs, from a login node without torch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from milesbatch.cli.runs import find_submitted
from milesbatch.cli.submit import refuse_queued
from milesbatch.jobs import life
from milesbatch.report.status import is_finished

_RUN = typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")


def cancel(
    run: Annotated[str, _RUN],
    now: Annotated[bool, typer.Option("--now", help="At once, without a checkpoint.")] = False,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds that a clean stop may take.", min=0)] = 120.0,
) -> None:
    """Stop a run and end all its jobs; it is not queued again. `milesbatch resume` goes on with it."""
    layout = find_submitted(run)
    done = life.cancel(layout, _say, now=now, wait_s=5.0 if now else wait_s)
    if not done.was_alive and not done.jobs:
        _say(f"{layout.root} was not running, and no job of it by this user is queued")
    for job_id in done.jobs:
        _say(f"job {job_id} was ended")


def resume(run: Annotated[str, _RUN]) -> None:
    """Submit a run again as it was submitted last: after a cancel, a failure that was mended, or a time limit."""
    layout = find_submitted(run)
    if is_finished(layout, life.submitted_order(layout).recipe.steps):
        _say(f"{layout.root} is finished; nothing was queued")
        return
    refuse_queued(layout)
    for role, job_id in life.resume(layout).items():
        _say(f"{role} job {job_id}")


def scale(
    run: Annotated[str, _RUN],
    rollout: Annotated[int, typer.Option("--rollout", help="Rollout workers in all.", min=0, show_default=False)],
) -> None:
    """Have more or fewer rollout workers: extra jobs join the running run, or leave it."""
    done = life.scale(find_submitted(run), rollout)
    for job_id in done.ended:
        _say(f"rollout job {job_id} was ended")
    for job_id in done.submitted:
        _say(f"rollout job {job_id} was submitted")
    _say(f"{done.workers} rollout workers when all jobs run")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
