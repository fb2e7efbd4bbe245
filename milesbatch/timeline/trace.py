"""The whole run as Chrome trace events, for Perfetto or ``chrome://tracing``. Pure: from the story to JSON values.

    one process for each process of the run (trainer-0, rollout-1 …), one thread for each of its tracks
    slices: complete events (X)                 troubles: instant events (i)
    publish -> activate: flow arrows (s, f)     reward, loss, lag: counters (C)

Owns: the form of the trace. Invariant: slices of one thread are nested or apart, times are whole microseconds since the run's
first sign of life, ids of flows are unique. Page: the Trace Event Format document of the Chromium project.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from milesbatch.timeline.evidence import Evidence
from milesbatch.timeline.numbers import number
from milesbatch.timeline.slices import Slice, Story
from milesbatch.timeline.troubles import Trouble

COUNTERS = ("reward_mean", "loss", "lag_mean", "entropy", "grad_norm", "length_mean")
_LIFE, _WORK, _WEIGHTS, _SAVING, _GENERATING = 1, 2, 3, 4, 10
_THREADS = {_LIFE: "life", _WORK: "work", _WEIGHTS: "weights", _SAVING: "saving checkpoints"}
_RUN = 1
_MOST_SLOTS = 64

Event = dict[str, Any]


def trace_document(run: str, evidence: Evidence, story: Story, troubles: Sequence[Trouble]) -> Event:
    """The JSON document; ``otherData`` says which run and when its first sign of life was."""
    begin_s = min([evidence.first_s or 0.0, *(piece.start_s for piece in story.slices)])
    writer = _Writer(begin_s, story)
    events = [
        *writer.incarnations(),
        *writer.lives(),
        *writer.slices(),
        *writer.flows(),
        *writer.troubles(troubles),
        *writer.counters(evidence),
    ]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    other = {"run": run, "begins_at_unix_s": round(begin_s, 6), "incarnations": len(story.incarnations)}
    return {"traceEvents": [*writer.names(), *events], "displayTimeUnit": "ms", "otherData": other}


def trace_bytes(document: Event) -> bytes:
    """The document as a file. Perfetto shows an escaped character (``\\u201c``) as its escape: all are written as UTF-8."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


class _Writer:
    def __init__(self, begin_s: float, story: Story) -> None:
        self._begin_s = begin_s
        self._story = story
        hosts = {life.process: life.host for life in story.lives if life.host}
        names = sorted({piece.process for piece in story.slices} | {life.process for life in story.lives}, key=_order)
        self._pids = {name: _RUN + 1 + place for place, name in enumerate(names)}
        self._titles = {name: f"{name} ({hosts[name]})" if name in hosts else name for name in names}
        self._threads: dict[tuple[int, int], str] = {}
        self._placed: dict[Slice, tuple[int, int]] = {}

    def names(self) -> Iterator[Event]:
        """Metadata: called last, when it is known which threads there are."""
        yield _meta("process_name", _RUN, 0, "run")
        for name, pid in self._pids.items():
            yield _meta("process_name", pid, 0, self._titles[name])
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for (pid, thread), title in sorted(self._threads.items()):
            yield _meta("thread_name", pid, thread, title)

    def incarnations(self) -> Iterator[Event]:
        self._threads[_RUN, _LIFE] = "incarnations"
        free = 0
        for number_, start_s, end_s in self._story.incarnations:
            start, end = max(self._us(start_s), free), self._us(end_s)
            if end > start:
                yield _slice(_RUN, _LIFE, f"incarnation {number_}", "incarnation", start, end, {})
                free = end

    def lives(self) -> Iterator[Event]:
        free: dict[int, int] = {}
        for life in self._story.lives:
            pid = self._pids[life.process]
            start, end = max(self._us(life.start_s), free.get(pid, 0)), self._us(life.end_s)
            if end > start:
                self._threads[pid, _LIFE] = _THREADS[_LIFE]
                name = f"start {life.attempt} in incarnation {life.incarnation}"
                yield _slice(pid, _LIFE, name, "life", start, end, {"ended": life.ended, "host": life.host})
                free[pid] = end

    def slices(self) -> Iterator[Event]:
        free: dict[tuple[int, int], int] = {}
        for piece in self._story.slices:
            pid = self._pids[piece.process]
            start, end = self._us(piece.start_s), self._us(piece.end_s)
            thread = self._thread(piece, pid, start, free)
            start = max(start, free.get((pid, thread), 0))
            if end <= start:
                continue
            free[pid, thread] = end
            self._placed[piece] = (start, end)
            args = {"what": piece.text, "incarnation": piece.incarnation}
            yield _slice(pid, thread, piece.activity, piece.activity, start, end, args)

    def _thread(self, piece: Slice, pid: int, start: int, free: dict[tuple[int, int], int]) -> int:
        """Leases that are open at once go to threads of their own: slices of a thread may not overlap."""
        thread = _WEIGHTS if piece.track == "weights" else _SAVING if piece.track == "saving" else _WORK
        title = _THREADS[thread]
        if piece.activity == "generating":
            slots = (_GENERATING + slot for slot in range(_MOST_SLOTS))
            thread = next((slot for slot in slots if free.get((pid, slot), 0) <= start), _GENERATING)
            title = f"generating {thread - _GENERATING + 1}"
        self._threads[pid, thread] = title
        return thread

    def flows(self) -> Iterator[Event]:
        """From where a policy version was published to each place where it was activated afterwards."""
        published = {
            piece.version: (
                self._pids[piece.process],
                _WEIGHTS if piece.track == "weights" else _WORK,
                self._placed[piece][1],
            )
            for piece in self._story.slices
            if piece.activity == "publishing" and piece.version is not None and piece in self._placed
        }
        ids = count(1)
        for piece in self._story.slices:
            if piece.activity != "weights" or piece not in self._placed or piece.version not in published:
                continue
            pid, thread, end = published[piece.version]
            if end <= self._placed[piece][1]:
                flow = {"cat": "weights", "name": f"version {piece.version}", "id": next(ids)}
                yield {"ph": "s", **flow, "pid": pid, "tid": thread, "ts": end - 1}
                arrives = max(self._placed[piece][0], end - 1)
                yield {"ph": "f", "bp": "e", **flow, "pid": self._pids[piece.process], "tid": _WEIGHTS, "ts": arrives}

    def troubles(self, troubles: Sequence[Trouble]) -> Iterator[Event]:
        for trouble in troubles:
            pid = self._pids.get(trouble.who, _RUN)
            self._threads.setdefault((pid, _LIFE), _THREADS[_LIFE])
            args = {"who": trouble.who, "said": trouble.said, "then": trouble.then, "incarnation": trouble.incarnation}
            yield {
                "ph": "i", "s": "p", "name": f"{trouble.kind}: {trouble.what}", "cat": "trouble",
                "pid": pid, "tid": _LIFE, "ts": self._us(trouble.at_s), "args": args,
            }  # fmt: skip

    def counters(self, evidence: Evidence) -> Iterator[Event]:
        for log in evidence.of("trainer-0"):
            for event in log.events:
                figures = event.body.get("metrics")
                if event.name == "train_step" and isinstance(figures, dict):
                    for name in COUNTERS:
                        value = number(figures.get(name))
                        if value is not None:
                            ts = self._us(event.at_s)
                            # Perfetto calls the track by both names: "reward_mean value".
                            yield {"ph": "C", "name": name, "pid": _RUN, "tid": 0, "ts": ts, "args": {"value": value}}

    def _us(self, at_s: float) -> int:
        return max(0, round((at_s - self._begin_s) * 1e6))


def _order(name: str) -> tuple[int, str, int]:
    """Controller, trainer, workers, others; by index."""
    role, _, index = name.rpartition("-")
    place = {"controller": 0, "trainer": 1, "rollout": 2}.get(role, 3)
    return place, role, int(index) if index.isdigit() else 0


def _slice(pid: int, tid: int, name: str, category: str, start: int, end: int, args: Event) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def _meta(name: str, pid: int, tid: int, value: str) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}
