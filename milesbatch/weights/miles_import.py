"""Reading weights that were published in Miles' layout, by its own trainer or by ``milesbatch weights export``.

Owns the chain from a full checkpoint to a version; never writes. Invariant: what :func:`rebuild_published` returns has, for
each tensor that any delta of the chain changed, the checksum that the last such delta states, computed from the returned
bytes; a file that does not account for all of its bytes is refused before a tensor is touched. The page behind it is
``docs/format-miles.md``.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard

from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.store.durable import digest_file, storage_error
from milesbatch.weights.digest import weights_digest
from milesbatch.weights.miles_layout import (
    INDEX,
    XOR,
    VersionIndex,
    new_checksum,
    published_versions,
    read_index,
)
from milesbatch.weights.tensorfile import Row, parse_header
from milesbatch.weights.tensors import Bytes, RawTensor

_BLOCK_BYTES = 4 << 20
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_MEND = "copy or publish this version again; nothing was written"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A version as it was published."""

    version: int
    source: Path
    """The full checkpoint that it was built on; holds configuration and tokenizer."""
    tensors: Mapping[str, RawTensor]
    deltas: int
    unproven: tuple[str, ...]
    """Tensors that no checksum covers: those of a full checkpoint that has none, as far as no delta changed them."""


def rebuild_published(directory: Path, version: int, base: Path | None = None) -> Rebuilt:
    """The tensors of ``version``: the newest full checkpoint at or before it, and all deltas from there.

    ``base`` is version 0 where ``directory`` does not hold it: the model that engines were started with. Holds one copy of the
    model and one file of a delta in memory.

    Raises:
        InputError: there is no such version, or no way to it; says what there is. Or the layout's variant is not known.
        CorruptArtefactError: a file is damaged or missing: names it, and the tensor.
        StorageError: a file cannot be read.
    """
    deltas, full = _chain(directory, version, base)
    source = _place(full)
    tensors = _read_full(full)
    proven = set(tensors) if isinstance(full, VersionIndex) and full.weights_digest else set()
    for index in reversed(deltas):
        proven |= _apply(index, tensors)
    if deltas and deltas[0].weights_digest is not None:
        _compare(deltas[0].directory / INDEX, deltas[0].weights_digest, tensors)
        proven = set(tensors)
    unproven = sorted(name for name, tensor in tensors.items() if tensor.data.size and name not in proven)
    return Rebuilt(version, source, tensors, len(deltas), tuple(unproven))


def source_of(directory: Path, version: int, base: Path | None = None) -> Path:
    """The full checkpoint that ``version`` is built on, from indexes alone; see :func:`rebuild_published`."""
    return _place(_chain(directory, version, base)[1])


def _place(full: VersionIndex | Path) -> Path:
    return full if isinstance(full, Path) else full.directory


def _chain(directory: Path, version: int, base: Path | None) -> tuple[list[VersionIndex], VersionIndex | Path]:
    """Deltas from the newest to the oldest, and what they build on."""
    deltas: list[VersionIndex] = []
    wanted = version
    while True:
        index = read_index(directory, wanted)
        if index is None and wanted == 0 and base is not None:
            return deltas, base
        if index is None:
            raise _no_way(directory, version, wanted)
        if index.base is None:
            return deltas, index
        deltas.append(index)
        wanted = index.base


def _no_way(directory: Path, version: int, missing: int) -> InputError:
    there = published_versions(directory)
    if missing == version:
        choice = f"choose one of {there[0]} to {there[-1]}" if there else "give the directory that holds weight_v000001"
        return InputError(f"{directory} holds no version {version}", mend=choice)
    what = f"version {version} in {directory} builds on version {missing}, which is not there"
    mend = "give the model that the engines were started with as --base" if missing == 0 else _MEND
    return InputError(what, mend=mend)


# -- full checkpoints -----------------------------------------------------------------------------------------------------


def _read_full(full: VersionIndex | Path) -> dict[str, RawTensor]:
    """All tensors of a full checkpoint, in memory of their own."""
    directory = _place(full)
    files = {} if isinstance(full, Path) else full.files
    try:
        paths = [directory / name for name in files] or sorted(directory.glob("*.safetensors"))
    except OSError as error:
        raise storage_error(directory, error) from error
    if not paths:
        raise InputError(f"{directory} holds no *.safetensors", mend="give a model directory in Hugging Face's layout")
    tensors: dict[str, RawTensor] = {}
    for path in paths:
        for name, tensor in _read_file(path):
            if name in tensors:
                raise _damaged(path, f"tensor {name} is in another file too")
            tensors[name] = tensor
    expected = frozenset[str]().union(*files.values())
    if files and expected != set(tensors):
        odd = sorted(expected ^ set(tensors))
        raise _damaged(directory / INDEX, f"it and its files name different tensors: {', '.join(odd[:5])}")
    if isinstance(full, VersionIndex) and full.weights_digest is not None:
        _compare(paths[0], full.weights_digest, tensors)
        _check_others(full)
    return tensors


def _read_file(path: Path) -> Iterator[tuple[str, RawTensor]]:
    with _opened(path) as stream:
        rows, _ = _header(path, stream)
        for name, dtype, shape, length in rows:
            data = np.empty(length, np.uint8)
            if stream.readinto(data.data) != length:  # type: ignore[attr-defined]
                raise _damaged(path, f"it ends inside tensor {name}")
            yield name, RawTensor(dtype, shape, data)


def _check_others(full: VersionIndex) -> None:
    for name, digest in (full.digests or {}).items():
        path = full.directory / name
        try:
            found = digest_file(path)
        except FileNotFoundError:
            raise _damaged(path, "it is missing") from None
        except OSError as error:
            raise storage_error(path, error) from error
        if found != digest:
            raise _damaged(path, f"its digest is {found}, expected {digest}")


def _compare(path: Path, expected: str, tensors: Mapping[str, RawTensor]) -> None:
    found = weights_digest((name, tensor.dtype, tensor.shape, tensor.digest) for name, tensor in tensors.items())
    if found != expected:
        raise _damaged(path, f"the tensors have weights digest {found}, expected {expected}")


# -- deltas ---------------------------------------------------------------------------------------------------------------


def _apply(index: VersionIndex, tensors: Mapping[str, RawTensor]) -> set[str]:
    """Apply one version to ``tensors``, in place; returns the tensors whose checksums were compared."""
    for file, names in index.files.items():
        path = index.directory / file
        with _opened(path) as stream:
            rows, checksums = _header(path, stream)
            if {row[0] for row in rows} != names:
                odd = sorted({row[0] for row in rows} ^ names)
                raise _damaged(path, f"it and the index name different tensors: {', '.join(odd[:5])}")
            for row in rows:
                _apply_tensor(index, path, row, stream.read(row[3]), tensors, checksums.get(row[0]))
    return set().union(*index.files.values())


def _apply_tensor(
    index: VersionIndex, path: Path, row: Row, blob: bytes, tensors: Mapping[str, RawTensor], expected: object
) -> None:
    name, dtype, shape, length = row
    tensor = tensors.get(name)
    if tensor is None:
        raise _damaged(path, f"tensor {name} is not in the checkpoint that this version builds on")
    if dtype != "U8" or len(shape) != 1 or len(blob) != length:
        raise _damaged(path, f"tensor {name} is no compressed difference ({dtype} {shape})")
    if not isinstance(expected, str):
        raise _damaged(path, f"it states no checksum of tensor {name}")
    checksum = new_checksum(index.checksum, path)
    try:
        if index.encoding == XOR:
            for part in _xor(blob, tensor.data):
                checksum.update(part.data)
        else:
            _overwrite(blob, tensor.data)
            checksum.update(tensor.data.data)
    except (zstandard.ZstdError, ValueError) as error:
        raise _damaged(path, f"the difference of tensor {name} cannot be applied: {error}") from error
    if checksum.hexdigest() != expected:
        what = f"tensor {name} has {index.checksum} {checksum.hexdigest()} after it, expected {expected}"
        raise _damaged(path, f"{what}: this file or a version before it is damaged")


def _xor(blob: bytes, data: Bytes) -> Iterator[Bytes]:
    """XOR a zstd frame into ``data``; gives each part when it is done. As many bytes as the tensor, no more and no fewer."""
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(blob))
    at = 0
    while block := reader.read(min(_BLOCK_BYTES, data.size - at + 1)):
        if at + len(block) > data.size:
            raise ValueError(f"it is longer than the tensor's {data.size} bytes")
        part = data[at : at + len(block)]
        np.bitwise_xor(part, np.frombuffer(block, np.uint8), out=part)
        yield part
        at += len(block)
    if at != data.size:
        raise ValueError(f"it has {at} bytes, the tensor {data.size}")


def _overwrite(blob: bytes, data: Bytes) -> None:
    """Put new bytes where a count, that many positions and that many bytes say; all numbers are four bytes, little-endian."""
    most = 4 + 5 * data.size
    body = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(blob)).read(most + 1)
    count = int.from_bytes(body[:4], "little")
    if len(body) != 4 + 5 * count or count > data.size:
        raise ValueError(f"{len(body)} bytes for {count} changes of a tensor of {data.size} bytes")
    positions = np.frombuffer(body, "<u4", count, 4)
    if count and int(positions.max()) >= data.size:
        raise ValueError(f"position {int(positions.max())} in a tensor of {data.size} bytes")
    data[positions] = np.frombuffer(body, np.uint8, count, 4 + 4 * count)


# -- files ----------------------------------------------------------------------------------------------------------------


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    except OSError as error:
        raise storage_error(path, error) from error


def _header(path: Path, stream: BinaryIO) -> tuple[list[Row], dict[str, Any]]:
    """Tensors and metadata of a safetensors file that accounts for all of its bytes; the stream is then at the first tensor."""
    size = os.fstat(stream.fileno()).st_size
    prefix = stream.read(_LENGTH.size)
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else size
    if length > min(_MAX_HEADER_BYTES, size - _LENGTH.size):
        raise _damaged(path, f"its {size} bytes are too few for its header")
    try:
        rows, metadata = parse_header(stream.read(length))
        metadata = dict(metadata)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read ({error})") from error
    if _LENGTH.size + length + sum(row[3] for row in rows) != size:
        raise _damaged(path, f"its header does not account for its {size} bytes")
    return rows, metadata


def _damaged(path: Path, what: str) -> CorruptArtefactError:
    return CorruptArtefactError(f"{path} is damaged: {what}", mend=_MEND)
