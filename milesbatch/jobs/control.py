"""The process in the batch script: ``python -m milesbatch.jobs.control RUN --recipe FILE --site FILE``.

    who am I (Slurm's environment) -> the nodes and their roles -> make or open the run -> take it over -> controller loop
      -> finished: end its other jobs | stopped: start this job again, or another one without the lost nodes | failed: end

It replaces the shell of the batch script, so that Slurm's signals reach it (through the guard, whose child it is: a
controller that is killed is started again). Exit status: 0 finished or cancelled, 75 to be continued, 1 failed, 2 wrong
input; Slurm starts none of these again by itself, only what a node's failure, a preemption or this process's own request
asks for.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from milesbatch.cluster import slurm
from milesbatch.cluster.context import JobContext, job_context
from milesbatch.cluster.job_plan import Role, plan_jobs
from milesbatch.cluster.stamps import stamp_output
from milesbatch.cluster.steps import StepLauncher, read_allocation
from milesbatch.controller.opening import control, open_or_make
from milesbatch.controller.stopping import Ending, StopCause, StopRequest
from milesbatch.decisions.going_on import BY_HAND, Exclusions, Next, starts_without_progress, what_next
from milesbatch.decisions.job_states import JobState
from milesbatch.engines.sglang.key import check_key
from milesbatch.errors import EXIT_TEMPFAIL, InputError, MilesbatchError, RunFailedError, RunHeldError, SlurmError
from milesbatch.jobs.deadline import job_deadline
from milesbatch.jobs.guard import run_guarded
from milesbatch.jobs.order import Order, read_order
from milesbatch.jobs.queue_again import queue_again
from milesbatch.jobs.submit import end_jobs, scripts_of, submit
from milesbatch.records import IncarnationRecord
from milesbatch.report.status import cause_of_restart, is_finished
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import read_incarnations
from milesbatch.store.takeover import Claimant

_HANDOVER_S = 90.0
"""How long the job that this one replaces may take to end."""


@dataclass(frozen=True, slots=True)
class Batch:
    """This job."""

    job: JobContext
    order: Order
    excluded: tuple[str, ...]
    after: str
    """Job id of the one that this job takes over from; empty for none."""
    cause: str

    @property
    def layout(self) -> RunLayout:
        return self.order.layout


def run_batch(batch: Batch) -> int:
    """Control the run in this job to an end; returns the exit status.

    Raises:
        MilesbatchError: the run failed, or is held by another controller; it is not queued again.
    """
    order, recipe = batch.order, batch.order.recipe
    plan = plan_jobs(recipe, order.site)
    roles: tuple[Role, ...] = ("trainer",) if plan.shape == "separate" else ("trainer", "rollout")
    launcher = StepLauncher(read_allocation(batch.job, plan, roles), order.site, batch.layout.root)
    if is_finished(batch.layout, recipe.steps):
        _say("the run is finished; there is nothing to do")
        return 0
    _refuse_hopeless(batch)
    check_key(recipe, may_be_elsewhere=True)
    changes = open_or_make(batch.layout, recipe, _say, launcher.python_step())
    claimant = Claimant(batch.job.job_id, batch.job.restart_count, _cause(batch))
    ending = _with_handover(
        batch,
        lambda: control(
            batch.layout,
            recipe,
            changes,
            launcher,
            claimant,
            _say,
            lambda loop: (job_deadline(batch.job.job_id, loop.hub.time_to_stop_s, lambda: loop.hub.warnings),),
            lambda record: _is_gone(batch, record),
        ),
    )
    return _after(batch, ending)


def _cause(batch: Batch) -> str:
    """A start that a person asked for says so; one by Slurm tells how the one before ended."""
    if batch.job.restart_count == 0 and batch.cause:
        return batch.cause
    return cause_of_restart(batch.layout)


def _refuse_hopeless(batch: Batch) -> None:
    incarnations = read_incarnations(batch.layout)
    limit = batch.order.recipe.slurm.max_restarts_without_progress
    if not incarnations and batch.job.restart_count > limit:
        raise RunFailedError(
            f"job {batch.job.job_id} was started {batch.job.restart_count + 1} times, and {batch.layout.root} has not begun:"
            " its model or data take longer to prepare than a job lasts",
            mend=f"raise slurm.time_limit_minutes, and see `milesbatch logs {batch.layout.root}`; then submit it again",
        )
    is_asked_for = batch.job.restart_count == 0 and batch.cause.startswith(BY_HAND)
    count = starts_without_progress(incarnations)
    if not is_asked_for and incarnations and count >= limit and _newest_made_nothing(batch.layout, incarnations):
        raise RunFailedError(
            f"the last {count + 1} starts of {batch.layout.root} recorded no new step; the last one ended because"
            f" {cause_of_restart(batch.layout)}",
            mend=f"see `milesbatch logs {batch.layout.root}`; mend the cause, then `milesbatch resume {batch.layout.root}`",
        )


def _newest_made_nothing(layout: RunLayout, incarnations: Sequence[IncarnationRecord]) -> bool:
    return not layout.batch(incarnations[-1].seal.last_batch + 1).exists()


def _with_handover(batch: Batch, start: Callable[[], Ending]) -> Ending:
    """Start; while the job that this one replaces still holds the run, wait for it."""
    deadline_s = time.monotonic() + (_HANDOVER_S if batch.after else 0.0)
    while True:
        try:
            return start()
        except RunHeldError as error:
            if time.monotonic() > deadline_s:
                raise
            _say(f"{error.what}; waiting for job {batch.after} to end")
            time.sleep(1.0)


def _is_gone(batch: Batch, record: IncarnationRecord) -> bool:
    """Does Slurm say that the controller of ``record`` has ended? No answer is no."""
    if record.job_id == batch.job.job_id:
        return record.restart_count < batch.job.restart_count  # Slurm starts a job again only when it has ended
    if not record.job_id.isdigit():
        return False
    try:
        return slurm.job_state(record.job_id).is_over
    except SlurmError:
        return False


# -- after the loop -------------------------------------------------------------------------------------------------------


def _after(batch: Batch, ending: Ending) -> int:
    """What comes next. From here on nothing is running but this process, and a signal changes nothing any more."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if ending.stop is None:
        _end_rollout(batch)
        return 0
    own_state, is_requeued = _own_state(batch)
    chosen = what_next(
        cancelled=ending.stop.cause is StopCause.CANCELLED,
        nodes_lost=ending.stop.cause is StopCause.NODE_LOST,
        may_requeue=batch.order.recipe.slurm.requeue,
        own_state=own_state,
        is_requeued=is_requeued,
    )
    _say(f"stopped: {ending.stop.text}; next: {chosen.value}")
    if chosen is Next.LEAVE:
        return EXIT_TEMPFAIL
    if chosen is Next.END:
        _end_rollout(batch)
        return 0 if ending.stop.cause is StopCause.CANCELLED else EXIT_TEMPFAIL
    if chosen is Next.REPLACE and _replace(batch, ending.stop):
        return EXIT_TEMPFAIL
    queue_again(batch.job.job_id)
    return EXIT_TEMPFAIL


def _own_state(batch: Batch) -> tuple[JobState, bool]:
    """What Slurm says of this job, and whether it counts another start of it already (it does as soon as it requeues)."""
    try:
        found = slurm.job(batch.job.job_id)
    except SlurmError:
        return JobState.UNKNOWN, False
    if not found:
        return JobState.UNKNOWN, False
    state = JobState.TIMED_OUT if any(part.is_at_time_limit for part in found) else found[0].state
    return state, found[0].restarts > batch.job.restart_count


def _replace(batch: Batch, stop: StopRequest) -> bool:
    """Submit the run again without the lost nodes, and end this job; False when Slurm refuses."""
    limit = batch.order.recipe.slurm.max_excluded_nodes
    excluded = Exclusions(batch.excluded, limit).plus(stop.nodes)
    scripts = scripts_of(batch.order, excluded=excluded, after=batch.job.job_id, cause=stop.text)[:1]
    try:
        queued = submit(batch.order, scripts)
    except MilesbatchError as error:
        _say(f"no other job could be submitted ({error.what}); this one is queued again")
        return False
    _say(f"job {queued['run']} goes on without {', '.join(excluded) or 'exclusions'}")
    try:
        slurm.cancel(batch.job.job_id)
    except SlurmError as error:
        _say(f"this job could not be cancelled ({error.what}); it ends by itself")
    return True


def _end_rollout(batch: Batch) -> None:
    try:
        for job_id in end_jobs(batch.layout, "rollout"):
            _say(f"rollout job {job_id} was ended")
    except SlurmError as error:
        _say(f"the run's rollout jobs could not be asked to end ({error.what}); they end by themselves")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_batch(arguments: Sequence[str]) -> Batch:
    """This job, from its command line and Slurm's environment.

    Raises:
        InputError: not inside a Slurm job, or the order's files are not there.
    """
    parser = argparse.ArgumentParser(prog="milesbatch.jobs.control")
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--excluded", default="")
    parser.add_argument("--after", default="")
    parser.add_argument("--cause", default="")
    given = parser.parse_args(arguments)
    job = job_context()
    if job is None:
        raise InputError("this process was not started by Slurm", mend="use `milesbatch submit RECIPE`")
    excluded = tuple(node for node in given.excluded.split(",") if node)
    return Batch(job, read_order(given.run, given.recipe, given.site), excluded, given.after, given.cause)


def main(arguments: Sequence[str]) -> int:
    """Exit status of the controller; the last line of its log says why."""
    stamp_output()
    batch = None
    try:
        batch = read_batch(arguments)
        return run_batch(batch)
    except MilesbatchError as error:
        # With 75 somebody else holds the run, and may need its rollout jobs.
        if batch is not None and error.exit_code != EXIT_TEMPFAIL:
            _end_rollout(batch)
        _say(f"error: {error}")
        return error.exit_code


def guarded(arguments: Sequence[str]) -> int:
    """:func:`main` under its guard: exit status of the batch script."""
    return run_guarded(lambda: main(arguments), lambda number: _controller_killed(arguments, number))


def _controller_killed(arguments: Sequence[str], number: int) -> int:
    """Nothing is lost; the job is started again, unless Slurm is ending it anyway or the recipe does not want that."""
    stamp_output()
    _say(f"the controller was killed by {signal.Signals(number).name}")
    try:
        batch = read_batch(arguments)
        _tell_killed(batch, number)
        if batch.order.recipe.slurm.requeue and _own_state(batch)[0] is JobState.LIVE:
            queue_again(batch.job.job_id)
    except MilesbatchError as error:
        _say(f"error: not queued again: {error}")
    return EXIT_TEMPFAIL


def _tell_killed(batch: Batch, number: int) -> None:
    """The controller's last word, said for it; nothing is decided by it."""
    try:
        incarnations = read_incarnations(batch.layout)
        if not incarnations:
            return
        newest = incarnations[-1]
        if (newest.job_id, newest.restart_count) == (batch.job.job_id, batch.job.restart_count):
            EventLog(batch.layout, "controller-0", newest.incarnation).write(
                "controller_killed", signal=signal.Signals(number).name
            )
    except MilesbatchError as error:
        _say(f"its end could not be noted: {error.what}")


if __name__ == "__main__":
    sys.exit(guarded(sys.argv[1:]))
