"""The time in front of each line that a process without a terminal prints, and taking it off again.

Owns: the form of a line in ``RUN/logs``, ``2026-03-01T12:34:56.789012Z text``. Never: which lines are printed. Invariant: a
line is written when it is printed, never held back: the last words before a SIGKILL are in the log. What does not come
through Python's streams (a fatal signal's traceback, C libraries, subprocesses, srun) has no stamp, and readers must bear
that. The page behind it is ``docs/format.md``.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
from typing import Any, TextIO

from milesbatch.store.clock import utc_now

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z) ")
_START = re.compile(r"[a-z]+-\d+, start \d+, on \S+, process \d+\s*")


class Stamped(io.TextIOBase):
    """A text stream that puts the time in front of every line; everything else is the stream's below.

    The log may lie on the disk that is full or read-only: what cannot be said is lost, and never a reason to end.
    """

    _lock = threading.RLock()
    _open_line: Stamped | None = None
    """The stream whose line is not ended yet: standard output and standard error share a log."""

    def __init__(self, under: TextIO) -> None:
        self._under = under

    def write(self, text: str) -> int:
        with Stamped._lock:
            out = []
            for line in text.splitlines(keepends=True) if "\n" in text else [text] * bool(text):
                out.append(line if Stamped._open_line is self else self._begin() + line)
                Stamped._open_line = None if line.endswith("\n") else self
            with contextlib.suppress(OSError):
                self._under.write("".join(out))
        return len(text)

    def _begin(self) -> str:
        return ("" if Stamped._open_line is None else "\n") + utc_now() + " "

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._under.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._under.fileno()

    def isatty(self) -> bool:
        return self._under.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._under.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._under.errors

    @property
    def buffer(self) -> Any:
        """For those who write bytes; they get no stamp."""
        return self._under.buffer


def stamp_output() -> None:
    """From now on every line that this process prints carries its time.

    A log may look like a terminal from here: srun reads an unbuffered task through one.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Stamped):
            setattr(sys, name, Stamped(stream))


def is_stamped(stream: object) -> bool:
    """Does ``stream`` put the time in front of lines by itself?"""
    return isinstance(stream, Stamped)


def start_line(name: str, attempt: int, host: str, pid: int) -> str:
    """The first line of each start of a role process."""
    return f"{name}, start {attempt}, on {host}, process {pid}"


def since_last_start(text: str) -> str:
    """What the last start of a role process printed, of a log's text without times."""
    lines = text.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if _START.fullmatch(line)]
    return "".join(lines[starts[-1] + 1 :] if starts else lines)


def split_stamp(line: str) -> tuple[str | None, str]:
    """The time (as events have it) and the text of a line; None for a line without one."""
    match = _STAMP.match(line)
    return (None, line) if match is None else (match[1], line[match.end() :])


def without_stamps(text: str) -> str:
    """The text as it was printed."""
    return "".join(split_stamp(line)[1] for line in text.splitlines(keepends=True))
