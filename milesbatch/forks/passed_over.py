"""Why a state of the parent is not one to begin with, in words: what the survey left out, and what retention has deleted.

Owns the words; never decides what is used (``choose.py``), and reads only. Invariant: what is told of a checkpoint that does
not count names the file that is the cause. Event logs are asked for what nothing else remembers, a checkpoint whose manifest is
gone; they may be incomplete, so that their silence means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from milesbatch.ids import number, parse_number
from milesbatch.records import IncarnationRecord
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import Seals, Survey


def newer_than(
    parent: RunLayout, incarnations: Sequence[IncarnationRecord], found: Survey, chosen: int
) -> tuple[tuple[int, str], ...]:
    """Checkpoints above ``chosen`` that were saved and cannot be used, newest first: step and reason."""
    steps = {*found.checkpoints, *_steps_of(parent, [*(path for path, _ in found.broken), *found.unseen])}
    steps |= _promised(parent, incarnations)
    reasons = ((step, _damage(parent, found, step)) for step in sorted(steps, reverse=True) if step > chosen)
    return tuple((step, reason) for step, reason in reasons if reason is not None)


def why_not(parent: RunLayout, incarnations: Sequence[IncarnationRecord], found: Survey, step: int) -> str:
    """Why nothing can begin behind ``step``, which is not among what can be used."""
    if step < found.origin.step:
        return f"it is a fork itself, which began behind step {found.origin.step}"
    manifest = parent.checkpoint_manifest(step)
    is_lost = manifest in found.unseen or (
        step > max(found.checkpoints, default=0) and step in _promised(parent, incarnations)
    )
    if not manifest.exists() and not is_lost:
        if step in _saved(parent, incarnations) or any(step in record.seal.checkpoints for record in incarnations):
            return "it was deleted, as older ones are (checkpoint.keep and checkpoint.keep_every say which are kept)"
        if step > found.last_batch:
            return f"{found.last_batch} steps are trained"
        return "none is there (checkpoint.every says at which steps one is saved)"
    return _damage(parent, found, step) or "it was saved a moment ago"


def _damage(parent: RunLayout, found: Survey, step: int) -> str | None:
    """What is broken of checkpoint ``step`` or of what it follows from; None when it has only just been saved."""
    reasons: dict[Path, str] = {}
    for path, reason in found.broken:
        reasons.setdefault(path, reason)

    def told(path: Path) -> str | None:
        if path in reasons:
            said = reasons[path].splitlines()[0]
            return said if str(path.parent) in said else f"{path}: {said}"
        return None if path.exists() else f"{path} is missing"

    if (whole := told(parent.checkpoint_manifest(step))) is not None and step <= found.last_batch:
        return whole
    if step > found.last_batch:
        return told(parent.batch(found.last_batch + 1))
    return told(parent.weights_manifest(max(found.last_version + 1, found.origin.first_version)))


def _steps_of(parent: RunLayout, paths: Sequence[Path]) -> set[int]:
    """Steps whose checkpoints' manifests are among ``paths``."""
    places = (
        path.parent for path in paths if path.name == "manifest.json" and path.parent.parent == parent.checkpoints
    )
    return {parse_number(place.name) for place in places}


def _promised(parent: RunLayout, incarnations: Sequence[IncarnationRecord]) -> set[int]:
    """Checkpoints that were saved and that no later seal leaves out; the newest of them are there: those are not retired."""
    seals = Seals(incarnations)

    def is_covered(step: int, by: int) -> bool:
        return seals.cover(by, lambda seal: step in seal.checkpoints)

    return {step for step, by in _saved(parent, incarnations).items() if is_covered(step, by)}


def _saved(parent: RunLayout, incarnations: Sequence[IncarnationRecord]) -> dict[int, int]:
    """Steps of which event logs say that a checkpoint was saved, each with the last incarnation that did."""
    return {
        int(event["step"]): record.incarnation
        for record in incarnations
        for log in sorted(parent.events.glob(f"trainer-0*.i{number(record.incarnation)}.jsonl"))
        for event, _ in read_events(log)
        if event.get("event") == "checkpoint_committed" and isinstance(event.get("step"), int)
    }
