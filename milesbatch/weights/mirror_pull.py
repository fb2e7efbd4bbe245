"""Pulling: policy versions are brought from another store into a directory that looks like a run as far as weights go.

Owns that directory. Never fetches what the wanted version does not need: what is there already costs nothing, and the plan
is the cheapest of keyframes and deltas. Invariant: every file was compared with its digest before it became visible, and a
version with a manifest there can be rebuilt from what is there. The page behind it is ``docs/storage.md``.

    DIR/mirror.json            from where; other directories that hold something are refused
    DIR/model/, run.json       configuration and tokenizer
    DIR/weights/000013/…       only the files that were needed, and the manifest as it was published

Crash states, in order of time: a part of that without ``run.json``; payload without its manifest, which is not a version and
is not fetched again; versions up to one of the chain, each of them whole. The next pull goes on from each.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.records import FileRef, RunRecord, WeightsManifest, canonical_json
from milesbatch.store.durable import (
    create_exclusively,
    is_residue,
    make_directory,
    move_to_quarantine,
    publish_file,
    publishing,
    read_optional,
    remove_tree,
    storage_error,
    sweep_temporary,
)
from milesbatch.store.entries import numbered
from milesbatch.store.holds import HoldWatch
from milesbatch.store.layout import RunLayout
from milesbatch.store.object_requests import in_order
from milesbatch.store.port import ArtefactStore, MissingArtefactError, join
from milesbatch.weights.mirror import (
    RUN_KEY,
    listed_versions,
    manifest_key,
    model_refs,
    parse_manifest,
    same_run,
    version_prefix,
)
from milesbatch.weights.reader import Plan, Step, delta_refs, keyframe_refs, plan_chain, read_manifest

_RANGE_BYTES = 8 << 20
_RANGES = 4
"""Ranges of one file on their way at a time; each is in memory once."""
_STEPS = 4
"""Files of so many versions are fetched at a time."""
_MEND = "push that version again after deleting the object, or choose another version"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version that the directory now holds: what was fetched for it, and damage in the store that was gone around."""

    version: int
    digest: str
    files: int
    bytes: int
    damage: tuple[str, ...]


@dataclass
class _Way:
    """The search for one version: manifests, and what turned out to be unusable."""

    manifests: dict[int, WeightsManifest | None] = field(default_factory=dict)
    texts: dict[int, bytes] = field(default_factory=dict)
    unusable: set[Step] = field(default_factory=set)
    damage: list[str] = field(default_factory=list)


class Pull:
    """From one store into one directory, one process at a time (a lock sees to it). Not for several threads."""

    def __init__(self, store: ArtefactStore, directory: Path) -> None:
        self._store, self._layout = store, RunLayout(directory)
        self._holds = HoldWatch(self._layout)

    @property
    def layout(self) -> RunLayout:
        """Of the directory, for what reads weights."""
        return self._layout

    def require(self, version: int | None) -> None:
        """Return when the store has this version, or any; nothing is made.

        Raises:
            InputError: it was not pushed.
        """
        if self._store.read(RUN_KEY) is None:
            return  # :meth:`taken` says so
        if version is None and self.newest() is None:
            raise InputError("no policy version was pushed there yet", mend="wait for the first one with --follow")
        if version is not None and not self._store.exists(manifest_key(version)):
            raise self._not_pushed(version)

    def _not_pushed(self, version: int) -> InputError:
        return InputError(
            f"policy version {version} is not at {self._store.url}",
            mend="choose one that was pushed, or wait with --follow",
        )

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take the directory and make it what :meth:`bring` needs; one that an earlier pull made is continued.

        Raises:
            InputError: nothing was pushed there; the directory holds something else, or another run's weights, or
                another pull has it.
            CorruptArtefactError: a file of ``model/`` in the store is damaged.
        """
        theirs = self._store.read(RUN_KEY)
        if theirs is None:
            raise InputError(
                f"{self._store.url} holds no pushed weights: it has no {RUN_KEY}",
                mend="push first: milesbatch weights push RUN URL",
            )
        record = RunRecord.from_bytes(theirs, f"{self._store.url}/{RUN_KEY}")
        self._make_directory()
        lock = _lock(self._layout.mirror)
        try:
            self._begin(record, theirs)
            yield
        finally:
            os.close(lock)

    def _begin(self, record: RunRecord, theirs: bytes) -> None:
        for version in self._layout.weights.iterdir():
            sweep_temporary(version)  # of a pull that was killed
        mine = read_optional(self._layout.run_record)
        if mine is not None:
            same_run(mine, theirs, str(self._layout.root), self._store.url)
            return
        for ref in model_refs(record):
            path = self._layout.root / ref.path
            make_directory(path.parent)
            publish_file(path, self._store.read_verified(ref.path, ref))
        create_exclusively(self._layout.run_record, theirs)

    def _make_directory(self) -> None:
        root = self._layout.root
        try:
            held = sorted(path.name for path in root.iterdir() if not is_residue(path.name)) if root.exists() else []
        except OSError as error:
            raise storage_error(root, error) from error
        if held and self._layout.mirror.name not in held:
            raise InputError(
                f"{root} is not empty and was not made by a pull: it holds {', '.join(held[:5])}",
                mend="give a new or empty directory",
            )
        make_directory(root)
        if self._layout.mirror.name not in held:
            publish_file(self._layout.mirror, canonical_json({"source": self._store.url}))
        make_directory(self._layout.weights)

    def newest(self, known: int | None = None, *, look: bool = True) -> int | None:
        """The newest version in the store; None without any. ``look`` at a listing, or only at the names after ``known``."""
        found = listed_versions(self._store) if look else set()
        newest = max({*found, -1 if known is None else known})
        while self._store.exists(manifest_key(newest + 1)):  # a listing may be old
            newest += 1
        return None if newest < 0 else newest

    def bring(self, version: int) -> Pulled:
        """Have the directory hold ``version``, by the way that fetches the fewest bytes and is undamaged.

        Durability: durable on return. If killed midway, see the module's crash states.

        Raises:
            CorruptArtefactError: every way is damaged, or leads to versions that were never pushed; says what was found.
            InputError: it was not pushed.
            StorageError: the store does not answer, or the directory cannot be written.
        """
        way = _Way()
        target = self._manifest(way, version, version)
        if target is None:
            raise self._not_pushed(version)
        plan, files, num_bytes = self._reach(way, version, partial(self._priced, way, version))
        if plan is not None:
            return Pulled(version, target.weights_digest, files, num_bytes, tuple(way.damage))
        found = "; ".join(way.damage) or "no keyframe with an unbroken chain of deltas was pushed"
        raise CorruptArtefactError(
            f"policy version {version} cannot be had from {self._store.url}: {found}", mend=_MEND
        )

    def shrink(self, version: int, limit_bytes: int) -> tuple[int, ...]:
        """When ``weights/`` has more than ``limit_bytes``: drop what the cheapest whole chain to ``version`` does not need.

        That chain may begin with a keyframe that is fetched first. What readers of the directory hold stays. Returns the
        versions that were dropped, newest first: if killed midway, what is left can still be rebuilt.

        Raises:
            StorageError: as :meth:`bring`; or something could not be deleted.
        """
        if self._num_bytes() <= limit_bytes:
            return ()
        way = _Way()
        plan, _, _ = self._reach(way, version, partial(self._manifest, way, version))
        held = self._holds.versions()
        if plan is None or plan.keyframe is None or held is None:
            return ()
        if min((plan.keyframe.version, *held)) < plan.keyframe.version:
            return ()  # a reader needs the older chain
        old = [number for number in self._directories() if number < plan.keyframe.version]
        for number in reversed(old):
            remove_tree(self._layout.weights_version(number))
        return tuple(reversed(old))

    def _num_bytes(self) -> int:
        try:
            return sum(path.stat().st_size for path in self._layout.weights.glob("*/*"))
        except OSError as error:
            raise storage_error(self._layout.weights, error) from error

    def _directories(self) -> list[int]:
        """Versions that have anything here, ascending."""
        return [version for version, _ in numbered(self._layout.weights)]

    # -- manifests and the plan ---------------------------------------------------------------------------------------

    def _manifest(self, way: _Way, target: int, version: int) -> WeightsManifest | None:
        """The manifest that is here, or in the store; a damaged one does not count, but is an error for the target."""
        if version not in way.manifests:
            way.manifests[version] = None
            try:
                way.manifests[version] = self._local(version) or self._remote(way, version)
            except CorruptArtefactError as error:
                if version == target:
                    raise
                way.damage.append(error.what)
        return way.manifests[version]

    def _local(self, version: int) -> WeightsManifest | None:
        try:
            return read_manifest(self._layout, version)
        except CorruptArtefactError as error:
            move_to_quarantine(self._layout.weights_manifest(version), self._layout.quarantine, error.what)
            return None

    def _remote(self, way: _Way, version: int) -> WeightsManifest | None:
        data = self._store.read(manifest_key(version))
        if data is None:
            return None
        way.texts[version] = data
        return parse_manifest(data, f"{self._store.url}/{manifest_key(version)}", version)

    def _priced(self, way: _Way, target: int, version: int) -> WeightsManifest | None:
        """A manifest whose files that are here have 0 bytes: the plan then counts what is to be fetched."""
        manifest = self._manifest(way, target, version)
        if manifest is None:
            return None
        price = tuple(
            ref.model_copy(update={"bytes": 0 if self._is_here(version, ref) else ref.bytes}) for ref in manifest.files
        )
        return manifest.model_copy(update={"files": price})

    def _path(self, version: int, ref: FileRef) -> Path:
        return self._layout.weights_version(version) / ref.path

    def _is_here(self, version: int, ref: FileRef) -> bool:
        """A file that became visible was proven; one that lost its end since is not taken."""
        try:
            return self._path(version, ref).stat().st_size == ref.bytes
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error(self._path(version, ref), error) from error

    # -- files --------------------------------------------------------------------------------------------------------

    def _reach(
        self, way: _Way, version: int, read: Callable[[int], WeightsManifest | None]
    ) -> tuple[Plan | None, int, int]:
        """Fetch the cheapest way that is undamaged, as ``read`` tells the prices. None without one; files and bytes fetched."""
        files = num_bytes = 0
        while (plan := plan_chain(read, version, unusable=way.unusable)) is not None:
            more_files, more_bytes, culprit = self._follow(way, plan)
            files, num_bytes = files + more_files, num_bytes + more_bytes
            if culprit is None:
                break
            way.unusable.add(culprit)
        return plan, files, num_bytes

    def _follow(self, way: _Way, plan: Plan) -> tuple[int, int, Step | None]:
        """Fetch the files of a plan, and commit each manifest after its payload. Files, bytes, and the step that is damaged."""
        files = num_bytes = 0
        work: Iterator[Callable[[], tuple[int, int] | CorruptArtefactError]]
        work = (partial(self._fetch_step, way, step) for step in plan.steps)
        for step, done in zip(plan.steps, in_order(work, _STEPS), strict=True):
            if isinstance(done, CorruptArtefactError):
                way.damage.append(done.what)
                return files, num_bytes, step
            files, num_bytes = files + done[0], num_bytes + done[1]
            text = way.texts.get(step.version)
            if text is not None:  # else it is here
                create_exclusively(self._layout.weights_manifest(step.version), text)
        return files, num_bytes, None

    def _fetch_step(self, way: _Way, step: Step) -> tuple[int, int] | CorruptArtefactError:
        manifest = way.manifests[step.version]
        assert manifest is not None, "a plan goes only through manifests that are there"
        refs = keyframe_refs(manifest) if step.kind == "keyframe" else delta_refs(manifest)
        missing = [ref for ref in refs if not self._is_here(step.version, ref)]
        make_directory(self._layout.weights_version(step.version))
        try:
            for ref in missing:
                self._fetch(step.version, ref)
        except CorruptArtefactError as error:
            return error
        return len(missing), sum(ref.bytes for ref in missing)

    def _fetch(self, version: int, ref: FileRef) -> None:
        path, key = self._path(version, ref), join(version_prefix(version), ref.path)
        if path.exists():
            move_to_quarantine(path, self._layout.quarantine, f"it should have {ref.bytes} bytes")

        def proven(digest: str) -> str:
            if digest != ref.digest:
                raise self._damaged(key, ref, digest)
            return ref.path

        with publishing(path.parent, proven, needed_bytes=ref.bytes) as file:
            for piece in in_order(self._ranges(key, ref), _RANGES):
                file.stream.write(piece)

    def _ranges(self, key: str, ref: FileRef) -> Iterator[Callable[[], bytes]]:
        for start in range(0, ref.bytes, _RANGE_BYTES):
            yield partial(self._range, key, ref, start, min(_RANGE_BYTES, ref.bytes - start))

    def _range(self, key: str, ref: FileRef, start: int, length: int) -> bytes:
        try:
            piece = self._store.read_range(key, start, length)
        except MissingArtefactError:
            raise self._damaged(key, ref, "nothing") from None
        if len(piece) != length:
            raise self._damaged(key, ref, f"only {start + len(piece)} bytes")
        return piece

    def _damaged(self, key: str, ref: FileRef, found: str) -> CorruptArtefactError:
        return CorruptArtefactError(
            f"{self._store.url}/{key} is damaged or missing: expected {ref.bytes} bytes, {ref.digest}, found {found}",
            mend=_MEND,
        )


def _lock(path: Path) -> int:
    """An open descriptor that holds the lock until it is closed.

    Raises:
        InputError: another process has it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise InputError(
                f"another process is pulling into {path.parent}", mend="end it first, or give another directory"
            ) from None
        raise storage_error(path, error) from error
    return descriptor
