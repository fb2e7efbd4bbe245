"""Rebuilding a policy version from keyframes and deltas, proven before it is handed out.

Owns the application of payload and the comparison of digests; never keeps a copy and never writes. Invariant: what
:func:`rebuild` returns has every tensor's digest and the weights digest of the target's manifest, computed from the returned
bytes; arrays given to it are never changed. Damage on one way is answered by another way (design: quarantine or rebuild);
only when none is left it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from milesbatch.errors import CorruptArtefactError, StorageError
from milesbatch.records import TensorEntry, WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.weights.digest import entries_digest
from milesbatch.weights.folding import DigestError, Link, LinkError, fold, in_threads
from milesbatch.weights.reader import (
    AcceptManifest,
    Plan,
    RetiredError,
    Step,
    accept_all,
    delta_refs,
    is_retired,
    keyframe_refs,
    plan_chain,
    read_manifest,
    retired_error,
)
from milesbatch.weights.tensorfile import read_tensors
from milesbatch.weights.tensors import RawTensor

_FOLD_BYTES = 1 << 28
"""Payload of consecutive deltas that is held in memory to be applied in one pass."""

_MEND = "run `milesbatch weights verify` on the run"


@dataclass(frozen=True, slots=True)
class Copy:
    """All stored tensors of one policy version, proven against its manifest."""

    manifest: WeightsManifest
    tensors: Mapping[str, RawTensor]

    @property
    def version(self) -> int:
        return self.manifest.version


def read_keyframe(layout: RunLayout, manifest: WeightsManifest) -> dict[str, RawTensor]:
    """All tensors of a full copy, in memory of their own; tensor digests are not compared yet.

    Raises:
        CorruptArtefactError: a file is damaged.
    """
    refs, tensors = keyframe_refs(manifest), dict[str, RawTensor]()
    assert refs, "a plan takes keyframes only where there is one"
    for ref in refs:
        tensors.update(read_tensors(layout.weights_version(manifest.version) / ref.path, ref))
    return tensors


def read_link(layout: RunLayout, manifest: WeightsManifest) -> Link:
    """A version's delta, in memory, after the digests of its files were compared.

    Raises:
        CorruptArtefactError: a file is damaged.
    """
    directory = layout.weights_version(manifest.version)
    payloads = {ref.path: read_tensors(directory / ref.path, ref) for ref in delta_refs(manifest)}
    return Link(manifest, directory, payloads)


def check_tensors(layout: RunLayout, manifest: WeightsManifest, tensors: Mapping[str, RawTensor]) -> None:
    """Compare every tensor, and the weights digest, with the manifest.

    Raises:
        DigestError: names the version, the first tensor that differs, and both digests.
    """
    path = layout.weights_manifest(manifest.version)
    if set(tensors) != {entry.name for entry in manifest.tensors}:
        odd = sorted(set(tensors) ^ {entry.name for entry in manifest.tensors})
        raise DigestError(f"{path} and its payload name different tensors: {', '.join(odd[:5])}", mend=_MEND)
    size = sum(tensor.data.size for tensor in tensors.values())
    in_threads(lambda entry: check_tensor(path, entry, tensors[entry.name]), manifest.tensors, num_bytes=size)
    check_weights_digest(layout, manifest)


def check_weights_digest(layout: RunLayout, manifest: WeightsManifest) -> None:
    """Compare a manifest's weights digest with what its tensors' digests amount to.

    Raises:
        DigestError: it states another one; names both.
    """
    path = layout.weights_manifest(manifest.version)
    try:
        found = entries_digest(manifest.tensors)
    except ValueError as error:
        raise DigestError(f"{path}: {error}", mend=_MEND) from error
    if found != manifest.weights_digest:
        raise DigestError(
            f"{path}: its tensors have weights digest {found}, it states {manifest.weights_digest}", mend=_MEND
        )


def check_tensor(path: Path, entry: TensorEntry, tensor: RawTensor) -> None:
    """Compare one tensor with its entry in the manifest ``path``.

    Raises:
        DigestError: it is another one; names both.
    """
    found = (tensor.dtype, tensor.shape, tensor.digest)
    if found != (entry.dtype, entry.shape, entry.digest):
        raise DigestError(
            f"{path}: tensor {entry.name} should be {entry.dtype} {entry.shape} {entry.digest}, "
            f"found {found[0]} {found[1]} {found[2]}",
            mend=_MEND,
        )


def rebuild(layout: RunLayout, version: int, *, local: Copy | None = None, accept: AcceptManifest = accept_all) -> Copy:
    """A proven copy of ``version``, by the way that reads the fewest bytes and works.

    ``local`` may save reading. It need not be trusted: when the result is wrong, it is given up for a keyframe.

    Raises:
        RetiredError: its files were deleted on purpose; says which versions are kept.
        CorruptArtefactError: every way is damaged; says what was found on each.
        StorageError: the version is not published (or not accepted), or a file cannot be read.
    """
    manifests = _Manifests(layout, accept, version)
    target = manifests(version)
    if target is None:
        raise StorageError(
            f"policy version {version} is not published in {layout.weights}",
            mend="wait for its manifest, or choose one of the versions that `milesbatch weights ls` shows",
            unseen=layout.weights_manifest(version),
        )
    unusable: set[Step] = set()
    while (plan := _plan(manifests, version, local, unusable)) is not None:
        try:
            return Copy(target, _follow(layout, manifests, plan, {} if local is None else local.tensors))
        except _StepError as error:
            manifests.damage.append(error.cause)
            if error.culprit is None:
                local = None
            else:
                unusable.add(error.culprit)
    raise manifests.no_way(version)


class _StepError(Exception):
    """A way led to something wrong; without a culprit, the local copy is in doubt."""

    def __init__(self, cause: CorruptArtefactError, culprit: Step | None) -> None:
        super().__init__(cause.what)
        self.cause, self.culprit = cause, culprit


def _follow(
    layout: RunLayout, manifests: _Manifests, plan: Plan, tensors: Mapping[str, RawTensor]
) -> Mapping[str, RawTensor]:
    """Proven tensors at the end of a plan that begins with a keyframe or goes on from ``tensors``."""
    culprit, deltas = plan.keyframe, plan.steps
    try:
        if culprit is not None:
            tensors, deltas = read_keyframe(layout, manifests.get(culprit.version)), deltas[1:]
        last = None
        for group in _groups(deltas, manifests):
            links = []
            for culprit in group:
                links.append(read_link(layout, manifests.get(culprit.version)))
            # All files are as committed: if something is wrong from here on, the start is in doubt.
            culprit, last = plan.keyframe, links[-1].manifest
            tensors = fold(links, tensors, owned=plan.keyframe is not None)
        if last is None:
            check_tensors(layout, manifests.target, tensors)
        else:
            check_weights_digest(layout, last)
    except LinkError as error:
        raise _StepError(error, Step(error.version, "delta")) from error
    except CorruptArtefactError as error:
        raise _StepError(error, culprit) from error
    return tensors


def _groups(deltas: Sequence[Step], manifests: _Manifests) -> Iterator[list[Step]]:
    """Deltas that are held in memory together: as many as :data:`_FOLD_BYTES` allow, at least one."""
    group: list[Step] = []
    size = 0
    for step in deltas:
        num_bytes = sum(ref.bytes for ref in delta_refs(manifests.get(step.version)))
        if group and size + num_bytes > _FOLD_BYTES:
            yield group
            group, size = [], 0
        group.append(step)
        size += num_bytes
    if group:
        yield group


def _plan(manifests: _Manifests, version: int, local: Copy | None, unusable: set[Step]) -> Plan | None:
    return plan_chain(manifests, version, local=None if local is None else local.version, unusable=unusable)


class _Manifests:
    """Manifests read once for one rebuild; collects the damage that was met."""

    def __init__(self, layout: RunLayout, accept: AcceptManifest, target: int) -> None:
        self._layout, self._accept, self._target = layout, accept, target
        self._known: dict[int, WeightsManifest | None] = {}
        self.damage: list[CorruptArtefactError] = []

    def __call__(self, version: int) -> WeightsManifest | None:
        """The manifest when it counts; a damaged one does not, except that of the target, which is an error."""
        if version not in self._known:
            try:
                manifest = read_manifest(self._layout, version)
            except CorruptArtefactError as error:
                if version == self._target:
                    raise
                self.damage.append(error)
                manifest = None
            if manifest is not None and not self._accept(manifest):
                manifest = None
            if manifest is not None and version != self._target and is_retired(self._layout, version):
                manifest = None  # no way leads through it
                self.damage.append(RetiredError(f"policy version {version} was retired"))
            self._known[version] = manifest
        return self._known[version]

    @property
    def target(self) -> WeightsManifest:
        return self.get(self._target)

    def get(self, version: int) -> WeightsManifest:
        manifest = self._known[version]
        assert manifest is not None, "a plan goes only through manifests that count"
        return manifest

    def no_way(self, version: int) -> CorruptArtefactError:
        if is_retired(self._layout, version):  # perhaps only since the files were looked at
            return retired_error(self._layout, version)
        found = "; ".join(error.what for error in self.damage) or "no keyframe with an unbroken chain of deltas"
        what = f"policy version {version} cannot be rebuilt from {self._layout.weights}: {found}"
        return CorruptArtefactError(what, mend=_MEND, unseen=self._unseen())

    def _unseen(self) -> Path | None:
        """What may still appear and open a way: a file of one; without any damage the manifest at which all ways end."""
        if self.damage:
            return next((error.unseen for error in self.damage if error.unseen is not None), None)
        ends = [version for version, manifest in self._known.items() if manifest is None]
        return self._layout.weights_manifest(max(ends)) if ends else None
