"""What the controller knows while it runs: leases, finished groups, heartbeats. Memory only; it holds no truth.

All of it can be rebuilt from the run directory (:meth:`Hub.restore`), and every message may be repeated: a trainer that was
restarted tells again what it recorded and published. Everything here runs in the controller's one event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from milesbatch.controller.broadcasts import Broadcasts
from milesbatch.controller.change import Change
from milesbatch.controller.regeneration import Regeneration
from milesbatch.decisions.batching import BatchRule, choose_batch, missing_groups
from milesbatch.decisions.fates import FateTable
from milesbatch.decisions.leases import CommitAnswer, LeaseTable
from milesbatch.decisions.origin import BEGINNING, Origin
from milesbatch.recipe.models import Recipe
from milesbatch.records import GroupRef
from milesbatch.store.layout import TrajectoryName
from milesbatch.wire import messages as wire

_STOP_MARGIN_S = 10.0


@dataclass(slots=True)
class Peer:
    """A role process as its heartbeats show it."""

    beat: wire.Heartbeat
    seen_at_s: float
    active_at_s: float


@dataclass(slots=True)
class Failures:
    """The last episodes, to stop when too many of them fail."""

    window: deque[bool]
    first_error: str = ""

    def share(self) -> float:
        return sum(self.window) / len(self.window) if self.window else 0.0


@dataclass(slots=True)
class Throughput:
    """Tokens committed lately: (when, tokens)."""

    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=32))

    def tokens_per_s(self, now_s: float) -> float:
        if not self.recent:
            return 0.0
        span = max(now_s - self.recent[0][0], 1e-3)
        return sum(tokens for _, tokens in self.recent) / span


class Hub:
    """Answers the roles' questions. Methods named after the messages of :mod:`milesbatch.wire.messages`."""

    def __init__(self, recipe: Recipe, origin: Origin = BEGINNING) -> None:
        """``origin`` is where the run begins: a fork does not begin with the first group."""
        self._recipe, self._origin = recipe, origin
        self.rule = BatchRule(
            recipe.trainer.groups_per_step, recipe.rollout.staleness, recipe.determinism == "bitwise", origin
        )
        size = recipe.rollout.groups_per_lease
        self._leases = LeaseTable(size, origin.first_group // size)
        self.ready: dict[int, GroupRef] = {}
        self._decided: set[int] = set()
        self._regeneration = Regeneration()
        self._saved: dict[int, list[str]] = {}
        """Block -> files of its unfinished episodes, as found at the take-over."""
        self._accepted: dict[int, set[str]] = {}
        """Block -> the file that its accepted commit named."""
        self.last_step = 0
        self.published = -1
        self.unreachable: dict[int, str] = {}
        """Published versions that a worker could not rebuild, and what it found, until they are published again."""
        self.peers: dict[str, Peer] = {}
        self._attempts: dict[str, int] = {}
        self._losses: dict[str, int] = {}
        """How often a process of that name was given up: what it was waiting for then is not for the next one."""
        self._unheard: set[str] = set()
        """Processes that were started and have sent no heartbeat yet."""
        self.failures = Failures(deque(maxlen=recipe.environment.failed_window))
        self.throughput = Throughput()
        self.save_s = 0.0
        """What the last checkpoint took, from its beginning to its commit."""
        self.step_s = 0.0
        """What the last train step took, without waiting for rollouts."""
        self.is_stopping = False
        self._told_to_stop: set[str] = set()
        self.warnings = 0
        """How many heartbeats said that their process was warned of its end."""
        self.is_finished = False
        self._rendezvous: tuple[int, str] | None = None
        self.broadcasts = Broadcasts()
        self._change = Change()

    # -- state from disk --------------------------------------------------------------------------------------------

    def restore(
        self,
        fates: FateTable,
        ready: Iterable[GroupRef],
        last_version: int,
        unfinished: Iterable[TrajectoryName] = (),
    ) -> None:
        """Take in what a take-over accepted. Published versions stay in use while the trainer is still loading."""
        self.published = last_version
        self._decided = {*fates.fates, *self._origin.decided}
        self.last_step = fates.last_step
        self.ready = {group.group_id: group for group in ready if group.group_id not in self._decided}
        size = self._leases.block_size
        done = {self._leases.block_of(group_id) for group_id in (*self._decided, *self.ready)}
        have = self._decided | set(self.ready)
        first = self._origin.first_group  # it may lie inside a block, whose other groups are to be made
        self._leases.mark_done(b for b in done if all(g < first or g in have for g in range(b * size, (b + 1) * size)))
        for name in () if self.rule.bitwise else unfinished:
            block = self._leases.block_of(name.first_group)
            if self._leases.groups(block) == range(name.first_group, name.last_group + 1):
                self._saved.setdefault(block, []).append(str(name))

    # -- heartbeats -------------------------------------------------------------------------------------------------

    def started(self, name: str, attempt: int) -> None:
        """From now on only this start of ``name`` is heard; one that was given up may still run on a node that is lost."""
        self._attempts[name] = attempt
        self._unheard.add(name)

    def is_current(self, process: str) -> bool:
        """May ``NAME.ATTEMPT`` speak? Processes that this controller did not start (workers that joined) may."""
        name, _, attempt = process.rpartition(".")
        return attempt == str(self._attempts.get(name, attempt))

    def heartbeat(self, beat: wire.Heartbeat) -> wire.HeartbeatAnswer:
        now_s = time.monotonic()
        peer = self.peers.get(beat.name)
        self.warnings += beat.warned
        moved = peer is None or peer.beat.attempt != beat.attempt or peer.beat.activity != beat.activity
        waits = beat.state in ("waiting", "starting")
        active_at_s = now_s if peer is None or moved or waits else peer.active_at_s
        self.peers[beat.name] = Peer(beat, now_s, active_at_s)
        self._unheard.discard(beat.name)
        if self.is_stopping:
            self._told_to_stop.add(beat.name)
        return wire.HeartbeatAnswer(stop=self.is_stopping, published=self.published)

    def forget(self, name: str) -> list[int]:
        """A process is gone: its leases are handed out again; returns the blocks."""
        self.peers.pop(name, None)
        self._unheard.discard(name)
        self._losses[name] = self._losses.get(name, 0) + 1
        blocks = self._leases.end_worker(name)
        self._regeneration.end_worker(name)
        self.broadcasts.forget(name)
        self._wake()
        return blocks

    # -- rollout ----------------------------------------------------------------------------------------------------

    async def lease(self, request: wire.LeaseRequest) -> wire.LeaseAnswer:
        deadline_s = time.monotonic() + request.wait_s
        losses = self._losses.get(request.name, 0)
        if (peer := self.peers.get(request.name)) is not None and request.policy_version >= 0:
            peer.beat = peer.beat.model_copy(update={"policy_version": request.policy_version})
        while True:
            if self._losses.get(request.name, 0) != losses:
                return wire.LeaseAnswer()  # who asked is gone; a block would be lost with the answer
            answer = self._lease_now(request)
            if answer.stop:
                self._told_to_stop.add(request.name)
            if answer.stop or answer.groups or not await self._wait_for_change(deadline_s):
                return answer

    def _lease_now(self, request: wire.LeaseRequest) -> wire.LeaseAnswer:
        if self.is_stopping or self.is_finished:
            return wire.LeaseAnswer(stop=True, is_over=self.is_finished)
        now_s = time.monotonic()
        self._leases.expire(now_s)
        lost = [block for block in self._leases.held_by(request.name) if block not in request.holding]
        if lost:
            block = lost[0]  # its reply was lost on the way
        elif (again := self._regeneration.take(request.name, request.holding)) is not None:
            block = again
        else:
            duration_s = self._recipe.rollout.lease_s
            lease = self._leases.take(request.name, now_s, duration_s, self._may_start, self._end_block())
            if lease is None:
                return wire.LeaseAnswer()
            block = lease.block
        groups = tuple(self._leases.groups(block))
        version = self.rule.version_for(groups[0]) if self.rule.bitwise else self.published
        saved = tuple(self._saved.get(block, ()))
        return wire.LeaseAnswer(block=block, groups=groups, version=version, step=self.last_step + 1, saved=saved)

    def _may_start(self, block: int) -> bool:
        waiting = self._leases.num_leased_groups + self._num_fresh()
        return self.rule.may_start(
            self._leases.groups(block)[0],
            published=self.published,
            steps_left=self._recipe.steps - self.last_step,
            waiting=waiting,
        )

    def _num_fresh(self) -> int:
        """Finished groups that the next step may train on."""
        return sum(not self.rule.is_stale(group, self.last_step + 1) for group in self.ready.values())

    def _end_block(self) -> int | None:
        if not self.rule.bitwise:
            return None
        return self.rule.groups_of_step(self._recipe.steps).stop // self._leases.block_size

    def commit(self, request: wire.CommitRequest) -> wire.CommitReply:
        if self._regeneration.commit(request.block, request.groups):
            self._wake()
            return wire.CommitReply(accepted=True)
        paths = {group.path for group in request.groups}
        if self._leases.commit(request.block) is CommitAnswer.DUPLICATE:
            # The accepted commit may be told again (its reply was lost), and by then its groups may be in a batch record:
            # refusing it would quarantine a file that training needs.
            return wire.CommitReply(accepted=self._accepted.get(request.block) == paths)
        self._accepted[request.block] = paths
        self._saved.pop(request.block, None)
        for group in request.groups:
            if group.group_id not in self._decided and not self._origin.has_decided(group.group_id):
                self.ready[group.group_id] = group
        self.throughput.recent.append((time.monotonic(), request.response_tokens))
        self.failures.window.extend([True] * len(request.errors) + [False] * (request.episodes - len(request.errors)))
        if request.errors and not self.failures.first_error:
            self.failures.first_error = request.errors[0]
        self._wake()
        return wire.CommitReply(accepted=True)

    # -- trainer ----------------------------------------------------------------------------------------------------

    async def batch(self, request: wire.BatchRequest) -> wire.BatchAnswer:
        deadline_s = time.monotonic() + request.wait_s
        while True:
            if self.is_stopping:
                return wire.BatchAnswer(ready=False, stop=True)
            choice = choose_batch(self.rule, request.step, self.ready)
            unreachable = tuple(sorted(self.unreachable))
            if choice is not None:
                return wire.BatchAnswer(
                    ready=True, trained=choice.trained, rejected=choice.rejected, unreachable=unreachable
                )
            if unreachable or not await self._wait_for_change(deadline_s):
                missing = len(missing_groups(self.rule, request.step, self.ready))
                return wire.BatchAnswer(ready=False, missing=missing, unreachable=unreachable)

    async def regenerate(self, request: wire.RegenerateRequest) -> wire.RegenerateAnswer:
        """Have blocks that were trained on before generated again, each once; the answer comes when they are there."""
        if self._regeneration.found(request.groups) is None:
            self._regeneration.want({self._leases.block_of(group_id) for group_id in request.groups})
            self._wake()
        deadline_s = time.monotonic() + request.wait_s
        while True:
            found = self._regeneration.found(request.groups)
            if found is not None:
                return wire.RegenerateAnswer(groups=found)
            unreachable = tuple(sorted(self.unreachable))
            if unreachable or not await self._wait_for_change(deadline_s):
                return wire.RegenerateAnswer(groups=(), unreachable=unreachable)

    def recorded(self, message: wire.Recorded) -> None:
        self.last_step = max(self.last_step, message.step)
        self._decided.update(message.group_ids)
        for group_id in message.group_ids:
            self.ready.pop(group_id, None)
        self._wake()

    def publish(self, message: wire.Published) -> None:
        self.published = max(self.published, message.version)
        self.unreachable.pop(message.version, None)
        if not self.rule.bitwise:  # nobody needs an older one once there is a newer one
            self.unreachable = {v: what for v, what in self.unreachable.items() if v > message.version}
        self._wake()

    async def report_unreachable(self, message: wire.Unreachable) -> wire.UnreachableAnswer:
        """A worker cannot rebuild a version; answered when the trainer has published it again."""
        if message.what:
            self.unreachable[message.version] = message.what
            self._wake()
        deadline_s = time.monotonic() + message.wait_s
        while message.version in self.unreachable:
            if not await self._wait_for_change(deadline_s):
                return wire.UnreachableAnswer(pending=True)
        return wire.UnreachableAnswer(pending=False)

    def oldest_held(self) -> int | None:
        """Smallest policy version that a live worker holds or goes on from; None while it cannot be known.

        That is while a worker was started and has not been heard of, or has not come to its first lease. One that waits and
        has no version yet holds none: it will begin with the version that its first lease names.
        """
        beats = [peer.beat for name, peer in self.peers.items() if name.startswith("rollout-")]
        is_starting = any(beat.policy_version < 0 and beat.state != "waiting" for beat in beats)
        if is_starting or any(name.startswith("rollout-") for name in self._unheard):
            return None
        return min([self.published, *(beat.policy_version for beat in beats if beat.policy_version >= 0)])

    def to_publish_again(self) -> wire.UnreachableVersions:
        versions = tuple(sorted(self.unreachable))
        return wire.UnreachableVersions(versions=versions, recorded=self.last_step, published=self.published)

    def broadcast_members(self, request: wire.BroadcastMembersRequest) -> wire.BroadcastMembers:
        """Who can take a version by broadcast. One that was published before is in use, or will be read from its files."""
        if request.version <= self.published or self.is_stopping:
            return wire.BroadcastMembers(processes=())
        return self.broadcasts.members()

    def finish(self) -> None:
        self.is_finished = True
        self._wake()

    def stop(self) -> None:
        """Hand out nothing more; every role is told with its next heartbeat or answer."""
        self.is_stopping = True
        self._wake()

    def workers_to_tell(self) -> list[str]:
        """Rollout workers, those of other jobs included, that have not heard of the stop yet, so that nothing is saved."""
        return [name for name in self.peers if name.startswith("rollout-") and name not in self._told_to_stop]

    def time_to_stop_s(self) -> float:
        """What it takes from the order to stop until everything is saved, as measured in this incarnation, with a margin."""
        return _STOP_MARGIN_S + 2 * (self.step_s + self.save_s)

    async def rendezvous(self, message: wire.Rendezvous) -> wire.RendezvousAnswer:
        if message.address is not None:
            self._rendezvous = (message.attempt, message.address)
            self._wake()
            return wire.RendezvousAnswer(address=message.address)
        deadline_s = time.monotonic() + message.wait_s
        while True:
            if self._rendezvous is not None and self._rendezvous[0] == message.attempt:
                return wire.RendezvousAnswer(address=self._rendezvous[1])
            if not await self._wait_for_change(deadline_s):
                return wire.RendezvousAnswer(address=None)

    # -- for people -------------------------------------------------------------------------------------------------

    def status(self) -> wire.StatusAnswer:
        now_s = time.monotonic()
        workers = tuple(
            {
                "name": name,
                "host": peer.beat.host,
                "state": peer.beat.state,
                "policy_version": peer.beat.policy_version,
                "samples_in_flight": peer.beat.samples_in_flight,
                "servers": peer.beat.servers,
                "leases": (leases := len(self._leases.held_by(name))),
                "groups_in_flight": leases * self._leases.block_size,
            }
            for name, peer in sorted(self.peers.items())
            if name.startswith("rollout-")
        )
        return wire.StatusAnswer(
            state="finished" if self.is_finished else "draining" if self.is_stopping else "running",
            workers=workers,
            waiting_for=self.waiting_for(),
            ready_groups=len(self.ready),
            stale_groups=len(self.ready) - self._num_fresh(),
            leased_groups=self._leases.num_leased_groups,
            leases=self._leases.num_leases,
            tokens_per_s=round(self.throughput.tokens_per_s(now_s), 1),
        )

    def waiting_for(self) -> str:
        """What the next train step waits for, in words."""
        for name, peer in sorted(self.peers.items()):
            if peer.beat.trouble:
                return f"{name}: {peer.beat.trouble}"
        trainers = [peer.beat.state for name, peer in sorted(self.peers.items()) if name.startswith("trainer-")]
        if not trainers:
            return "the trainer to start"
        if trainers[0] != "waiting":
            return f"the trainer ({trainers[0]})"
        workers = [peer.beat for name, peer in sorted(self.peers.items()) if name.startswith("rollout-")]
        busy = sum(beat.samples_in_flight for beat in workers)
        needed = len(missing_groups(self.rule, self.last_step + 1, self.ready))
        servers = [beat.servers for beat in workers if beat.servers]
        return "; ".join([f"rollout: {needed} groups to come, {busy} samples in flight", *servers])

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Everybody who waits looks again."""
        self._change.tell()

    async def _wait_for_change(self, deadline_s: float) -> bool:
        """False when the deadline passed first."""
        return await self._change.wait(deadline_s)
