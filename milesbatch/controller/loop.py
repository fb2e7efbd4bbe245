"""The controller's loop: observe -> decide -> act, until the run is finished, stopped or failed.

    milesbatch run ──> take over the run directory (store.takeover) ──> this loop
        ├── HTTP (server -> hub): leases, batches, heartbeats
        ├── supervisor: trainer ranks, rollout workers, tracking, evaluation: started, watched, restarted
        └── whoever may ask to stop (stopping): signals, `cancel`, a time limit, a lost node; a signal's handler only sets a
            flag; the trainer checkpoints at the next step boundary, also when it is waiting for rollouts

It holds no truth: killed at any moment, nothing is lost but the work since the last commit (see docs/protocol.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from milesbatch.cluster.context import RoleContext
from milesbatch.cluster.port import Launcher
from milesbatch.controller.display import Display
from milesbatch.controller.hub import Hub
from milesbatch.controller.server import ControllerServer
from milesbatch.controller.stopping import CancelWatch, Ending, StopCause, StopRequest, StopWatch
from milesbatch.controller.supervise import Supervisor
from milesbatch.errors import MilesbatchError, RunFailedError, StorageError
from milesbatch.faults.points import point
from milesbatch.recipe.models import Recipe
from milesbatch.store.durable import write_secret
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import LivenessHint
from milesbatch.store.takeover import Incarnation
from milesbatch.tracking.last_report import LIMIT_S, wants_report
from milesbatch.trajectories.groups import group_refs
from milesbatch.wire import messages as wire

_LOOK_S = 0.1
_STOP_S = 120.0
_WORKERS_S = 10.0
_DRAIN_S = 30.0
_HASTY_DRAIN_S = 3.0
"""Where the job's time runs out: the next start logs what is missing."""


@dataclass(slots=True)
class _Signals:
    """Set by handlers; looked at by the loop."""

    count: int = 0
    name: str = ""

    def arrived(self, number: signal.Signals) -> None:
        # Slurm may send one more than once, and a warning before the end: only a person's second Ctrl-C means "at once".
        self.count += number is signal.SIGINT or not self.count
        self.name = number.name

    def look_for_stop(self) -> StopRequest | None:
        return StopRequest(StopCause.SIGNAL, self.name, at_once=self.count > 1) if self.count else None


class ControllerLoop:
    """One incarnation of the controller."""

    def __init__(
        self,
        layout: RunLayout,
        recipe: Recipe,
        incarnation: Incarnation,
        launcher: Launcher,
        display: Display,
    ) -> None:
        self._layout = layout
        self._recipe = recipe
        self._incarnation = incarnation
        self._display = display
        self._signals = _Signals()
        self._is_hint_late = False
        self._finished_at_s: float | None = None
        self._watches: tuple[StopWatch, ...] = (self._signals, CancelWatch(layout, incarnation.number))
        self.events = EventLog(layout, "controller-0", incarnation.number)
        found = incarnation.found
        self.hub = Hub(recipe, found.origin)
        ready = [ref for name in found.ready_files for ref in group_refs(layout.trajectory(name))]
        self.hub.restore(found.fates, ready, found.last_version, incarnation.unfinished)
        token = secrets.token_hex(16)
        self._server = ControllerServer(self.hub, token, incarnation.number, launcher.address, self._progress)
        write_secret(layout.token(incarnation.number), token.encode())
        base = RoleContext(
            run_directory=Path(layout.root).resolve(),
            role="trainer",
            index=0,
            count=1,
            incarnation=incarnation.number,
            attempt=1,
            controller_url=self._server.url,
            token=token,
            parent_pid=incarnation.record.pid,
            heartbeat_s=recipe.slurm.heartbeat_s,
            address=launcher.address,
        )
        self._supervisor = Supervisor(layout, recipe, self.hub, launcher, base, self.events)

    def watch(self, watches: Sequence[StopWatch]) -> None:
        """Let others ask this run to stop, too."""
        self._watches += tuple(watches)

    async def run(self) -> Ending:
        """Run until the end.

        Raises:
            MilesbatchError: the run failed, the input is wrong, or a newer incarnation took over. All processes are gone.
        """
        self._install_signals()
        self._server.start()
        hint = LivenessHint(self._layout, self._incarnation.number, self._server.url)
        self._announce()
        try:
            self._supervisor.start_all()
            ending = await self._until_end(hint)
            self._say_ending(ending)
            if ending.stop is None:
                await self._drain_tracking(self._closing_s())
            else:
                await self._drain_tracking(_HASTY_DRAIN_S if ending.stop.within_s is not None else _DRAIN_S)
            return ending
        except MilesbatchError as error:
            with contextlib.suppress(StorageError):  # the terminal hears of it all the same
                self.events.write("failed", error=error.what, exit_code=error.exit_code)
            self._supervisor_stop_now()
            await self._drain_tracking(self._closing_s())
            raise
        finally:
            self._supervisor.kill_all()
            await self._server.stop()
            self.events.close()

    async def _until_end(self, hint: LivenessHint) -> Ending:
        next_beat_s = 0.0
        stop: StopRequest | None = None
        stop_by_s = float("inf")
        while True:
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                self._beat(hint)
                next_beat_s = now_s + self._recipe.slurm.heartbeat_s
            point("controller.look")
            for text in self._supervisor.look():
                self._display.note(text)
            self._check_failures()
            self._display.tick(self.hub)
            if self.hub.is_finished and not self._supervisor.running("trainer") and self._may_end(now_s):
                return Ending()
            asked = self._asked_to_stop()
            if asked is not None and (stop is None or asked.at_once):
                if stop is None:
                    stop_by_s = now_s + (_STOP_S if asked.within_s is None else min(_STOP_S, asked.within_s))
                    self._begin_stop(asked)
                stop = stop or asked
            if stop is not None:
                if not self._supervisor.running(
                    "trainer"
                ):  # the state is saved: workers may still end what is nearly done
                    stop_by_s = min(stop_by_s, now_s + _WORKERS_S)
                running = self._supervisor.running
                working = running("trainer") or running("rollout") or self.hub.workers_to_tell()
                if not working or now_s > stop_by_s or (asked is not None and asked.at_once):
                    return Ending(stop)
            await asyncio.sleep(_LOOK_S)

    def _may_end(self, now_s: float) -> bool:
        """The run is finished. Evaluations that are still to come get a set time, unless somebody asks to stop."""
        section = self._recipe.evaluation
        if section is None or not self._supervisor.running("evaluation") or self._asked_to_stop() is not None:
            return True
        if self._finished_at_s is None:
            self._finished_at_s = now_s
            self._display.note(
                f"all steps are trained; waiting for the last evaluations, {section.wait_s:.0f} s at most"
            )
        is_late = now_s - self._finished_at_s > section.wait_s
        if is_late:
            left = f"`milesbatch evaluate {self._layout.root}` makes what is missing"
            self._display.note(f"the evaluations are not done; {left}")
        return is_late

    def _asked_to_stop(self) -> StopRequest | None:
        """The most urgent request; a lost node's comes from the supervisor."""
        found = [
            request for watch in (*self._watches, self._supervisor) if (request := watch.look_for_stop()) is not None
        ]
        return next((request for request in found if request.at_once), found[0] if found else None)

    def _beat(self, hint: LivenessHint) -> None:
        try:
            hint.beat()
            self._is_hint_late = False
        except StorageError as error:  # only a hint
            if not self._is_hint_late:  # said once, not at every beat
                self._display.note(error.what)
            self._is_hint_late = True

    def _begin_stop(self, request: StopRequest) -> None:
        again = " (again: at once)" if request.cause is StopCause.SIGNAL else ""
        how = "at once" if request.at_once else f"after the current step, with a checkpoint{again}"
        self._display.note(f"{request.text}: stopping {how}")
        self.events.write("stopping", cause=request.cause.name.lower(), text=request.text, nodes=list(request.nodes))
        self.hub.stop()

    def _say_ending(self, ending: Ending) -> None:
        if ending.stop is None:
            self.events.write("finished", step=self.hub.last_step)
        else:
            self.events.write(
                "stopped", step=self.hub.last_step, cause=ending.stop.cause.name.lower(), text=ending.stop.text
            )

    def _supervisor_stop_now(self) -> None:
        self.hub.stop()
        self._supervisor.kill_working()

    def _check_failures(self) -> None:
        failures = self.hub.failures
        limit = self._recipe.environment.max_failed_share
        if len(failures.window) == failures.window.maxlen and failures.share() > limit:
            raise RunFailedError(
                f"{failures.share():.0%} of the last {len(failures.window)} episodes failed; allowed are {limit:.0%}"
                f"\n  the first error was: {failures.first_error}",
                mend="a run keeps the reward function that it began with: mend it and go on in a fork (--fork NEW); if what"
                " failed lies outside of it, or environment.max_failed_share is to be raised, the same command goes on",
            )

    def _closing_s(self) -> float:
        """How long the tracking process may take after a run's end, with the report where it makes one."""
        return _DRAIN_S + (LIMIT_S if wants_report(self._recipe.tracking) else 0.0)

    async def _drain_tracking(self, limit_s: float) -> None:
        """The tracking process ends by itself when it has logged everything; wait for it, but not for ever, and hardly any more
        once somebody asks to stop."""
        deadline_s = time.monotonic() + limit_s
        was_asked = self._asked_to_stop() is not None
        while self._supervisor.running("tracking"):
            if not was_asked and self._asked_to_stop() is not None:
                was_asked, deadline_s = True, min(deadline_s, time.monotonic() + _HASTY_DRAIN_S)
            code = self._supervisor.children["tracking-0"].process.exit_code()
            if code == 0:
                return
            if code is not None or time.monotonic() > deadline_s:
                log = self._layout.log("tracking-0", self._incarnation.number)
                self._display.note(f"tracking has not logged all steps (see {log}); the next start will log them")
                return
            await asyncio.sleep(_LOOK_S)

    def _announce(self) -> None:
        found = self._incarnation.found
        self.events.write(
            "incarnation_started",
            cause=self._incarnation.record.cause,
            last_batch=found.last_batch,
            last_version=found.last_version,
            checkpoints=found.checkpoints,
            ready_files=len(found.ready_files),
            unfinished_files=len(self._incarnation.unfinished),
            quarantined=list(self._incarnation.quarantined),
        )
        for path, reason in self._incarnation.quarantined:
            self._display.note(f"quarantined {path}: {reason}")

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signals.arrived, number)

    def _progress(self, message: wire.Message) -> None:
        """Figures for people, as the trainer tells them."""
        if isinstance(message, wire.StepDone):
            self._display.step(message, self.hub)
        elif isinstance(message, wire.Checkpointed):
            self._display.note(f"checkpoint {message.step} committed")
