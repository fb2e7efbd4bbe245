"""Policy versions of a run, published as Miles publishes them: a full checkpoint first, then XOR deltas.

Owns one directory of such versions; never changes the run (but for a hold while it reads) and never a version that is there.
Invariant: a version's directory appears under its name with all it holds, durably, or not at all; each delta was taken between
two proven copies, the older of which is, bit for bit, the version before in that directory, and can be read there. Needs no
torch. The page behind it is ``docs/format-miles.md``.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.records import WeightsManifest
from milesbatch.store.directories import held_names, listed, missing, publish_directory, take_back
from milesbatch.store.durable import (
    TEMPORARY_PREFIX,
    AlreadyExistsError,
    digest_file,
    make_directory,
    publish_file,
    publishing,
    remove_tree,
)
from milesbatch.store.holds import holding
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import process_started
from milesbatch.weights.materialize import write_model
from milesbatch.weights.miles_layout import (
    INDEX,
    WEIGHTS,
    VersionIndex,
    delta_index,
    file_name,
    full_index,
    published_versions,
    read_index,
    version_name,
)
from milesbatch.weights.reader import AcceptManifest, committed_versions, is_retired, read_manifest
from milesbatch.weights.rebuild import Copy, rebuild
from milesbatch.weights.tensorfile import read_rows, write_tensors
from milesbatch.weights.tensors import RawTensor

_BLOCK_BYTES = 4 << 20
_LEVEL = 1
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Exported:
    """A version that was published."""

    version: int
    kind: str
    """``full`` or ``delta``."""
    bytes: int
    """Of its tensors' files."""
    changed: int
    """Tensors that a delta holds; all of a full checkpoint."""
    path: Path
    because: str
    """Why it is a full checkpoint, in words; empty for a delta."""


class Exporter:
    """Writes versions of ``layout`` into ``directory``. Not for several threads; several processes do no harm."""

    def __init__(self, layout: RunLayout, directory: Path, accept: Callable[[], AcceptManifest]) -> None:
        """``accept`` gives, at each look, the judge of which committed manifests count.

        Raises:
            InputError: ``directory`` holds other weights than this run's, or other things and no weights.
            CorruptArtefactError: a version from its newest full copy on is damaged. StorageError: it cannot be read or written.
        """
        self._layout, self._directory, self._accept = layout, directory, accept
        self._copy: Copy | None = None
        self.left_out: dict[int, str] = {}
        """Versions that were found damaged in the run, and how; they are not tried again."""
        _sweep(directory)
        if (last := self.last) is not None:
            self._require_same(last)
        elif held := held_names(directory):
            raise InputError(
                f"{directory} is not empty and holds no exported versions: it holds {listed(held)}",
                mend="give a new or empty directory, or one that was exported to",
            )
        self.gaps = self._find_gaps()
        """Versions that are not in the directory although others there build on them, ascending."""

    @property
    def last(self) -> int | None:
        """The newest version in the directory; None when there is none."""
        return max(self.versions, default=None)

    @property
    def versions(self) -> list[int]:
        """What the directory holds, ascending; nothing when it does not exist (yet)."""
        return published_versions(self._directory) if self._directory.exists() else []

    def _find_gaps(self) -> list[int]:
        """From the newest full copy on, for a reader needs nothing before it; all files that indexes name must be there."""
        there = self.versions
        begin: int | None = None
        for version in reversed(there):
            index = self._read_whole(version)
            begin = version if index.base is None else index.base
            if index.base is None:
                break
        return [] if begin is None else [version for version in range(begin, there[-1]) if version not in set(there)]

    def _read_whole(self, version: int) -> VersionIndex:
        mend = "remove this version's directory: the same command publishes it anew"
        try:
            index = read_index(self._directory, version)
        except CorruptArtefactError as error:
            raise CorruptArtefactError(error.what, mend=mend) from error
        assert index is not None, "it was listed"
        for name in (*index.files, *(index.digests or ())):
            path = index.directory / name
            if not path.is_file():
                raise CorruptArtefactError(f"{path} is missing", mend=mend)
            if name in index.files:
                try:
                    read_rows(path)
                except CorruptArtefactError as error:
                    raise CorruptArtefactError(error.what, mend=mend) from error
        return index

    def due(self, first: int | None, last: int | None) -> list[int]:
        """Versions to publish now, ascending: those of ``first`` to ``last`` that are kept, count, and are not there yet.

        Without ``first``, the gaps, and what follows the newest one that is there; all that is kept when there is none.
        """
        newest = self.last
        begin = first if first is not None else 0 if newest is None else newest + 1
        gaps = set(self.gaps) - set(self.left_out) if first is None else set()
        is_following = newest is not None and begin == newest + 1 and not gaps
        if is_following and not self._layout.weights_manifest(begin).is_file():
            return []  # the usual case: one look, no listing
        accept, present = self._accept(), {*self.versions, *self.left_out}
        chosen = []
        for version in committed_versions(self._layout):
            is_asked = (version >= begin or version in gaps) and (last is None or version <= last)
            if not is_asked or version in present or is_retired(self._layout, version):
                continue
            try:
                manifest = read_manifest(self._layout, version)
            except CorruptArtefactError as error:
                self.left_out[version] = error.what
                continue
            if manifest is not None and accept(manifest):
                chosen.append(version)
        return chosen

    def export_or_leave_out(self, version: int) -> Exported | None:
        """As :meth:`export`, but a version that is damaged in the run is noted in :attr:`left_out`; the next that can be
        rebuilt is then a full checkpoint. One that was retired meanwhile is passed over."""
        try:
            return self.export(version)
        except CorruptArtefactError as error:
            if not is_retired(self._layout, version):
                self.left_out[version] = error.what
            return None

    def export(self, version: int) -> Exported | None:
        """Publish ``version``: as a delta when the version before is in the directory and can be read, else in full.

        Durability: on return the version is durable and visible; if killed midway only a ``.tmp-*`` directory is left, which
        the next exporter on this host removes. None when it is there already, or was published meanwhile by another process.

        Raises:
            InputError: the version before it in the directory is another one than the run's.
            CorruptArtefactError: it cannot be rebuilt, or was retired (``RetiredError``); StorageError: it is not published,
                or cannot be written.
        """
        if (self._directory / version_name(version)).is_dir():
            return None
        with holding(self._layout, max(version - 1, 0), "weights export"):
            before = self._before(version)
            after = rebuild(self._layout, version, local=before, accept=self._accept())
        self._copy = after
        made_directories = missing(self._directory)
        make_directory(self._directory)
        staged = self._directory / f"{TEMPORARY_PREFIX}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}"
        final = self._directory / version_name(version)
        try:
            if before is None:
                because = self._why_full(version)
                made = Exported(version, "full", *_write_full(self._layout, staged, after), final, because)
            elif _shapes(before.manifest) != _shapes(after.manifest):
                because = f"version {version - 1} has other tensors"
                made = Exported(version, "full", *_write_full(self._layout, staged, after), final, because)
            else:
                made = Exported(version, "delta", *_write_delta(staged, before, after), final, "")
            publish_directory(staged, final)
        except AlreadyExistsError:
            remove_tree(staged)
            return None
        except BaseException:
            if staged.is_dir():
                remove_tree(staged)
            take_back(made_directories)
            raise
        self.gaps = [gap for gap in self.gaps if gap > version or (gap < version and made.kind == "delta")]
        return made

    def _why_full(self, version: int) -> str:
        if version == 0:
            return "it is the first"
        if broken := [gap for gap in self.gaps if gap < version - 1]:
            return f"version {broken[0]} is not here, and those behind it cannot be read"
        return f"version {version - 1} is not here"

    def _before(self, version: int) -> Copy | None:
        """The version before, as the directory has it; None when there is none to build on."""
        before = version - 1
        if before < 0 or not (self._directory / version_name(before)).is_dir():
            return None
        if any(gap < version for gap in self.gaps):
            return None  # readers cannot get to it
        self._require_same(before)
        if self._copy is not None and self._copy.version == before:
            return self._copy
        try:
            return rebuild(self._layout, before, local=self._copy, accept=self._accept())
        except CorruptArtefactError:  # retired, or damaged: the version itself may still have a full copy
            return None

    def _require_same(self, version: int) -> None:
        """Raises:
        InputError: a version in the directory is not what the run says that version is.
        """
        index = read_index(self._directory, version)
        found = None if index is None else index.weights_digest
        manifest = read_manifest(self._layout, version)
        expected = None if manifest is None else manifest.weights_digest
        if found is None or found != expected:
            says = "was not written by `milesbatch weights export`" if found is None else f"has weights digest {found}"
            raise InputError(
                f"{self._directory / version_name(version)} {says}; version {version} of {self._layout.root} "
                + ("is not published" if expected is None else f"has {expected}"),
                mend="give an empty directory, or the one that this run was exported to",
            )


def _shapes(manifest: WeightsManifest) -> list[tuple[str, str, tuple[int, ...]]]:
    return sorted((entry.name, entry.dtype, entry.shape) for entry in manifest.tensors)


def _write_full(layout: RunLayout, staged: Path, copy: Copy) -> tuple[int, int]:
    """A Hugging Face model directory with an index that tells what it is; returns its tensors' bytes and number."""
    write_model(layout, copy.tensors, staged)
    others = {str(path.relative_to(staged)): path for path in sorted(staged.rglob("*")) if path.is_file()}
    weights = others.pop(WEIGHTS)
    digests = {name: digest_file(path) for name, path in others.items()}
    total = sum(tensor.data.size for tensor in copy.tensors.values())
    publish_file(staged / INDEX, full_index(copy.version, copy.tensors, total, copy.manifest.weights_digest, digests))
    return weights.stat().st_size, len(copy.tensors)


def _write_delta(staged: Path, before: Copy, after: Copy) -> tuple[int, int]:
    """One file of compressed differences, and the index behind it; returns its bytes and how many tensors changed."""
    old = {entry.name: entry.digest for entry in before.manifest.tensors}
    checksums = {
        entry.name: entry.digest.removeprefix("xxh128:")
        for entry in after.manifest.tensors
        if old[entry.name] != entry.digest
    }
    names, size = sorted(checksums), 0
    make_directory(staged)
    if names:
        blobs = _differences(names, before.tensors, after.tensors)
        with publishing(staged, file_name(0, 1)) as file:
            write_tensors(file.stream, blobs, checksums)
        assert file.ref is not None
        size = file.ref.bytes
    index = delta_index(after.version, dict.fromkeys(names, file_name(0, 1)), after.manifest.weights_digest)
    publish_file(staged / INDEX, index)
    return size, len(names)


def _differences(
    names: list[str], before: Mapping[str, RawTensor], after: Mapping[str, RawTensor]
) -> dict[str, RawTensor]:
    """Each tensor's difference as one zstd frame; several tensors at a time, for XOR and zstd need no lock."""

    def one(name: str) -> RawTensor:
        blob = np.frombuffer(xor_frame(before[name], after[name]), np.uint8)
        return RawTensor("U8", (blob.size,), blob)

    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="export") as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def xor_frame(old: RawTensor, new: RawTensor) -> bytes:
    """Old xor new as one zstd frame; memory beyond the result is one block."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=new.data.size)
    block = np.empty(min(_BLOCK_BYTES, new.data.size), np.uint8)
    parts = []
    for begin in range(0, new.data.size, _BLOCK_BYTES):
        end = min(begin + _BLOCK_BYTES, new.data.size)
        part = np.bitwise_xor(old.data[begin:end], new.data[begin:end], out=block[: end - begin])
        parts.append(compressor.compress(part.data))
    parts.append(compressor.flush())
    return b"".join(parts)


def _sweep(directory: Path) -> None:
    """Remove what exporters of this host left that are gone."""
    for path in directory.glob(f"{TEMPORARY_PREFIX}{socket.gethostname()}-*"):
        pid = path.name.removeprefix(f"{TEMPORARY_PREFIX}{socket.gethostname()}-").partition("-")[0]
        if path.is_dir() and pid.isdigit() and process_started(pid) is None:
            remove_tree(path)
