"""A rollout worker's local copy of the weights: catches up with published versions and proves what it holds.

Owns one copy; never touches an engine, and waits only for files of which it was told (``sight``). Invariant: ``current`` is
always a whole policy version whose every tensor was compared with its manifest; a failed step leaves it as it was.
The page behind it is ``docs/protocol.md``, rule 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milesbatch.errors import StorageError
from milesbatch.records import WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.store.sight import AT_ONCE, Sight
from milesbatch.weights.materialize import write_model
from milesbatch.weights.reader import AcceptManifest, accept_all, read_manifest
from milesbatch.weights.rebuild import Copy, rebuild
from milesbatch.weights.tensors import to_torch

if TYPE_CHECKING:
    import torch


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

    def __init__(self, layout: RunLayout, *, accept: AcceptManifest = accept_all, sight: Sight = AT_ONCE) -> None:
        """``accept`` says which committed manifests count (those within the seal of the newest incarnation); ``sight`` how
        long a version is looked for that was published, as somebody said."""
        self._layout, self._accept, self._sight = layout, accept, sight
        self._current: VerifiedWeights | None = None

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
        """Go on from a proven copy that did not come from files; deltas are applied to it from now on."""
        self._current = VerifiedWeights(self._layout, copy)
        return self._current

    def advance_to(self, version: int) -> VerifiedWeights:
        """Reach ``version`` by deltas on the local copy or from a keyframe, whichever reads fewer bytes and works.

        Every tensor is compared before the result exists; earlier results stay valid. Going back is allowed.

        Raises:
            CorruptArtefactError: no undamaged way to it; ``current`` stays.
            StorageError: not published, or unreadable; ``current`` stays.
        """
        local = None if self._current is None else self._current.copy
        copy = self._sight.until_seen(lambda: rebuild(self._layout, version, local=local, accept=self._accept))
        self._current = VerifiedWeights(self._layout, copy)
        return self._current
