"""What a trainer rank tells: the controller, the event log, its own log. Nothing here decides anything.

Also called from the thread that publishes: a message is one call, an event one write.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from milesbatch.records import BatchRecord
from milesbatch.store.events import EventLog
from milesbatch.wire import messages as wire
from milesbatch.wire.client import Controller, Pulse


@dataclass(frozen=True, slots=True)
class Telling:
    """Of one rank; what concerns the whole group is called on rank 0."""

    controller: Controller
    pulse: Pulse
    events: EventLog

    def recorded(self, record: BatchRecord) -> None:
        ids = tuple(g.group_id for g in record.trained) + tuple(r.group_id for r in record.rejected)
        self.controller.tell("recorded", wire.Recorded(step=record.step, group_ids=ids))

    def published(self, version: int) -> None:
        self.controller.tell("published", wire.Published(version=version))

    def step(self, step: int, is_replay: bool, weights_digest: str, figures: dict[str, float]) -> None:
        figures = {name: round(float(value), 7) for name, value in figures.items()}
        self.events.write("train_step", step=step, replayed=is_replay, weights_digest=weights_digest, metrics=figures)
        self.controller.tell("step", wire.StepDone(step=step, replayed=is_replay, metrics=figures))

    def full(self, text: str) -> None:
        """A disk is full."""
        self.pulse.waits_for_space(text)
        print(text, file=sys.stderr, flush=True)
        self.events.write("waiting_for_space", error=text)

    def unusual(self, version: int, text: str) -> None:
        """Of the weights of a version."""
        print(f"policy version {version}: {text}", file=sys.stderr, flush=True)
        self.events.write("weights_unusual", version=version, text=text)

    def unseen(self, text: str) -> None:
        """A file that must be there is looked for."""
        self.pulse.moved()
        print(text, file=sys.stderr, flush=True)
