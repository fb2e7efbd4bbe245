"""Follows a run's policy versions and evaluates those that are due, one after the other.

    for each due version: hold it against retirement ─ wait until it is published ─ evaluated already? ─ evaluate ─ tell

Owns the order, the holds, and what happens when one version cannot be evaluated: it is told and left out, and the next
start tries again. Never decides what training does: the hold is all that training sees of it. Invariant: from before it
is waited for until its record is committed, a due version is held, so that a slow evaluator finds its weights. The page
behind it is ``docs/evaluation.md``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from milesbatch.errors import CorruptArtefactError
from milesbatch.evaluation.evaluator import Evaluator
from milesbatch.evaluation.figures import metrics_of
from milesbatch.records import EvaluationRecord
from milesbatch.store.holds import holding
from milesbatch.store.layout import RunLayout
from milesbatch.store.sight import refresh

_READER = "evaluation"
_UNSEEN_S = 0.5


class Teller(Protocol):
    """Where an evaluator's story goes: an event log, or a terminal."""

    def write(self, event: str, **fields: Any) -> None: ...


def follow_versions(
    layout: RunLayout,
    evaluator: Evaluator,
    due: Sequence[int],
    events: Teller,
    held: contextlib.ExitStack,
    await_published: Callable[[int], bool],
    began: Callable[[int], None] = lambda version: None,
) -> list[EvaluationRecord]:
    """Evaluate the versions ``due`` (ascending) as they come; returns the records, those that were there before included.

    ``held`` has the caller's hold, of the first one; it is exchanged for later ones. ``await_published`` returns True
    when a version may be published, and False when it is not worth to wait for it any more; ``began`` is told of each
    version before it is evaluated.

    Raises:
        DataError, ExtensionError, ModelError: what is asked cannot be asked.
        StoppedToContinue: told to stop in the middle of an evaluation; nothing of that one counts.
        StorageError: something cannot be read or written.
    """
    records: list[EvaluationRecord] = []
    for version in due:
        try:
            record = _known(evaluator, version)
            if record is None:
                _hold(layout, version, held)
                digest = _until_published(evaluator, version, await_published)
                if digest is None:
                    break
                began(version)
                events.write("evaluation_started", version=version)
                record = evaluator.known(version, digest) or evaluator.evaluate(version, digest)
                events.write("evaluation_committed", **_told(layout, record))
            records.append(record)
        except CorruptArtefactError as error:  # damaged, or retired before this evaluator came
            events.write("evaluation_skipped", version=version, error=error.what)
    return records


def hold_from(layout: RunLayout, version: int) -> contextlib.ExitStack:
    """A hold on ``version`` and later ones, to be closed by the caller."""
    held = contextlib.ExitStack()
    held.enter_context(holding(layout, version, _READER))
    return held


def _hold(layout: RunLayout, version: int, held: contextlib.ExitStack) -> None:
    """Exchange what is held for ``version`` and later ones, without a moment between."""
    following = hold_from(layout, version)
    held.close()
    held.push(following)


def _known(evaluator: Evaluator, version: int) -> EvaluationRecord | None:
    digest = evaluator.published_digest(version)
    return None if digest is None else evaluator.known(version, digest)


def _until_published(evaluator: Evaluator, version: int, await_published: Callable[[int], bool]) -> str | None:
    while await_published(version):
        digest = evaluator.published_digest(version)
        if digest is not None:
            return digest
        refresh(evaluator.layout.weights_version(version))  # it was told of, and a shared filesystem shows it late
        time.sleep(_UNSEEN_S)
    return None


def _told(layout: RunLayout, record: EvaluationRecord) -> dict[str, Any]:
    path = layout.evaluation_record(record.version, record.tag)
    return {
        "version": record.version,
        "path": str(path.relative_to(layout.root)),
        "seconds": record.seconds,
        "metrics": metrics_of(record.figures),
    }
