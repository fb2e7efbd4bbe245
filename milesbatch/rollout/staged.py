"""Following the weights on local disk instead of in memory: for engines whose servers load a model directory.

Owns one :class:`~milesbatch.weights.staging.Staging`, and who may look at it when: it is patched in place, so that
whoever reads it holds it still meanwhile; readers do not wait for each other. Invariant: a directory that is given out
holds exactly the version that was asked for, every byte of which was compared with its manifest, until it is given back.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milesbatch.engines.protocol import PolicyWeights
from milesbatch.engines.sglang.weights import SupersededError
from milesbatch.errors import StorageFullError
from milesbatch.records import WeightsManifest
from milesbatch.rollout.memory import Room
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import AT_ONCE
from milesbatch.store.sight import Sight
from milesbatch.weights.reader import AcceptManifest, read_manifest
from milesbatch.weights.staging import Staging

if TYPE_CHECKING:
    import torch


_NO_WAITING = Room(AT_ONCE)


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A proven policy version on local disk (satisfies ``PolicyWeights``), for as long as it is the newest there."""

    manifest: WeightsManifest
    follower: StagedFollower

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def weights_digest(self) -> str:
        return self.manifest.weights_digest

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All stored tensors by name, read from the disk; memory of their own."""
        from safetensors.torch import load_file

        with self.follower.held(self) as directory:
            tensors: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
            return {name: tensor.clone() for name, tensor in sorted(tensors.items())}

    def write_model(self, directory: Path) -> None:
        """A copy of the model directory."""
        with self.follower.held(self) as model:
            shutil.copytree(model, directory)


class StagedFollower:
    """Moves the local model directory from version to version; stands where a ``Follower`` does."""

    def __init__(
        self, staging: Staging, layout: RunLayout, accept: AcceptManifest, sight: Sight, room: Room = _NO_WAITING
    ) -> None:
        self._staging, self._layout, self._accept, self._sight = staging, layout, accept, sight
        self._room = room
        self._change = threading.Condition()
        self._readers = 0

    @property
    def layout(self) -> RunLayout:
        """Of the run that it follows."""
        return self._layout

    def published_digest(self, version: int) -> str | None:
        """As :meth:`milesbatch.weights.follower.Follower.published_digest`."""
        manifest = read_manifest(self._layout, version)
        return manifest.weights_digest if manifest is not None and self._accept(manifest) else None

    def advance_to(self, version: int) -> StagedWeights:
        """Make the directory ``version``; waits for whoever reads it, and for space.

        Raises:
            CorruptArtefactError: no undamaged way to it.
            LocalSpaceError: there was no space for it for too long.
            StorageError: not published, or something cannot be read or written.
        """
        return StagedWeights(self._room.until_there(lambda: self._advance(version)), self)

    def _advance(self, version: int) -> WeightsManifest:
        """Nobody is kept from the directory while there is no space. Where a patch, or a copy beside the old one, finds none,
        the old one makes way when that is enough: so room for one copy is always enough."""
        with self._alone():
            try:
                return self._sight.until_seen(lambda: self._staging.advance_to(version))
            except StorageFullError as error:
                full = StorageFullError(
                    error.what, mend=error.mend
                )  # the frames of ``error`` hold the old copy's memory
            if not self._staging.make_way(version):
                raise full
            return self._sight.until_seen(lambda: self._staging.advance_to(version))

    @contextmanager
    def held(self, weights: PolicyWeights) -> Iterator[Path]:
        """The directory with ``weights``, which holds still while the context is open. A server that hangs over it does not
        keep others from it.

        Raises:
            SupersededError: it has moved on to another version.
        """
        with self._change:
            if self._staging.current != weights.version:
                raise SupersededError(f"policy version {weights.version} is not staged any more; a newer one is coming")
            self._readers += 1
        try:
            yield self._staging.model
        finally:
            with self._change:
                self._readers -= 1
                self._change.notify_all()

    def close(self) -> None:
        """Let the directory go; it stays."""
        with self._alone():
            self._staging.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody reads, and nobody begins to."""
        with self._change:
            self._change.wait_for(lambda: self._readers == 0)
            yield
