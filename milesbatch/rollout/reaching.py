"""Reaching a policy version: when every way to it is damaged, say so and wait until the trainer has published it again.

Owns the patience of a worker with damaged weights; never uses a version that is unproven (:mod:`milesbatch.weights.follower`).
Invariant: a worker goes on with exactly the version that it was told to use (or, without bitwise mode, a newer one), or
not at all. The page behind it is ``docs/protocol.md``, "damage while the run is live".
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from milesbatch.errors import CorruptArtefactError, StoppedToContinue
from milesbatch.store.events import EventLog
from milesbatch.store.run import OpenRun
from milesbatch.store.sight import sight_of
from milesbatch.store.survey import Seals, read_incarnations
from milesbatch.weights.follower import Follower, VerifiedWeights
from milesbatch.wire.client import Controller, Pulse

_TRIES = 5
"""How often a version may come back damaged before this worker gives up: then the fault is rather its own host's."""


def open_follower(run: OpenRun, incarnation: int, tell: Callable[[str], None]) -> Follower:
    """A follower of the versions that count in ``incarnation``; those that the controller names are looked for a while.

    Raises:
        CorruptArtefactError: an incarnation record is missing or damaged, so that nobody knows what counts.
    """
    sight = sight_of(run.layout.root, run.recipe.slurm.visible_wait_s, tell)
    incarnations = sight.until_seen(lambda: read_incarnations(run.layout, at_least=incarnation))
    return Follower(run.layout, accept=Seals(incarnations).accept_weights, sight=sight)


class WeightsReach:
    """One worker's way to the versions that it needs."""

    def __init__(
        self, follower: Follower, controller: Controller, pulse: Pulse, events: EventLog, *, is_bitwise: bool
    ) -> None:
        self._follower = follower
        self._controller = controller
        self._pulse = pulse
        self._events = events
        self._is_bitwise = is_bitwise

    def published_digest(self, version: int) -> str | None:
        """As :meth:`milesbatch.weights.follower.Follower.published_digest`."""
        return self._follower.published_digest(version)

    def reach(self, version: int) -> VerifiedWeights:
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
                return self._follower.advance_to(wanted)
            except CorruptArtefactError as error:
                tries += 1
                if tries > _TRIES:
                    raise
                self._await_mend(wanted, error.what)

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
