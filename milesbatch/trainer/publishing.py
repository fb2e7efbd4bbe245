"""Publishing each new policy version, and comparing a replayed one with what was published.

All ranks take part (the weights are gathered by collectives); rank 0 writes. A replay that gives other weights than the
published ones follows ``checkpoint.on_divergence``: ``stop`` ends the run; ``adopt`` goes on with the trainer's weights,
keeps the published version as what the rollouts used, and notes the step in every later checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

import torch

from milesbatch.backends.protocol import TrainerBackend
from milesbatch.errors import CorruptArtefactError, DivergenceError, StorageError
from milesbatch.recipe.models import Recipe
from milesbatch.records import WeightsManifest
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import Patience
from milesbatch.store.sight import Sight
from milesbatch.store.survey import Seals, read_incarnations
from milesbatch.trainer.broadcasting import Broadcasting
from milesbatch.trainer.density import DensityWatch
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import RetiredError, read_manifest


class Publishing:
    """One rank's part in publishing."""

    def __init__(
        self,
        layout: RunLayout,
        recipe: Recipe,
        fence: Fence,
        backend: TrainerBackend,
        is_first: bool,
        patience: Patience,
        sight: Sight,
        warn: Callable[[int, str], None],
        broadcasting: Broadcasting | None = None,
    ) -> None:
        """``warn`` is told the version and what is unusual about it; ``broadcasting``: of rank 0, where the recipe wants it."""
        self._warn, self._density = warn, DensityWatch()
        self._broadcasting = broadcasting
        self._layout = layout
        self._recipe = recipe
        self._backend = backend
        self._dtype = getattr(torch, recipe.weights.dtype)
        self._publisher: Publisher | None = None
        if is_first:
            incarnations = sight.until_seen(lambda: read_incarnations(layout, at_least=fence.incarnation))
            self._publisher = Publisher(
                layout,
                fence.incarnation,
                keyframe_every=recipe.weights.keyframe_every,
                before_commit=fence.check,
                accept=Seals(incarnations).accept_weights,
                patience=patience,
                sight=sight,
            )
        self.version = -1
        self.weights_digest = ""
        self.divergences: list[int] = []

    def resume_at(self, version: int, weights_digest: str) -> None:
        """Go on from a checkpoint of ``version``: the next version becomes a delta on the published one."""
        self.version, self.weights_digest = version, weights_digest
        if self._publisher is not None:
            try:
                self._publisher.seed(version)
            except (CorruptArtefactError, StorageError):
                return  # damaged or not there: no base for a delta: the next version is published as a keyframe

    def distrust(self, versions: Iterable[int]) -> None:
        """Rank 0: these versions cannot be reached by the workers; a replay publishes each again, as a keyframe."""
        if self._publisher is not None:
            self._publisher.distrust(versions)

    def mend(self, versions: Collection[int]) -> None:
        """Rank 0, which has published everything up to ``self.version``: make ``versions`` reachable, if it can.

        A version that can be rebuilt from the files now needs nothing (the report came late, or the reader was at fault).

        Raises:
            CorruptArtefactError: a version older than the newest is lost: only a replay can make it again.
        """
        assert self._publisher is not None
        for version in sorted(versions):
            if self._publisher.can_rebuild(version):
                continue
            if version != self._publisher.snapshot_version:
                raise CorruptArtefactError(
                    f"policy version {version} cannot be rebuilt from the files, and workers need it",
                    mend="nothing: the trainer starts again and publishes it from a replay",
                )
            self._publisher.republish()

    def publish(self, version: int, *, moved: bool) -> dict[str, float]:
        """Make the backend's weights policy ``version`` (all ranks); figures on rank 0. ``moved``: the optimizer's step was not
        zero, so that some weights should have changed.

        Raises:
            DivergenceError: the version was published before with other weights, and the recipe says ``stop``.
            FencedError, StorageError: nothing was committed.
        """
        sent = {} if self._broadcasting is None else self._broadcasting.finish()  # it reads what the publisher replaces
        began_s = time.monotonic()
        named = self._backend.named_weights(self._dtype)
        if self._publisher is None:
            for _ in named:
                pass  # the collectives need every rank
            self.version = version
            return {}
        try:
            manifest = self._publisher.publish(version, named, self._backend.tied_names())
        except DivergenceError:
            if self._recipe.checkpoint.on_divergence == "stop":
                raise
            manifest = self._adopt(version)
            self.divergences.append(version)
        self.version, self.weights_digest = version, manifest.weights_digest
        figures = _figures(manifest, time.monotonic() - began_s)
        if (unusual := self._density.look(manifest, moved=moved)) is not None:
            self._warn(version, unusual)
        if self._broadcasting is not None and self._publisher.snapshot_version == version:
            self._broadcasting.begin(manifest, self._publisher.snapshot_tensors)
        return {**figures, **sent}

    def close(self) -> None:
        """Nothing more is published."""
        if self._broadcasting is not None:
            self._broadcasting.close()

    def _adopt(self, version: int) -> WeightsManifest:
        """The rollouts keep what was published. When its files were retired, the next new version becomes a keyframe."""
        assert self._publisher is not None
        try:
            return self._publisher.seed(version)
        except RetiredError:
            manifest = read_manifest(self._layout, version)
            assert manifest is not None, "its digest was just compared"
            return manifest


def _figures(manifest: WeightsManifest, seconds: float) -> dict[str, float]:
    elements = sum(_elements(entry.shape) for entry in manifest.tensors)
    return {
        "weights_bytes": float(sum(ref.bytes for ref in manifest.files)),
        "weights_changed_share": sum(entry.changed for entry in manifest.tensors) / max(elements, 1),
        "weights_publish_s": seconds,
    }


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
