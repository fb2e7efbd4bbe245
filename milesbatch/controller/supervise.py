"""Starts the role processes, notices when one died or hangs, and starts it again or gives up. Never decides what is trained.

The trainer's ranks live and die together (one torch.distributed job); rollout workers one by one; the tracking process and the
evaluator are not needed by the run, and their deaths never stop it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from milesbatch.cluster.context import RoleContext
from milesbatch.cluster.last_words import last_error, own_error
from milesbatch.cluster.local import log_tail
from milesbatch.cluster.memory import MemoryKills, slurm_says_out_of_memory
from milesbatch.cluster.port import Launcher, RunningProcess
from milesbatch.cluster.stamps import since_last_start
from milesbatch.controller.hub import Hub
from milesbatch.controller.peers_words import PeersWords
from milesbatch.controller.stopping import StopCause, StopRequest
from milesbatch.decisions.first_cause import first_cause, may_be_symptom, what_to_try
from milesbatch.decisions.restarts import RestartPolicy, Verdict
from milesbatch.errors import FencedError, InputError, RunFailedError
from milesbatch.recipe.models import Recipe
from milesbatch.store.events import EventLog
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout

_LOST_HEARTBEATS = 7.5
"""Heartbeats that must fail to come before a process is lost: importing torch can hold a process up for some."""
_START_S = 180.0
_SETTLE_S = 1.0
"""Slurm tells of a step's end up to a second late."""


_WHAT_TO_DO = "\n  what to do: "
"""Between what a role said and how it is mended."""
_NOT_NEEDED = ("tracking", "evaluation")
"""Roles that end by themselves, and whose end never stops the run."""


@dataclass(slots=True)
class Child:
    """A started role process."""

    context: RoleContext
    process: RunningProcess
    started_at_s: float
    ended_at_s: float = 0.0
    """When it was first found to have ended, if that was not acted upon at once."""


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
        self._evaluation_policy = RestartPolicy(recipe.slurm.max_restarts_without_progress)
        """Of its own: steps of the trainer are no progress of the evaluator."""
        self._notes: list[str] = []
        self._step_at_last_look = hub.last_step
        self._attempts: dict[str, int] = {}
        self._lost_nodes: dict[str, str] = {}
        """Node -> why: what ran there is gone, or cannot be proven to be."""
        self._words = PeersWords()
        self._memory = MemoryKills()
        self.children: dict[str, Child] = {}

    # -- starting ---------------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        self._start_trainer()
        for index in range(self._recipe.rollout.workers):
            if self._launcher.has("rollout"):
                self._start("rollout", index, self._recipe.rollout.workers, self._recipe.rollout.threads)
        if self._recipe.tracking.kind != "none":
            self._start("tracking", 0, 1, 1)
        if self._recipe.evaluation is not None:
            self._start_evaluation()

    def _start_evaluation(self) -> None:
        rollout = self._recipe.rollout
        needs_gpu = rollout.engine == "sglang" and rollout.sglang.device == "cuda"  # training has them all
        if self._launcher.has("evaluation") and not needs_gpu:
            self._start("evaluation", 0, 1, rollout.threads)
        else:
            where = "on a GPU of its own" if needs_gpu else "in a job of its own"
            self._notes.append(
                f"no place for evaluation here: `milesbatch evaluate {self._layout.root} --follow` {where}"
            )

    def _start_trainer(self) -> None:
        for index in range(self._recipe.trainer.ranks):
            self._start("trainer", index, self._recipe.trainer.ranks, self._recipe.trainer.threads)

    def _start(self, role: str, index: int, count: int, threads: int) -> None:
        name = f"{role}-{index}"
        self._attempts[name] = self._attempts.get(name, 0) + 1
        context = replace(self._base, role=role, index=index, count=count, attempt=self._attempts[name])
        self._hub.started(name, context.attempt)
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
        codes = {name: child.process.exit_code() for name, child in self.children.items()}
        ended = {name: code for name, code in codes.items() if code is not None}
        for name in first_cause(ended):
            child = self.children.get(name)
            if child is None or self._may_be_explained(name, child, ended):
                continue  # the trainer's ranks end together: one of the others was the cause, or is still to show itself
            happened.append(self._ended(name, child, ended[name], describe_exit(ended[name])))
        for name in [name for name in codes if name not in ended]:
            child = self.children.get(name)
            if child is not None and (reason := self._why_lost(name, child)):
                if not child.process.kill():
                    self._lose_node(child.context, reason)
                happened.append(self._ended(name, child, -signal.SIGKILL, reason))
        notes, self._notes = self._notes, []
        beats = {name: peer.beat for name, peer in self._hub.peers.items()}
        return [*notes, *happened, *self._forget_silent_guests(), *self._words.changes(beats)]

    def _may_be_explained(self, name: str, child: Child, ended: Mapping[str, int]) -> bool:
        """Wait a moment before a rank's own error is taken for the cause, while other ranks live that may have caused it."""
        if child.context.role != "trainer" or not may_be_symptom(ended[name]):
            return False
        if all(other in ended for other in self.running("trainer")):
            return False
        child.ended_at_s = child.ended_at_s or time.monotonic()
        return time.monotonic() - child.ended_at_s < _SETTLE_S

    def look_for_stop(self) -> StopRequest | None:
        """A lost node: the rest of this job cannot make up for it, another job can."""
        if not self._lost_nodes:
            return None
        text = "; ".join(f"node {node} is lost ({why})" for node, why in self._lost_nodes.items())
        return StopRequest(StopCause.NODE_LOST, text, nodes=tuple(self._lost_nodes))

    def _lose_node(self, context: RoleContext, reason: str) -> None:
        self._lost_nodes.setdefault(self._launcher.node_of(context), f"{context.name}: {reason}")

    def _forget_silent_guests(self) -> list[str]:
        """Workers that joined from jobs of their own are not this controller's to start again: their leases are freed."""
        limit_s = _LOST_HEARTBEATS * self._recipe.slurm.heartbeat_s
        now_s = time.monotonic()
        silent = [
            name
            for name, peer in self._hub.peers.items()
            if name not in self.children and now_s - peer.seen_at_s > limit_s
        ]
        for name in silent:
            blocks = self._hub.forget(name)
            self._events.write("guest_lost", name=name, leases_freed=blocks)
        return [f"{name}, of another job, is silent; its work is handed out again" for name in silent]

    def _why_lost(self, name: str, child: Child) -> str | None:
        now_s = time.monotonic()
        peer = self._hub.peers.get(name)
        if child.context.role == "tracking":
            return None
        if peer is None or peer.beat.attempt != child.context.attempt:
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
        host = self._host_of(child)
        log = since_last_start(log_tail(self._layout.log(name, child.context.incarnation)))
        said = last_error(log)
        if code < 0 and (self._memory.have_grown() or slurm_says_out_of_memory(log)):
            reason += ", out of memory"
        if name in self._words.in_trouble and not said:
            said = self._hub.peers[name].beat.trouble  # its log is on the disk that is full
        blocks = self._hub.forget(name)
        self._events.write(
            "process_ended", name=name, exit_code=code, reason=reason, host=host, said=said, leases_freed=blocks
        )
        if code == 0 and (self._hub.is_stopping or self._hub.is_finished or role in _NOT_NEEDED):
            return f"{name} ended"
        if role == "evaluation":
            return self._evaluation_died(child, code, reason, said)
        is_fenced = self._layout.incarnation(child.context.incarnation + 1).exists()
        verdict = self._policy.judge(role, code, is_fenced)
        if role == "tracking" and verdict is not Verdict.RESTART:
            return f"tracking is off for the rest of this start ({reason}): {said}"
        if self._hub.is_stopping:
            if role == "trainer":  # the others wait for it in a collective
                self._kill_role("trainer")
            return f"{name} ended while stopping ({reason})"
        self._raise_final(verdict, name if not host else f"{name} on {host}", reason, said)
        if not self._may_restart_at(child.context, reason):
            return f"{name} died ({reason}); its node is lost"
        self._restart(role, child)
        words = said if role == "tracking" else own_error(log) if code > 0 else ""  # killed, it could not say why
        return f"{name} died ({reason}); started again" + (f": {words.splitlines()[0]}" if words else "")

    def _evaluation_died(self, child: Child, code: int, reason: str, said: str) -> str:
        """Never the end of the run; what is missing is made by the next start, or by hand."""
        name = child.context.name
        if self._hub.is_stopping:
            return f"{name} ended while stopping ({reason})"
        if self._evaluation_policy.judge(name, code) is Verdict.RESTART:
            self._restart("evaluation", child)
            return f"{name} died ({reason}); started again" + (f": {said.splitlines()[0]}" if said else "")
        self._events.write("evaluation_off", reason=reason, said=said)
        return f"evaluation is off for the rest of this start ({reason}): {said}"

    def _host_of(self, child: Child) -> str:
        """Its node as Slurm calls it, else the host that it named; empty when it was never heard of."""
        peer = self._hub.peers.get(child.context.name)
        return self._launcher.node_of(child.context) or ("" if peer is None else peer.beat.host)

    def _may_restart_at(self, context: RoleContext, reason: str) -> bool:
        """Not on a lost node; and no new trainer while a rank of the old one may still write in this incarnation."""
        if self._launcher.is_lost(context):
            self._lose_node(context, reason)
        if context.role == "trainer":
            return not self._lost_nodes
        return self._launcher.node_of(context) not in self._lost_nodes

    def _restart(self, role: str, child: Child) -> None:
        if role == "trainer":
            self._kill_role("trainer")
            if not self._lost_nodes:
                self._start_trainer()
        else:
            context = child.context
            threads = 1 if role == "tracking" else self._recipe.rollout.threads
            self._start(role, context.index, context.count, threads)

    def _raise_final(self, verdict: Verdict, name: str, reason: str, said: str) -> None:
        """``name`` says the host too, where it is known."""
        log = self._layout.log(name.split()[0], self._base.incarnation)
        if verdict is Verdict.STOP_INPUT:
            raise InputError(said or f"{name} refused its input; see {log}")
        if verdict is Verdict.STOP_HOPELESS:
            raise RunFailedError(said or f"{name} failed; see {log}")
        if verdict is Verdict.STOP_FENCED:
            Fence(self._layout, self._base.incarnation).check()
            raise FencedError(f"{name} was fenced")
        if verdict is Verdict.STOP_NO_PROGRESS:
            limit = self._recipe.slurm.max_restarts_without_progress
            words, _, own_mend = said.partition(_WHAT_TO_DO)
            raise RunFailedError(
                f"{name} died {limit + 1} times without a new train step; the last time: {reason}"
                + (f"\n  it said: {words}" if words else ""),
                mend=_mend(own_mend or what_to_try(reason, said) or "mend the cause", log),
            )

    # -- ending -----------------------------------------------------------------------------------------------------

    def running(self, role: str | None = None) -> list[str]:
        return [name for name, child in self.children.items() if role in (None, child.context.role)]

    def kill_all(self) -> None:
        self.kill_working()
        self._kill_role("tracking")

    def kill_working(self) -> None:
        """All but the tracking process, which still has figures to log."""
        self._kill_role("trainer", "rollout", "evaluation")

    def _kill_role(self, *roles: str) -> None:
        """All at once: on a cluster each end is waited for."""
        names = [name for role in roles for name in self.running(role)]
        ended = [self.children.pop(name) for name in names]
        with ThreadPoolExecutor(max_workers=max(len(ended), 1)) as pool:
            proven = list(pool.map(lambda child: child.process.kill(), ended))
        for name, child, is_proven in zip(names, ended, proven, strict=True):
            if not is_proven:
                self._lose_node(child.context, "its processes could not be ended")
            self._hub.forget(name)


def _mend(what: str, log: Path) -> str:
    """``what`` to do, and then the same command again: that is said once."""
    if "the same command" in what:
        return f"{what}; the whole story is in {log}"
    return f"{what}; read {log}; then give the same command again"


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
