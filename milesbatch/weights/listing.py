"""What a run's ``weights/`` holds: rows for people, and the proof that every kept version can be rebuilt.

Owns the walk over all versions; never changes anything. Invariant: :func:`verify` reads every committed byte of
``weights/`` and holds one copy of the model at a time. The page behind it is ``docs/format-weights.md``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from milesbatch.errors import CorruptArtefactError, FormatVersionError, MilesbatchError, StorageError
from milesbatch.records import Retirement, WeightsManifest
from milesbatch.store.durable import read_optional, verify_file
from milesbatch.store.layout import RunLayout
from milesbatch.weights.expected import expected_versions
from milesbatch.weights.folding import DigestError, fold
from milesbatch.weights.reader import committed_versions, delta_refs, is_retired, keyframe_refs, read_manifest
from milesbatch.weights.rebuild import check_tensor, check_tensors, check_weights_digest, read_keyframe, read_link
from milesbatch.weights.tensorfile import read_rows, stream_tensors
from milesbatch.weights.tensors import RawTensor


@dataclass(frozen=True, slots=True)
class WeightsRow:
    """One policy version. ``changed`` counts elements that differ from the version before (all, without a delta)."""

    version: int
    kind: str
    bytes: int
    elements: int
    changed: int
    digest: str
    incarnation: int
    path: str
    retired: bool
    """Its files were deleted; ``bytes`` is what they had."""
    bytes_by_encoding: Mapping[str, int] | None
    """Sums up to ``bytes``: ``keyframe`` files, the delta's payload in each encoding, and its ``headers``. None when a file is
    not there or cannot be read."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that should hold and does not. ``kind``: ``missing``, ``manifest``, ``retirement``, ``file``, ``digest`` or
    ``chain``."""

    kind: str
    path: str
    detail: str


def rows(layout: RunLayout, damaged: list[Violation] | None = None) -> list[WeightsRow]:
    """All committed versions, ascending; ``path`` is relative to the run directory.

    With a list of ``damaged``, versions whose manifest cannot be read are added to it and left out.

    Raises:
        CorruptArtefactError, FormatVersionError: a manifest cannot be read, and there is no such list.
    """
    found = []
    for version in committed_versions(layout):
        try:
            manifest = read_manifest(layout, version)
        except (CorruptArtefactError, FormatVersionError) as error:
            if damaged is None:
                raise
            damaged.append(Violation("manifest", _manifest_path(layout, version), error.what))
            continue
        if manifest is not None:
            found.append(_row(layout, manifest))
    return found


def _manifest_path(layout: RunLayout, version: int) -> str:
    return str(layout.weights_manifest(version).relative_to(layout.root))


def bytes_by_encoding(layout: RunLayout, manifest: WeightsManifest) -> dict[str, int]:
    """Bytes of a version's files by what they hold, from the headers of its deltas.

    Raises:
        CorruptArtefactError: a file is missing, or holds a tensor that the manifest does not know.
        StorageError: it cannot be read.
    """
    directory, encodings = layout.weights_version(manifest.version), {e.name: e.encoding for e in manifest.tensors}
    sums: Counter[str] = Counter(keyframe=sum(ref.bytes for ref in keyframe_refs(manifest)))
    for ref in delta_refs(manifest):
        stored = 0
        for name, _, _, length in read_rows(directory / ref.path):
            if name not in encodings:
                raise CorruptArtefactError(
                    f"{directory / ref.path} holds tensor {name}, which the manifest does not name",
                    mend="run `milesbatch weights verify` on the run",
                )
            sums[encodings[name]] += length
            stored += length
        sums["headers"] += ref.bytes - stored
    return {name: size for name, size in sums.most_common() if size}


def _known_bytes(layout: RunLayout, manifest: WeightsManifest, is_gone: bool) -> dict[str, int] | None:
    try:
        return None if is_gone else bytes_by_encoding(layout, manifest)
    except (CorruptArtefactError, StorageError):
        return None  # `verify` says what is wrong


def _row(layout: RunLayout, manifest: WeightsManifest) -> WeightsRow:
    retired = is_retired(layout, manifest.version)
    return WeightsRow(
        version=manifest.version,
        kind=manifest.artefact,
        bytes=sum(ref.bytes for ref in manifest.files),
        elements=sum(math.prod(entry.shape) for entry in manifest.tensors),
        changed=sum(entry.changed for entry in manifest.tensors),
        digest=manifest.weights_digest,
        incarnation=manifest.incarnation,
        path=str(layout.weights_version(manifest.version).relative_to(layout.root)),
        retired=retired,
        bytes_by_encoding=_known_bytes(layout, manifest, retired),
    )


def verify(layout: RunLayout) -> Iterator[Violation]:
    """Check every kept version: files against their digests, and each chain against each recorded weights digest.

    A version with a delta and a keyframe is checked both ways. After damage the walk goes on from the next keyframe. Of a
    retired version only the records are checked: the walk begins with the first keyframe behind it. In a directory of pulled
    weights a file may be absent, as long as the version can be rebuilt without it. Of a run, versions of which nothing is left
    are told first.
    """
    is_part = layout.mirror.exists()
    held: _Held | None = None
    base = 0
    committed = committed_versions(layout)
    yield from _missing(layout, committed)
    for version in committed:
        path = _manifest_path(layout, version)
        try:
            manifest = read_manifest(layout, version)
        except (CorruptArtefactError, FormatVersionError) as error:
            yield Violation("manifest", path, error.what)
            manifest = None
        try:
            base = max(base, _base_of(layout, version))
        except (CorruptArtefactError, FormatVersionError) as error:
            retirement = str(layout.weights_retirement(version).relative_to(layout.root))
            yield Violation("retirement", retirement, error.what)
        if manifest is None or is_retired(layout, version):
            held = None
            continue
        walk = _Walk(layout, manifest, path)
        has_delta, has_keyframe = walk.ways(is_part)
        held = walk.by_delta(held) if has_delta else None
        held = walk.by_keyframe(held) if has_keyframe else held
        if is_part and held is None:
            walk.is_lost()
        if not is_retired(layout, version):  # it may have been retired while it was read
            yield from (found for found in walk.violations if found.kind != "chain" or version >= base)


def _missing(layout: RunLayout, committed: list[int]) -> Iterator[Violation]:
    expected = expected_versions(layout, committed)
    for version in sorted(set(expected) - set(committed)):
        path = layout.weights_manifest(version)
        if not path.exists():  # else it was published since the versions were listed
            detail = f"{path} is missing; versions {expected[0]} to {expected[-1]} were published"
            yield Violation("missing", _manifest_path(layout, version), detail)


def _base_of(layout: RunLayout, version: int) -> int:
    """Versions below this one are being retired, if ``version`` is; 0 when it is not."""
    path = layout.weights_retirement(version)
    data = read_optional(path)
    return 0 if data is None else Retirement.from_bytes(data, str(path)).base


@dataclass(frozen=True, slots=True)
class _Held:
    version: int
    tensors: Mapping[str, RawTensor]


class _Walk:
    """The checks of one version; each gives the copy that the next version's delta can be applied to."""

    def __init__(self, layout: RunLayout, manifest: WeightsManifest, path: str) -> None:
        self._layout, self._manifest, self._path = layout, manifest, path
        self.violations: list[Violation] = []

    def ways(self, is_part: bool) -> tuple[bool, bool]:
        """Is there a delta, and a keyframe? With ``is_part`` those with all files; when no way has, both are to be named."""
        manifest, directory = self._manifest, self._layout.weights_version(self._manifest.version)
        stated = (manifest.parent is not None, manifest.keyframe is not None)
        here = (
            stated[0] and all((directory / ref.path).exists() for ref in delta_refs(manifest)),
            stated[1] and all((directory / ref.path).exists() for ref in keyframe_refs(manifest)),
        )
        return here if is_part and any(here) else stated

    def is_lost(self) -> None:
        """The files that are there do not lead to this version."""
        if not self.violations:
            self._add("chain", f"version {self._manifest.version} cannot be rebuilt from the files that are here")

    def by_delta(self, held: _Held | None) -> _Held | None:
        manifest = self._manifest
        if held is None or held.version != manifest.parent:
            self._check_files()
            if manifest.keyframe is None:
                self._add("chain", f"version {manifest.version} cannot be rebuilt: version {manifest.parent} cannot")
            return None
        return self._apply_delta(held.tensors)

    def by_keyframe(self, held: _Held | None) -> _Held | None:
        """Check the full copy; held in memory only when the delta gave nothing."""
        manifest = self._manifest
        if held is None:
            return self._hold_keyframe()
        directory = self._layout.weights_version(manifest.version)
        entries = {entry.name: entry for entry in manifest.tensors}
        try:
            for ref in keyframe_refs(manifest):
                for name, tensor in stream_tensors(directory / ref.path, ref):
                    entry = entries.pop(name, None)
                    if entry is not None:
                        check_tensor(directory / ref.path, entry, tensor)
        except MilesbatchError as error:
            self._add("file", error.what)
        else:
            if entries:
                self._add(
                    "digest", f"{directory / str(manifest.keyframe)} lacks tensors: {', '.join(sorted(entries)[:5])}"
                )
        return held

    def _apply_delta(self, before: Mapping[str, RawTensor]) -> _Held | None:
        try:
            tensors = fold([read_link(self._layout, self._manifest)], before, owned=False)
            check_weights_digest(self._layout, self._manifest)
        except DigestError as error:
            self._add("digest", error.what)
        except MilesbatchError as error:
            self._add("file", error.what)
        else:
            return _Held(self._manifest.version, tensors)
        return None

    def _hold_keyframe(self) -> _Held | None:
        try:
            tensors = read_keyframe(self._layout, self._manifest)
            check_tensors(self._layout, self._manifest, tensors)
        except DigestError as error:
            self._add("digest", error.what)
        except MilesbatchError as error:
            self._add("file", error.what)
        else:
            return _Held(self._manifest.version, tensors)
        return None

    def _check_files(self) -> None:
        directory = self._layout.weights_version(self._manifest.version)
        for ref in delta_refs(self._manifest):
            try:
                verify_file(directory / ref.path, ref)
            except MilesbatchError as error:
                self._add("file", error.what)

    def _add(self, kind: str, detail: str) -> None:
        self.violations.append(Violation(kind, self._path, detail))
