"""Drives one run of a drill to its end: start, break, and give the same command again, as a user or a scheduler would.

Never measures. Invariant: when :func:`drive` returns, no process of the run is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from milesbatch.drill.acts import Actor
from milesbatch.drill.command import StartedRun, start_run
from milesbatch.drill.evidence import Fired, newest_incarnation, read_fired
from milesbatch.drill.on_site import submit_run
from milesbatch.drill.plan import HOLD_PREFIX, Act, DrillRun
from milesbatch.errors import EXIT_TEMPFAIL, EXIT_USAGE
from milesbatch.store.layout import RunLayout

MOST_STARTS = 8
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Order:
    """What to run, and where."""

    recipe: Path
    overrides: tuple[str, ...]
    directory: Path
    """For this run alone: the run directory ``run``, the fault plan, and what each start said."""
    site: str | None = None
    """On this site, by Slurm; None: on this machine."""
    steps: int = 0
    start_s: float = 600.0
    """Longest time that one start may take."""


@dataclass(frozen=True, slots=True)
class Driven:
    """A run that was driven to its end."""

    layout: RunLayout
    fired: dict[str, Fired]
    exits: tuple[int, ...]
    detected_s: dict[str, float]
    problems: dict[str, str]
    """Fault or act -> what went wrong with it."""
    failure: str | None
    """Why the run did not finish."""
    seconds: float


def drive(order: Order, broken: DrillRun | None, say: Callable[[str], None]) -> Driven:
    """Run the recipe, broken as the plan says (None: not at all), until it is finished or hopeless."""
    order.directory.mkdir(parents=True, exist_ok=True)
    return _Drive(order, broken, say).run()


class _Drive:
    def __init__(self, order: Order, broken: DrillRun | None, say: Callable[[str], None]) -> None:
        self._order = order
        self._broken = broken
        self._say = say
        self._layout = RunLayout(order.directory / "run")
        self._pending: list[tuple[Act, ...]] = broken.steps() if broken is not None else []
        self._actor = Actor(self._layout, lambda name: self._start(name, None), order.site is not None)
        self._exits: list[int] = []

    def run(self) -> Driven:
        began_s = time.monotonic()
        most = MOST_STARTS if self._broken is not None else 1  # what nobody breaks must not need a second start
        failure: str | None = f"not finished after {most} starts"
        for number in range(1, most + 1):
            code = self._attend(self._start(f"start-{number}", self._write_plan()))
            if code is None:
                failure = f"start {number} did not end within {self._order.start_s:.0f} s"
                break
            self._exits.append(code)
            self._check_preempted(code)
            if code == 0:
                failure = None
                break
            if code == EXIT_USAGE or number == most:
                failure = f"start {number} ended with {code}; it said: {_last_error(self._log(f'start-{number}'))}"
                break
            self._say(f"    start {number} ended with {code}; the same command again")
        done = self._actor.done
        fired = dict(done.fired)
        for fault in self._broken.faults if self._broken is not None else ():
            record = read_fired(self._layout, fault.name, self._order.site is not None)
            if record is not None:
                fired[fault.name] = record
        seconds = time.monotonic() - began_s
        return Driven(self._layout, fired, tuple(self._exits), done.detected_s, done.problems, failure, seconds)

    def _write_plan(self) -> Path | None:
        if self._broken is None:
            return None
        path = self._order.directory / "faults.yaml"
        plan = self._broken.fault_plan(self._pending, self._actor.done.zombies)
        path.write_text(yaml.safe_dump(plan.model_dump(mode="json"), sort_keys=False))
        return path

    def _start(self, name: str, plan: Path | None) -> StartedRun:
        overrides = (*self._order.overrides, *(self._broken.set if self._broken is not None else ()))
        if self._order.site is not None:
            place = (self._order.recipe, self._layout.root, self._order.site)
            return submit_run(*place, overrides, self._order.steps, self._log(name), plan)
        return start_run(self._order.recipe, self._layout.root, overrides, self._log(name), plan)

    def _log(self, name: str) -> Path:
        return self._order.directory / f"{name}.log"

    def _attend(self, command: StartedRun) -> int | None:
        """Watch a start and do the acts whose moment has come; its exit code, None when it took too long."""
        deadline_s = time.monotonic() + self._order.start_s
        incarnation = newest_incarnation(self._layout)
        try:
            while (code := command.exit_code()) is None and time.monotonic() < deadline_s:
                if self._actor.done.zombies and newest_incarnation(self._layout) > incarnation:
                    self._actor.wake_zombies()
                if self._pending and (trigger := read_fired(self._layout, HOLD_PREFIX + self._pending[0][0].name)):
                    self._actor.perform(self._pending.pop(0), command, trigger)
                time.sleep(_LOOK_S)
            return code
        finally:
            # Also when the drill itself is ended. Zombies wait for the next start, and not for ever.
            command.kill_everything(self._actor.done.zombies.values())
            if command.exit_code() == 0:
                self._actor.kill_zombies()

    def _check_preempted(self, code: int) -> None:
        name, self._actor.done.preempted = self._actor.done.preempted, None
        # On a site the job itself is started again, and this start goes on to the end.
        if name is not None and code != EXIT_TEMPFAIL and self._order.site is None:
            self._actor.done.problems[name] = f"after SIGTERM the run ended with {code}, not {EXIT_TEMPFAIL}"


def _last_error(log: Path) -> str:
    """The error that a start ended with, or its last line."""
    said = log.read_text(encoding="utf-8", errors="replace").strip()
    _, mark, error = said.rpartition("error: ")
    return error if mark else said.splitlines()[-1] if said else "nothing"
