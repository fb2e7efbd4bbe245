"""What is remembered of one run: its recipe, its results, its troubles. Read from its files alone.

Owns: the keys of ``milesbatch runs ls --json``. Never writes, never asks Slurm or a controller. Invariant: a number is
null when nothing is behind it, never 0; a run that cannot be read is an entry that says why. The page behind it is
``docs/runs.md``.
"""

from __future__ import annotations

import itertools
import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from milesbatch.decisions.going_on import BY_HAND
from milesbatch.decisions.origin import origin_of
from milesbatch.errors import MilesbatchError
from milesbatch.evaluation.reader import main_curve
from milesbatch.jobs.order import was_submitted
from milesbatch.recipe.dotted import dotted
from milesbatch.records import ForkedFrom, IncarnationRecord
from milesbatch.report.endings import CONTROLLER, Failure, controller_events, failure_of, last_word
from milesbatch.report.status import is_finished
from milesbatch.report.summary import first_and_last, first_of_each, trained_in
from milesbatch.store.beginning import not_started, read_beginning
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import is_alive
from milesbatch.store.run import open_run, read_run_record
from milesbatch.store.survey import read_incarnations

_LOST = "the controller was lost without a word"


@dataclass(frozen=True, slots=True)
class Start:
    """One incarnation after the first."""

    incarnation: int
    cause: str
    at: str
    by_hand: bool
    seconds_to_step: float | None
    """From its beginning to its first new train step; null when it made none."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One run."""

    path: str
    name: str = ""
    run_id: str | None = None
    state: str = "unreadable"
    """``finished failed stopped running lost queued forked gone unreadable``; ``running`` may also be a run on another host."""
    cause: str | None = None
    """Why it ended badly."""
    failed_process: str | None = None
    failed_host: str | None = None
    remedy: str | None = None
    created_at: str | None = None
    parent_run_id: str | None = None
    """Of a fork: the run that it began with."""
    parent_path: str | None = None
    """Where that was."""
    parent_step: int | None = None
    """And behind which of its steps."""
    last_at: str | None = None
    """Time of the last train step."""
    step: int = 0
    steps: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    reward_best: float | None = None
    reward_best_step: int | None = None
    eval_last: float | None = None
    """Mean reward on held-out prompts, of the last evaluated policy version; see ``milesbatch evaluate``."""
    eval_last_version: int | None = None
    eval_best: float | None = None
    eval_best_version: int | None = None
    evaluations: int | None = None
    """Evaluated versions on the same prompts."""
    lag_mean: float | None = None
    """Mean staleness over all steps, in policy versions."""
    failed_share: float | None = None
    """Share of episodes that ended with an error."""
    truncated_share: float | None = None
    rejected_groups: int | None = None
    tokens: int | None = None
    train_s: float | None = None
    wait_s: float | None = None
    replayed_steps: int = 0
    starts: tuple[Start, ...] = ()
    diagnosis_s: tuple[float, ...] = ()
    """From each bad end to the next start by a person: how long it took to find out and mend."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Dotted path -> value, as the newest incarnation runs it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"recipe": dict(self.recipe)}

    @property
    def recovered(self) -> int:
        """Starts that led to a new step."""
        return sum(start.seconds_to_step is not None for start in self.starts)


def entry_from_json(document: Mapping[str, Any]) -> Entry:
    """The entry as it was written.

    Raises:
        TypeError, KeyError: it was written by another version of milesbatch.
    """
    known = {field.name for field in fields(Entry)}
    if document.keys() != known:
        raise KeyError(f"other keys: {sorted(document.keys() ^ known)}")
    starts = tuple(Start(**start) for start in document["starts"])
    return Entry(**{**document, "starts": starts, "diagnosis_s": tuple(document["diagnosis_s"])})


def read_entry(layout: RunLayout) -> Entry:
    """What the run's files say now; damage makes the entry ``unreadable``, with the reason as its cause."""
    path = str(layout.root.resolve())
    try:
        return _read(layout, path)
    except MilesbatchError as error:
        return Entry(path=path, name=layout.root.name, cause=error.what)


def _read(layout: RunLayout, path: str) -> Entry:
    records = read_incarnations(layout)
    newest = records[-1] if records else None
    if newest is None:
        return _not_begun(layout, path)
    run = open_run(layout, newest.incarnation)
    trained = {record.incarnation: trained_in(layout, record.incarnation) for record in records}
    steps = first_of_each(event for events in trained.values() for event in events)
    state, cause, failure = _state(layout, newest, run.recipe.steps)
    return Entry(
        path=path,
        name=run.recipe.name,
        run_id=run.record.run_id,
        state=state,
        cause=cause,
        failed_process=None if failure is None else failure.name,
        failed_host=None if failure is None else failure.host,
        remedy=None if failure is None else failure.try_this or None,
        created_at=run.record.created_at,
        **_parent(run.record.forked_from),
        last_at=max((str(event["at"]) for event in steps.values()), default=None),
        step=max(steps, default=origin_of(run.record).step),
        steps=run.recipe.steps,
        **_figures([event["metrics"] for event in steps.values()]),
        **_evaluated(layout),
        replayed_steps=sum(bool(event.get("replayed")) for events in trained.values() for event in events),
        starts=tuple(_start(record, trained[record.incarnation]) for record in records[1:]),
        diagnosis_s=_diagnosis(layout, records),
        recipe=dotted(run.recipe.model_dump(mode="json")),
    )


def _not_begun(layout: RunLayout, path: str) -> Entry:
    """A run without an incarnation: it waits for its first, or is a fork that nobody has started."""
    fork, record = read_beginning(layout), read_run_record(layout)
    if fork is None:
        begun = None if record is None else record.forked_from
        return Entry(path=path, name=layout.root.name, state="queued", **_parent(begun), step=origin_of(record).step)
    submitted = was_submitted(layout)
    return Entry(
        path=path,
        name=layout.root.name,
        state="queued" if submitted else "forked",
        cause=None if submitted else str(not_started(layout, was_submitted=False)),
        created_at=fork.created_at,
        **_parent(fork.forked_from),
        step=fork.forked_from.step,
    )


def _parent(fork: ForkedFrom | None) -> dict[str, Any]:
    if fork is None:
        return {}
    return {"parent_run_id": fork.run_id, "parent_path": fork.path, "parent_step": fork.step}


def _state(layout: RunLayout, newest: IncarnationRecord, steps: int) -> tuple[str, str | None, Failure | None]:
    """State; and of a bad end its cause, and who it was."""
    if is_finished(layout, steps):
        return "finished", None, None
    word = last_word(layout, newest)
    if word.get("event") == "failed":
        failure = failure_of(layout, newest)
        said = str(word.get("error", "")).splitlines()
        return "failed", said[0] if said else failure.reason, failure
    if word:
        return "stopped", None, None
    if newest.host != socket.gethostname() or is_alive(layout, newest):
        return "running", None, None
    return "lost", _LOST, Failure(CONTROLLER, newest.host, None, "", "", ())


def _figures(metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Results over all steps; empty when none was trained."""
    if not metrics:
        return {}
    rewards = [row["reward_mean"] for row in metrics]
    _, first, last = first_and_last(rewards)
    best = max(range(len(rewards)), key=rewards.__getitem__)

    def values(key: str) -> list[float]:
        return [row[key] for row in metrics if key in row]

    def mean(key: str) -> float | None:
        return round(statistics.fmean(found), 6) if (found := values(key)) else None

    def total(key: str) -> float | None:
        return round(sum(found), 3) if (found := values(key)) else None

    samples, tokens, rejected = total("samples"), total("tokens"), total("groups_rejected")
    failed = total("failed")
    return {
        "reward_first": round(first, 6),
        "reward_last": round(last, 6),
        "reward_best": rewards[best],
        "reward_best_step": int(metrics[best]["step"]),
        "lag_mean": mean("lag_mean"),
        "failed_share": None if failed is None or not samples else round(failed / samples, 6),
        "truncated_share": mean("truncated_share"),
        "rejected_groups": None if rejected is None else int(rejected),
        "tokens": None if tokens is None else int(tokens),
        "train_s": total("train_s"),
        "wait_s": total("wait_s"),
    }


def _evaluated(layout: RunLayout) -> dict[str, Any]:
    """The run's evaluations; empty when there are none."""
    curve = main_curve(layout)
    if curve is None:
        return {}
    last, best = curve.last, curve.best
    return {
        "eval_last": _rounded(last.figures.reward_mean),
        "eval_last_version": last.version,
        "eval_best": _rounded(best.figures.reward_mean),
        "eval_best_version": best.version,
        "evaluations": len(curve.points),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _start(record: IncarnationRecord, trained: Sequence[Mapping[str, Any]]) -> Start:
    new = [event["at"] for event in trained if not event.get("replayed")]
    return Start(
        incarnation=record.incarnation,
        cause=record.cause,
        at=record.started_at,
        by_hand=record.cause.startswith(BY_HAND),
        seconds_to_step=_seconds(record.started_at, new[0]) if new else None,
    )


def _diagnosis(layout: RunLayout, records: Sequence[IncarnationRecord]) -> tuple[float, ...]:
    """Seconds from each ``failed`` to the start after it: Slurm never starts a failed run again, so a person did."""
    found = []
    for record, following in itertools.pairwise(records):
        ends = [event for event in controller_events(layout, record) if event["event"] == "failed"]
        if ends:
            found.append(_seconds(ends[-1]["at"], following.started_at))
    return tuple(found)


def _seconds(first: str, second: str) -> float:
    return round((datetime.fromisoformat(second) - datetime.fromisoformat(first)).total_seconds(), 3)
