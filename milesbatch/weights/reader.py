"""Reading committed policy versions: which exist, and the cheapest way to one of them.

Owns the choice of the chain; never touches payload (that is :mod:`milesbatch.weights.rebuild`). Invariant: only committed
manifests are looked at, by their predictable names; a directory without a manifest is no version. The page behind it is
``docs/format-weights.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from milesbatch.errors import CorruptArtefactError, InputError, StorageError
from milesbatch.records import FileRef, WeightsManifest
from milesbatch.store.durable import read_optional, verify_files
from milesbatch.store.entries import numbered
from milesbatch.store.layout import RunLayout


class RetiredError(CorruptArtefactError):
    """The payload of a policy version was deleted on purpose (``decisions/retention.py``); only its manifest is kept."""


AcceptManifest = Callable[[WeightsManifest], bool]
"""Does this committed manifest count? False for what a fenced incarnation committed after the seal."""


def accept_all(manifest: WeightsManifest) -> bool:
    """Accept every committed manifest."""
    return True


def read_manifest(layout: RunLayout, version: int) -> WeightsManifest | None:
    """Manifest of a policy version; None when the version is not committed.

    Raises:
        CorruptArtefactError: it is committed but damaged, or names another version.
        StorageError: it cannot be read.
    """
    path = layout.weights_manifest(version)
    data = read_optional(path)
    if data is None:
        return None
    try:
        manifest = WeightsManifest.from_bytes(data, str(path))
    except CorruptArtefactError as error:
        raise CorruptArtefactError(error.what, mend=_mend(layout) or error.mend, unseen=error.unseen) from error
    if manifest.version != version:
        mend = _mend(layout) or "run `milesbatch weights verify` on the run"
        raise CorruptArtefactError(f"{path} is the manifest of version {manifest.version}", mend=mend)
    return manifest


def _mend(layout: RunLayout) -> str | None:
    """Of a damaged manifest in what only looks like a run as far as weights go; None in a run."""
    if layout.mirror.exists():
        return "give the same `milesbatch weights pull` again: it fetches that version anew"
    return None if layout.batches.is_dir() else "delete that file, and push that version again"


def committed_versions(layout: RunLayout) -> list[int]:
    """Versions with a manifest, ascending, from a directory listing: for reports, never to decide what is newest."""
    return [version for version, _ in numbered(layout.weights) if layout.weights_manifest(version).is_file()]


def require_version(layout: RunLayout, version: int) -> None:
    """Return when a version that a person asked for was published and is kept.

    Raises:
        InputError: it was never published; says which were.
        RetiredError: its payload was deleted on purpose.
    """
    if layout.weights_manifest(version).exists():
        if is_retired(layout, version):
            raise retired_error(layout, version)
        return
    there = committed_versions(layout)
    held = f"versions {there[0]} to {there[-1]}" if there else "none yet"
    raise InputError(
        f"{layout.root} has no policy version {version}: it has {held}",
        mend="choose one that `milesbatch weights ls` shows",
    )


def is_retired(layout: RunLayout, version: int) -> bool:
    """Was the payload of this policy version retired? True from when that is committed, before the files are gone.

    Raises:
        StorageError: it cannot be known.
    """
    return read_optional(layout.weights_retirement(version)) is not None


def retired_error(layout: RunLayout, version: int) -> RetiredError:
    """The error of one who needs a retired version: says which are kept."""
    kept = [number for number in committed_versions(layout) if not is_retired(layout, number)]
    choice = f"choose one of the versions that are kept ({kept[0]} to {kept[-1]}); " if kept else ""
    return RetiredError(
        f"policy version {version} was retired: its files in {layout.weights_version(version)} were deleted, only its"
        " manifest is kept",
        mend=f"{choice}`weights.retire: false` in the recipe keeps all of them",
    )


def keyframe_refs(manifest: WeightsManifest) -> tuple[FileRef, ...]:
    """Files of the full copy, one for each rank that wrote a part of it; empty when there is none."""
    full = {manifest.keyframe, *manifest.keyframe_shards}
    return tuple(ref for ref in manifest.files if ref.path in full)


def delta_refs(manifest: WeightsManifest) -> tuple[FileRef, ...]:
    """Files of a version's delta; empty when it has none, or when nothing changed."""
    full = {manifest.keyframe, *manifest.keyframe_shards}
    return tuple(ref for ref in manifest.files if ref.path not in full)


def chain_bytes(layout: RunLayout, version: int) -> int:
    """Bytes of the deltas from the last keyframe to ``version``; 0 where the way to it cannot be read."""
    total = 0
    try:
        while (manifest := read_manifest(layout, version)) is not None and manifest.keyframe is None:
            total += sum(ref.bytes for ref in delta_refs(manifest))
            version -= 1
    except CorruptArtefactError:
        return 0
    return total


@dataclass(frozen=True, slots=True)
class Step:
    """One file set to apply: version 20's keyframe, or its delta on 19."""

    version: int
    kind: Literal["keyframe", "delta"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to reach a version. Without a keyframe as its first step, it goes on from the local copy."""

    steps: tuple[Step, ...]
    num_bytes: int

    @property
    def keyframe(self) -> Step | None:
        """The keyframe it starts from; None when it goes on from the local copy."""
        return self.steps[0] if self.steps and self.steps[0].kind == "keyframe" else None


def plan_chain(
    read: Callable[[int], WeightsManifest | None],
    target: int,
    *,
    local: int | None = None,
    unusable: Collection[Step] = (),
) -> Plan | None:
    """The way to ``target`` that reads the fewest bytes: from ``local`` by deltas, or from a keyframe and deltas.

    Pure but for ``read``, which gives the manifest of a version, or None when it does not count. Steps in ``unusable``
    are avoided. None when there is no way. Equal bytes: the shorter walk back from the target wins.
    """
    best: Plan | None = None
    deltas: list[Step] = []
    delta_bytes = 0
    version = target
    while best is None or delta_bytes < best.num_bytes:
        if version == local:
            return Plan(tuple(reversed(deltas)), delta_bytes)
        manifest = read(version)
        if manifest is None:
            break
        full, step = keyframe_refs(manifest), Step(version, "keyframe")
        num_bytes = delta_bytes + sum(ref.bytes for ref in full)
        if full and step not in unusable and (best is None or num_bytes < best.num_bytes):
            best = Plan((step, *reversed(deltas)), num_bytes)
        step = Step(version, "delta")
        if manifest.parent is None or step in unusable:
            break
        deltas.append(step)
        delta_bytes += sum(ref.bytes for ref in delta_refs(manifest))
        version = manifest.parent
    return best


def verify_way(layout: RunLayout, version: int, *, accept: AcceptManifest = accept_all) -> WeightsManifest:
    """Manifest of a version after the files on the cheapest way to it were compared with their digests; nothing is held.

    Raises:
        CorruptArtefactError: one of them is damaged or missing.
        StorageError: the version is not published, or there is no way to it, or a file cannot be read.
    """

    def accepted(number: int) -> WeightsManifest | None:
        manifest = read_manifest(layout, number)
        return manifest if manifest is not None and accept(manifest) and not is_retired(layout, number) else None

    target = accepted(version)
    plan = plan_chain(accepted, version)
    if target is None or plan is None:
        path = layout.weights_manifest(version)
        raise StorageError(f"policy version {version} cannot be reached: {path} or what it builds on", unseen=path)
    for step in plan.steps:
        manifest = accepted(step.version)
        assert manifest is not None, "a plan goes only through manifests that count"
        refs = keyframe_refs(manifest) if step.kind == "keyframe" else delta_refs(manifest)
        verify_files(layout.weights_version(step.version), refs)
    return target
