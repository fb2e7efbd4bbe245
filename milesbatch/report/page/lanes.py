"""The timeline as a chart can hold it: lanes, bars, marks. Pure.

Owns: which processes get a lane when there are very many, and making bars fewer: where there are too many, each process's time
is cut into equal pieces, and a piece shows the share of each activity; the slices themselves come along in a terse form, for
whoever looks closer. Invariant: a process with a
trouble keeps its lane before one without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from milesbatch.timeline.slices import ACTIVITIES, Activity, Slice, Story
from milesbatch.timeline.troubles import Trouble

MOST_LANES = 24
MOST_BARS = 6000
MOST_FINE = 40_000
_PIECES = 200
_LEAST_PART = 0.01
RUN_LANE = "run"
_ORDER = {"controller": 0, "trainer": 1, "rollout": 2, "evaluation": 3}
_BAD = frozenset({"died", "failed", "lost", "storage"})


@dataclass(frozen=True, slots=True)
class Lanes:
    """Columns for the chart; times are milliseconds since 1970."""

    names: tuple[str, ...]
    hidden: int
    """Processes without a lane."""
    bars: dict[str, list[Any]]
    """``lane``, ``activity``, ``start``, ``end``, ``thin`` (drawn below), ``top`` and ``part`` of the height, ``text``."""
    lives: dict[str, list[Any]]
    marks: dict[str, list[Any]]
    is_reduced: bool
    fine: dict[str, list[Any]] | None
    """When reduced, and unless there are far too many: each slice by ``lane`` and ``activity`` (indices into ``names`` and
    ``ACTIVITIES``), ``start`` (after ``start_ms``) and ``length`` in milliseconds."""
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class _Bar:
    process: str
    activity: Activity
    start_s: float
    end_s: float
    is_thin: bool
    text: str
    top: float = 0.0
    part: float = 1.0


def _is_thin(piece: Slice) -> bool:
    return piece.track in ("weights", "saving")


def _exact(pieces: Sequence[Slice]) -> list[_Bar]:
    return [_Bar(p.process, p.activity, p.start_s, p.end_s, _is_thin(p), p.text) for p in pieces]


def lay_lanes(story: Story, troubles: Sequence[Trouble], most_bars: int = MOST_BARS) -> Lanes:
    """Lanes for the whole run, all incarnations."""
    troubled = {trouble.who for trouble in troubles}
    every = sorted({life.process for life in story.lives} | {piece.process for piece in story.slices}, key=_order)
    kept = sorted(sorted(every, key=lambda name: (name not in troubled, _order(name)))[:MOST_LANES], key=_order)
    names = (RUN_LANE, *kept)
    starts = [start_s for _, start_s, _ in story.incarnations]
    ends = [end_s for _, _, end_s in story.incarnations]
    start_s, end_s = min(starts, default=0.0), max(ends, default=1.0)
    pieces = [piece for piece in story.slices if piece.process in set(kept)]
    is_reduced = len(pieces) > most_bars
    shown = _reduced(pieces, start_s, max((end_s - start_s) / _PIECES, 1e-3)) if is_reduced else _exact(pieces)
    bars = [
        (bar.process, bar.activity, _ms(bar.start_s), _ms(bar.end_s), bar.is_thin, bar.top, bar.part, bar.text)
        for bar in shown
    ]
    lives = [
        (
            life.process,
            _ms(life.start_s),
            _ms(life.end_s),
            _life_text(life.attempt, life.incarnation, life.host, life.ended),
        )
        for life in story.lives
        if life.process in set(kept)
    ]
    lives += [(RUN_LANE, _ms(a), _ms(b), f"incarnation {number}") for number, a, b in story.incarnations]
    marks = [
        (t.who if t.who in set(kept) else RUN_LANE, _ms(t.at_s), t.kind in _BAD, f"{t.who}: {t.what}", t.then)
        for t in troubles
    ]
    return Lanes(
        names=names,
        hidden=len(every) - len(kept),
        bars=_columns(("lane", "activity", "start", "end", "thin", "top", "part", "text"), bars),
        lives=_columns(("lane", "start", "end", "text"), lives),
        marks=_columns(("lane", "at", "bad", "text", "then"), marks),
        is_reduced=is_reduced,
        fine=_fine(pieces, names, _ms(start_s)) if is_reduced and len(pieces) <= MOST_FINE else None,
        start_ms=_ms(start_s),
        end_ms=max(_ms(end_s), _ms(start_s) + 1),
    )


def _fine(pieces: Sequence[Slice], names: Sequence[str], start_ms: int) -> dict[str, list[Any]]:
    places = {name: place for place, name in enumerate(names)}
    rows = [
        (places[p.process], ACTIVITIES.index(p.activity), _ms(p.start_s) - start_ms, _ms(p.end_s) - _ms(p.start_s))
        for p in pieces
    ]
    return _columns(("lane", "activity", "start", "length"), rows)


def _life_text(attempt: int, incarnation: int, host: str, ended: str) -> str:
    where = f" on {host}" if host else ""
    return f"start {attempt} in incarnation {incarnation}{where}" + (f"; {ended}" if ended else "")


def _order(name: str) -> tuple[int, str, int]:
    role, _, index = name.rpartition("-")
    return _ORDER.get(role, 4), role, int(index) if index.isdigit() else 0


def _ms(at_s: float) -> int:
    return round(at_s * 1000)


def _columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _reduced(pieces: Sequence[Slice], start_s: float, width_s: float) -> list[_Bar]:
    """Equal pieces of time for each process: in the main strip shares are stacked, in the thin one the largest is shown."""

    def strip(piece: Slice) -> tuple[str, bool]:
        return piece.process, _is_thin(piece)

    found: list[_Bar] = []
    for (process, is_thin), group in groupby(sorted(pieces, key=strip), key=strip):
        shares = _shares(list(group), start_s, width_s)
        make = _largest if is_thin else _stacked
        found += make(process, shares, start_s, width_s)
    return found


def _shares(pieces: Sequence[Slice], start_s: float, width_s: float) -> dict[int, dict[Activity, float]]:
    """Piece of time -> seconds by activity."""
    shares: dict[int, dict[Activity, float]] = {}
    for piece in pieces:
        first, last = int((piece.start_s - start_s) / width_s), int((piece.end_s - start_s) / width_s)
        for place in range(first, last + 1):
            begin_s = max(piece.start_s, start_s + place * width_s)
            stop_s = min(piece.end_s, start_s + (place + 1) * width_s)
            if stop_s > begin_s:
                spent = shares.setdefault(place, {})
                spent[piece.activity] = spent.get(piece.activity, 0.0) + stop_s - begin_s
    return shares


def _stacked(process: str, shares: dict[int, dict[Activity, float]], start_s: float, width_s: float) -> list[_Bar]:
    """Activities one below the other, in the order of ``ACTIVITIES``; several leases at once count as one whole."""
    found: list[_Bar] = []
    for place, spent in sorted(shares.items()):
        whole_s = max(width_s, sum(spent.values()))
        begin_s, top = start_s + place * width_s, 0.0
        for activity in ACTIVITIES:
            part = spent.get(activity, 0.0) / whole_s
            if part > _LEAST_PART:
                text = f"{part:.0%} of the time"
                found.append(
                    _Bar(process, activity, begin_s, begin_s + width_s, False, text, round(top, 3), round(part, 3))
                )
                top += part
    return found


def _largest(process: str, shares: dict[int, dict[Activity, float]], start_s: float, width_s: float) -> list[_Bar]:
    """Neighbours that mostly did the same are one bar."""
    mostly = {place: max(spent, key=lambda name: spent[name]) for place, spent in shares.items()}
    runs: list[list[int]] = []
    for place in sorted(mostly):
        if runs and place == runs[-1][-1] + 1 and mostly[place] == mostly[runs[-1][-1]]:
            runs[-1].append(place)
        else:
            runs.append([place])
    found: list[_Bar] = []
    for run in runs:
        busy_s = sum(seconds for place in run for seconds in shares[place].values())
        text = f"{busy_s / (len(run) * width_s):.0%} of the time"
        begin_s, end_s = start_s + run[0] * width_s, start_s + (run[-1] + 1) * width_s
        found.append(_Bar(process, mostly[run[0]], begin_s, end_s, True, text))
    return found
