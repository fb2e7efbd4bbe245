"""The worker's side of broadcasts: be ready, take part, keep what is proven until the engine wants it.

    thread of its own:  poll ─> call ─> receive (broadcast/rounds.py) ─> prove against the published manifest ─> keep ─> confirm
    the worker's loop:  take(version) ─> waits while it is on its way, at most until the round's end ─> or None: files

Owns versions that were received and are not in use yet. Invariant: what is kept is whole, and every tensor has the digest that
the committed manifest states; what came and is not that is dropped. So nothing half-received can ever be activated.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from milesbatch.broadcast.attempt import Attempt
from milesbatch.broadcast.group import Group
from milesbatch.broadcast.header import Header, tensors_in
from milesbatch.broadcast.rounds import confirm, receive
from milesbatch.errors import BroadcastError, CorruptArtefactError, FencedError, StoppedToContinue, StorageError
from milesbatch.faults.points import point
from milesbatch.records import WeightsManifest
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.weights.rebuild import Copy, check_tensors
from milesbatch.weights.tensors import Bytes
from milesbatch.wire import messages as wire
from milesbatch.wire.client import Controller, Pulse

_GRACE_S = 2.0
_LOOK_S = 0.5
_MOST_KEPT = 8


class Receiver:
    """One worker's part in broadcasts."""

    def __init__(
        self,
        layout: RunLayout,
        manifest_of: Callable[[int], WeightsManifest],
        controller: Controller,
        pulse: Pulse,
        events: EventLog,
        keep: int,
    ) -> None:
        """``manifest_of`` gives the committed manifest of a version that was published; ``keep`` is how many versions may be in
        use at a time: so many that were received wait for the engine, the newest ones."""
        self._layout, self._manifest_of = layout, manifest_of
        self._controller, self._pulse, self._events = controller, pulse, events
        self._keep = min(max(keep, 1), _MOST_KEPT)
        self._group: tuple[int, Group] | None = None
        self._changed = threading.Condition()
        self._kept: dict[int, Copy] = {}
        self._last_round = -1
        self._expected: tuple[int, int, float] | None = None
        """A version, the round that brings it, and when that must be over (monotonic)."""
        self._thread = threading.Thread(target=self._run, name="broadcasts", daemon=True)

    def start(self) -> None:
        """Begin to be ready."""
        self._thread.start()

    # -- the worker's loop ------------------------------------------------------------------------------------------

    def is_coming(self, version: int) -> bool:
        """Is it on its way, and not here yet? Asks the controller, until that says yes; waits for nothing."""
        if self._expected is None or self._expected[0] != version:
            answer = self._controller.is_coming(version)
            self._expected = (version, answer.round, time.monotonic() + answer.within_s) if answer.round >= 0 else None
        with self._changed:
            if self._expected is None or version in self._kept:
                return False
            _, number, deadline_s = self._expected
            return number > self._last_round and time.monotonic() < deadline_s

    def take(self, version: int) -> Copy | None:
        """The proven version, and it is the caller's from now on; older ones are dropped. None: read it from the files.

        Waits while it is on its way, until that has ended, well or not, or until this process is told to stop.
        """
        with self._changed:
            is_here = version in self._kept
        if not is_here:
            answer = self._controller.is_coming(version)
            if answer.round >= 0:
                self._await(version, answer.round, time.monotonic() + answer.within_s + _GRACE_S)
        with self._changed:
            copy = self._kept.get(version)
            self._kept = {number: kept for number, kept in self._kept.items() if number > version}
        return copy

    def _await(self, version: int, number: int, deadline_s: float) -> None:
        with self._changed:
            while version not in self._kept and self._last_round < number and not self._pulse.should_stop:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return
                self._pulse.moved()  # not a hang: it has an end
                self._changed.wait(min(left_s, _LOOK_S))

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                call = self._controller.next_broadcast(self._last_round)
                if call.round >= 0:
                    self._take_part(call)
        except (FencedError, StoppedToContinue) as error:  # the heartbeats find the same, and end the process
            print(f"no more broadcasts: {error.what}", file=sys.stderr, flush=True)

    def _take_part(self, call: wire.BroadcastCall) -> None:
        """One round; whatever it leads to, the next one can follow."""
        began_s = time.monotonic()
        deadline_s = began_s + call.within_s
        attempt = Attempt(f"receiving policy version {call.version}", lambda: self._receive(call, deadline_s))
        try:
            self._group = call.generation, attempt.result(deadline_s + _GRACE_S)
        except (BroadcastError, CorruptArtefactError, StorageError) as error:
            self._group = None
            self._events.write(
                "broadcast_lost",
                version=call.version,
                generation=call.generation,
                seconds=round(time.monotonic() - began_s, 4),
                error=error.what,
            )
            print(f"policy version {call.version} is read from files: {error.what}", file=sys.stderr, flush=True)
        with self._changed:
            self._last_round = call.round
            self._changed.notify_all()

    def _receive(self, call: wire.BroadcastCall, deadline_s: float) -> Group:
        """In a thread that may be given up: it leaves the group itself when it fails."""
        before, group = self._group, None
        try:
            if before is not None and before[0] == call.generation:
                group = before[1]
            else:
                if before is not None:
                    before[1].leave()
                group = Group.enter(call.store, call.rank, call.size, deadline_s)
            self._receive_over(group, call.round, deadline_s)
        except (BroadcastError, CorruptArtefactError, StorageError):
            if group is not None:
                group.leave()
            raise
        return group

    def _receive_over(self, group: Group, number: int, deadline_s: float) -> None:
        header, stream = receive(group, number, deadline_s)
        try:
            copy = prove(self._layout, self._manifest_of(header.version), header, stream)
        except (CorruptArtefactError, StorageError) as error:
            confirm(group, number, error.what)
            raise
        self._keep_it(copy)
        point("broadcast.received")
        confirm(group, number)

    def _keep_it(self, copy: Copy) -> None:
        with self._changed:
            self._kept[copy.version] = copy
            for version in sorted(self._kept)[: -self._keep]:
                del self._kept[version]
            self._changed.notify_all()


def prove(layout: RunLayout, manifest: WeightsManifest, header: Header, stream: Bytes) -> Copy:
    """What came, as a copy that may be used: every tensor was compared with the committed ``manifest``.

    Raises:
        CorruptArtefactError: it is not what was published.
    """
    if header.weights_digest != manifest.weights_digest:
        raise CorruptArtefactError(
            f"policy version {manifest.version} was broadcast with weights digest {header.weights_digest}, and published with"
            f" {manifest.weights_digest}",
            mend="nothing: it is read from its files",
        )
    tensors = tensors_in(header, stream)
    try:
        check_tensors(layout, manifest, tensors)
    except CorruptArtefactError as error:
        raise CorruptArtefactError(f"it was not broadcast as it was published: {error.what}") from error
    return Copy(manifest, tensors)
