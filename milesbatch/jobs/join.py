"""Rollout workers in a job of their own: ``python -m milesbatch.jobs.join RUN --recipe FILE --site FILE``.

    wait for a living controller of the run -> start workers as steps, under its address and secret -> watch them
      -> the controller is gone: end them, wait for the next one | the run is over, or nobody came for long: end the job

Owns: this job's workers. Never: leases or fates (the controller's), and no truth: it may vanish at any moment, and Slurm may
start it again. Invariant: workers of two jobs never share a name, because the name carries the job's id.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from milesbatch.cluster import slurm
from milesbatch.cluster.context import JobContext, RoleContext, job_context
from milesbatch.cluster.job_plan import plan_jobs
from milesbatch.cluster.port import Launcher, RunningProcess
from milesbatch.cluster.stamps import stamp_output
from milesbatch.cluster.steps import StepLauncher, read_allocation
from milesbatch.controller.stopping import StopWatch
from milesbatch.decisions.job_states import JobState
from milesbatch.decisions.restarts import RestartPolicy, Verdict
from milesbatch.errors import EXIT_TEMPFAIL, InputError, MilesbatchError, RunFailedError, SlurmError
from milesbatch.jobs.deadline import job_deadline
from milesbatch.jobs.order import Order, read_order
from milesbatch.jobs.queue_again import queue_again
from milesbatch.report.status import is_finished
from milesbatch.store.durable import read_optional
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import read_hint
from milesbatch.store.survey import read_incarnations

_LOOK_S = 0.2
_NAMES_PER_JOB = 1000
_STARTS_PER_STINT = 1000
_SILENT_HEARTBEATS = 10
_ALONE_S = 1800.0
"""For how long workers wait for a controller before they give their nodes back."""
_JOIN_AGAIN_S = 10.0
"""Pause before the same incarnation is joined again: it may be the end of it that made the workers leave."""
_LEAVE_S = 8.0
"""What it takes to leave: nothing need be saved."""
_LONGEST_LIFE_S = 30.0
"""A worker that lived less counts as a failed start."""


@dataclass(frozen=True, slots=True)
class Host:
    """A living controller, and how to reach it."""

    incarnation: int
    url: str
    token: str
    count: int
    """Of its liveness hint, which grows while it lives."""


def find_host(layout: RunLayout) -> Host | None:
    """The newest incarnation's controller as its hint and token tell; whether it lives shows only in a growing ``count``."""
    incarnations = read_incarnations(layout)
    if not incarnations:
        return None
    number = incarnations[-1].incarnation
    hint, token = read_hint(layout, number), read_optional(layout.token(number))
    if hint is None or token is None:
        return None
    return Host(number, str(hint["address"]), token.decode(), int(hint["count"]))


@dataclass(slots=True)
class _Worker:
    context: RoleContext
    process: RunningProcess
    started_s: float


class Guests:
    """This job's workers under one controller."""

    def __init__(self, launcher: Launcher, order: Order, job_id: str, host: Host, count: int, stint: int = 0) -> None:
        """``stint`` counts how often this job has joined: no two starts of a worker are told apart by less."""
        self._launcher = launcher
        self._threads = order.recipe.rollout.threads
        self._policy = RestartPolicy(order.recipe.slurm.max_restarts_without_progress)
        first = int(job_id) * _NAMES_PER_JOB
        base = RoleContext(
            run_directory=order.layout.root,
            role="rollout",
            index=first,
            count=count,
            incarnation=host.incarnation,
            attempt=stint * _STARTS_PER_STINT,
            controller_url=host.url,
            token=host.token,
            parent_pid=os.getpid(),
            heartbeat_s=order.recipe.slurm.heartbeat_s,
        )
        self._workers = [self._start(replace(base, index=first + place)) for place in range(count)]

    def _start(self, context: RoleContext) -> _Worker:
        context = replace(context, attempt=context.attempt + 1)
        return _Worker(context, self._launcher.start(context, self._threads), time.monotonic())

    def look(self) -> None:
        """Start again what died.

        Raises:
            RunFailedError: a worker dies again and again just after its start.
        """
        for place, worker in enumerate(self._workers):
            code = worker.process.exit_code()
            if code is None:
                continue
            if code == EXIT_TEMPFAIL or code == 0:  # its controller told it to stop, or is gone: that shows soon
                continue
            if time.monotonic() - worker.started_s > _LONGEST_LIFE_S:
                self._policy.progressed()
            if self._policy.judge("rollout", code) is not Verdict.RESTART:
                raise RunFailedError(
                    f"{worker.context.name} cannot be kept running (exit status {code})",
                    mend="see its log in the run directory; the run itself goes on without this job",
                )
            _say(f"{worker.context.name} died (exit status {code}); started again")
            self._workers[place] = self._start(worker.context)

    @property
    def is_alone(self) -> bool:
        """Have all workers left?"""
        return all(worker.process.exit_code() is not None for worker in self._workers)

    def end(self) -> None:
        for worker in self._workers:
            worker.process.kill()


class JoinLoop:
    """Waits for controllers, and serves one after the other."""

    def __init__(self, order: Order, launcher: Launcher, job_id: str, deadline: StopWatch) -> None:
        self._order = order
        self._layout = order.layout
        self._launcher = launcher
        self._job_id = job_id
        group = plan_jobs(order.recipe, order.site).rollout
        self._count = group.nodes * group.tasks_per_node
        self._silent_s = _SILENT_HEARTBEATS * order.recipe.slurm.heartbeat_s
        self._deadline = deadline
        self._stints = 0
        self.was_signalled = False

    @property
    def is_stopping(self) -> bool:
        return self.was_signalled or self._deadline.look_for_stop() is not None

    def run(self) -> int:
        """Until the run is finished, nobody came for long, or Slurm ends this job; returns the exit status."""
        alone_since_s = time.monotonic()
        served, not_before_s = 0, 0.0
        while not self.is_stopping:
            if is_finished(self._layout, self._order.recipe.steps):
                _say("the run is finished")
                return 0
            host = find_host(self._layout)
            may_join = host is not None and (host.incarnation > served or time.monotonic() > not_before_s)
            if host is not None and may_join and self._is_living(host):
                self._serve(host)
                served, alone_since_s = host.incarnation, time.monotonic()
                not_before_s = alone_since_s + _JOIN_AGAIN_S
            elif time.monotonic() - alone_since_s > _ALONE_S:
                _say(f"no controller of {self._layout.root} came for {_ALONE_S:.0f} s; the nodes are given back")
                return 0
            time.sleep(_LOOK_S)
        return EXIT_TEMPFAIL

    def _is_living(self, host: Host) -> bool:
        deadline_s = time.monotonic() + self._silent_s
        while time.monotonic() < deadline_s and not self.is_stopping:
            found = find_host(self._layout)
            if found is None or found.incarnation != host.incarnation:
                return False
            if found.count != host.count:
                return True
            time.sleep(_LOOK_S)
        return False

    def _serve(self, host: Host) -> None:
        _say(f"{self._count} workers join incarnation {host.incarnation}")
        guests = Guests(self._launcher, self._order, self._job_id, host, self._count, self._stints)
        self._stints += 1
        last, changed_s = host.count, time.monotonic()
        try:
            while not self.is_stopping and not guests.is_alone:
                guests.look()
                found = find_host(self._layout)
                if found is not None and found.incarnation != host.incarnation:
                    return
                if found is not None and found.count != last:
                    last, changed_s = found.count, time.monotonic()
                if time.monotonic() - changed_s > self._silent_s:
                    return
                time.sleep(_LOOK_S)
        finally:
            guests.end()
            _say(f"left incarnation {host.incarnation}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="milesbatch.jobs.join")
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--site", type=Path, required=True)
    given = parser.parse_args(arguments)
    job = job_context()
    if job is None:
        raise InputError("this process was not started by Slurm", mend="use `milesbatch scale RUN --rollout N`")
    order = read_order(given.run, given.recipe, given.site)
    plan = plan_jobs(order.recipe, order.site)
    launcher = StepLauncher(read_allocation(job, plan, ("rollout",)), order.site, order.layout.root)
    deadline = job_deadline(job.job_id, lambda: _LEAVE_S, lambda: 0)
    loop = JoinLoop(order, launcher, job.job_id, deadline)

    def stop(number: int, frame: object) -> None:
        loop.was_signalled = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    code = loop.run()
    return _go_on(job) if loop.is_stopping else code


def _go_on(job: JobContext) -> int:
    """Warned of a time limit or a preemption: be queued again; not when Slurm is ending this job, for whatever reason."""
    try:
        if slurm.job_state(job.job_id) is JobState.LIVE:
            queue_again(job.job_id)
    except SlurmError as error:
        _say(f"not queued again: {error.what}")
    return EXIT_TEMPFAIL


def main(arguments: Sequence[str]) -> int:
    """Exit status of the batch script; the last line of its log says why."""
    stamp_output()
    _say(f"rollout job on {socket.gethostname()}")
    try:
        return _run(arguments)
    except MilesbatchError as error:
        _say(f"error: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
