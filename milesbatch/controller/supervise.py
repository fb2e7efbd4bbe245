"""Starts the role processes, notices when one died or hangs, and starts it again or gives up. Never decides what is trained.

The trainer's ranks live and die together (one torch.distributed job); rollout workers one by one; the tracking process is
not needed by the run and its death never stops it.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace

from milesbatch.cluster.context import RoleContext
from milesbatch.cluster.local import log_tail
from milesbatch.cluster.port import Launcher, RunningProcess
from milesbatch.controller.hub import Hub
from milesbatch.decisions.restarts import RestartPolicy, Verdict
from milesbatch.errors import FencedError, InputError, RunFailedError
from milesbatch.recipe.models import Recipe
from milesbatch.store.events import EventLog
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout

_LOST_HEARTBEATS = 7.5
"""Heartbeats that must fail to come before a process is lost: importing torch can hold a process up for some."""
_START_S = 180.0


@dataclass(slots=True)
class Child:
    """A started role process."""

    context: RoleContext
    process: RunningProcess
    started_at_s: float


class Supervisor:
    """The role processes of one incarnation."""

    def __init__(
        self, layout: RunLayout, recipe: Recipe, hub: Hub, launcher: Launcher, base: RoleContext, events: EventLog
    ) -> None:
        self._layout = layout
        self._recipe = recipe
        self._hub = hub
        self._launcher = launcher
        self._base = base
        self._events = events
        self._policy = RestartPolicy(recipe.slurm.max_restarts_without_progress)
        self._step_at_last_look = hub.last_step
        self._attempts: dict[str, int] = {}
        self.children: dict[str, Child] = {}

    # -- starting ---------------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        self._start_trainer()
        for index in range(self._recipe.rollout.workers):
            self._start("rollout", index, self._recipe.rollout.workers, self._recipe.rollout.threads)
        if self._recipe.tracking.kind != "none":
            self._start("tracking", 0, 1, 1)

    def _start_trainer(self) -> None:
        for index in range(self._recipe.trainer.ranks):
            self._start("trainer", index, self._recipe.trainer.ranks, self._recipe.trainer.threads)

    def _start(self, role: str, index: int, count: int, threads: int) -> None:
        name = f"{role}-{index}"
        self._attempts[name] = self._attempts.get(name, 0) + 1
        context = replace(self._base, role=role, index=index, count=count, attempt=self._attempts[name])
        process = self._launcher.start(context, threads)
        self.children[name] = Child(context, process, time.monotonic())
        self._events.write("process_started", name=name, pid=process.pid, attempt=context.attempt)

    # -- watching ---------------------------------------------------------------------------------------------------

    def look(self) -> list[str]:
        """Notice deaths and hangs and act on them; returns what happened, in words.

        Raises:
            InputError: a role says that the input is wrong.
            RunFailedError: a role died too often without progress.
            FencedError: a newer incarnation has taken over.
        """
        if self._hub.last_step > self._step_at_last_look:
            self._step_at_last_look = self._hub.last_step
            self._policy.progressed()
        happened = []
        for name, child in list(self.children.items()):
            code = child.process.exit_code()
            if code is None and (reason := self._why_lost(name, child)):
                child.process.kill()
                happened.append(self._ended(name, child, -signal.SIGKILL, reason))
            elif code is not None and self.children.get(name) is child:
                happened.append(self._ended(name, child, code, describe_exit(code)))
        return happened

    def _why_lost(self, name: str, child: Child) -> str | None:
        now_s = time.monotonic()
        peer = self._hub.peers.get(name)
        if child.context.role == "tracking":
            return None
        if peer is None or peer.beat.pid != child.process.pid:
            waited_s = now_s - child.started_at_s
            return f"no heartbeat {waited_s:.0f} s after its start" if waited_s > _START_S else None
        lost_s = _LOST_HEARTBEATS * self._recipe.slurm.heartbeat_s
        if now_s - peer.seen_at_s > lost_s:
            return f"no heartbeat for {now_s - peer.seen_at_s:.0f} s"
        if now_s - peer.active_at_s > self._recipe.slurm.hang_s:
            return f"no progress for {now_s - peer.active_at_s:.0f} s while {peer.beat.state}"
        return None

    def _ended(self, name: str, child: Child, code: int, reason: str) -> str:
        role = child.context.role
        del self.children[name]
        blocks = self._hub.forget(name)
        self._events.write("process_ended", name=name, exit_code=code, reason=reason, leases_freed=blocks)
        if code == 0 and (self._hub.is_stopping or self._hub.is_finished or role == "tracking"):
            return f"{name} ended"
        said = last_error(log_tail(self._layout.log(name, child.context.incarnation)))
        is_fenced = self._layout.incarnation(child.context.incarnation + 1).exists()
        verdict = self._policy.judge(role, code, is_fenced)
        if role == "tracking" and verdict is not Verdict.RESTART:
            return f"tracking is off for the rest of this start ({reason}): {said}"
        if self._hub.is_stopping:
            return f"{name} ended while stopping ({reason})"
        self._raise_final(verdict, name, reason, said)
        self._restart(role, child)
        return f"{name} died ({reason}); started again"

    def _restart(self, role: str, child: Child) -> None:
        if role == "trainer":
            self._kill_role("trainer")
            self._start_trainer()
        else:
            context = child.context
            threads = self._recipe.rollout.threads if role == "rollout" else 1
            self._start(role, context.index, context.count, threads)

    def _raise_final(self, verdict: Verdict, name: str, reason: str, said: str) -> None:
        log = self._layout.log(name, self._base.incarnation)
        if verdict is Verdict.STOP_INPUT:
            raise InputError(said or f"{name} refused its input; see {log}")
        if verdict is Verdict.STOP_HOPELESS:
            raise RunFailedError(said or f"{name} failed; see {log}")
        if verdict is Verdict.STOP_FENCED:
            Fence(self._layout, self._base.incarnation).check()
            raise FencedError(f"{name} was fenced")
        if verdict is Verdict.STOP_NO_PROGRESS:
            limit = self._recipe.slurm.max_restarts_without_progress
            raise RunFailedError(
                f"{name} died {limit + 1} times without a new train step; the last time: {reason}"
                + (f"\n  it said: {said}" if said else ""),
                mend=f"read {log}; mend the cause and give the same command again",
            )

    # -- ending -----------------------------------------------------------------------------------------------------

    def running(self, role: str | None = None) -> list[str]:
        return [name for name, child in self.children.items() if role in (None, child.context.role)]

    def kill_all(self) -> None:
        for role in ("trainer", "rollout", "tracking"):
            self._kill_role(role)

    def _kill_role(self, role: str) -> None:
        for name in self.running(role):
            child = self.children.pop(name)
            child.process.kill()
            self._hub.forget(name)


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def last_error(tail: str) -> str:
    """The decisive lines at the end of a log: from the last ``error:`` on, else the last line of a traceback."""
    position = max(tail.rfind("\nerror: "), 0 if tail.startswith("error: ") else -1)
    if position >= 0:
        return tail[position:].strip().removeprefix("error: ")
    lines = [line for line in tail.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
