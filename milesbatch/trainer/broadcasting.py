"""The trainer's side of broadcasts: who is asked, in which group, for how long; what came of it.

    version committed ─> members? ─> the group of before, or a new one ─> begin (the workers are called) ─> published is told
                                             in the background, while the next step trains: send (broadcast/rounds.py)
    before the next version is published ─> the end of it is waited for, at most ``weights.broadcast_timeout_s`` from its begin

Rank 0 only. Owns the group and what is remembered of members that failed; never the version, whose files were committed before.
Invariant: nothing that goes wrong here stops or changes training; it costs that time at most, and workers read files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from milesbatch.broadcast.attempt import Attempt
from milesbatch.broadcast.group import Group
from milesbatch.broadcast.header import Header, header_of
from milesbatch.broadcast.rounds import Sent, UnansweredError, send
from milesbatch.broadcast.standing import Standing
from milesbatch.cluster.context import RoleContext
from milesbatch.errors import BroadcastError
from milesbatch.recipe.models import Recipe
from milesbatch.records import WeightsManifest
from milesbatch.store.events import EventLog
from milesbatch.weights.tensors import RawTensor
from milesbatch.wire import messages as wire
from milesbatch.wire.client import Controller, Pulse

_GRACE_S = 2.0
"""Beyond the deadline, for a library that keeps its own times a little late."""
_LOOK_S = 1.0
_LEAVE_S = 1.0
_OPEN_S = 5.0


@dataclass(frozen=True, slots=True)
class _Members:
    """A generation of the group: its number, and its workers as ranks 1, 2, 3 …"""

    generation: int
    processes: tuple[str, ...]
    group: Group

    def named(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self.processes[rank - 1] for rank in ranks)


@dataclass(frozen=True, slots=True)
class _Round:
    """A broadcast on its way."""

    number: int
    header: Header
    members: _Members
    deadline_s: float
    attempt: Attempt[Sent]


class Broadcasting:
    """Rank 0's broadcasts, one at a time."""

    def __init__(
        self, context: RoleContext, recipe: Recipe, controller: Controller, pulse: Pulse, events: EventLog
    ) -> None:
        weights = recipe.weights
        self._address = context.address
        self._timeout_s, self._bucket_bytes = weights.broadcast_timeout_s, weights.broadcast_bucket_bytes
        behind = recipe.rollout.staleness if recipe.determinism == "bitwise" else 0
        self._last_useful = recipe.steps - 1 - behind
        """Newest version that a worker will be asked to use; later ones are only in files."""
        self._controller, self._pulse, self._events = controller, pulse, events
        self._standing = Standing()
        self._members: _Members | None = None
        self._round: _Round | None = None
        self._groups = 0

    def begin(self, manifest: WeightsManifest, tensors: Mapping[str, RawTensor]) -> None:
        """Call the workers that can take this committed version, and begin to send it; returns at once.

        ``tensors`` must stay as they are until :meth:`finish`.

        Raises:
            FencedError, StoppedToContinue: as every question to the controller.
        """
        version = manifest.version
        processes = self._willing(version)
        if not processes or set(tensors) != {entry.name for entry in manifest.tensors}:
            return
        try:
            group = self._group_of(processes)
        except BroadcastError as error:
            self._standing.failed(processes, version)  # not tried again at every version
            self._tell_failure(version, -1, 0.0, error, ())
            return
        deadline_s = time.monotonic() + self._timeout_s
        message = wire.BroadcastBegin(
            version=version,
            processes=processes,
            generation=-1 if self._members is None else self._members.generation,
            store=f"{self._address}:{group.port}",
            within_s=self._timeout_s,
        )
        begun = self._controller.ask("broadcast-begin", message, wire.BroadcastBegun)
        if self._members is None:
            self._members = _Members(begun.generation, processes, group)
            self._groups += 1
            self._events.write("broadcast_group", generation=begun.generation, members=list(processes))
        header = header_of(manifest, self._bucket_bytes)

        def work() -> Sent:
            confirmed: tuple[str, ...] = ()
            try:
                sent = send(group, begun.round, header, tensors, deadline_s)
                confirmed = tuple(processes[rank - 1] for rank in sent.confirmed)
                return sent
            finally:
                self._controller.tell("broadcast-end", wire.BroadcastEnd(round=begun.round, confirmed=confirmed))

        attempt = Attempt(f"the broadcast of policy version {version}", work)
        self._round = _Round(begun.round, header, self._members, deadline_s, attempt)

    def finish(self) -> dict[str, float]:
        """Wait for the end of the last broadcast; its figures, empty when there was none, or when it failed.

        Raises:
            FencedError, StoppedToContinue: as every question to the controller.
        """
        current, self._round = self._round, None
        if current is None:
            return {}
        waits_since_s = time.monotonic()
        while not current.attempt.is_over and time.monotonic() < current.deadline_s + _GRACE_S:
            self._pulse.moved()  # not a hang: it has an end
            current.attempt.wait(min(_LOOK_S, current.deadline_s + _GRACE_S - time.monotonic()))
        waited_s = time.monotonic() - waits_since_s
        try:
            sent = current.attempt.result(time.monotonic())
        except BroadcastError as error:
            self._failed(current, error)
            return {"broadcast_wait_s": waited_s, "broadcast_receivers": 0.0}
        return {**self._sent(current, sent), "broadcast_wait_s": waited_s}

    def close(self) -> None:
        """No more broadcasts; one that is under way is given up, for nobody will use it."""
        self._round = None
        self._leave()

    # -- members ----------------------------------------------------------------------------------------------------

    def _willing(self, version: int) -> tuple[str, ...]:
        if version > self._last_useful:
            return ()
        ready = self._controller.ask(
            "broadcast-members", wire.BroadcastMembersRequest(version=version), wire.BroadcastMembers
        )
        return tuple(process for process in ready.processes if self._standing.may_get(process, version))

    def _group_of(self, processes: tuple[str, ...]) -> Group:
        """The group of before when it has the same members, else a new one."""
        if self._members is not None and self._members.processes == processes:
            return self._members.group
        self._leave()
        opening = Attempt("opening a store", lambda: Group.found(self._address, 1 + len(processes), self._timeout_s))
        return opening.result(time.monotonic() + _OPEN_S)

    def _leave(self) -> None:
        members, self._members = self._members, None
        if members is not None:
            # It may wait for a collective that hangs; its memory is the price of that.
            leaving = Attempt("leaving a broadcast group", members.group.leave)
            del members
            leaving.wait(_LEAVE_S)

    # -- what came of it --------------------------------------------------------------------------------------------

    def _sent(self, current: _Round, sent: Sent) -> dict[str, float]:
        seconds = current.attempt.seconds
        self._standing.succeeded(current.members.named(sent.confirmed))
        refused = {current.members.processes[rank - 1]: why for rank, why in sent.refused.items()}
        self._standing.failed(refused, current.header.version)
        self._events.write(
            "weights_broadcast",
            version=current.header.version,
            generation=current.members.generation,
            seconds=round(seconds, 4),
            bytes=current.header.num_bytes,
            receivers=len(sent.confirmed),
            refused=refused,
        )
        return {
            "broadcast_s": seconds,
            "broadcast_bytes": float(current.header.num_bytes),
            "broadcast_receivers": float(len(sent.confirmed)),
            "broadcast_groups": float(self._groups),
        }

    def _failed(self, current: _Round, error: BroadcastError) -> None:
        missing = current.members.named(error.ranks) if isinstance(error, UnansweredError) else ()
        self._standing.failed(missing, current.header.version)
        self._tell_failure(current.header.version, current.members.generation, current.attempt.seconds, error, missing)
        self._leave()

    def _tell_failure(
        self, version: int, generation: int, seconds: float, error: BroadcastError, missing: tuple[str, ...]
    ) -> None:
        who = f" ({', '.join(missing)})" if missing else ""
        text = f"policy version {version} was not broadcast: {error.what}{who}; workers read it from files"
        print(text, file=sys.stderr, flush=True)
        self._events.write(
            "broadcast_failed",
            version=version,
            generation=generation,
            seconds=round(seconds, 4),
            error=error.what,
            missing=list(missing),
        )
