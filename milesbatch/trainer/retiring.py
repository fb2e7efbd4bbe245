"""Retiring weights: deleting the payload of policy versions that nothing needs any more. Trainer rank 0, after a checkpoint.

Owns the deletion; what goes is decided in :mod:`milesbatch.decisions.retention`. It never deletes a manifest. Invariant:
payload is deleted only when the retirement of its version is durable, and only of versions below a full copy that was just
read and found whole. The page behind it is ``docs/protocol.md``.

Crash states, for one version after the other, ascending:

1. killed before ``retired.json`` is created (exclusively, the fence checked just before): nothing happened;
2. killed after it, while the payload files are deleted: the version is retired, and some of its files are left. They cost
   space only; the next retirement by a later process deletes them. Only the newest retired version can have such files,
   because the directory is synced before the next version begins;
3. killed between two versions: less is deleted than could be. What is left below the base can perhaps not be rebuilt any
   more, and nothing needs it; the next retirement goes on there.
"""

from __future__ import annotations

from dataclasses import dataclass

from milesbatch.decisions.retention import Needs, find_base, needed_versions, versions_to_retire
from milesbatch.errors import CorruptArtefactError
from milesbatch.recipe.models import Recipe
from milesbatch.records import Retirement
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import AlreadyExistsError, create_exclusively, remove_files, sync_names, verify_files
from milesbatch.store.fence import Fence
from milesbatch.store.holds import HoldWatch
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_origin
from milesbatch.store.survey import Seals, read_incarnations
from milesbatch.trainer.checkpointing import counting_checkpoints
from milesbatch.weights.reader import is_retired, keyframe_refs, read_manifest


@dataclass(frozen=True, slots=True)
class Retired:
    """What one retirement did: versions ``first`` .. ``last``, all below ``base``."""

    first: int
    last: int
    base: int


class Retiring:
    """Retires weights in one process. Not for several threads."""

    def __init__(self, layout: RunLayout, recipe: Recipe, fence: Fence) -> None:
        self._layout, self._recipe, self._fence = layout, recipe, fence
        self._holds = HoldWatch(layout)
        self._retired: set[int] | None = None

    def retire(self, newest_checkpoint: int, workers: int | None) -> Retired | None:
        """Delete what can go now that the checkpoint of step ``newest_checkpoint`` is committed; None when nothing can.

        ``workers`` is the smallest version that a live worker holds, None when that is not known.

        Durability: each retirement is durable before its payload goes. If killed midway, see the module's crash states.

        Raises:
            FencedError: a newer incarnation has taken over; nothing more was deleted.
            StorageError: something could not be read, written or deleted; the same call can be made again.
        """
        if not self._recipe.weights.retire:
            return None
        needs = needed_versions(
            counting_checkpoints(self._layout, newest_checkpoint),
            keep=self._recipe.checkpoint.keep,
            staleness=self._recipe.rollout.staleness,
            workers=workers,
            readers=self._holds.versions(),
        )
        if needs is None:
            return None
        retired = self._look(newest_checkpoint)
        oldest = next(version for version in range(newest_checkpoint + 2) if version not in retired)
        base = find_base(needs.version, oldest, self._is_whole_keyframe)
        going = () if base is None else versions_to_retire(base, retired)
        if base is None or not going:
            return None
        for version in going:
            self._retire(version, base, needs)
            retired.add(version)
        return Retired(going[0], going[-1], base)

    def _look(self, newest: int) -> set[int]:
        """Versions that are retired; at the first call, what a killed process left of the newest one is deleted."""
        if self._retired is None:
            first = read_origin(self._layout).first_version  # a fork has none before
            self._retired = {v for v in range(newest + 1) if v < first or is_retired(self._layout, v)}
            if self._retired and (left := self._payload(max(self._retired))):
                directory = self._layout.weights_version(max(self._retired))
                self._fence.check()
                sync_names(directory)  # its retirement is visible, but was perhaps never made durable
                remove_files(directory, left)
        return self._retired

    def _is_whole_keyframe(self, version: int) -> bool:
        """Reads the whole full copy: what is older is deleted on the strength of it."""
        try:
            return self._has_full_copy(version)
        except CorruptArtefactError:
            return False

    def _has_full_copy(self, version: int) -> bool:
        manifest = read_manifest(self._layout, version)
        seals = Seals(read_incarnations(self._layout, at_least=self._fence.incarnation))
        refs = () if manifest is None or not seals.accept_weights(manifest) else keyframe_refs(manifest)
        if not refs or is_retired(self._layout, version):
            return False
        verify_files(self._layout.weights_version(version), refs)
        return True

    def _retire(self, version: int, base: int, needs: Needs) -> None:
        if not self._layout.weights_manifest(version).exists():
            return  # not a version; an audit asks for its manifest
        record = Retirement(
            version=version,
            incarnation=self._fence.incarnation,
            base=base,
            needed=needs.version,
            checkpoint=needs.checkpoint,
            staleness=needs.staleness,
            created_at=utc_now(),
        )
        directory = self._layout.weights_version(version)
        try:
            create_exclusively(self._layout.weights_retirement(version), record.to_bytes(), self._fence.check)
        except AlreadyExistsError:  # retired already; by whom, and why, does not matter
            sync_names(directory)
        remove_files(directory, self._payload(version))

    def _payload(self, version: int) -> list[str]:
        return sorted(path.name for path in self._layout.weights_version(version).glob("*.safetensors"))
