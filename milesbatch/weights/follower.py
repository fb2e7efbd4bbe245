"""A rollout worker's local copy of the weights: catches up with published versions and proves what it holds.

Owns one copy; never touches an engine, and waits only for files of which it was told (``sight``). Invariant: ``current`` is
always a whole policy version whose every tensor was compared with its manifest, or, in place and after an error, None.
The page behind it is ``docs/protocol.md``, rule 6.

In place, deltas are applied to the one copy there is: peak memory is that copy and the payload. Every file is read and compared
with its digest before the first byte of the copy changes; while it changes, and when a tensor's digest then is not the
manifest's, nothing is current. Such a copy is given up and made anew from a keyframe: there is no way back to the old version,
and nobody is ever given the half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milesbatch.errors import CorruptArtefactError, StorageError
from milesbatch.records import WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.store.sight import AT_ONCE, Sight
from milesbatch.weights.folding import fold
from milesbatch.weights.materialize import write_model
from milesbatch.weights.reader import AcceptManifest, accept_all, delta_refs, plan_chain, read_manifest
from milesbatch.weights.rebuild import Copy, check_weights_digest, read_link, rebuild
from milesbatch.weights.tensors import to_torch

if TYPE_CHECKING:
    import torch


_PATCH_BYTES = 1 << 28
"""Payload that is held for one pass in place; a longer way is gone with two copies, in several passes."""


@dataclass(frozen=True, slots=True)
class VerifiedWeights:
    """A proven policy version; satisfies :class:`milesbatch.engines.protocol.PolicyWeights`."""

    layout: RunLayout
    copy: Copy

    @property
    def version(self) -> int:
        return self.copy.version

    @property
    def weights_digest(self) -> str:
        return self.copy.manifest.weights_digest

    @property
    def manifest(self) -> WeightsManifest:
        return self.copy.manifest

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All stored tensors by name, in name order. They share memory with this copy: copy them, never write to them."""
        return {name: to_torch(tensor) for name, tensor in sorted(self.copy.tensors.items())}

    def write_model(self, directory: Path) -> None:
        """Write a directory that transformers and servers load; see :func:`milesbatch.weights.materialize.write_model`."""
        write_model(self.layout, self.copy.tensors, directory)


class Follower:
    """Holds one verified policy version and moves it to others. Not for several threads."""

    def __init__(
        self,
        layout: RunLayout,
        *,
        accept: AcceptManifest = accept_all,
        sight: Sight = AT_ONCE,
        in_place: bool = False,
    ) -> None:
        """``accept`` says which committed manifests count (those within the seal of the newest incarnation); ``sight`` how
        long a version is looked for that was published, as somebody said. ``in_place``: the caller's engine has a copy of its
        own, and results of :meth:`advance_to` are not looked at any more once it is called again."""
        self._layout, self._accept, self._sight, self._in_place = layout, accept, sight, in_place
        self._current: VerifiedWeights | None = None
        self._is_own = False
        """Nobody else holds the arrays of the copy: they may be written to."""

    @property
    def layout(self) -> RunLayout:
        """Of the run that it follows."""
        return self._layout

    @property
    def current(self) -> VerifiedWeights | None:
        """The newest version that was reached; None before the first."""
        return self._current

    def is_published(self, version: int) -> bool:
        """Is ``version`` committed and accepted? Looks at one predictable name, not at a listing.

        Raises:
            CorruptArtefactError: its manifest is damaged.
        """
        return self.published_digest(version) is not None

    def published_digest(self, version: int) -> str | None:
        """Weights digest of ``version`` as it is published; None when no version of that number counts.

        Raises:
            CorruptArtefactError: its manifest is damaged.
        """
        manifest = read_manifest(self._layout, version)
        return manifest.weights_digest if manifest is not None and self._accept(manifest) else None

    def published_manifest(self, version: int) -> WeightsManifest:
        """Manifest of a version that was published, as somebody said; may be asked by another thread.

        Raises:
            CorruptArtefactError: it is damaged.
            StorageError: it is not there, or does not count.
        """

        def look() -> WeightsManifest:
            manifest = read_manifest(self._layout, version)
            if manifest is None or not self._accept(manifest):
                path = self._layout.weights_manifest(version)
                raise StorageError(f"policy version {version} is not published: {path} does not count", unseen=path)
            return manifest

        return self._sight.until_seen(look)

    def adopt(self, copy: Copy) -> VerifiedWeights:
        """Go on from a proven copy that did not come from files, and that others may hold, too."""
        self._current, self._is_own = VerifiedWeights(self._layout, copy), False
        return self._current

    def advance_to(self, version: int) -> VerifiedWeights:
        """Reach ``version`` by deltas on the local copy or from a keyframe, whichever reads fewer bytes and works.

        Every tensor is compared before the result exists. Earlier results stay valid, but in place. Going back is allowed.

        Raises:
            CorruptArtefactError: no undamaged way to it; ``current`` stays (in place it may be None).
            StorageError: not published, or unreadable; as above.
        """
        if self._in_place and self._is_own and (patched := self._patched(version)) is not None:
            self._current = patched
            return patched
        local = None if self._current is None else self._current.copy
        copy = self._sight.until_seen(lambda: rebuild(self._layout, version, local=local, accept=self._accept))
        self._current, self._is_own = VerifiedWeights(self._layout, copy), True
        return self._current

    def _patched(self, version: int) -> VerifiedWeights | None:
        """The copy itself, moved to ``version`` by deltas; None when that is not the way, or it did not end well."""
        if self._current is None:
            return None
        copy = self._current.copy
        try:
            plan = plan_chain(self._counting, version, local=copy.version)
            target = self._counting(version)
            if plan is None or plan.keyframe is not None or target is None or not plan.steps:
                return None
            size = sum(ref.bytes for step in plan.steps for ref in delta_refs(self._must_count(step.version)))
            if size > _PATCH_BYTES:
                return None
            links = [read_link(self._layout, self._must_count(step.version)) for step in plan.steps]
            check_weights_digest(self._layout, target)
        except CorruptArtefactError:
            return None  # another way may be there, and the copy is whole
        self._current = None
        try:
            tensors = fold(links, copy.tensors, owned=True)
        except CorruptArtefactError:
            return None
        return VerifiedWeights(self._layout, Copy(target, tensors))

    def _counting(self, version: int) -> WeightsManifest | None:
        manifest = read_manifest(self._layout, version)
        return manifest if manifest is not None and self._accept(manifest) else None

    def _must_count(self, version: int) -> WeightsManifest:
        manifest = self._counting(version)
        if manifest is None:
            raise CorruptArtefactError(f"policy version {version} does not count any more")
        return manifest
