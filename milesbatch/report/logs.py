"""Logs of a run's processes as one stream in time order, and following it while the run goes on. Reads only.

Owns: the time of a line. A line has its own (``cluster/stamps.py``); one without is given the time of the line before it,
and the last of a process (its last words: a fatal signal's traceback, srun's complaint) the time at which its end was
noticed, if the controller noticed one. Never: what is worth reading. Invariant: the lines of one file stay in their order.
"""

from __future__ import annotations

import bisect
import heapq
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from milesbatch.cluster.stamps import split_stamp
from milesbatch.errors import InputError
from milesbatch.records import IncarnationRecord
from milesbatch.report.event_words import event_in_words
from milesbatch.report.sources import Source, list_sources
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import storage_error
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import read_incarnations

_BLOCK_BYTES = 1 << 16
_MOST_UNTIMED = 10_000
_SLURMS_TIME = re.compile(r"slurmstepd\S*: .* AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
"""Slurm writes when it ended a job, in local time."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log, or one event in words."""

    at: str
    """UTC, as events have it; sorts as text."""
    is_timed: bool
    """The time is the line's own."""
    name: str
    incarnation: int
    """0 when it belongs to none (a batch job before its controller took the run over)."""
    text: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which lines."""

    role: str | None = None
    """A role (``trainer``), a process (``trainer-0``) or a batch job's output (``slurm-run-12``); None for all."""
    incarnation: int | None = None
    all_events: bool = False
    """Events of every process, not only the controller's."""


class LogReader:
    """All wanted logs of one run, as they are and as they grow."""

    def __init__(self, layout: RunLayout, wanted: Wanted, *, goes_on: bool = False) -> None:
        """``goes_on``: :meth:`new` comes after this, so a last line that is not whole yet is left to it."""
        self._layout = layout
        self._wanted = wanted
        self._goes_on = goes_on
        self._offsets: dict[Path, int] = {}
        self._last_at: dict[Path, str] = {}
        self._incarnations: list[IncarnationRecord] = []

    def last(self, count: int) -> tuple[list[Line], bool]:
        """The last ``count`` lines of all wanted logs together, and whether there are more before them.

        Raises:
            InputError: nothing of the kind exists; lists what there is.
        """
        kept = deque(self._merged(count + 1), maxlen=count + 1)
        return list(kept)[1:] if len(kept) > count else list(kept), len(kept) > count

    def everything(self) -> Iterator[Line]:
        """All wanted lines, the first one first; see :meth:`last` for errors."""
        return self._merged(None)

    def new(self, *, rest: bool = False) -> list[Line]:
        """Lines that were added since, in new files too, in time order; one that is not whole yet only with ``rest``."""
        now = utc_now()
        lines: list[Line] = []
        sources = self._sources()
        newest = len(self._incarnations)
        for source in sources:
            if source.incarnation is not None and source.incarnation < newest - 1:
                continue  # what was fenced long ago writes no more; a long life has thousands of such files
            lines += self._new_events(source) if source.is_events else self._new_text(source, now, rest)
        return sorted(lines, key=lambda line: line.at)

    def _merged(self, count: int | None) -> Iterator[Line]:
        sources = self._sources()
        if not sources:
            raise self._nothing()
        return heapq.merge(*(self._whole(source, count) for source in sources), key=lambda line: line.at)

    # -- which ------------------------------------------------------------------------------------------------------

    def _sources(self) -> list[Source]:
        if not self._incarnations or self._layout.incarnation(len(self._incarnations) + 1).exists():
            self._incarnations = read_incarnations(self._layout)
        sources = list_sources(self._layout, all_events=self._wanted.all_events)
        return [source for source in sources if self._is_wanted(source)]

    def _is_wanted(self, source: Source) -> bool:
        role, incarnation = self._wanted.role, self._wanted.incarnation
        if role is not None and role not in (source.role, source.name):
            return False
        if incarnation is None or source.incarnation is not None:
            return incarnation in (None, source.incarnation)
        # A batch job's output: is the incarnation one of that job's (for a rollout job: any may be)?
        jobs = {record.job_id for record in self._incarnations if record.incarnation == incarnation}
        return source.job_id in jobs or (source.role == "rollout" and bool(jobs))

    def _nothing(self) -> InputError:
        sources = list_sources(self._layout, all_events=self._wanted.all_events)
        if not sources:
            return InputError(
                f"{self._layout.root} has no logs yet",
                mend="a job that is pending writes none: see `milesbatch status`",
            )
        asked = [f"--role {self._wanted.role}"] if self._wanted.role else []
        asked += [f"--incarnation {self._wanted.incarnation}"] if self._wanted.incarnation is not None else []
        roles, names = ({getattr(source, key) for source in sources} for key in ("role", "name"))
        numbers = sorted({source.incarnation for source in sources if source.incarnation is not None})
        return InputError(
            f"{self._layout.root} has no log of {' '.join(asked)}",
            mend=f"there are the roles {', '.join(sorted(roles))}; the names {', '.join(sorted(names))};"
            f" the incarnations {', '.join(map(str, numbers)) or 'none'}",
        )

    # -- what is there ----------------------------------------------------------------------------------------------

    def _whole(self, source: Source, count: int | None) -> Iterator[Line]:
        """Lines of one file (the last ``count``) in order of ``at``; notes where they end."""
        if source.is_events:
            yield from self._events(source, 0)
            return
        start = 0 if count is None else offset_of_last(source.path, count)
        texts = self._texts(source.path, start, rest=not self._goes_on)
        for at, is_timed, text in timed(texts, self._ends_of(source), _changed_at(source.path)):
            line = self._owned(source, at, is_timed, text)
            if self._wanted.incarnation in (None, line.incarnation):
                yield line

    def _events(self, source: Source, offset: int) -> Iterator[Line]:
        at = ""
        for event, end in read_events(source.path, offset):
            self._offsets[source.path] = end
            at = max(at, str(event.get("at", "")))
            yield Line(at, True, source.name, source.incarnation or 0, event_in_words(event))

    def _ends_of(self, source: Source) -> list[str]:
        """When the controller noticed that a process had ended; ascending."""
        if source.incarnation is None:
            return []
        events = read_events(self._layout.event_log("controller-0", source.incarnation))
        return [str(e["at"]) for e, _ in events if e.get("event") == "process_ended" and e.get("name") == source.name]

    def _owned(self, source: Source, at: str, is_timed: bool, text: str) -> Line:
        incarnation = source.incarnation
        if incarnation is None:  # of those that its job could have had, the last one that had begun
            records = [r for r in self._incarnations if source.role == "rollout" or r.job_id == source.job_id]
            begun = bisect.bisect_right([record.started_at for record in records], at)
            incarnation = records[max(begun - 1, 0)].incarnation if records else 0
        return Line(at, is_timed, source.name, incarnation, text)

    # -- what is new ------------------------------------------------------------------------------------------------

    def _new_events(self, source: Source) -> list[Line]:
        return list(self._events(source, self._offsets.get(source.path, 0)))

    def _new_text(self, source: Source, now: str, rest: bool) -> list[Line]:
        lines: list[Line] = []
        at = self._last_at.get(source.path, "")
        for text in self._texts(source.path, self._offsets.get(source.path, 0), rest=rest):
            own, said = _own_time(text)
            at = max(at, own or now)  # it was not there at the last look, so it is about that old
            line = self._owned(source, at, own is not None, said)
            if self._wanted.incarnation in (None, line.incarnation):
                lines.append(line)
        self._last_at[source.path] = at
        return lines

    def _texts(self, path: Path, start: int, *, rest: bool) -> Iterator[str]:
        """Lines from an offset on; a last one without an end only with ``rest``. Notes where the whole lines end.

        The file is not kept open between blocks: a long life leaves more logs than a process may have files.
        """
        self._offsets[path] = start
        while True:
            try:
                with open(path, "rb") as stream:
                    stream.seek(start)
                    raws = stream.readlines(_BLOCK_BYTES)
            except FileNotFoundError:
                return
            except OSError as error:
                raise storage_error(path, error) from error
            for raw in raws:
                is_whole = raw.endswith(b"\n")
                if is_whole or rest:
                    yield raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]  # as a terminal shows it
                if not is_whole:
                    return
                start += len(raw)
                self._offsets[path] = start
            if not raws:
                return


def timed(texts: Iterable[str], ends: Sequence[str], otherwise: str) -> Iterator[tuple[str, bool, str]]:
    """Time, whether it is the line's own, and text, for the lines of one log; see the module's promise.

    ``ends`` are the times at which the process was found to have ended, ascending; ``otherwise`` is the time of lines in a log
    that has no time at all.
    """
    last = ""
    untimed: list[str] = []
    for text in texts:
        own, said = _own_time(text)
        if own is None and len(untimed) < _MOST_UNTIMED:
            untimed.append(said)
            continue
        at = max(own or last, last)
        yield from ((_between(last, at, ends, otherwise), False, held) for held in untimed)
        untimed = [] if own is not None else [said]
        last = at
        if own is not None:
            yield at, True, said
    yield from ((_between(last, "", ends, otherwise), False, held) for held in untimed)


def _between(before: str, after: str, ends: Sequence[str], otherwise: str) -> str:
    """The time of lines between two that have theirs (empty: there is none on that side)."""
    found = [end for end in ends if before <= end and (not after or end <= after)]
    return found[-1] if found else before or after or otherwise


def _own_time(text: str) -> tuple[str | None, str]:
    at, said = split_stamp(text)
    if at is None and (match := _SLURMS_TIME.match(text)):
        at = datetime.fromisoformat(match[1]).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return at, said


def _changed_at(path: Path) -> str:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    except OSError:
        return ""


def offset_of_last(path: Path, count: int) -> int:
    """Where the last ``count`` lines of a file begin; 0 when there is no such file."""
    try:
        with open(path, "rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            position, found = end, 0
            while position > 0:
                size = min(_BLOCK_BYTES, position)
                position -= size
                stream.seek(position)
                block = stream.read(size)
                place = len(block)
                while (place := block.rfind(b"\n", 0, place)) >= 0:
                    found += position + place + 1 < end  # the last line's own end begins no line
                    if found == count:
                        return position + place + 1
    except OSError:
        pass
    return 0
