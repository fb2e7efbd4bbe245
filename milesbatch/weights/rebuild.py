"""Rebuilding a policy version from keyframes and deltas, proven before it is handed out.

Owns the application of payload and the comparison of digests; never keeps a copy and never writes. Invariant: what
:func:`rebuild` returns has every tensor's digest and the weights digest of the target's manifest, computed from the returned
bytes; arrays given to it are never changed. Damage on one way is answered by another way (design: quarantine or rebuild);
only when none is left it is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from milesbatch.errors import CorruptArtefactError, StorageError
from milesbatch.records import TensorEntry, WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.weights.codec import decode
from milesbatch.weights.digest import entries_digest
from milesbatch.weights.reader import (
    AcceptManifest,
    Plan,
    RetiredError,
    Step,
    accept_all,
    delta_refs,
    is_retired,
    keyframe_ref,
    plan_chain,
    read_manifest,
    retired_error,
)
from milesbatch.weights.tensorfile import read_tensors
from milesbatch.weights.tensors import RawTensor, element_bytes, num_bytes

_MEND = "run `milesbatch weights verify` on the run"


@dataclass(frozen=True, slots=True)
class Copy:
    """All stored tensors of one policy version, proven against its manifest."""

    manifest: WeightsManifest
    tensors: Mapping[str, RawTensor]

    @property
    def version(self) -> int:
        return self.manifest.version


def apply_step(
    layout: RunLayout, manifest: WeightsManifest, step: Step, before: Mapping[str, RawTensor]
) -> dict[str, RawTensor]:
    """Tensors after one step. File digests are checked here, tensor digests by :func:`check_tensors`.

    Unchanged tensors share memory with ``before``; all others are new arrays.

    Raises:
        CorruptArtefactError: a file is damaged, or its content does not fit the manifest or ``before``.
    """
    directory = layout.weights_version(manifest.version)
    if step.kind == "keyframe":
        ref = keyframe_ref(manifest)
        assert ref is not None, "a plan takes keyframes only where there is one"
        return read_tensors(directory / ref.path, ref)
    payloads = {ref.path: read_tensors(directory / ref.path, ref) for ref in delta_refs(manifest)}
    return {entry.name: _apply(directory, entry, payloads, before) for entry in manifest.tensors}


def _apply(
    directory: Path,
    entry: TensorEntry,
    payloads: Mapping[str, Mapping[str, RawTensor]],
    before: Mapping[str, RawTensor],
) -> RawTensor:
    old = before.get(entry.name)
    if old is None or (old.dtype, old.shape) != (entry.dtype, entry.shape):
        found = "no such tensor" if old is None else f"{old.dtype} {old.shape}"
        raise CorruptArtefactError(
            f"{directory}: tensor {entry.name} is {entry.dtype} {entry.shape}, its parent version has {found}",
            mend=_MEND,
        )
    if entry.encoding == "same":
        return old
    payload = payloads.get(entry.file or "", {}).get(entry.name)
    if payload is None:
        raise CorruptArtefactError(f"{directory / (entry.file or '')} lacks tensor {entry.name}", mend=_MEND)
    size, width = num_bytes(entry.dtype, entry.shape), element_bytes(entry.dtype)
    try:
        data = decode(entry.encoding, payload.data, old.data, num_bytes=size, element_bytes=width)
    except CorruptArtefactError as error:
        raise CorruptArtefactError(f"{directory}: tensor {entry.name}: {error.what}", mend=error.mend) from error
    return RawTensor(entry.dtype, entry.shape, data)


def check_tensors(layout: RunLayout, manifest: WeightsManifest, tensors: Mapping[str, RawTensor]) -> None:
    """Compare every tensor, and the weights digest, with the manifest.

    Raises:
        CorruptArtefactError: names the version, the first tensor that differs, and both digests.
    """
    path = layout.weights_manifest(manifest.version)
    if set(tensors) != {entry.name for entry in manifest.tensors}:
        odd = sorted(set(tensors) ^ {entry.name for entry in manifest.tensors})
        raise CorruptArtefactError(f"{path} and its payload name different tensors: {', '.join(odd[:5])}", mend=_MEND)
    for entry in manifest.tensors:
        check_tensor(path, entry, tensors[entry.name])
    try:
        found = entries_digest(manifest.tensors)
    except ValueError as error:
        raise CorruptArtefactError(f"{path}: {error}", mend=_MEND) from error
    if found != manifest.weights_digest:
        raise CorruptArtefactError(
            f"{path}: its tensors have weights digest {found}, it states {manifest.weights_digest}", mend=_MEND
        )


def check_tensor(path: Path, entry: TensorEntry, tensor: RawTensor) -> None:
    """Compare one tensor with its entry in the manifest ``path``.

    Raises:
        CorruptArtefactError: it is another one; names both.
    """
    found = (tensor.dtype, tensor.shape, tensor.digest)
    if found != (entry.dtype, entry.shape, entry.digest):
        raise CorruptArtefactError(
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
        tensors: Mapping[str, RawTensor] = {} if local is None else local.tensors
        culprit: Step | None = None
        try:
            for culprit in plan.steps:
                tensors = apply_step(layout, manifests.get(culprit.version), culprit, tensors)
            # All files were as committed, so the start is in doubt: the keyframe, or else the local copy.
            culprit = plan.keyframe
            check_tensors(layout, target, tensors)
            return Copy(target, tensors)
        except CorruptArtefactError as error:
            manifests.damage.append(error)
        if culprit is None:
            local = None
        else:
            unusable.add(culprit)
    raise manifests.no_way(version)


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
