"""Reaching a policy version: when every way to it is damaged, say so and wait until the trainer has published it again.

Owns the patience of a worker with damaged weights; never uses a version that is unproven
(:mod:`milesbatch.weights.follower`). Invariant: a worker goes on with exactly the version that it was told to use (or,
without bitwise mode, a newer one), or not at all. The page behind it is ``docs/protocol.md``, "damage while the run is
live".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from milesbatch.engines.protocol import PolicyWeights
from milesbatch.errors import CorruptArtefactError, RunFailedError, StoppedToContinue
from milesbatch.recipe.models import Recipe
from milesbatch.rollout.memory import Room
from milesbatch.rollout.receiving import Receiver
from milesbatch.rollout.staged import StagedFollower
from milesbatch.store.events import EventLog
from milesbatch.store.run import OpenRun
from milesbatch.store.sight import sight_of
from milesbatch.store.survey import Seals, read_incarnations
from milesbatch.weights.follower import Follower
from milesbatch.weights.rebuild import Copy
from milesbatch.weights.staging import Staging
from milesbatch.wire.client import Controller, Pulse

_TRIES = 5
"""How often a version may come back damaged before this worker gives up: then the fault is rather its own host's."""


def open_follower(run: OpenRun, incarnation: int, tell: Callable[[str], None], *, in_place: bool = False) -> Follower:
    """A follower of the versions that count in ``incarnation``; those that the controller names are looked for a while.

    ``in_place`` as of :class:`Follower`.

    Raises:
        CorruptArtefactError: an incarnation record is missing or damaged, so that nobody knows what counts.
    """
    sight = sight_of(run.layout.root, run.recipe.slurm.visible_wait_s, tell)
    incarnations = sight.until_seen(lambda: read_incarnations(run.layout, at_least=incarnation))
    return Follower(run.layout, accept=Seals(incarnations).accept_weights, sight=sight, in_place=in_place)


def open_staged_follower(
    run: OpenRun, incarnation: int, tell: Callable[[str], None], directory: Path, room: Room
) -> StagedFollower:
    """As :func:`open_follower`, with the copy in ``directory`` on this host instead of in memory.

    Raises:
        CorruptArtefactError: as there.
        LocalSpaceError: there was no space for it for too long.
        StorageError: the directory cannot be used.
    """
    sight = sight_of(run.layout.root, run.recipe.slurm.visible_wait_s, tell)
    incarnations = sight.until_seen(lambda: read_incarnations(run.layout, at_least=incarnation))
    accept = Seals(incarnations).accept_weights
    staging = room.until_there(lambda: Staging(directory, run.layout, accept=accept))
    return StagedFollower(staging, run.layout, accept, sight, room)


def reach_of(
    recipe: Recipe, follower: Follower | StagedFollower, controller: Controller, pulse: Pulse, events: EventLog
) -> WeightsReach:
    """The way that the recipe asks for; with broadcasts the worker is ready for them from now on."""
    is_bitwise, transport = recipe.determinism == "bitwise", recipe.weights.transport
    receiver = None
    if transport != "delta" and isinstance(follower, Follower):
        in_use = recipe.rollout.staleness + 1 if is_bitwise else 1
        receiver = Receiver(follower.layout, follower.published_manifest, controller, pulse, events, in_use)
        receiver.start()
    return WeightsReach(
        follower,
        controller,
        pulse,
        events,
        is_bitwise=is_bitwise,
        receiver=receiver,
        compares=transport == "both",
    )


class WeightsReach:
    """One worker's way to the versions that it needs."""

    def __init__(
        self,
        follower: Follower | StagedFollower,
        controller: Controller,
        pulse: Pulse,
        events: EventLog,
        *,
        is_bitwise: bool,
        receiver: Receiver | None = None,
        compares: bool = False,
    ) -> None:
        """With a ``receiver`` versions come by broadcast where they can; ``compares``: each is also built from its
        files."""
        self._receiver = receiver
        self._compares = compares
        self.source = "files"
        """Whence the last version came: ``files`` or ``broadcast``."""
        self._follower = follower
        self._controller = controller
        self._pulse = pulse
        self._events = events
        self._is_bitwise = is_bitwise

    def published_digest(self, version: int) -> str | None:
        """As :meth:`milesbatch.weights.follower.Follower.published_digest`."""
        return self._follower.published_digest(version)

    def reach(self, version: int) -> PolicyWeights:
        """Proven weights of ``version``, or of a newer one without bitwise mode.

        Raises:
            CorruptArtefactError: it was published again, and could still not be rebuilt here, several times.
            StoppedToContinue: the controller said stop while this worker waited.
            StorageError: not published, or a file cannot be read.
        """
        tries = 0
        while True:
            wanted = version if self._is_bitwise else max(version, self._pulse.published)
            try:
                return self._advance_to(wanted)
            except CorruptArtefactError as error:
                tries += 1
                if tries > _TRIES:
                    raise
                self._await_mend(wanted, error.what)

    def is_near(self, version: int) -> bool:
        """Would :meth:`reach` give ``version`` without waiting for a broadcast?"""
        return self._receiver is None or not self._receiver.is_coming(version)

    def _advance_to(self, version: int) -> PolicyWeights:
        copy = None if self._receiver is None else self._receiver.take(version)
        self.source = "files" if copy is None else "broadcast"
        if copy is None or isinstance(self._follower, StagedFollower):
            return self._follower.advance_to(version)
        if self._compares:
            _compare(copy, self._follower.advance_to(version).copy)
        return self._follower.adopt(copy)

    def _await_mend(self, version: int, what: str) -> None:
        print(f"policy version {version} is damaged, waiting for another: {what}", file=sys.stderr, flush=True)
        self._events.write("weights_unreachable", version=version, error=what)
        before, self._pulse.state = self._pulse.state, "waiting"
        pending = self._controller.unreachable(version, what)
        while pending and self._may_wait():
            pending = self._controller.unreachable(version, "")
        self._pulse.state = before

    def _may_wait(self) -> bool:
        if self._pulse.should_stop:
            raise StoppedToContinue("stopped while damaged weights were published again")
        return True


def _compare(received: Copy, built: Copy) -> None:
    """Both were proven by digests; with ``weights.transport: both`` the bits themselves are compared, too.

    Raises:
        RunFailedError: they differ; names the tensor.
    """
    for name, tensor in built.tensors.items():
        other = received.tensors[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape) or tensor.memory != other.memory:
            raise RunFailedError(
                f"policy version {built.version}: tensor {name} came otherwise by broadcast than from the files, and both have"
                " the published digest",
                mend="report it with the run directory; weights.transport: delta uses files only",
            )
