"""Which policy versions a run must have, by its records: so that one of which nothing is left is missed all the same.

Owns that judgement; reads no payload. Never guesses: a record that is damaged says nothing here (the audit names it).
Invariant: what is expected was published once, and not only begun. The page behind it is ``docs/format-weights.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from milesbatch.errors import CorruptArtefactError, FormatVersionError
from milesbatch.records import BatchRecord, CheckpointManifest, Record
from milesbatch.store.durable import read_optional
from milesbatch.store.entries import numbered
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_origin
from milesbatch.store.survey import read_incarnations

R = TypeVar("R", bound=Record)


def expected_versions(layout: RunLayout, committed: list[int]) -> range:
    """Versions that must have a manifest, ``committed`` being those that have one; manifests are never deleted.

    Empty for what is no run but only looks like one as far as weights go, a store or a pulled copy: holes are no damage there.

    Raises:
        StorageError: something cannot be read.
    """
    if not layout.batches.is_dir():
        return range(0)
    newest = max([_promised(layout), *committed])
    try:
        first = read_origin(layout).first_version
    except (CorruptArtefactError, FormatVersionError):
        first = min(committed, default=0)
    return range(first, newest + 1)


def _promised(layout: RunLayout) -> int:
    """The newest version that a record speaks of as published; -1 without any.

    Step k is recorded only after version k - 2 was published, a checkpoint after its version. What earlier incarnations
    recorded beyond the newest seal may have been found damaged at the take-over, and is published again when it is replayed.
    """
    try:
        incarnations = read_incarnations(layout)
    except (CorruptArtefactError, FormatVersionError):
        return -1
    promised, sealed_batch, newest = -1, 0, len(incarnations)
    if incarnations:
        seal = incarnations[-1].seal
        promised, sealed_batch = seal.last_version, seal.last_batch
    steps = [step for step, _ in numbered(layout.batches, ".json")]
    if steps and steps[-1] > sealed_batch:
        record = _read(BatchRecord, layout.batch(steps[-1]))
        if record is not None and record.incarnation >= newest:
            promised = max(promised, steps[-1] - 2)
    for step, _ in reversed(numbered(layout.checkpoints)):
        manifest = _read(CheckpointManifest, layout.checkpoint_manifest(step))
        if manifest is not None:
            return max(promised, manifest.policy_version) if manifest.incarnation >= newest else promised
    return promised


def _read(kind: type[R], path: Path) -> R | None:
    data = read_optional(path)
    try:
        return None if data is None else kind.from_bytes(data, str(path))
    except (CorruptArtefactError, FormatVersionError):
        return None
