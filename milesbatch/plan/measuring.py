"""What an earlier run shows for a plan: the bytes of its deltas and the seconds of its steps, from its own files.

Never reads payload. Invariant: only versions with a delta count, and only a run whose model has as many elements.
"""

from __future__ import annotations

import statistics

from milesbatch.errors import InputError
from milesbatch.plan.memory import BYTES
from milesbatch.plan.model_size import ModelSize
from milesbatch.plan.traffic import Measured
from milesbatch.recipe.models import Recipe
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout
from milesbatch.weights.reader import committed_versions, delta_refs, read_manifest

_MOST = 200
_FIRST = 3
"""Steps that are not counted: processes warm up."""


def measure(layout: RunLayout, recipe: Recipe, size: ModelSize) -> Measured:
    """Mean delta and step of the newest versions of a run.

    Raises:
        InputError: the run has another model, another ``weights.dtype``, or no delta yet.
        CorruptArtefactError, StorageError: a manifest is damaged, or cannot be read.
    """
    deltas, changed, full = [], [], BYTES[recipe.weights.dtype] * size.parameters
    for version in committed_versions(layout)[-_MOST:]:
        manifest = read_manifest(layout, version)
        if manifest is None or manifest.parent is None:
            continue
        elements = sum(_elements(entry.shape) for entry in manifest.tensors)
        dtypes = {entry.dtype for entry in manifest.tensors}
        if elements != size.parameters or dtypes != {_SPELLED[recipe.weights.dtype]}:
            raise InputError(
                f"{layout.root} has {elements:,} elements of {', '.join(sorted(dtypes))}, the recipe's model"
                f" {size.parameters:,} of {_SPELLED[recipe.weights.dtype]}",
                mend="measure with a run of the same model and weights.dtype",
            )
        deltas.append(sum(ref.bytes for ref in delta_refs(manifest)))
        changed.append(sum(entry.changed for entry in manifest.tensors) / max(elements, 1))
    if not deltas:
        raise InputError(f"{layout.root} has no delta to measure", mend="give a run with at least two policy versions")
    return Measured(str(layout.root), statistics.fmean(deltas) / full, statistics.fmean(changed), _step_s(layout))


def _step_s(layout: RunLayout) -> float | None:
    seconds = []
    for path in sorted(layout.events.glob("trainer-0*")):
        for event, _ in read_events(path):
            figures = event.get("metrics")
            if event.get("event") == "train_step" and not event.get("replayed") and isinstance(figures, dict):
                seconds.append(sum(float(figures.get(name, 0)) for name in ("wait_s", "train_s", "publish_s")))
    return statistics.fmean(seconds[_FIRST:]) if len(seconds) > _FIRST else None


_SPELLED = {"float32": "F32", "bfloat16": "BF16"}


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
