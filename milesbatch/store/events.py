"""The event log of one process: JSON lines, appended, one writer. What every tool draws from; never read to decide.

A line that was being written when the process died may be cut off; readers skip it. Lines carry ``at`` (UTC), ``mono_s``
(monotonic seconds of that host), ``process``, ``incarnation`` and ``event``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milesbatch.errors import StorageFullError
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import make_directory, storage_error
from milesbatch.store.layout import RunLayout


class EventLog:
    """Appends events of one process of one incarnation."""

    def __init__(self, layout: RunLayout, process: str, incarnation: int) -> None:
        self._path = layout.event_log(process, incarnation)
        self._common = {"process": process, "incarnation": incarnation}
        if layout.root.is_dir():
            make_directory(self._path.parent)  # a host that has not seen it yet sees it then
        try:
            # Unbuffered: a line that finds no space is lost at once, and is not met again in the next write or close.
            self._stream = open(self._path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the process
            self._is_torn = bool(self._stream.tell()) and not self._path.read_bytes().endswith(b"\n")
        except OSError as error:
            raise storage_error(self._path, error) from error

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. A full disk loses the event, not the run: diagnosis is never worth a stop.

        Raises:
            StorageError: the log cannot be written for another reason than a full disk.
        """
        line = {"at": utc_now(), "mono_s": round(time.monotonic(), 4), "event": event, **self._common, **fields}
        try:
            data = b"\n" * self._is_torn + (json.dumps(line, ensure_ascii=False, default=str) + "\n").encode()
            self._is_torn = self._stream.write(data) != len(data)
        except OSError as error:
            mapped = storage_error(self._path, error)
            if not isinstance(mapped, StorageFullError):
                raise mapped from error

    def close(self) -> None:
        self._stream.close()


def read_events(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole events from ``offset`` on, each with the offset after it; a torn or cut-off line is skipped or left for later."""
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            for raw in stream:
                if not raw.endswith(b"\n"):
                    return
                offset += len(raw)
                try:
                    event = json.loads(raw)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    yield event, offset
    except FileNotFoundError:
        return
