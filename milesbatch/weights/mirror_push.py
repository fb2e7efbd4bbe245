"""Pushing: a run's committed policy versions are copied to another store, for rollout fleets that share no filesystem.

Owns what is sent and in which order; never rewrites and never deletes anything there. Invariant: a manifest in the store stands
behind its payload, and every byte sent was compared with its digest before it became visible. The page behind it is
``docs/storage.md``.

Crash states, in order of time: some of ``model/`` is there; ``run.json`` is there; payload of a version without its manifest,
which nobody takes for a version; the version is there. The next push goes on from each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import xxhash

from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.records import FileRef, RunRecord, WeightsManifest
from milesbatch.store.durable import read_optional, storage_error
from milesbatch.store.holds import holding
from milesbatch.store.layout import RunLayout
from milesbatch.store.object_requests import in_order
from milesbatch.store.port import AlreadyExistsError, ArtefactStore, join
from milesbatch.store.survey import Seals, read_incarnations
from milesbatch.weights.mirror import (
    RUN_KEY,
    WEIGHTS_PREFIX,
    manifest_key,
    model_refs,
    parse_manifest,
    same_run,
    version_prefix,
)
from milesbatch.weights.reader import committed_versions, is_retired

_CHUNK_BYTES = 1 << 20
_AHEAD = 8
"""Manifests that are asked for at a time."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was done with a version: ``bytes`` of payload sent, 0 when it was there; ``damage`` says why it was left out."""

    version: int
    kind: str
    bytes: int
    was_there: bool = False
    damage: str = ""


class Push:
    """From one run to one store. Not for several threads; several processes may push the same run."""

    def __init__(self, layout: RunLayout, store: ArtefactStore) -> None:
        self._layout, self._store = layout, store
        self._done: set[int] = set()
        self._told: dict[int, str] = {}

    def begin(self) -> None:
        """Send of which run it is, and the model's configuration, unless they are there.

        Raises:
            InputError: the store holds weights of another run, or this is no run.
            CorruptArtefactError: a file of ``model/`` is not as the run recorded it.
        """
        path = self._layout.run_record
        mine = read_optional(path)
        if mine is None:
            raise InputError(f"{path} is missing", mend="give the directory of a run")
        theirs = self._store.read(RUN_KEY)
        if theirs is None:
            record = RunRecord.from_bytes(mine, str(path))
            for ref in model_refs(record):
                self._send(ref.path.rpartition("/")[0], self._layout.root / ref.path, ref)
            try:
                self._store.create_exclusively(RUN_KEY, mine)
                return
            except AlreadyExistsError:  # another push was quicker: of the same run?
                theirs = self._store.read(RUN_KEY) or b""
        same_run(mine, theirs, str(self._layout.root), self._store.url)

    def versions(self) -> Iterator[Pushed]:
        """Send what counts, was not retired and is not there, oldest first; versions done before are not looked at again.

        A version that is damaged, here or as manifest there, is left out and told once. While the iterator lives the run
        retires nothing of it.

        Raises:
            InputError: the store has other weights under a version's number.
            StorageError: the store or the run cannot be used.
        """
        due = [number for number in committed_versions(self._layout) if number not in self._done]
        due = [number for number in due if not is_retired(self._layout, number)]
        if not due:
            return
        with holding(self._layout, due[0], "weights push"):
            accept = Seals(read_incarnations(self._layout)).accept_weights
            listed = set(self._store.list_keys(WEIGHTS_PREFIX)) if len(due) > 1 else set()
            there = in_order((partial(self._store.read, manifest_key(version)) for version in due), _AHEAD)
            for version, theirs in zip(due, there, strict=True):
                try:
                    pushed = self._version(version, accept, theirs, listed)
                except CorruptArtefactError as error:
                    if is_retired(self._layout, version):
                        continue
                    pushed = Pushed(version, "", 0, damage=error.what)
                if pushed is not None and self._told.get(version) != pushed.damage:
                    self._told[version] = pushed.damage
                    yield pushed

    def _version(
        self, version: int, accept: Callable[[WeightsManifest], bool], theirs: bytes | None, listed: set[str]
    ) -> Pushed | None:
        """None when the version does not count (any more)."""
        path = self._layout.weights_manifest(version)
        mine = read_optional(path)
        manifest = None if mine is None else parse_manifest(mine, str(path), version)
        if mine is None or manifest is None or not accept(manifest):
            return None
        if theirs is not None:
            self._compare(manifest, theirs)
        sent = 0
        if theirs is None or theirs == mine:  # else it was published anew here: the same weights in other files
            sent = self._send_payload(manifest, listed)
        if theirs is None:
            try:
                self._store.create_exclusively(manifest_key(version), mine)
            except AlreadyExistsError:
                self._compare(manifest, self._store.read(manifest_key(version)) or b"")
        self._done.add(version)
        return Pushed(version, manifest.artefact, sent, was_there=theirs is not None and not sent)

    def _send_payload(self, manifest: WeightsManifest, listed: set[str]) -> int:
        """Bytes sent. Names carry the digest, and what is visible is whole: an object that is there need not be read."""
        prefix, sent = version_prefix(manifest.version), 0
        for ref in manifest.files:
            key = join(prefix, ref.path)
            if key in listed or self._store.exists(key):
                continue
            self._send(prefix, self._layout.weights_version(manifest.version) / ref.path, ref)
            sent += ref.bytes
        return sent

    def _compare(self, manifest: WeightsManifest, theirs: bytes) -> None:
        place = f"{self._store.url}/{manifest_key(manifest.version)}"
        try:
            other = parse_manifest(theirs, place, manifest.version)
        except CorruptArtefactError as error:
            raise CorruptArtefactError(f"{error.what}; delete this object and push again") from error
        if other.weights_digest != manifest.weights_digest:
            raise InputError(
                f"{place} has weights {other.weights_digest}, the run has {manifest.weights_digest}",
                mend="nothing is rewritten there: push to another place",
            )

    def _send(self, prefix: str, path: Path, ref: FileRef) -> None:
        """Copy one file; nothing becomes visible when it is not what ``ref`` says."""
        hasher = xxhash.xxh3_128()

        def write(stream: BinaryIO) -> None:
            hasher.reset()
            try:
                with open(path, "rb") as source:
                    while chunk := source.read(_CHUNK_BYTES):
                        hasher.update(chunk)
                        stream.write(chunk)
            except FileNotFoundError:
                raise CorruptArtefactError(f"{path} is missing; expected {ref.digest}", mend=_MEND) from None

        def check() -> None:
            found = "xxh128:" + hasher.hexdigest()
            if found != ref.digest:
                raise CorruptArtefactError(f"{path} is damaged: expected {ref.digest}, found {found}", mend=_MEND)

        try:
            self._store.publish(prefix, path.name, write, check)
        except OSError as error:
            raise storage_error(path, error) from error


_MEND = "run `milesbatch audit` on the run; it cannot be pushed as it is"
