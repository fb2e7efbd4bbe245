"""The state of a run: from its files alone, with the living controller's view of the workers where it answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from milesbatch.errors import CorruptArtefactError
from milesbatch.records import CheckpointManifest, IncarnationRecord, WeightsManifest
from milesbatch.report.summary import step_events
from milesbatch.store.durable import read_optional
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import is_alive, read_hint
from milesbatch.store.run import open_run
from milesbatch.store.survey import Seals, read_incarnations

_ASK_S = 2.0


def run_status(layout: RunLayout) -> dict[str, Any]:
    """What ``milesbatch status --json`` prints; the keys are those of the interface page.

    Raises:
        InputError: not a run. CorruptArtefactError: a record that the state depends on is damaged.
    """
    incarnations = read_incarnations(layout)
    current = incarnations[-1] if incarnations else None
    run = open_run(layout, current.incarnation) if current else None
    step = _last_number(layout, "batch")
    version, digest = _newest_version(layout, step)
    checkpoint = _last_checkpoint(layout, step)
    steps = run.recipe.steps if run else 0
    alive = current is not None and is_alive(layout, current, watch_s=3.0)
    ending = _ending(layout, current)
    live = _ask_controller(layout, current) if alive and current else None
    metrics = list(step_events(layout).values())[-1:]
    figures = metrics[0]["metrics"] if metrics else {}
    return {
        "run_id": run.record.run_id if run else None,
        "state": _state(steps > 0 and is_finished(layout, steps), alive, ending, live),
        "step": step,
        "steps": steps,
        "policy_version": version,
        "weights_digest": digest,
        "incarnation": current.incarnation if current else 0,
        "job_ids": sorted({record.job_id for record in incarnations}),
        "last_checkpoint_step": checkpoint,
        "restarts": [
            {"incarnation": record.incarnation, "cause": record.cause, "at": record.started_at}
            for record in incarnations[1:]
        ],
        "workers": live["workers"] if live else [],
        "lag": {"mean": figures.get("lag_mean"), "max": figures.get("lag_max")},
        "reward_mean": figures.get("reward_mean"),
        "cause": ending.get("error") if ending.get("event") == "failed" and not alive else None,
        "waiting_for": live["waiting_for"] if live else None,
        "would_be_replayed": max(step - max(checkpoint, 0), 0),
    }


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
    ending = _ending(layout, incarnations[-1] if incarnations else None)
    if not ending:
        return "the controller was lost without a word (killed, or its node died)"
    if ending["event"] == "failed":
        return f"it failed: {str(ending.get('error', '')).splitlines()[0]}"
    return {"finished": "more steps were asked for", "stopped": "it was stopped by a signal"}[ending["event"]]


def _state(has_finished: bool, alive: bool, ending: dict[str, Any], live: dict[str, Any] | None) -> str:
    if has_finished:
        return "finished"
    if alive:
        return str(live["state"]) if live else "running"
    if ending.get("event") == "failed":
        return "failed"
    return "stopped"


def _last_number(layout: RunLayout, kind: str) -> int:
    step = 0
    while getattr(layout, kind)(step + 1).exists():
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


def _ending(layout: RunLayout, current: IncarnationRecord | None) -> dict[str, Any]:
    """The controller's last word in the newest incarnation, if it said one."""
    if current is None:
        return {}
    last: dict[str, Any] = {}
    for event, _ in read_events(layout.event_log("controller-0", current.incarnation)):
        if event["event"] in ("finished", "stopped", "failed"):
            last = event
    return last


def _ask_controller(layout: RunLayout, current: IncarnationRecord) -> dict[str, Any] | None:
    hint = read_hint(layout, current.incarnation)
    if not hint:
        return None
    try:
        with urllib.request.urlopen(f"{hint['address']}/v1/status", timeout=_ASK_S) as answer:
            body = json.load(answer)
    except (urllib.error.URLError, TimeoutError, ValueError, KeyError):
        return None
    return body if isinstance(body, dict) else None
