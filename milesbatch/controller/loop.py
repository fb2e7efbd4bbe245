"""The controller's loop: observe -> decide -> act, until the run is finished, stopped or failed.

    milesbatch run ──> take over the run directory (store.takeover) ──> this loop
        ├── HTTP (server -> hub): leases, batches, heartbeats
        ├── supervisor: trainer ranks, rollout workers, tracking: started, watched, restarted
        └── signals: SIGINT and SIGTERM set a flag; the trainer checkpoints at the next step boundary

It holds no truth: killed at any moment, nothing is lost but the work since the last commit (see docs/protocol.md).
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from milesbatch.cluster.context import RoleContext
from milesbatch.cluster.port import Launcher
from milesbatch.controller.display import Display
from milesbatch.controller.hub import Hub
from milesbatch.controller.server import ControllerServer
from milesbatch.controller.supervise import Supervisor
from milesbatch.errors import MilesbatchError, RunFailedError, StorageFullError
from milesbatch.faults.points import point
from milesbatch.recipe.models import Recipe
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import LivenessHint
from milesbatch.store.takeover import Incarnation
from milesbatch.trajectories.groups import group_refs
from milesbatch.wire import messages as wire

_LOOK_S = 0.1
_STOP_S = 120.0
_DRAIN_S = 30.0


class Ending(Enum):
    """How the loop ended."""

    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(slots=True)
class _Signals:
    """Set by handlers; looked at by the loop."""

    count: int = 0
    name: str = ""

    def arrived(self, number: signal.Signals) -> None:
        self.count += 1
        self.name = number.name


class ControllerLoop:
    """One incarnation of the controller."""

    def __init__(
        self, layout: RunLayout, recipe: Recipe, incarnation: Incarnation, launcher: Launcher, display: Display
    ) -> None:
        self._layout = layout
        self._recipe = recipe
        self._incarnation = incarnation
        self._display = display
        self._signals = _Signals()
        self.events = EventLog(layout, "controller-0", incarnation.number)
        self.hub = Hub(recipe)
        found = incarnation.found
        ready = [ref for name in found.ready_files for ref in group_refs(layout.trajectory(name))]
        self.hub.restore(found.fates, ready, found.last_version)
        token = secrets.token_hex(16)
        self._server = ControllerServer(self.hub, token, incarnation.number, "127.0.0.1", self._progress)
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
        )
        self._supervisor = Supervisor(layout, recipe, self.hub, launcher, base, self.events)

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
            self.events.write(ending.value, step=self.hub.last_step)
            await self._drain_tracking()
            return ending
        except MilesbatchError as error:
            self.events.write("failed", error=error.what, exit_code=error.exit_code)
            self._supervisor_stop_now()
            await self._drain_tracking()
            raise
        finally:
            self._supervisor.kill_all()
            await self._server.stop()
            self.events.close()

    async def _until_end(self, hint: LivenessHint) -> Ending:
        next_beat_s = 0.0
        stop_by_s: float | None = None
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
            if self._signals.count and stop_by_s is None:
                stop_by_s = now_s + _STOP_S
                self._begin_stop()
            working = self._supervisor.running("trainer") or self._supervisor.running("rollout")
            if self.hub.is_finished and not self._supervisor.running("trainer"):
                return Ending.FINISHED
            if stop_by_s is not None and (not working or now_s > stop_by_s or self._signals.count > 1):
                return Ending.STOPPED
            await asyncio.sleep(_LOOK_S)

    def _beat(self, hint: LivenessHint) -> None:
        try:
            hint.beat()
        except StorageFullError as error:
            self._display.note(error.what)

    def _begin_stop(self) -> None:
        self._display.note(f"{self._signals.name}: stopping after the current step, with a checkpoint (again: at once)")
        self.events.write("stopping", signal=self._signals.name)
        self.hub.stop()

    def _supervisor_stop_now(self) -> None:
        self.hub.stop()
        for name in [*self._supervisor.running("trainer"), *self._supervisor.running("rollout")]:
            self._supervisor.children.pop(name).process.kill()

    def _check_failures(self) -> None:
        failures = self.hub.failures
        limit = self._recipe.environment.max_failed_share
        if len(failures.window) == failures.window.maxlen and failures.share() > limit:
            raise RunFailedError(
                f"{failures.share():.0%} of the last {len(failures.window)} episodes failed; allowed are {limit:.0%}"
                f"\n  the first error was: {failures.first_error}",
                mend="a run keeps the reward function that it began with: mend it and start a new run (--run-dir NEW); if what"
                " failed lies outside of it, or environment.max_failed_share is to be raised, the same command goes on",
            )

    async def _drain_tracking(self) -> None:
        """The tracking process ends by itself when it has logged everything; wait for it, but not for ever."""
        deadline_s = time.monotonic() + _DRAIN_S
        while self._supervisor.running("tracking") and time.monotonic() < deadline_s:
            child = self._supervisor.children["tracking-0"]
            if child.process.exit_code() is not None:
                return
            await asyncio.sleep(_LOOK_S)

    def _announce(self) -> None:
        found = self._incarnation.found
        self.events.write(
            "incarnation_started",
            cause=self._incarnation.record.cause,
            last_batch=len(found.batches),
            last_version=found.last_version,
            checkpoints=found.checkpoints,
            ready_files=len(found.ready_files),
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
