"""What the drill does to a run from outside: power cuts, signals, a second controller, damage, zombies.

Each act is done once, while a process of the run is held at a point by the injector, and gives a record of what was done.
Invariant: an act that could not be done is never recorded as fired; it says why instead.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from milesbatch.drill.command import StartedRun, is_alive, send, still_alive
from milesbatch.drill.evidence import Fired, newest_incarnation, unconsumed_files
from milesbatch.drill.plan import Act
from milesbatch.errors import EXIT_TEMPFAIL
from milesbatch.faults.injector import damage
from milesbatch.ids import parse_number
from milesbatch.store.layout import RunLayout

_SECOND_S = 120.0
_ZOMBIE_S = 60.0


@dataclass(slots=True)
class Done:
    """What came of the acts so far."""

    fired: dict[str, Fired] = field(default_factory=dict)
    detected_s: dict[str, float] = field(default_factory=dict)
    """Where the drill itself sees the answer, as with a second controller."""
    problems: dict[str, str] = field(default_factory=dict)
    preempted: str | None = None
    """Act whose SIGTERM the running command has got: it must exit with 75."""
    zombies: dict[str, int] = field(default_factory=dict)
    """Act -> process that is stopped and waits for the next incarnation."""


class Actor:
    """Does acts to one run."""

    def __init__(
        self, layout: RunLayout, start_another: Callable[[str], StartedRun], by_wall_clock: bool = False
    ) -> None:
        self._layout = layout
        self._start_another = start_another
        self._clock = time.time if by_wall_clock else time.monotonic
        self.done = Done()

    def perform(self, acts: Sequence[Act], command: StartedRun, trigger: Fired) -> None:
        """Do the acts of one point; those that damage share one power cut."""
        damaging = [act for act in acts if act.act in ("flip", "truncate")]
        for act in acts:
            if act.act == "second_controller":
                self._second_controller(act, command)
            elif act.act == "preempt":
                self._fired(act)
                command.terminate()
                self.done.preempted = act.name
            elif act.act == "kill_controller":
                self._kill_controller(act, command)
            elif act.act == "zombie":
                self._make_zombie(act, command, trigger)
            elif act.act == "power_cut":
                self._fired(act)
                self._power_cut([act], command)
        if damaging:
            self._damage(damaging, command)

    def _fired(self, act: Act, path: Path | None = None) -> None:
        relative = None if path is None else str(path.relative_to(self._layout.root))
        self.done.fired[act.name] = Fired("drill", 0, round(self._clock(), 4), relative)

    def _power_cut(self, acts: Sequence[Act], command: StartedRun, spare: tuple[int, ...] = ()) -> None:
        alive = command.kill_everything(spare)
        for act in acts if alive else ():
            self.done.problems[act.name] = f"processes {alive} survived SIGKILL"

    def _kill_controller(self, act: Act, command: StartedRun) -> None:
        """Its roles must not outlive it."""
        children = command.children()
        self._fired(act)
        command.kill()
        if alive := still_alive(children):
            self.done.problems[act.name] = f"roles outlived their controller: processes {alive}"
            for pid in alive:
                send(pid, signal.SIGKILL)

    def _second_controller(self, act: Act, command: StartedRun) -> None:
        incarnation = newest_incarnation(self._layout)
        self._fired(act)
        began_s = time.monotonic()
        second = self._start_another(act.name)
        code = second.wait(_SECOND_S)
        self.done.detected_s[act.name] = time.monotonic() - began_s
        if code is None:
            second.kill_everything()
            self.done.problems[act.name] = f"the second controller still ran after {_SECOND_S:.0f} s"
        elif code != EXIT_TEMPFAIL:
            self.done.problems[act.name] = (
                f"the second controller ended with {code}, not {EXIT_TEMPFAIL}: see {second.log}"
            )
        elif newest_incarnation(self._layout) != incarnation or command.exit_code() not in (None, 0):
            self.done.problems[act.name] = "the second controller disturbed the first"

    def _damage(self, acts: Sequence[Act], command: StartedRun) -> None:
        if any(act.artefact == "trajectory" for act in acts):
            deadline_s = time.monotonic() + max(act.hold_s for act in acts) - 1.0
            while not unconsumed_files(self._layout) and time.monotonic() < deadline_s:
                time.sleep(0.05)
        self._power_cut(acts, command)
        for act in acts:
            path = self._newest(act)
            if path is None:
                self.done.problems[act.name] = f"there was no {act.artefact} to damage"
            else:
                damage(path, "flip" if act.act == "flip" else "truncate")
                self._fired(act, path)

    def _newest(self, act: Act) -> Path | None:
        """The file to damage: payload of the newest committed artefact."""
        layout = self._layout
        if act.artefact == "trajectory":
            return next(iter(unconsumed_files(layout)), None)
        if act.artefact == "batch":
            return max(layout.batches.glob("[0-9]*.json"), default=None)
        if act.artefact == "weights":
            return _largest(_newest_manifest(layout.weights))
        return _largest(_newest_manifest(layout.checkpoints))

    # -- zombies ----------------------------------------------------------------------------------------------------

    def _make_zombie(self, act: Act, command: StartedRun, trigger: Fired) -> None:
        self._fired(act)
        self._power_cut([act], command, spare=(trigger.pid,))
        if is_alive(trigger.pid):
            self.done.fired[act.name] = replace(self.done.fired[act.name], process=trigger.process, pid=trigger.pid)
            self.done.zombies[act.name] = trigger.pid
        else:
            del self.done.fired[act.name]
            self.done.problems[act.name] = "the process did not outlive its controller"

    def wake_zombies(self) -> None:
        """The next incarnation has taken over: let the zombies go on, and wait for them to end by themselves."""
        for pid in self.done.zombies.values():
            send(pid, signal.SIGCONT)
        for name, pid in self.done.zombies.items():
            if still_alive([pid], _ZOMBIE_S):
                self.done.problems[name] = f"the zombie still ran {_ZOMBIE_S:.0f} s after it was fenced out"
        self.kill_zombies()

    def kill_zombies(self) -> None:
        for pid in self.done.zombies.values():
            send(pid, signal.SIGKILL)
        self.done.zombies.clear()


def _newest_manifest(directory: Path) -> Path | None:
    found = []
    for path in directory.glob("*/manifest.json"):
        try:
            found.append((parse_number(path.parent.name), path))
        except ValueError:
            continue
    return max(found, default=(0, None))[1]


def _largest(manifest: Path | None) -> Path | None:
    """The largest payload file beside a manifest."""
    if manifest is None:
        return None
    files = [path for path in manifest.parent.rglob("*") if path.is_file() and path != manifest]
    return max(files, key=lambda path: (path.stat().st_size, path.name), default=None)
