"""Publishing each new policy version, and comparing a replayed one with what was published.

    train step k ─> shares are gathered (all ranks; training waits) ─> train step k + 1 ...
                                                                     └ beside it: encode, write, commit version k, tell

All ranks take part: each encodes and writes the tensors that it was assigned (``decisions/shares.py``); rank 0 commits. With
broadcasts rank 0 has all of them, for it sends them from memory. A rank holds its share once, as the base of the next delta,
and what is on its way besides: memory of two shares while a version is published, one between.

With ``weights.diff_on`` the share is held on the device that trains, too, in the same numbers. A version's tensors then stay
there until it is known what of them changed, and that alone crosses to the host, beside the next step.

A replay that gives other weights than the published ones follows ``checkpoint.on_divergence``: ``stop`` ends the run; ``adopt``
goes on with the trainer's weights, keeps the published version as what the rollouts used, and notes the step in every later
checkpoint.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable

import torch

from milesbatch.backends.protocol import TrainerBackend
from milesbatch.decisions.shares import shares
from milesbatch.errors import CorruptArtefactError, DivergenceError
from milesbatch.recipe.models import Recipe
from milesbatch.records import WeightsManifest
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import Patience
from milesbatch.store.sight import Sight
from milesbatch.store.survey import Seals, read_incarnations
from milesbatch.trainer.broadcasting import Broadcasting
from milesbatch.trainer.density import DensityWatch
from milesbatch.trainer.overlap import Overlap
from milesbatch.weights.draft import Share, left_there, owned
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import RetiredError, read_manifest
from milesbatch.weights.team import Team, from_first

Figures = dict[str, float]


class Publishing:
    """One rank's part in publishing. Methods marked *collective* are called by all ranks alike."""

    def __init__(
        self,
        layout: RunLayout,
        recipe: Recipe,
        fence: Fence,
        backend: TrainerBackend,
        team: Team,
        ranks: int,
        overlap: Overlap,
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
        self._on_device = _looks_on_device(recipe.weights.diff_on, backend.device)
        self._team, self._ranks, self._overlap = team, ranks, overlap
        is_sent = recipe.weights.transport != "delta"
        self._owners = shares(backend.weight_sizes(), 1 if is_sent else ranks)
        incarnations = sight.until_seen(lambda: read_incarnations(layout, at_least=fence.incarnation))
        self._publisher = Publisher(
            layout,
            fence.incarnation,
            keyframe_every=recipe.weights.keyframe_every,
            before_commit=fence.check,
            accept=Seals(incarnations).accept_weights,
            patience=patience,
            sight=sight,
            team=team,
        )
        self.version = -1
        """The newest that is committed; as everything here that a job changes, to be relied on after :meth:`finish`."""
        self.weights_digest = ""
        self.divergences: list[int] = []
        self._digests: dict[int, str] = {}

    @property
    def is_idle(self) -> bool:
        """No version is on its way."""
        return self._overlap.is_idle

    def resume_at(self, version: int, weights_digest: str) -> None:
        """Go on from a checkpoint of ``version``, which is loaded (collective): the next version becomes a delta on the
        published one, when that is what the checkpoint holds and its files are whole; else a keyframe."""
        self.version, self.weights_digest = version, weights_digest
        self._digests[version] = weights_digest
        self._publisher.resume(version, self._taken(self._share()))

    def distrust(self, versions: Iterable[int]) -> None:
        """Rank 0: these versions cannot be reached by the workers; a replay publishes each again, as a keyframe."""
        self._publisher.distrust(versions)

    def mend(self, versions: Collection[int]) -> None:
        """Make ``versions`` reachable, if that is possible (collective). Everything up to ``self.version`` was published.

        A version that can be rebuilt from the files now needs nothing (the report came late, or the reader was at fault).

        Raises:
            CorruptArtefactError: a version older than the newest is lost: only a replay can make it again.
        """
        self.finish()
        for version in sorted(versions):
            if from_first(self._team, functools.partial(self._publisher.can_rebuild, version)):
                continue
            if version != self._publisher.snapshot_version:
                raise CorruptArtefactError(
                    f"policy version {version} cannot be rebuilt from the files, and workers need it",
                    mend="nothing: the trainer starts again and publishes it from a replay",
                )
            self._publisher.republish()

    def publish(self, version: int, *, moved: bool) -> None:
        """Make the backend's weights policy ``version``, and return when they are (collective); see :meth:`begin`."""
        self.begin(version, moved=moved, then=lambda figures: None)
        self.finish()

    def begin(self, version: int, *, moved: bool, then: Callable[[Figures], None], waits: bool = False) -> None:
        """Begin to make the backend's weights policy ``version`` (collective); they may change when this returns.

        The one before is finished first. ``moved``: the optimizer's step was not zero, so some weights should have changed.
        ``then`` is called on all ranks when the version is committed, with figures on rank 0, from the job's thread.
        ``waits``: the caller calls :meth:`finish` at once, so that training is held up by all of it.

        Raises:
            as :meth:`finish`, of the version before.
        """
        began_s = time.monotonic()
        self.finish()
        waited_s = time.monotonic() - began_s
        sent = {} if self._broadcasting is None else self._broadcasting.finish()  # it reads what the publisher replaces
        share = self._share()
        held_s = time.monotonic() - began_s

        def job() -> None:
            job_began_s = time.monotonic()
            figures = self._publish(version, share, moved)
            seconds = time.monotonic() - job_began_s
            then(
                {
                    **figures,
                    **sent,
                    "publish_s": held_s + seconds * waits,
                    "publish_wait_s": waited_s,
                    "publish_overlap_s": seconds * (not waits),
                    "weights_publish_s": held_s - waited_s + seconds,
                }
            )

        self._overlap.start(job)

    def finish(self) -> None:
        """Return when no version is on its way (collective, as all ranks' jobs end together).

        Raises:
            DivergenceError: the version was published before with other weights, and the recipe says ``stop``.
            FencedError, StorageError: nothing was committed.
        """
        self._overlap.finish()

    def digest_of(self, version: int) -> str:
        """Weights digest of a version that was begun here; waits for it when it is on its way.

        Raises:
            as :meth:`finish`.
        """
        if version not in self._digests:
            self.finish()
        return self._digests[version]

    def close(self) -> None:
        """Nothing more is published; what is on its way still is (collective)."""
        self.finish()
        if self._broadcasting is not None:
            self._broadcasting.close()

    # -- the job ----------------------------------------------------------------------------------------------------

    def _share(self) -> dict[str, torch.Tensor]:
        """This rank's tensors, in memory that nobody else writes to (collective)."""
        return {
            name: tensor
            for name, tensor in self._backend.named_weights(self._dtype, self._owners, on_device=self._on_device)
            if self._owners[name] == self._team.rank
        }

    def _taken(self, share: dict[str, torch.Tensor]) -> Share:
        """The tensors that are stored, for the publisher to keep; ``share`` is empty then."""
        take = left_there if self._on_device else owned
        taken: Share = take(share.items(), self._backend.tied_names())
        share.clear()
        return taken

    def _publish(self, version: int, share: dict[str, torch.Tensor], moved: bool) -> Figures:
        try:
            manifest = self._publisher.publish_share(version, self._taken(share), self._backend.tied_names())
        except DivergenceError:
            if self._recipe.checkpoint.on_divergence == "stop":
                raise
            manifest = self._adopt(version)
            self.divergences.append(version)
        self.version, self.weights_digest = version, manifest.weights_digest
        self._digests[version] = manifest.weights_digest
        self._digests.pop(version - 2 * max(self._recipe.checkpoint.every, 1) - 2, None)
        for drift in self._publisher.drifts:
            self._warn(version, f"{drift}; the version was written as a full copy of what the device has")
        if self._team.rank != 0:
            return {}
        if (unusual := self._density.look(manifest, moved=moved)) is not None:
            self._warn(version, unusual)
        if self._broadcasting is not None and self._publisher.snapshot_version == version:
            self._broadcasting.begin(manifest, self._publisher.snapshot_tensors)
        return {**_figures(manifest), "weights_crossed_bytes": float(self._publisher.crossed_bytes)}

    def _adopt(self, version: int) -> WeightsManifest:
        """The rollouts keep what was published. One rank takes that from its files for the next delta; where several would each
        have to read all of it, or when the files were retired, the next new version becomes a keyframe."""
        self._publisher.forget()
        if self._ranks == 1:
            try:
                return self._publisher.seed(version)
            except RetiredError:
                pass
        manifest = from_first(self._team, lambda: read_manifest(self._layout, version))
        assert manifest is not None, "its digest was just compared"
        return manifest


def _looks_on_device(diff_on: str, device: torch.device) -> bool:
    """Are changes looked for where the weights are trained? On a CPU that brings nothing, and is for tests."""
    return diff_on == "device" or (diff_on == "auto" and device.type != "cpu")


def _figures(manifest: WeightsManifest) -> Figures:
    elements = sum(_elements(entry.shape) for entry in manifest.tensors)
    return {
        "weights_bytes": float(sum(ref.bytes for ref in manifest.files)),
        "weights_changed_share": sum(entry.changed for entry in manifest.tensors) / max(elements, 1),
    }


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
