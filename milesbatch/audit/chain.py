"""The walk over keyframes and deltas that proves each policy version, holding one copy of the model.

Owns the copy; never decides which versions count. Invariant: the held tensors are those of a version whose every tensor
digest was compared; a delta is applied in place, tensor by tensor, and any doubt lets go of the copy. The page behind it is
``docs/format-weights.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from milesbatch.audit.findings import Findings
from milesbatch.errors import CorruptArtefactError, MilesbatchError
from milesbatch.records import FileRef, TensorEntry, WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.weights.codec import decode
from milesbatch.weights.digest import entries_digest
from milesbatch.weights.reader import delta_refs, keyframe_refs
from milesbatch.weights.rebuild import check_tensor
from milesbatch.weights.tensorfile import stream_tensors
from milesbatch.weights.tensors import RawTensor, element_bytes, num_bytes

TensorDigest = tuple[str, tuple[int, ...], str]


@dataclass(slots=True)
class Chain:
    """Proves versions given in ascending order to :meth:`prove`."""

    layout: RunLayout
    findings: Findings
    is_retired: Callable[[int], bool]
    """Was the payload of a version deleted on purpose, perhaps just now?"""
    unproven: list[int] = field(default_factory=list)
    """Versions that are whole by themselves, but whose parent could not be proven."""
    _held: dict[str, RawTensor] = field(default_factory=dict)
    _digests: dict[str, TensorDigest] = field(default_factory=dict)
    _version: int | None = None

    def prove(self, manifest: WeightsManifest) -> bool:
        """Check a version's files, and that they give the tensors and the weights digest that it records."""
        if not self._digest_agrees(manifest):
            self.let_go()
            return False
        follows = manifest.parent is not None and self._version == manifest.parent
        by_delta = follows and self._apply_delta(manifest)
        is_whole = by_delta
        if manifest.parent is not None and not follows:
            is_whole = self._verify(manifest, delta_refs(manifest))
        if manifest.keyframe is not None:
            by_keyframe = self._check_keyframe(manifest, hold=not by_delta)
            return by_keyframe and (manifest.parent is None or is_whole)
        if not by_delta:
            self.let_go()
            if is_whole:
                self.unproven.append(manifest.version)
        return by_delta

    def pass_over(self, manifest: WeightsManifest) -> None:
        """A retired version: only that its manifest agrees with itself can be checked."""
        self._digest_agrees(manifest)
        self.let_go()

    def let_go(self) -> None:
        """What follows cannot be built on what was held."""
        self._held, self._digests, self._version = {}, {}, None

    def _digest_agrees(self, manifest: WeightsManifest) -> bool:
        path = self.layout.weights_manifest(manifest.version)
        try:
            found = entries_digest(manifest.tensors)
        except ValueError as error:
            self.findings.violate("mismatch", path, str(error))
            return False
        if found != manifest.weights_digest:
            detail = f"its tensors have weights digest {found}, it states {manifest.weights_digest}"
            self.findings.violate("mismatch", path, detail)
            return False
        return True

    # -- keyframes --------------------------------------------------------------------------------------------------

    def _check_keyframe(self, manifest: WeightsManifest, *, hold: bool) -> bool:
        refs = keyframe_refs(manifest)
        directory = self.layout.weights_version(manifest.version)
        if hold:
            self.let_go()
        entries = {entry.name: entry for entry in manifest.tensors}
        held: dict[str, RawTensor] = {}
        try:
            for path, ref in ((directory / ref.path, ref) for ref in refs):
                for name, tensor in stream_tensors(path, ref):
                    entry = entries.pop(name, None)
                    _expect(entry is not None, f"{path} holds tensor {name}, which the manifest does not name")
                    assert entry is not None
                    check_tensor(path, entry, tensor)
                    if hold:
                        held[name] = tensor
            _expect(
                not entries, f"{directory / str(manifest.keyframe)} lacks tensors: {', '.join(sorted(entries)[:5])}"
            )
        except MilesbatchError as error:
            self._blame(manifest, refs, error)
            return False
        self.findings.count(sum(ref.bytes for ref in refs))
        if hold:
            self._held, self._version = held, manifest.version
            self._digests = {entry.name: _identity(entry) for entry in manifest.tensors}
        return True

    # -- deltas -----------------------------------------------------------------------------------------------------

    def _apply_delta(self, manifest: WeightsManifest) -> bool:
        refs = delta_refs(manifest)
        directory = self.layout.weights_version(manifest.version)
        entries = {entry.name: entry for entry in manifest.tensors}
        try:
            _expect(entries.keys() == self._held.keys(), f"{directory}: its tensors are not those of its parent")
            for ref in refs:
                for name, payload in stream_tensors(directory / ref.path, ref):
                    entry = entries.pop(name, None)
                    _expect(entry is not None, f"{directory / ref.path} holds tensor {name}, which is not expected")
                    assert entry is not None
                    self._replace(directory, entry, payload)
            for entry in entries.values():
                same = entry.encoding == "same" and self._digests[entry.name] == _identity(entry)
                _expect(same, f"{directory}: no payload gives tensor {entry.name} with digest {entry.digest}")
        except MilesbatchError as error:
            self.let_go()
            self._blame(manifest, refs, error)
            return False
        for ref in refs:
            self.findings.count(ref.bytes)
        self._version = manifest.version
        return True

    def _replace(self, directory: Path, entry: TensorEntry, payload: RawTensor) -> None:
        dtype, shape, _ = self._digests[entry.name]
        _expect((dtype, shape) == (entry.dtype, entry.shape), f"{directory}: tensor {entry.name} was {dtype} {shape}")
        try:
            size, width = num_bytes(entry.dtype, entry.shape), element_bytes(entry.dtype)
        except ValueError as error:
            raise CorruptArtefactError(f"{directory}: tensor {entry.name}: {error}") from error
        old = self._held[entry.name].data
        data = decode(entry.encoding, payload.data, old, num_bytes=size, element_bytes=width)
        tensor = RawTensor(entry.dtype, entry.shape, data)
        check_tensor(directory, entry, tensor)
        self._held[entry.name], self._digests[entry.name] = tensor, _identity(entry)

    # -- blame ------------------------------------------------------------------------------------------------------

    def _blame(self, manifest: WeightsManifest, refs: Iterable[FileRef], error: MilesbatchError) -> None:
        """Name the file that is not as committed; the manifest when all are, so that it is wrong itself."""
        if self._verify(manifest, refs) and not self.is_retired(manifest.version):
            self.findings.violate("chain", self.layout.weights_manifest(manifest.version), error.what)

    def _verify(self, manifest: WeightsManifest, refs: Iterable[FileRef]) -> bool:
        directory = self.layout.weights_version(manifest.version)
        paths = [(directory / ref.path, ref) for ref in refs]
        retired = functools.partial(self.is_retired, manifest.version)
        return all([self.findings.verify(path, ref, move=path, unless=retired) for path, ref in paths])


def _identity(entry: TensorEntry) -> TensorDigest:
    return entry.dtype, entry.shape, entry.digest


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise CorruptArtefactError(what)
