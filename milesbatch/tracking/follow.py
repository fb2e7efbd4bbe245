"""Follows the trainer's event logs and hands each step to a tracker once. The logs are the buffer: nothing is lost when
the tracker was away, and steps that were logged before (by an earlier incarnation, or before a replay) are passed over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, Protocol

from milesbatch.cluster.context import RoleContext, mlflow_uri
from milesbatch.store.durable import make_directory
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import open_run

_POLL_S = 0.5


class Tracker(Protocol):
    """Where curves go."""

    def last_step(self) -> int:
        """Newest step that was logged, by any incarnation; 0 for none."""

    def log_step(self, step: int, at: str, metrics: dict[str, float]) -> None: ...

    def close(self, status: str) -> None:
        """``finished``, ``failed`` or ``stopped`` (to be continued)."""


def main(context: RoleContext) -> None:
    """Track one incarnation, until the controller's log says that it ended."""
    layout = RunLayout(context.run_directory)
    run = open_run(layout, context.incarnation)
    from milesbatch.tracking.mlflow_tracker import MlflowTracker

    tracker = MlflowTracker(run, context.incarnation, mlflow_uri(default_uri(layout)))
    follow(layout, context.incarnation, tracker)


def default_uri(layout: RunLayout) -> str:
    """The SQLite database beside the run.

    Named relative to the working directory, which this process changes: in a URI, a ``%``, ``?`` or ``#`` of the run's own
    name would mean something else.
    """
    make_directory(layout.tracking)
    os.chdir(layout.tracking)
    return "sqlite:///mlflow.db"


def follow(layout: RunLayout, incarnation: int, tracker: Tracker) -> None:
    """Log every step up to the end of ``incarnation``."""
    logged = tracker.last_step()
    trainer = _Tail(layout, [("trainer-0", number) for number in range(1, incarnation + 1)])
    controller = _Tail(layout, [("controller-0", incarnation)])
    ending: str | None = None
    while True:
        # The end is looked for first: what the trainer wrote before it is then read below.
        for event in controller.new():
            if event["event"] in ("finished", "stopped", "failed"):
                ending = event["event"]
        for event in trainer.new():
            if event["event"] == "train_step" and event["step"] > logged:
                tracker.log_step(event["step"], event["at"], event["metrics"])
                logged = event["step"]
        if ending is not None:
            tracker.close(ending)
            return
        time.sleep(_POLL_S)


class _Tail:
    """New events of several logs, each read once."""

    def __init__(self, layout: RunLayout, logs: list[tuple[str, int]]) -> None:
        self._offsets = {layout.event_log(process, incarnation): 0 for process, incarnation in logs}

    def new(self) -> Iterator[dict[str, Any]]:
        for path in list(self._offsets):
            for event, offset in read_events(path, self._offsets[path]):
                self._offsets[path] = offset
                yield event
