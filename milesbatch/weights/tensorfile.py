"""Payload files: the safetensors format, written and read as raw bytes, streaming, without torch.

Owns the header's text and the checks on it, for the whole package; never decides what a tensor means. Invariant: no tensor's
bytes leave :func:`read_tensors` as trusted before the digest of the whole file was compared, over the very bytes that were
handed out.
The format: 8 bytes little-endian header length, JSON header, data (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from milesbatch.errors import CorruptArtefactError
from milesbatch.records import FileRef
from milesbatch.store.durable import storage_error
from milesbatch.weights.tensors import Bytes, RawTensor, element_bytes, num_bytes

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format itself."""
_METADATA: Mapping[str, str] = {"format": "pt"}
Row = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and bytes of a tensor."""


def write_tensors(stream: BinaryIO, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] = _METADATA) -> None:
    """Write a safetensors file; the same tensors give the same bytes, whatever their order in the mapping.

    Raises:
        ValueError: a name that the format reserves, or data that does not fit dtype and shape.
    """
    # Widest elements first: each tensor's data then begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-element_bytes(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        tensor = tensors[name]
        if name == "__metadata__" or tensor.data.size != num_bytes(tensor.dtype, tensor.shape):
            raise ValueError(
                f"tensor {name!r} cannot be stored: {tensor.data.size} bytes as {tensor.dtype} {tensor.shape}"
            )
        end = offset + tensor.data.size
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    stream.write(_LENGTH.pack(len(text)))
    stream.write(text)
    for name in order:
        stream.write(tensors[name].memory)


def read_tensors(path: Path, ref: FileRef) -> dict[str, RawTensor]:
    """All tensors of a payload file, each in memory of its own, after the digest of the whole file was compared.

    Raises:
        CorruptArtefactError: missing, truncated, changed, or not a safetensors file; nothing is returned.
    """
    return dict(stream_tensors(path, ref))


def stream_tensors(path: Path, ref: FileRef) -> Iterator[tuple[str, RawTensor]]:
    """Tensors of a payload file one at a time. Only when the iteration ends without an error were they the right ones.

    Raises:
        CorruptArtefactError: as :func:`read_tensors`; a changed byte may be found only at the end.
    """
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size  # of what was opened: what the name says may be old
            if size != ref.bytes:
                is_short = size < ref.bytes
                raise _corrupt(path, f"it has {size} bytes, expected {ref.bytes}", unseen=path if is_short else None)
            hasher = xxhash.xxh3_128()
            for name, dtype, shape, length in _read_header(path, stream, hasher, size):
                data = np.empty(length, np.uint8)
                if stream.readinto(data.data) != length:
                    raise _corrupt(path, f"it ends inside tensor {name}")
                hasher.update(data.data)
                yield name, RawTensor(dtype, shape, data)
    except FileNotFoundError:
        raise _corrupt(path, f"it is missing, expected {ref.bytes} bytes", unseen=path) from None
    except OSError as error:
        raise storage_error(path, error) from error
    found = "xxh128:" + hasher.hexdigest()
    if found != ref.digest:
        raise _corrupt(path, f"its digest is {found}, expected {ref.digest}")


def read_rows(path: Path) -> list[Row]:
    """What a payload file holds, in file order, by its header alone: nothing is compared with a digest.

    Raises:
        CorruptArtefactError: missing, or not a safetensors file.
        StorageError: it cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            return _read_header(path, stream, xxhash.xxh3_128(), os.fstat(stream.fileno()).st_size)
    except FileNotFoundError:
        raise _corrupt(path, "it is missing", unseen=path) from None
    except OSError as error:
        raise storage_error(path, error) from error


def view_tensors(path: Path, data: Bytes) -> dict[str, RawTensor]:
    """Tensors of a whole file that is mapped, as views: writing to one writes the file. ``path`` is for messages.

    Raises:
        CorruptArtefactError: it is not a safetensors file.
    """
    length = _header_bytes(path, data[: _LENGTH.size].tobytes(), data.size)
    at = _LENGTH.size + length
    tensors = {}
    for name, dtype, shape, num in _rows(path, data[_LENGTH.size : at].tobytes(), data.size):
        tensors[name] = RawTensor(dtype, shape, np.asarray(data[at : at + num]))
        at += num
    return tensors


def _read_header(path: Path, stream: BinaryIO, hasher: xxhash.xxh3_128, size: int) -> list[Row]:
    prefix = stream.read(_LENGTH.size)
    text = stream.read(_header_bytes(path, prefix, size))
    hasher.update(prefix)
    hasher.update(text)
    return _rows(path, text, size)


def _header_bytes(path: Path, prefix: bytes, size: int) -> int:
    """Length of the header's text in a file of ``size`` bytes."""
    length: int = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else size
    if length > min(_MAX_HEADER_BYTES, size - _LENGTH.size):
        raise _corrupt(path, f"its header cannot have {length} bytes")
    return length


def _rows(path: Path, text: bytes, size: int) -> list[Row]:
    """The tensors of a file of ``size`` bytes with this header."""
    try:
        rows, _ = parse_header(text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _corrupt(path, f"its header cannot be read ({error})") from error
    if _LENGTH.size + len(text) + sum(row[3] for row in rows) != size:
        raise _corrupt(path, "its header does not account for all of its bytes")
    return rows


def parse_header(text: bytes) -> tuple[list[Row], dict[str, Any]]:
    """The tensors of a header in file order, when they follow each other without holes, and its metadata.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it is no such header.
    """
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("it is not a JSON object")
    metadata = header.pop("__metadata__", {})
    rows: list[Row] = []
    position = 0
    for name, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = str(value["dtype"]), tuple(value["shape"])
        begin, end = value["data_offsets"]
        if not all(isinstance(number, int) for number in (*shape, begin, end)):
            raise ValueError(f"tensor {name}: a size that is not a whole number")
        if min(shape, default=0) < 0 or begin != position or end - begin != num_bytes(dtype, shape):
            raise ValueError(f"tensor {name}: {dtype} {shape} at {begin}..{end}")
        rows.append((name, dtype, shape, end - begin))
        position = end
    return rows, metadata


def _corrupt(path: Path, what: str, unseen: Path | None = None) -> CorruptArtefactError:
    mend = "run `milesbatch weights verify` on the run; this file must not be used"
    return CorruptArtefactError(f"{path} is damaged: {what}", mend=mend, unseen=unseen)
