"""Publishing policy versions: keyframe and delta files, then the manifest whose creation is the commit.

Owns the snapshot (the newest version it published, as bytes) that the next delta is taken against; never decides when to
publish and never changes a committed version. Invariant: the snapshot is always a committed version, so a delta never refers
to weights that nobody can rebuild. The page behind it is ``docs/format-weights.md``.

Crash states, in order of time:

1. killed while encoding: nothing was written;
2. killed while a payload file is written: ``.tmp-*`` files, swept at the next take-over;
3. killed after payload, before the manifest: payload that no manifest names, which nobody takes for an artefact. Payload
   names carry the incarnation and a tag of their content, so a later writer (of the same incarnation, too) never meets its
   predecessor's file unless it has the same bytes; it commits beside it and then removes what its manifest does not name;
4. killed after the manifest: the version exists. Publishing it again is a comparison of digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from milesbatch.errors import CorruptArtefactError, DivergenceError
from milesbatch.ids import number
from milesbatch.records import FileRef, TensorEntry, WeightsManifest
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import (
    AlreadyExistsError,
    create_exclusively,
    make_directory,
    publishing,
    remove_file,
    verify_files,
)
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import AT_ONCE, Patience
from milesbatch.store.removal import take_away
from milesbatch.store.sight import AT_ONCE as SEEN_AT_ONCE
from milesbatch.store.sight import Sight, refresh
from milesbatch.weights.codec import Encoded, encode
from milesbatch.weights.digest import weights_digest
from milesbatch.weights.folding import in_threads
from milesbatch.weights.reader import AcceptManifest, accept_all, chain_bytes, delta_refs, is_retired, read_manifest
from milesbatch.weights.rebuild import rebuild
from milesbatch.weights.tensorfile import write_tensors
from milesbatch.weights.tensors import RawTensor, element_bytes, from_torch

if TYPE_CHECKING:
    import torch

_WORTHWHILE = 0.8
"""A delta of at least this share of a full copy is not worth its chain: the full copy is published instead."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    version: int
    tensors: Mapping[str, RawTensor]


@dataclass(slots=True)
class _Draft:
    """A version on its way: its tensors, their digests, and the difference to the base where there is one."""

    tensors: dict[str, RawTensor] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    differences: dict[str, Encoded] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return weights_digest((name, t.dtype, t.shape, self.digests[name]) for name, t in self.tensors.items())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.data.size for tensor in self.tensors.values())

    @property
    def delta_bytes(self) -> int:
        return sum(len(difference.payload) for difference in self.differences.values())

    def has_worthwhile_delta(self, base: Mapping[str, RawTensor]) -> bool:
        if set(self.differences) != set(base) or set(self.differences) != set(self.tensors):
            return False
        return self.delta_bytes < _WORTHWHILE * self.num_bytes or self.delta_bytes == 0


class Publisher:
    """Trainer rank 0's way to make a policy version visible. One instance per process; not for several threads."""

    def __init__(
        self,
        layout: RunLayout,
        incarnation: int,
        *,
        keyframe_every: int,
        before_commit: Callable[[], None],
        accept: AcceptManifest = accept_all,
        patience: Patience = AT_ONCE,
        sight: Sight = SEEN_AT_ONCE,
    ) -> None:
        """``before_commit`` runs just before each manifest becomes visible: the fencing check belongs there. A committed
        version that ``accept`` refuses (a fenced incarnation's) is moved to quarantine when its number is published."""
        if keyframe_every < 1:
            raise ValueError(f"keyframe_every must be at least 1, found {keyframe_every}")
        self._layout, self._incarnation, self._keyframe_every = layout, incarnation, keyframe_every
        self._before_commit, self._accept, self._patience, self._sight = before_commit, accept, patience, sight
        self._snapshot: _Snapshot | None = None
        self._tied: Mapping[str, str] = {}
        self._distrusted: set[int] = set()
        self._needed_from: int | None = None
        self._chain_bytes = 0
        """Of the deltas since the last keyframe: what a follower reads besides that."""

    @property
    def snapshot_version(self) -> int | None:
        """Version that the next delta would be taken against; None before the first one."""
        return None if self._snapshot is None else self._snapshot.version

    @property
    def snapshot_tensors(self) -> Mapping[str, RawTensor]:
        """Tensors of that version, to be sent on: only read, until the next :meth:`publish`. Empty before the first."""
        return {} if self._snapshot is None else self._snapshot.tensors

    def seed(self, version: int) -> WeightsManifest:
        """Take the snapshot from a committed version, after a restart, so that the next one can be a delta.

        Raises:
            CorruptArtefactError: the version cannot be rebuilt; there is no snapshot then.
            StorageError: it is not published, or cannot be read; as above.
        """
        self._snapshot = None
        copy = self._sight.until_seen(lambda: rebuild(self._layout, version, accept=self._accept))
        self._snapshot, self._tied = _Snapshot(version, copy.tensors), dict(copy.manifest.tied)
        self._chain_bytes = chain_bytes(self._layout, version)
        return copy.manifest

    def can_rebuild(self, version: int) -> bool:
        """Can a follower that starts now reach ``version``? Reads a whole chain.

        Raises:
            StorageError: a file cannot be read.
        """
        try:
            self._sight.until_seen(lambda: rebuild(self._layout, version, accept=self._accept))
        except CorruptArtefactError:
            return False
        return True

    def distrust(self, versions: Iterable[int]) -> None:
        """Followers cannot reach these committed versions: each is committed again, as a keyframe, when it is published."""
        self._distrusted.update(versions)
        self._needed_from = min(self._distrusted, default=None)

    def republish(self) -> WeightsManifest | None:
        """Commit the snapshot again, as a keyframe of the same weights digest; None when there is no snapshot.

        For a version that followers cannot reach any more while the trainer still holds it. The damaged artefact goes to
        quarantine; until the new one is committed the version is missing. Killed between: a replay publishes it again.

        Raises:
            FencedError, StorageError: not committed; the same call can be made again.
        """
        if self._snapshot is None:
            return None
        version, tensors = self._snapshot.version, self._snapshot.tensors
        draft = _Draft(dict(tensors), {name: tensor.digest for name, tensor in tensors.items()})
        return self._patience.until_space(lambda: self._commit_again(version, draft, None, self._tied))

    def digest_only(self, named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str] | None = None) -> str:
        """Weights digest that :meth:`publish` would record, without publishing; ``tied`` aliases do not count."""
        identities = []
        for name, tensor in _stored(named, tied or {}):
            raw = from_torch(name, tensor)
            identities.append((name, raw.dtype, raw.shape, raw.digest))
        return weights_digest(identities)

    def publish(
        self, version: int, named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]
    ) -> WeightsManifest:
        """Commit ``named`` as policy ``version``; a version that is committed already is compared instead.

        ``named`` is consumed one tensor at a time and always to its end (the values may come out of collectives). ``tied``
        maps aliases to stored names; aliases in ``named`` are passed over.

        Durability: on return the version is durable and visible. If killed midway, see the module's crash states.

        Raises:
            DivergenceError: the version is committed with another weights digest; nothing was written.
            ValueError: the snapshot is not ``version - 1`` where a delta is due; no tensors; an alias of nothing.
            FencedError: from ``before_commit``; the version was not committed.
            StorageError: not committed; the same call can be made again.
        """
        existing = self._committed(version)
        is_damaged = existing is not None and (version in self._distrusted or not self._is_whole(existing))
        base = self._base(version) if existing is None or is_damaged else None
        draft = _draft(_stored(named, tied), base)
        if not draft.tensors:
            raise ValueError(f"policy version {version} has no tensors")
        if missing := sorted(set(tied.values()) - set(draft.tensors)):
            raise ValueError(f"policy version {version}: tied to tensors that are not stored: {', '.join(missing)}")
        manifest = existing or self._patience.until_space(lambda: self._commit(version, draft, base, tied))
        if is_damaged and manifest.weights_digest == draft.digest:
            manifest = self._patience.until_space(lambda: self._commit_again(version, draft, base, tied))
        if manifest.weights_digest != draft.digest:
            raise DivergenceError(
                f"policy version {version} is published with weights digest {manifest.weights_digest} "
                f"(incarnation {manifest.incarnation}), but computed again it has {draft.digest}",
                mend="look for a non-deterministic kernel or a changed environment, or set checkpoint.on_divergence",
            )
        self._snapshot, self._tied = _Snapshot(version, draft.tensors), dict(tied)
        delta_bytes = sum(ref.bytes for ref in delta_refs(manifest))
        self._chain_bytes = 0 if manifest.keyframe is not None else self._chain_bytes + delta_bytes
        self._distrusted.discard(version)
        return manifest

    def _committed(self, version: int) -> WeightsManifest | None:
        manifest, reason = self._judge(version)
        if (
            reason is not None and self._sight.wait_s
        ):  # there may be another one by now, and this host remember the old one
            refresh(self._layout.weights_version(version))
            manifest, reason = self._judge(version)
        if reason is not None:
            take_away(self._layout, self._incarnation, self._layout.weights_version(version), reason)
        return manifest

    def _judge(self, version: int) -> tuple[WeightsManifest | None, str | None]:
        """The committed manifest when it counts, or why it does not."""
        try:
            manifest = self._sight.until_seen(lambda: read_manifest(self._layout, version))
        except CorruptArtefactError as error:
            return None, error.what
        if manifest is None or self._accept(manifest):
            return manifest, None
        return None, f"policy version {version} of incarnation {manifest.incarnation} came after it had been fenced out"

    def _is_whole(self, manifest: WeightsManifest) -> bool:
        """Are all payload files of a committed version there and undamaged? A retired one needs none, unless it follows one
        that a worker cannot reach: whoever needs that one goes on to this one."""
        version = manifest.version
        if is_retired(self._layout, version):
            return self._needed_from is None or version < self._needed_from
        directory = self._layout.weights_version(version)
        try:
            self._sight.until_seen(lambda: verify_files(directory, manifest.files))
        except CorruptArtefactError:
            return False
        return True

    def _commit_again(
        self, version: int, draft: _Draft, base: Mapping[str, RawTensor] | None, tied: Mapping[str, str]
    ) -> WeightsManifest:
        """A replay holds the very weights whose payload was lost: the damaged artefact goes to quarantine, a whole one takes
        its place with the same weights digest. Killed between: the version is not published, and the next replay does it."""
        if self._layout.weights_version(version).exists():
            reason = f"payload of policy version {version} was damaged or missing; it was published again from a replay"
            take_away(self._layout, self._incarnation, self._layout.weights_version(version), reason)
        return self._commit(version, draft, base, tied)

    def _base(self, version: int) -> Mapping[str, RawTensor] | None:
        """Tensors of ``version - 1`` for a delta; None when only a keyframe is possible."""
        snapshot = self._snapshot
        if version == 0 or snapshot is None or version in self._distrusted:
            return None
        if snapshot.version == version - 1:
            return snapshot.tensors
        if self._is_keyframe_due(version):
            return None
        raise ValueError(
            f"policy version {version} needs a delta on version {version - 1}, but the snapshot is version "
            f"{snapshot.version}: publish in order, or seed({version - 1}) first"
        )

    def _is_keyframe_due(self, version: int) -> bool:
        """Also behind a retired version: a delta on that could not be applied by anybody."""
        is_due = version % self._keyframe_every == 0 or version in self._distrusted
        return is_due or is_retired(self._layout, version - 1)

    def _commit(
        self, version: int, draft: _Draft, base: Mapping[str, RawTensor] | None, tied: Mapping[str, str]
    ) -> WeightsManifest:
        has_delta = base is not None and draft.has_worthwhile_delta(base)
        keyframe = None
        make_directory(self._layout.weights_version(version))
        costs_more = self._chain_bytes + draft.delta_bytes > draft.num_bytes
        if not has_delta or costs_more or self._is_keyframe_due(version):
            keyframe = self._write(version, "keyframe", draft.tensors)
        delta = self._write(version, "delta", _delta_payload(draft)) if has_delta else None
        manifest = WeightsManifest(
            version=version,
            incarnation=self._incarnation,
            artefact="delta" if keyframe is None else "keyframe",
            parent=version - 1 if has_delta else None,
            keyframe=None if keyframe is None else keyframe.path,
            weights_digest=draft.digest,
            tensors=tuple(_entries(draft, has_delta, delta or keyframe)),
            tied=dict(tied),
            files=tuple(ref for ref in (keyframe, delta) if ref is not None),
            created_at=utc_now(),
        )
        try:
            create_exclusively(self._layout.weights_manifest(version), manifest.to_bytes(), self._before_commit)
        except AlreadyExistsError:
            # A twin committed first; what it committed is compared like any version that was there before.
            winner = self._committed(version)
            if winner is None:
                raise
            return winner
        self._remove_leftovers(manifest)
        return manifest

    def _write(
        self, version: int, kind: Literal["keyframe", "delta"], tensors: Mapping[str, RawTensor]
    ) -> FileRef | None:
        """Make one payload file durable; None when there is nothing to store."""
        if not tensors:
            return None
        prefix = f"{kind}.i{number(self._incarnation)}"
        directory = self._layout.weights_version(version)
        with publishing(
            directory, lambda digest: f"{prefix}.{digest.removeprefix('xxh128:')[:16]}.safetensors"
        ) as file:
            write_tensors(file.stream, tensors)
        assert file.ref is not None
        return file.ref

    def _remove_leftovers(self, manifest: WeightsManifest) -> None:
        """Remove payload of writers that never committed: of this incarnation and earlier ones. A newer one may have put its
        own version here since the commit, and it is not for this one to touch."""
        named = {ref.path for ref in manifest.files}
        for path in self._layout.weights_version(manifest.version).glob("*.safetensors"):
            if path.name not in named and (writer := _payload_writer(path.name)) and writer <= self._incarnation:
                remove_file(path)


def _payload_writer(name: str) -> int | None:
    """Incarnation that wrote a payload file ``KIND.iINCARNATION.TAG.safetensors``."""
    parts = name.split(".")
    digits = parts[1].removeprefix("i") if len(parts) == 4 else ""
    return int(digits) if digits.isascii() and digits.isdigit() else None


def _stored(named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in named if name not in tied)


def _draft(named: Iterable[tuple[str, torch.Tensor]], base: Mapping[str, RawTensor] | None) -> _Draft:
    """Encode every tensor against the base, several at a time while ``named`` goes on giving them."""
    draft = _Draft()
    olds = base or {}

    def copies() -> Iterator[tuple[str, RawTensor]]:
        names: set[str] = set()
        for name, tensor in named:
            if name in names:
                raise ValueError(f"tensor {name} comes twice")
            names.add(name)
            raw = from_torch(name, tensor)
            # The trainer goes on changing its parameters in place: the snapshot needs memory of its own.
            yield name, RawTensor(raw.dtype, raw.shape, raw.data.copy())

    num_bytes = sum(tensor.data.size for tensor in olds.values())
    for name, raw, difference in in_threads(lambda item: _difference(olds, *item), copies(), num_bytes=num_bytes):
        draft.tensors[name] = raw
        if difference is None:
            draft.digests[name] = raw.digest
            continue
        draft.differences[name], draft.digests[name] = difference, difference.digest
        if difference.encoding == "same":
            draft.tensors[name] = olds[name]
    return draft


def _difference(olds: Mapping[str, RawTensor], name: str, raw: RawTensor) -> tuple[str, RawTensor, Encoded | None]:
    old = olds.get(name)
    if old is None or (old.dtype, old.shape) != (raw.dtype, raw.shape):
        return name, raw, None
    return name, raw, encode(old.data, raw.data, element_bytes(raw.dtype))


def _delta_payload(draft: _Draft) -> dict[str, RawTensor]:
    return {
        name: RawTensor("U8", (len(difference.payload),), np.frombuffer(difference.payload, np.uint8))
        for name, difference in draft.differences.items()
        if difference.encoding != "same"
    }


def _entries(draft: _Draft, has_delta: bool, file: FileRef | None) -> Iterator[TensorEntry]:
    for name, tensor in sorted(draft.tensors.items()):
        num_elements = tensor.data.size // element_bytes(tensor.dtype)
        difference = draft.differences[name] if has_delta else Encoded("raw", b"", num_elements, draft.digests[name])
        yield TensorEntry(
            name=name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            digest=draft.digests[name],
            encoding=difference.encoding,
            changed=difference.changed,
            file=None if difference.encoding == "same" or file is None else file.path,
        )
