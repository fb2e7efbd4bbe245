"""TensorBoard: event files under ``RUN/tracking/tensorboard``, one for each start; TensorBoard joins them.

Source: https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from milesbatch.errors import StorageError
from milesbatch.store.durable import make_directory
from milesbatch.tracking.evaluations import EVALUATED, EvaluationEntry

_STEP_METRIC = "reward_mean"
_LINEAGE = "milesbatch/forked from"


class TensorboardTracker:
    """Writes scalars with the package ``tensorboard`` alone (no TensorFlow, no torch)."""

    def __init__(self, directory: Path, lineage: Mapping[str, str] | None = None) -> None:
        """``lineage`` is shown as a text (:mod:`milesbatch.tracking.lineage`).

        Raises:
        StorageError: the package is missing, or the directory cannot be written; so do all other methods.
        """
        self._directory = directory
        make_directory(directory)
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise _unusable(directory, error, "pip install 'milesbatch[tensorboard]', or set tracking.kind") from error
        has_events = any(directory.glob("events.out.tfevents.*"))
        self._last, self._evaluated = _logged(directory)
        try:
            self._writer: Any = EventFileWriter(str(directory))
        except OSError as error:
            raise _unusable(directory, error) from error
        if lineage and not has_events:
            self._write_text(_LINEAGE, "  \n".join(f"{name}: {value}" for name, value in lineage.items()))

    def _write_text(self, name: str, text: str) -> None:
        """Source: https://github.com/tensorflow/tensorboard/blob/master/tensorboard/plugins/text/metadata.py"""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        value = Summary.Value(
            tag=name,
            metadata=create_summary_metadata(name, ""),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        )
        try:
            self._writer.add_event(Event(wall_time=time.time(), step=0, summary=Summary(value=[value])))
            self._writer.flush()
        except OSError as error:
            raise _unusable(self._directory, error) from error

    def last_step(self) -> int:
        return self._last

    def log_step(self, step: int, at: str, metrics: dict[str, float]) -> None:
        # The metric that last_step looks at goes last: a step that was logged by half is logged again.
        self._write(step, at, metrics, sorted(metrics, key=lambda name: (name == _STEP_METRIC, name)))

    def evaluated(self) -> frozenset[int]:
        return self._evaluated

    def log_evaluation(self, entry: EvaluationEntry) -> None:
        self._write(entry.version, entry.at, entry.metrics, entry.ordered_names())

    def _write(self, step: int, at: str, metrics: Mapping[str, float], names: Sequence[str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(metrics[name])) for name in names]
        seconds = datetime.fromisoformat(at).timestamp()
        try:
            self._writer.add_event(Event(wall_time=seconds, step=step, summary=Summary(value=values)))
            self._writer.flush()
        except OSError as error:
            raise _unusable(self._directory, error) from error

    def close(self, status: str) -> None:
        try:
            self._writer.close()
        except OSError as error:
            raise _unusable(self._directory, error) from error


def _logged(directory: Path) -> tuple[int, frozenset[int]]:
    """Newest step, and all evaluated versions, of all event files; what is torn at the end of one is not counted."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    last, evaluated = 0, set()
    for path in directory.glob("events.out.tfevents.*"):
        for event in EventFileLoader(str(path)).Load():
            tags = {value.tag for value in event.summary.value}
            if _STEP_METRIC in tags:
                last = max(last, event.step)
            if EVALUATED in tags:
                evaluated.add(int(event.step))
    return last, frozenset(evaluated)


def _unusable(place: Path, error: Exception, mend: str = "") -> StorageError:
    return StorageError(
        f"TensorBoard's event files in {place} cannot be written: {error}",
        mend=mend or "mend the directory, or set tracking.kind: none; training goes on without it",
    )
