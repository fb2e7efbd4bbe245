"""A policy version on local disk or tmpfs, as a model directory that servers load, moved from version to version in place.

Owns one directory; waits for nothing and tells no engine. Only what changed is written: the pages that hold changed elements.
Invariant: :attr:`Staging.current` is a version whose every byte was compared with its manifest, or None; what a killed process
left behind is never taken for one. One process at a time has a directory (a lock sees to it). Another directory than one that
was made here is refused as it is, and no link is followed.

    DIR/staging.json                              made here, first of all: what is below may be replaced; the lock is on it
    DIR/model/model.safetensors, config.json, …   the model; tensors are patched in place
    DIR/state.json                                {"version": 7, "target": 9}: target is null when the model is whole
    DIR/redo.bin                                  the tensor that is being written: where it changes, and to what

The protocol, for each tensor: its new bytes are made in memory from the old ones and verified; then places and new values are
written to ``redo.bin``; then they are written to the model. Crash states, in order of time:

1. before ``state.json`` names a target: the model is the old version;
2. after that, before the first write: every tensor is old;
3. while ``redo.bin`` is written: it lacks its digest, and its tensor is still old;
4. while the tensor is written: it is neither old nor new. ``redo.bin`` has all that is missing, as values and not as
   differences, so writing them once more mends it, wherever the writing stopped;
5. after the last tensor: every tensor is new;
6. while there is ``fresh/``, a full copy that is not whole: it goes when the directory is opened.

Opening the directory finds out which it was by the digests of the tensors alone, and goes on from there. When a tensor is
neither old nor new and cannot be mended, nothing is current, and the next :meth:`Staging.advance_to` makes a full copy. Files
beside the tensors are compared with the run's, and written anew where they differ.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from milesbatch.errors import CorruptArtefactError, InputError, StorageError, StorageFullError
from milesbatch.records import TensorEntry, WeightsManifest
from milesbatch.store.directories import held_names, missing, publish_directory, require_made_by, take_back
from milesbatch.store.durable import (
    make_directory,
    publish_file,
    read_optional,
    remove_file,
    remove_tree,
    replace_hint,
    storage_error,
)
from milesbatch.store.layout import RunLayout
from milesbatch.weights.folding import Link, LinkError, fold_tensor
from milesbatch.weights.materialize import WEIGHTS, model_files, write_model
from milesbatch.weights.reader import AcceptManifest, accept_all, plan_chain, read_manifest
from milesbatch.weights.rebuild import check_weights_digest, read_link, rebuild
from milesbatch.weights.tensorfile import view_tensors
from milesbatch.weights.tensors import RawTensor, element_bytes, num_bytes

_REDO = struct.Struct("<8sQQQ16s")
"""Magic, length of the tensor's name, bytes of an element, number of changed elements, xxh3-128 of all that follows."""
_MAGIC = b"mbredo01"
_BLOCK_BYTES = 512
"""Of ``st_blocks``, on every filesystem (stat(2))."""
_MARKER = "staging.json"
_MADE_HERE = b'{"made by": "milesbatch weights stage"}\n'


@dataclass(frozen=True, slots=True)
class _Redo:
    name: str
    places: NDArray[np.uint64]
    values: NDArray[np.unsignedinteger[Any]]


class Staging:
    """A model directory that follows the run. Use as a context manager, or close it."""

    def __init__(self, directory: Path, layout: RunLayout, *, accept: AcceptManifest = accept_all) -> None:
        """Take the directory over, as it is.

        Raises:
            InputError: another process has it, or it holds what was not made here.
            ModelError: the run has no readable ``model/config.json``.
            StorageError: it cannot be made or read.
        """
        self._directory, self._layout, self._accept = directory, layout, accept
        self._made = missing(directory)
        self._lock = _take(directory)
        self._current: int | None = None
        self._mended: list[str] = []
        try:
            remove_tree(self._fresh)
            with suppress(StorageFullError):  # to be asked again
                self._look()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the directory go. It stays, unless nothing was ever staged there."""
        with suppress(OSError, StorageError):
            if held_names(self._directory) == [_MARKER]:
                remove_file(self._directory / _MARKER)
                take_back(self._made)
        os.close(self._lock)

    @property
    def current(self) -> int | None:
        """The version that :attr:`model` holds; None when it holds none that was proven."""
        return self._current

    @property
    def model(self) -> Path:
        """The model directory; to be read only while :attr:`current` is not None, and not while :meth:`advance_to` runs."""
        return self._directory / "model"

    @property
    def mended(self) -> tuple[str, ...]:
        """Files beside the tensors that were not the run's when the directory was opened, and are now."""
        return tuple(self._mended)

    @property
    def _fresh(self) -> Path:
        return self._directory / "fresh"

    def advance_to(self, version: int) -> WeightsManifest:
        """Make the model ``version``: by deltas in place where there is an undamaged chain from the current one, else anew.

        Durability: of a cache. After a power loss the directory may be anything; opening it finds out.

        Raises:
            CorruptArtefactError: there is no undamaged way to the version; the model is what it was, or None.
            StorageError: it is not published, or something cannot be read or written; as above.
        """
        target = self._manifest(version)
        if self._current is None:
            self._look()
        if self._current == version:
            return target
        links = self._links(version)
        if links:
            try:
                self._patch(target, links)
                return target
            except LinkError:
                pass  # files as committed, but not for these bytes: a full copy is the way out
        self._rebase(target)
        return target

    def make_way(self, version: int) -> bool:
        """Remove the model when there is room for a full copy of ``version`` without it; then nothing is current.

        For one who cannot wait for space. False: it stays, or there is none.

        Raises:
            StorageError: it cannot be looked at or removed.
        """
        needed = sum(num_bytes(entry.dtype, entry.shape) for entry in self._manifest(version).tensors)
        try:
            held = (self.model / WEIGHTS).lstat().st_blocks * _BLOCK_BYTES
            found = os.statvfs(self._directory)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error(self.model, error) from error
        if found.f_bavail * found.f_frsize + held < needed:
            return False
        self._current = None
        remove_file(self._directory / "redo.bin")
        remove_tree(self.model)  # what was said of it is not true of nothing: opening the directory finds that out
        return True

    # -- from version to version ------------------------------------------------------------------------------------------

    def _links(self, version: int) -> list[Link]:
        """Deltas from the current version, read and verified; empty when there is another way to go."""
        if self._current is None:
            return []
        try:
            plan = plan_chain(self._accepted, version, local=self._current)
            if plan is None or plan.keyframe is not None:
                return []
            return [read_link(self._layout, self._manifest(step.version)) for step in plan.steps]
        except CorruptArtefactError:
            return []

    def _patch(self, target: WeightsManifest, links: list[Link]) -> None:
        """One tensor after the other, each verified in memory before the model is touched."""
        check_weights_digest(self._layout, target)
        self._write_state(self._current, target.version)
        self._current = None
        before = self._tensors()
        for entry in target.tensors:
            old = before[entry.name]
            if old.digest == entry.digest:
                continue
            new = fold_tensor(links, entry.name, before)
            self._replace(entry, old, new)
        self._write_state(target.version, None)
        self._current = target.version

    def _replace(self, entry: TensorEntry, old: RawTensor, new: RawTensor) -> None:
        width = min(8, element_bytes(entry.dtype))
        before, after = (tensor.data.view(f"<u{width}") for tensor in (old, new))
        places = np.flatnonzero(before != after).astype(np.uint64)
        redo = _Redo(entry.name, places, after[places])
        _write_redo(self._directory / "redo.bin", redo)
        _scatter(before, redo)

    def _rebase(self, target: WeightsManifest) -> None:
        """A full copy beside the old one, which then goes: the model is never half of two. One that is none goes first."""
        copy = rebuild(self._layout, target.version, accept=self._accept)
        if self._current is None:
            self._remove_model()
        remove_tree(self._fresh)
        try:
            write_model(self._layout, copy.tensors, self._fresh)
            self._remove_model()
            publish_directory(self._fresh, self.model)
        except BaseException:
            with suppress(StorageError):  # the first error is the one to be told
                remove_tree(self._fresh)
            raise
        self._write_state(target.version, None)
        self._current = target.version

    def _remove_model(self) -> None:
        self._current = None
        self._write_state(None, None)
        remove_tree(self.model)

    # -- after a crash, or without space ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find out what is there, prove it, and go on with what was begun; in the end it is current, or nothing is.

        Raises:
            StorageFullError: to go on takes space; nothing is current, and the next look may find more.
        """
        try:
            self._recover()
            self._prove_files()
        except StorageFullError:
            self._current = None
            raise
        except (CorruptArtefactError, StorageError, OSError, ValueError, KeyError, TypeError):
            self._current = None

    def _recover(self) -> None:
        """Prove what is there; go on with what was begun. Whatever does not fit leaves no current version."""
        state = json.loads((self._directory / "state.json").read_bytes())
        version, target = state["version"], state["target"]
        if target is None:
            self._current = version if version is not None and not self._unlike(self._manifest(version)) else None
            return
        self._redo()
        new, old = self._unlike(self._manifest(target)), self._unlike(self._manifest(version))
        if not new:
            self._write_state(target, None)
            self._current = target
        elif not old:
            self._write_state(version, None)
            self._current = version
        elif not new & old:  # each tensor is of one of the two
            self._finish(version, self._manifest(target), new)

    def _prove_files(self) -> None:
        """Compare configuration and tokenizer with the run's; what differs is written anew, or nothing is current."""
        if self._current is None:
            return
        version, self._current = self._current, None
        for relative, data in model_files(self._layout, self._tensors()).items():
            path = self.model / relative
            self._refuse_links(relative)
            if read_optional(path) != data:
                make_directory(path.parent)
                replace_hint(path, data)
                self._mended.append(str(relative))
        self._current = version

    def _finish(self, version: int, target: WeightsManifest, unlike: set[str]) -> None:
        """The rest of an interrupted patch: the old tensors among a version's new ones."""
        plan = plan_chain(self._accepted, target.version, local=version)
        if plan is None or plan.keyframe is not None:
            return
        links = [read_link(self._layout, self._manifest(step.version)) for step in plan.steps]
        tensors = self._tensors()
        for entry in target.tensors:
            if entry.name in unlike:
                self._replace(entry, tensors[entry.name], fold_tensor(links, entry.name, tensors))
        self._write_state(target.version, None)
        self._current = target.version

    def _redo(self) -> None:
        """Write once more what was being written; nothing when that had not begun."""
        redo = _read_redo(self._directory / "redo.bin")
        if redo is not None:
            tensor = self._tensors()[redo.name]
            _scatter(tensor.data.view(redo.values.dtype), redo)

    def _unlike(self, manifest: WeightsManifest) -> set[str]:
        """Tensors of the model that are not those of a version."""
        tensors = self._tensors()
        if set(tensors) != {entry.name for entry in manifest.tensors}:
            return set(tensors) | {entry.name for entry in manifest.tensors}
        return {
            entry.name
            for entry in manifest.tensors
            if (found := tensors[entry.name]).shape != entry.shape
            or found.dtype != entry.dtype
            or found.digest != entry.digest
        }

    # -- files ----------------------------------------------------------------------------------------------------------------

    def _tensors(self) -> Mapping[str, RawTensor]:
        """The model's tensors as views of the mapped file: writing to one writes the file."""
        path = self.model / WEIGHTS
        self._refuse_links(WEIGHTS)
        try:
            data = np.memmap(path, np.uint8, "r+")
        except (OSError, ValueError) as error:
            raise StorageError(f"{path} cannot be mapped: {error}", mend="remove the staging directory") from error
        try:
            return view_tensors(path, data)
        except CorruptArtefactError as error:
            raise CorruptArtefactError(error.what, mend=f"remove {self._directory}; it is a copy") from error

    def _refuse_links(self, relative: Path) -> None:
        """Raises:
        StorageError: the model, or a file of it, lies elsewhere: what is there is not to be written.
        """
        for path in (self.model, *(self.model / part for part in (*relative.parents, relative))):
            if path.is_symlink():
                raise StorageError(f"{path} is a link", mend="remove the link; the same command makes a file")

    def _write_state(self, version: int | None, target: int | None) -> None:
        replace_hint(self._directory / "state.json", json.dumps({"version": version, "target": target}).encode())

    def _accepted(self, version: int) -> WeightsManifest | None:
        manifest = read_manifest(self._layout, version)
        return manifest if manifest is not None and self._accept(manifest) else None

    def _manifest(self, version: int) -> WeightsManifest:
        manifest = self._accepted(version)
        if manifest is None:
            raise StorageError(
                f"policy version {version} is not published in {self._layout.weights}", mend="wait for it"
            )
        return manifest


def _take(directory: Path) -> int:
    """The lock on a directory that is new, empty, or was made here: an open descriptor.

    Raises:
        InputError: it holds other things, or another process has it.
        StorageError: it cannot be made or read.
    """
    marker = directory / _MARKER
    if not require_made_by(directory, "`milesbatch weights stage`", _MARKER):
        make_directory(directory)
        publish_file(marker, _MADE_HERE)
    try:
        descriptor = os.open(marker, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise storage_error(marker, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 0:
            raise BlockingIOError  # whoever had it found nothing to keep, and took it back
        is_ours = os.read(descriptor, len(_MADE_HERE) + 1) == _MADE_HERE
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(
            f"{directory} is used by another process", mend="give each process a staging directory of its own"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise storage_error(marker, error) from error
    if not is_ours:
        os.close(descriptor)
        raise InputError(
            f"{marker} was not written by `milesbatch weights stage`", mend="give a new or empty directory"
        )
    return descriptor


def _scatter(elements: NDArray[np.unsignedinteger[Any]], redo: _Redo) -> None:
    """Write new values where they belong; only pages that hold one are touched."""
    elements[redo.places.astype(np.int64)] = redo.values


def _write_redo(path: Path, redo: _Redo) -> None:
    name = redo.name.encode()
    body = (name, redo.places.astype("<u8").tobytes(), redo.values.tobytes())
    hasher = xxhash.xxh3_128()
    for part in body:
        hasher.update(part)
    head = _REDO.pack(_MAGIC, len(name), redo.values.itemsize, redo.places.size, hasher.digest())
    try:
        if path.is_symlink():
            remove_file(path)
        with open(path, "wb") as file:
            file.writelines((head, *body))
    except OSError as error:
        raise storage_error(path, error) from error


def _read_redo(path: Path) -> _Redo | None:
    """What was being written; None when that record is not whole, hence nothing had been written of it."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _REDO.size:
        return None
    magic, name_length, width, count, digest = _REDO.unpack_from(data)
    body = data[_REDO.size :]
    if magic != _MAGIC or width not in (1, 2, 4, 8) or len(body) != name_length + count * (8 + width):
        return None
    if xxhash.xxh3_128_digest(body) != digest:
        return None
    places = np.frombuffer(body, "<u8", count, name_length)
    values = np.frombuffer(body, f"<u{width}", count, name_length + 8 * count)
    return _Redo(body[:name_length].decode(), places, values)
