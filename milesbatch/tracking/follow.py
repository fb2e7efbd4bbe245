"""Follows the trainer's event logs and hands each step to a tracker once. The logs are the buffer: nothing is lost when
the tracker was away, and steps that were logged before (by an earlier incarnation, or before a replay) are passed over.
Evaluations on the recipe's own prompts are handed over too, each once, from their records, whoever made them.

A tracker that has worked and then fails (a server that is down, a disk that is full) is opened again after a pause, for as long
as the run goes on and a little longer; training hears nothing of it. One that never worked ends this process, so that the
cause is said at once. What could not be logged is logged by the next start.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from milesbatch.cluster.context import RoleContext, mlflow_uri
from milesbatch.errors import StorageError
from milesbatch.store.durable import make_directory
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import OpenRun, open_run
from milesbatch.tracking.evaluations import EvaluationEntry, EvaluationWatch
from milesbatch.tracking.last_report import attach_report, wants_report
from milesbatch.tracking.lineage import lineage_of
from milesbatch.tracking.machine import machine_figures

_POLL_S = 0.5
_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 60.0
_LAST_TRIES_S = 20.0
"""How long after the end of the incarnation a tracker that fails is tried again; the controller waits longer."""


class Tracker(Protocol):
    """Where curves go. Every method may raise ``StorageError``; the same call may then be made to a new tracker."""

    def last_step(self) -> int:
        """Newest step that was logged, by any incarnation; 0 for none. Steps after it may be logged in part."""

    def log_step(self, step: int, at: str, metrics: dict[str, float]) -> None: ...

    def evaluated(self) -> frozenset[int]:
        """Policy versions whose evaluation was logged, by any incarnation."""

    def log_evaluation(self, entry: EvaluationEntry) -> None:
        """Log the metrics at the step that made the version, and the table as an artefact where the tracker has such."""

    def close(self, status: str) -> None:
        """``finished``, ``failed`` or ``stopped`` (to be continued)."""


def main(context: RoleContext) -> None:
    """Track one incarnation, until the controller's log says that it ended.

    Raises:
        StorageError: the tracker could not be used up to the end.
    """
    layout = RunLayout(context.run_directory)
    run = open_run(layout, context.incarnation)
    open_tracker = _opener(run, context.incarnation)
    ending = follow(layout, context.incarnation, open_tracker, lambda: machine_figures(layout.root))
    if ending != "stopped" and wants_report(run.recipe.tracking):
        attach_report(layout)


def _opener(run: OpenRun, incarnation: int) -> Callable[[], Tracker]:
    """How the recipe's tracker is opened; its package is imported only then."""
    kind, directory = run.recipe.tracking.kind, run.layout.tracking
    if kind == "tensorboard":
        from milesbatch.tracking.tensorboard_tracker import TensorboardTracker

        return lambda: TensorboardTracker(directory / "tensorboard", lineage_of(run.record))
    if kind == "wandb":
        from milesbatch.tracking.wandb_tracker import WandbTracker

        return lambda: WandbTracker(run, directory)
    from milesbatch.tracking.mlflow_tracker import MlflowTracker

    uri = mlflow_uri(default_uri(run.layout))
    return lambda: MlflowTracker(run, incarnation, uri)


def default_uri(layout: RunLayout) -> str:
    """The SQLite database beside the run.

    Named relative to the working directory, which this process changes: in a URI, a ``%``, ``?`` or ``#`` of the run's own
    name would mean something else.
    """
    make_directory(layout.tracking)
    os.chdir(layout.tracking)
    return "sqlite:///mlflow.db"


def follow(
    layout: RunLayout,
    incarnation: int,
    open_tracker: Callable[[], Tracker],
    machine: Callable[[], dict[str, float]] = dict,
) -> str:
    """Log every step up to the end of ``incarnation``; ``machine`` gives figures of now, logged beside a step that is new.

    Returns how it ended: ``finished``, ``failed`` or ``stopped``.

    Raises:
        StorageError: some steps could not be logged; nothing is lost, the next start logs them.
    """
    trainer = _Tail(layout, [("trainer-0", number) for number in range(1, incarnation + 1)])
    controller = _Tail(layout, [("controller-0", incarnation)])
    evaluations = EvaluationWatch(layout)
    sink = _Sink(open_tracker)
    began_s = time.time()
    while True:
        # The end is looked for first: what the trainer wrote before it is then read below.
        for event in controller.new():
            if event["event"] in ("finished", "stopped", "failed"):
                sink.end(event["event"])
        for event in trainer.new():
            if event["event"] == "train_step":
                is_new = time.time() - began_s > _POLL_S and not event.get("replayed")
                sink.add(event, machine() if is_new else {})
        for entry in evaluations.new():
            sink.add_evaluation(entry)
        if sink.flush():
            return sink.ending
        time.sleep(_POLL_S)


class _Sink:
    """Steps on their way to a tracker that may fail."""

    def __init__(self, open_tracker: Callable[[], Tracker]) -> None:
        self._open = open_tracker
        self._tracker: Tracker | None = None
        self._has_worked = False
        self._logged = 0
        self._evaluated: frozenset[int] = frozenset()
        self._pending: deque[tuple[dict[str, Any], dict[str, float]]] = deque()
        self._evaluations: deque[EvaluationEntry] = deque()
        self._ending: str | None = None
        self._give_up_s = float("inf")
        self._next_try_s = 0.0
        self._pause_s = _PAUSE_S

    def add(self, event: dict[str, Any], more: dict[str, float]) -> None:
        self._pending.append((event, more))

    def add_evaluation(self, entry: EvaluationEntry) -> None:
        self._evaluations.append(entry)

    @property
    def ending(self) -> str:
        return self._ending or ""

    def end(self, status: str) -> None:
        self._ending = status
        self._give_up_s = min(self._give_up_s, time.monotonic() + _LAST_TRIES_S)
        self._next_try_s = 0.0

    def flush(self) -> bool:
        """Log what waits; True when that was all and the end is logged too."""
        if time.monotonic() < self._next_try_s:
            return False
        try:
            if self._tracker is None:
                self._tracker = self._open()
                self._logged = self._tracker.last_step()
                self._evaluated = self._tracker.evaluated()
                self._has_worked = True
            self._log_evaluations(self._tracker)
            while self._pending:
                event, more = self._pending[0]
                if event["step"] > self._logged:
                    self._tracker.log_step(event["step"], event["at"], {**event["metrics"], **more})
                    self._logged = event["step"]
                self._pending.popleft()
            if self._ending is None:
                return False
            self._tracker.close(self._ending)
            return True
        except StorageError as error:
            self._failed(error)
            return False

    def _log_evaluations(self, tracker: Tracker) -> None:
        while self._evaluations:
            entry = self._evaluations[0]
            if entry.version not in self._evaluated:
                tracker.log_evaluation(entry)
                self._evaluated |= {entry.version}
            self._evaluations.popleft()

    def _failed(self, error: StorageError) -> None:
        now_s = time.monotonic()
        if now_s > self._give_up_s or not self._has_worked:
            raise error
        waiting = f"{len(self._pending)} steps" + (
            f", {len(self._evaluations)} evaluations" if self._evaluations else ""
        )
        print(f"{waiting} wait: {error}", file=sys.stderr, flush=True)
        self._tracker = None  # what it was in the middle of is not known
        self._next_try_s = min(now_s + self._pause_s, self._give_up_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class _Tail:
    """New events of several logs, each read once."""

    def __init__(self, layout: RunLayout, logs: list[tuple[str, int]]) -> None:
        self._offsets = {layout.event_log(process, incarnation): 0 for process, incarnation in logs}

    def new(self) -> Iterator[dict[str, Any]]:
        for path in list(self._offsets):
            for event, offset in read_events(path, self._offsets[path]):
                self._offsets[path] = offset
                yield event
