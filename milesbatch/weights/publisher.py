"""Publishing policy versions: keyframe and delta files, then the manifest whose creation is the commit.

Owns the snapshot (one rank's share of the newest version that was published, as bytes, and on the device where changes are
looked for there) that the next delta is taken against; never decides when to publish and never changes a committed version.
Invariant: the snapshot, in both places, is always of a committed version, so a delta never refers to weights that nobody can
rebuild. The page behind it is ``docs/format-weights.md``.

    each rank: encode its share ─> tell sizes ─> write its files (durable) ─> tell names and digests
    rank 0:                                                                 ─> fence ─> manifest (commit) ─> tell all

A rank takes what rank 0 says after that for its next snapshot, so no rank is ever ahead of what is committed.

Crash states, in order of time (a death of one rank is the death of all; they start again together):

1. killed while encoding: nothing was written;
2. killed while payload files are written: ``.tmp-*`` files, swept at the next take-over; whole files of some ranks, as 3;
3. killed after payload, before the manifest: payload that no manifest names, which nobody takes for an artefact. Payload
   names carry the incarnation and a tag of their content, so a later writer (of the same incarnation, too) never meets its
   predecessor's file unless it has the same bytes; it commits beside it and then removes what its manifest does not name.
   A version of two attempts is therefore the files of the one whose manifest was created, whichever ranks wrote before;
4. killed after the manifest: the version exists. Publishing it again is a comparison of digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from milesbatch.errors import CorruptArtefactError, DivergenceError, StorageError
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
from milesbatch.weights.digest import weights_digest
from milesbatch.weights.draft import Draft, Share, Snapshot, Tensors, Whole, copies, make_draft, owned, together
from milesbatch.weights.reader import (
    AcceptManifest,
    accept_all,
    chain_bytes,
    delta_refs,
    is_retired,
    read_manifest,
    verify_way,
)
from milesbatch.weights.rebuild import rebuild
from milesbatch.weights.team import Alone, Team, from_first
from milesbatch.weights.tensorfile import write_tensors

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Found:
    """What rank 0 saw of a version before it is published."""

    existing: WeightsManifest | None
    is_damaged: bool
    """It exists, and must be written again."""
    is_keyframe_due: bool


@dataclass(frozen=True, slots=True)
class _Written:
    """One rank's files and its part of the manifest."""

    entries: tuple[TensorEntry, ...]
    keyframe: FileRef | None
    delta: FileRef | None


class Publisher:
    """A trainer rank's way to make a policy version visible, together with the other ranks of ``team``. One instance per
    process; one thread at a time. Methods marked *collective* are called by all ranks alike."""

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
        team: Team = Alone(),
    ) -> None:
        """``before_commit`` runs just before each manifest becomes visible: the fencing check belongs there. A committed
        version that ``accept`` refuses (a fenced incarnation's) is moved to quarantine when its number is published."""
        if keyframe_every < 1:
            raise ValueError(f"keyframe_every must be at least 1, found {keyframe_every}")
        self._layout, self._incarnation, self._keyframe_every = layout, incarnation, keyframe_every
        self._before_commit, self._accept, self._patience, self._sight = before_commit, accept, patience, sight
        self._team = team
        self._snapshot: Snapshot | None = None
        self._tied: Mapping[str, str] = {}
        self._distrusted: set[int] = set()
        self._needed_from: int | None = None
        self._chain_bytes = 0
        """Of the deltas since the last keyframe: what a follower reads besides that."""
        self.crossed_bytes = 0
        """Of this rank's share of the last version: bytes that came to the host for it."""
        self.drifts: tuple[str, ...] = ()
        """Tensors of the last version that host and device had different bytes of before, in words; it became a full copy."""

    @property
    def snapshot_version(self) -> int | None:
        """Version that the next delta would be taken against; None before the first one."""
        return None if self._snapshot is None else self._snapshot.version

    @property
    def snapshot_tensors(self) -> Tensors:
        """This rank's tensors of that version, to be sent on: only read, until the next one is published."""
        return {} if self._snapshot is None else self._snapshot.tensors

    def seed(self, version: int) -> WeightsManifest:
        """Take the snapshot from the files of a committed version, so that the next one can be a delta. For a team of one.

        Raises:
            CorruptArtefactError: the version cannot be rebuilt; there is no snapshot then.
            StorageError: it is not published, or cannot be read; as above.
        """
        self._snapshot = None
        copy = self._sight.until_seen(lambda: rebuild(self._layout, version, accept=self._accept))
        self._begin_at(copy.manifest, Snapshot(version, copy.tensors))
        return copy.manifest

    def resume(self, version: int, share: Share) -> bool:
        """Take the snapshot from weights that are held, after a restart (collective); ``share`` is this rank's part of them,
        without aliases.

        Only when they are bit for bit the committed version, and the files on a way to it are whole. Otherwise there is no
        snapshot, and the next version becomes a keyframe. Holds nothing in memory beyond the share.
        """
        self._snapshot = None
        snapshot = Snapshot.of(version, share)
        tensors = snapshot.tensors
        manifest = from_first(self._team, lambda: self._reachable(version))
        stated = {} if manifest is None else {e.name: (e.dtype, e.shape, e.digest) for e in manifest.tensors}
        fits = all(stated.get(name) == (t.dtype, t.shape, t.digest) for name, t in tensors.items())
        parts = self._team.all_of((fits, len(tensors)))
        if manifest is None or not all(fits for fits, _ in parts) or sum(size for _, size in parts) != len(stated):
            return False
        self._begin_at(manifest, snapshot)
        return True

    def forget(self) -> None:
        """Nothing is held: the next new version becomes a keyframe."""
        self._snapshot = None

    def _begin_at(self, manifest: WeightsManifest, snapshot: Snapshot) -> None:
        self._snapshot, self._tied = snapshot, dict(manifest.tied)
        self._chain_bytes = chain_bytes(self._layout, manifest.version)

    def _reachable(self, version: int) -> WeightsManifest | None:
        try:
            return self._sight.until_seen(lambda: verify_way(self._layout, version, accept=self._accept))
        except (CorruptArtefactError, StorageError):
            return None  # damaged or not there: no base for a delta

    def can_rebuild(self, version: int) -> bool:
        """Can a follower that starts now reach ``version``? Rebuilds it, in memory, from its files.

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
        """Commit the snapshot again, as a keyframe of the same weights digest (collective); None when there is no snapshot.

        For a version that followers cannot reach any more while the trainer still holds it. The damaged artefact goes to
        quarantine; until the new one is committed the version is missing. Killed between: a replay publishes it again.

        Raises:
            FencedError, StorageError: not committed; the same call can be made again.
        """
        if self._snapshot is None:
            return None
        version, tensors = self._snapshot.version, self._snapshot.tensors
        draft = Draft(dict(tensors), {name: tensor.digest for name, tensor in tensors.items()})
        whole = together(self._team.all_of(draft.summary(None)))
        return self._commit(version, draft, whole, self._tied, is_keyframe_due=True, again=True)

    def digest_only(self, named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str] | None = None) -> str:
        """Weights digest that :meth:`publish` would record, without publishing; ``tied`` aliases do not count."""
        tensors = owned(named, tied or {})
        return weights_digest((name, raw.dtype, raw.shape, raw.digest) for name, raw in tensors.items())

    def publish(
        self, version: int, named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]
    ) -> WeightsManifest:
        """:meth:`publish_share` of a copy of ``named``, which is consumed one tensor at a time, and not at all on a gap."""
        return self._publish(version, lambda: copies(named, tied), tied)

    def publish_share(self, version: int, share: Share, tied: Mapping[str, str]) -> WeightsManifest:
        """Commit the shares of all ranks as policy ``version`` (collective); one that is committed already is compared instead.

        ``share`` is this rank's, which must not change any more. ``tied`` maps aliases to stored names. Units: between two
        versions a rank holds its share once; while one is published, the old and the new one of what changed. The device of
        tensors that are still there holds them once, too, and both versions of them while one is published.

        Durability: on return the version is durable and visible. If killed midway, see the module's crash states.

        Raises:
            DivergenceError: the version is committed with another weights digest; nothing was written. On all ranks.
            ValueError: the snapshot is not ``version - 1`` where a delta is due; no tensors; an alias of nothing. On all ranks.
            FencedError: from ``before_commit``; the version was not committed. On rank 0; the others wait for its end.
            StorageError: this rank's files, or the manifest, were not written; as above.
        """
        return self._publish(version, lambda: share, tied)

    def _publish(self, version: int, take: Callable[[], Share], tied: Mapping[str, str]) -> WeightsManifest:
        found = from_first(self._team, lambda: self._found(version))
        existing = found.existing
        needs_files = existing is None or found.is_damaged
        base = self._base(version, is_keyframe_due=found.is_keyframe_due) if needs_files else None
        draft = make_draft(take(), base)
        self.crossed_bytes, self.drifts = draft.crossed_bytes, tuple(draft.drifts)
        whole = together(self._team.all_of(draft.summary(base)))
        if not whole.names:
            raise ValueError(f"policy version {version} has no tensors")
        if missing := sorted(set(tied.values()) - whole.names):
            raise ValueError(f"policy version {version}: tied to tensors that are not stored: {', '.join(missing)}")
        manifest = existing
        if existing is None or (found.is_damaged and existing.weights_digest == whole.digest):
            is_due = found.is_keyframe_due
            again = existing is not None
            manifest = self._commit(version, draft, whole, tied, is_keyframe_due=is_due, again=again)
        assert manifest is not None
        if manifest.weights_digest != whole.digest:
            raise DivergenceError(
                f"policy version {version} is published with weights digest {manifest.weights_digest} "
                f"(incarnation {manifest.incarnation}), but computed again it has {whole.digest}",
                mend="look for a non-deterministic kernel or a changed environment, or set checkpoint.on_divergence",
            )
        self._snapshot, self._tied = Snapshot(version, draft.tensors, draft.there), dict(tied)
        delta_bytes = sum(ref.bytes for ref in delta_refs(manifest))
        self._chain_bytes = 0 if manifest.keyframe is not None else self._chain_bytes + delta_bytes
        self._distrusted.discard(version)
        return manifest

    # -- what is there ----------------------------------------------------------------------------------------------

    def _found(self, version: int) -> _Found:
        """Rank 0: is it published, and must it be written (again)?"""
        existing = self._committed(version)
        is_damaged = existing is not None and (version in self._distrusted or not self._is_whole(existing))
        return _Found(existing, is_damaged, self._is_keyframe_due(version))

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

    def _base(self, version: int, *, is_keyframe_due: bool) -> Snapshot | None:
        """``version - 1`` for a delta; None when only a keyframe is possible."""
        snapshot = self._snapshot
        if version == 0 or snapshot is None or version in self._distrusted:
            return None
        if snapshot.version == version - 1:
            return snapshot
        if is_keyframe_due:
            return None
        raise ValueError(
            f"policy version {version} needs a delta on version {version - 1}, but the snapshot is version "
            f"{snapshot.version}: publish in order, or seed({version - 1}) first"
        )

    def _is_keyframe_due(self, version: int) -> bool:
        """Also behind a retired version: a delta on that could not be applied by anybody."""
        is_due = version % self._keyframe_every == 0 or version in self._distrusted
        return is_due or is_retired(self._layout, version - 1)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _commit(
        self, version: int, draft: Draft, whole: Whole, tied: Mapping[str, str], *, is_keyframe_due: bool, again: bool
    ) -> WeightsManifest:
        """Files of all ranks, then the manifest (collective).

        ``again``: a replay holds the very weights whose payload was lost. The damaged artefact goes to quarantine, and a whole
        one takes its place with the same weights digest. Killed between: the version is not published; the next replay does it.
        """
        if again:
            from_first(self._team, lambda: self._patience.until_space(lambda: self._take_damaged_away(version)))
        costs_more = self._team.all_of(self._chain_bytes)[0] + whole.delta_bytes > whole.num_bytes
        has_keyframe = not whole.has_delta or costs_more or is_keyframe_due
        written = self._patience.until_space(lambda: self._write_files(version, draft, whole.has_delta, has_keyframe))
        parts = self._team.all_of(written)
        return from_first(
            self._team,
            lambda: self._patience.until_space(lambda: self._create_manifest(version, parts, whole, tied)),
        )

    def _take_damaged_away(self, version: int) -> None:
        if self._layout.weights_version(version).exists():
            reason = f"payload of policy version {version} was damaged or missing; it was published again from a replay"
            take_away(self._layout, self._incarnation, self._layout.weights_version(version), reason)

    def _write_files(self, version: int, draft: Draft, has_delta: bool, has_keyframe: bool) -> _Written:
        """This rank's files, durable; safe to repeat."""
        make_directory(self._layout.weights_version(version))
        keyframe = self._write(version, "keyframe", draft.tensors) if has_keyframe else None
        delta = self._write(version, "delta", draft.delta_payload()) if has_delta else None
        return _Written(tuple(draft.entries(has_delta, delta or keyframe)), keyframe, delta)

    def _create_manifest(
        self, version: int, parts: Sequence[_Written], whole: Whole, tied: Mapping[str, str]
    ) -> WeightsManifest:
        full = [part.keyframe for part in parts if part.keyframe is not None]
        manifest = WeightsManifest(
            version=version,
            incarnation=self._incarnation,
            artefact="keyframe" if full else "delta",
            parent=version - 1 if whole.has_delta else None,
            keyframe=full[0].path if full else None,
            keyframe_shards=tuple(ref.path for ref in full[1:]),
            weights_digest=whole.digest,
            tensors=tuple(sorted((e for part in parts for e in part.entries), key=lambda entry: entry.name)),
            tied=dict(tied),
            files=(*full, *(part.delta for part in parts if part.delta is not None)),
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

    def _write(self, version: int, kind: Literal["keyframe", "delta"], tensors: Tensors) -> FileRef | None:
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
