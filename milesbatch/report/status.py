"""The state of a run: from its files, its living controller where it answers, and Slurm where the run was submitted.

Owns: the keys of ``milesbatch status --json``. Never writes, and never decides what a run does. Invariant: it works from
files alone when nobody else answers, and says so. The page behind it is ``docs/operations.md``.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from milesbatch.decisions.origin import origin_after
from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.evaluation.reader import main_curve
from milesbatch.jobs.order import submitted_recipe
from milesbatch.records import CheckpointManifest, ForkedFrom, IncarnationRecord, WeightsManifest
from milesbatch.report.condition import Condition, look
from milesbatch.report.disk_use import DiskUseReader
from milesbatch.report.endings import (
    VANISHED,
    controller_events,
    excluded_nodes,
    killed_in_words,
    last_word,
    process_ends,
    stop_in_words,
)
from milesbatch.report.event_words import event_in_words
from milesbatch.report.summary import recent_steps, seconds_left
from milesbatch.store.durable import read_optional
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import OpenRun, open_run, read_fork
from milesbatch.store.survey import Seals, read_incarnations
from milesbatch.trajectories.inflight_reader import unfinished_episodes

_EVENTS = 5
"""How many of the controller's last events are told."""


def run_status(layout: RunLayout) -> dict[str, Any]:
    """What ``milesbatch status --json`` prints; the keys are those of the interface page.

    Raises:
        InputError: not a run. CorruptArtefactError: a record that the state depends on is damaged.
    """
    return StatusReader(layout).read()


class StatusReader:
    """Reads a run's status again and again; what cannot change is read once."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._run: tuple[int, OpenRun] | None = None
        self._step = 0
        self._disk = DiskUseReader(layout)

    def condition(self) -> Condition:
        """Only whether it is queued, running or over; see :func:`run_status` for errors."""
        incarnations = read_incarnations(self._layout)
        current = incarnations[-1] if incarnations else None
        return self._condition(current)

    def read(self) -> dict[str, Any]:
        """As :func:`run_status`."""
        return self.read_both()[1]

    def read_both(self) -> tuple[Condition, dict[str, Any]]:
        """Condition, and the document for people and programs."""
        layout = self._layout
        incarnations = read_incarnations(layout)
        current = incarnations[-1] if incarnations else None
        condition = self._condition(current)
        run = self._open(current)
        begun = _beginning(layout, run)
        self._step = step = _last_step(layout, self._step, 0 if begun is None else origin_after(begun).step)
        version, digest = _newest_version(layout, step)
        checkpoint = _last_checkpoint(layout, step)
        recent, live = recent_steps(layout), condition.live or {}
        figures = recent[-1]["metrics"] if recent else {}
        steps, events, disk = self._steps(run), controller_events(layout, current), self._disk.read()
        limit = run.recipe.slurm.max_excluded_nodes if run else 0
        queued = [job.job_id for job in condition.queue.of_role("run")]
        return condition, {
            "run_id": run.record.run_id if run else None,
            "forked_from": _parent(begun),
            "state": condition.state,
            "step": step,
            "steps": steps,
            "seconds_left": seconds_left(recent, steps) if condition.state == "running" else None,
            "policy_version": version,
            "weights_digest": digest,
            "incarnation": current.incarnation if current else 0,
            "job_ids": sorted({*(record.job_id for record in incarnations), *queued}),
            "last_checkpoint_step": checkpoint,
            "restarts": [_restart(record) for record in incarnations[1:]],
            "workers": live.get("workers", []),
            "queue": _queue(live),
            "lag": {"mean": figures.get("lag_mean"), "max": figures.get("lag_max")},
            "reward_mean": figures.get("reward_mean"),
            "evaluation": _evaluation(layout),
            "rewards": [event["metrics"]["reward_mean"] for event in recent],
            "broadcast": _broadcast(figures),
            "disk_free_bytes": _disk_free(layout),
            "disk_bytes": disk.to_json() if disk else None,
            "cause": condition.cause,
            "failure": condition.failure.to_json() if condition.failure else None,
            "waiting_for": live.get("waiting_for"),
            "tokens_per_s": live.get("tokens_per_s"),
            "would_be_replayed": max(step - max(checkpoint, 0), 0),
            "unfinished_saved": unfinished_episodes(layout),
            "slurm": condition.queue.word,
            "jobs": [job.to_json() for job in condition.queue.jobs],
            "excluded_nodes": excluded_nodes(layout, incarnations, limit),
            "process_ends": process_ends(events),
            "events": [{"at": event["at"], "text": event_in_words(event)} for event in events[-_EVENTS:]],
            "note": condition.note,
        }

    def _condition(self, current: IncarnationRecord | None) -> Condition:
        steps = self._steps(self._open(current))
        return look(self._layout, current, current is not None and steps > 0 and is_finished(self._layout, steps))

    def _open(self, current: IncarnationRecord | None) -> OpenRun | None:
        if current is None:
            return None
        if self._run is None or self._run[0] != current.incarnation:
            self._run = current.incarnation, open_run(self._layout, current.incarnation)
        return self._run[1]

    def _steps(self, run: OpenRun | None) -> int:
        """Of the run, or of what was submitted and has not begun."""
        if run is not None:
            return run.recipe.steps
        with contextlib.suppress(InputError):
            recipe = submitted_recipe(self._layout)
            return 0 if recipe is None else recipe.steps
        return 0


def is_finished(layout: RunLayout, steps: int) -> bool:
    """A run is finished when a checkpoint of its last step counts: committed, whole as a record, and within the seals."""
    path = layout.checkpoint_manifest(steps)
    data = read_optional(path)
    if data is None:
        return False
    try:
        manifest = CheckpointManifest.from_bytes(data, str(path))
    except CorruptArtefactError:
        return False
    return Seals(read_incarnations(layout)).accept_checkpoint(manifest)


def cause_of_restart(layout: RunLayout) -> str:
    """Why another incarnation begins, in words, from the last one's own log (for people: nothing is decided by it)."""
    incarnations = read_incarnations(layout)
    word = last_word(layout, incarnations[-1] if incarnations else None)
    if not word:
        events = controller_events(layout, incarnations[-1] if incarnations else None)
        if any(event["event"] == "stopping" for event in events):
            return f"{stop_in_words(layout, incarnations[-1])}; its job ended before that was done"
        return VANISHED
    if word["event"] == "controller_killed":
        return killed_in_words(word)
    if word["event"] == "failed":
        return f"it failed: {str(word.get('error', '')).splitlines()[0]}"
    return "more steps were asked for" if word["event"] == "finished" else stop_in_words(layout, incarnations[-1])


def _evaluation(layout: RunLayout) -> dict[str, Any] | None:
    """The last and the best on the same held-out prompts; None without any."""
    curve = main_curve(layout)
    if curve is None:
        return None
    last, best = curve.last, curve.best
    return {
        "version": last.version,
        "reward_mean": last.figures.reward_mean,
        "reward_std": last.figures.reward_std,
        "at": last.started_at,
        "best_version": best.version,
        "best_reward_mean": best.figures.reward_mean,
        "versions": len(curve.points),
    }


def _queue(live: dict[str, Any]) -> dict[str, int] | None:
    """Groups between rollout and training; None when no controller (or one of an older version) says it."""
    names = {"ready": "ready_groups", "stale": "stale_groups", "in_flight": "leased_groups", "leases": "leases"}
    if not set(names.values()) <= live.keys():
        return None
    return {name: int(live[said]) for name, said in names.items()}


def _broadcast(figures: dict[str, Any]) -> dict[str, Any] | None:
    """What the last step tells of the last broadcast of weights; None when there was none, or when it failed."""
    names = {"receivers": "broadcast_receivers", "bytes": "broadcast_bytes", "groups": "broadcast_groups"}
    if "broadcast_s" not in figures:
        return None
    return {"seconds": figures["broadcast_s"], **{name: int(figures[key]) for name, key in names.items()}}


def _disk_free(layout: RunLayout) -> int | None:
    """What this user may still write where the run lies."""
    try:
        found = os.statvfs(layout.root)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _beginning(layout: RunLayout, run: OpenRun | None) -> ForkedFrom | None:
    """What a fork began with, or will when its job starts."""
    if run is not None:
        return run.record.forked_from
    made = read_fork(layout)
    return None if made is None else made.forked_from


def _parent(fork: ForkedFrom | None) -> dict[str, Any] | None:
    """The run, and its step, that a fork began with."""
    return None if fork is None else {"run_id": fork.run_id, "path": fork.path, "step": fork.step}


def _restart(record: IncarnationRecord) -> dict[str, Any]:
    return {
        "incarnation": record.incarnation,
        "cause": record.cause,
        "at": record.started_at,
        "job_id": record.job_id,
        "host": record.host,
    }


def _last_step(layout: RunLayout, known: int, origin: int) -> int:
    """``known`` was recorded at the last look; the run begins behind ``origin``."""
    step = known if known > origin and layout.batch(known).exists() else origin
    while layout.batch(step + 1).exists():
        step += 1
    return step


def _newest_version(layout: RunLayout, step: int) -> tuple[int, str | None]:
    for version in range(step, -1, -1):
        path = layout.weights_manifest(version)
        data = read_optional(path)
        if data is not None:
            return version, WeightsManifest.from_bytes(data, str(path)).weights_digest
    return -1, None


def _last_checkpoint(layout: RunLayout, step: int) -> int:
    return next((s for s in range(step, 0, -1) if layout.checkpoint_manifest(s).exists()), 0)
