"""Lossless encodings of one tensor against its older bits: pure functions over byte arrays, no I/O, no torch.

Owns the payload formats; never decides what is a keyframe. Invariant: ``decode`` of what ``encode`` gave, with the same
old bits, is bit for bit the new tensor; anything else given to ``decode`` is a :class:`CorruptArtefactError` or an array of the
right size (whose digest the caller compares), never a crash or an allocation beyond what the shape allows.

============== =======================================================================================================
``same``        nothing is stored
``sparse-zstd`` zstd of: changed positions as gaps, then their xor values, both as byte planes (little-endian)
``xor-zstd``    zstd of the byte planes of ``old xor new``
``raw-zstd``    zstd of the new bytes
``raw``         the new bytes
============== =======================================================================================================

Optimizer steps at low precision leave most elements as they were, and in the rest mostly low mantissa bits move: byte
planes put the bytes that stay zero side by side. The page behind this module is ``docs/format-weights.md``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from milesbatch.errors import CorruptArtefactError

Encoding = Literal["raw", "same", "xor-zstd", "sparse-zstd", "raw-zstd"]
Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]

_LEVEL = 3
_UNSIGNED: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
_SPARSE_HEADER = struct.Struct("<BQ")
"""Bytes of one gap (1, 2 or 4), number of changed elements."""
_MAX_SPARSE_ELEMENTS = 2**32 - 1
"""Gaps are at most four bytes wide, so that the sum of all gaps cannot overflow 64 bits."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor's difference. ``changed`` counts elements whose bits differ; without an old tensor, all of them."""

    encoding: Encoding
    payload: bytes
    changed: int


def encode(old: Buffer | None, new: Buffer, element_bytes: int) -> Encoded:
    """Encode ``new`` against ``old`` in the smallest of the encodings; ``old`` is None when there is none.

    Units: ``element_bytes`` is 1, 2, 4 or 8; both buffers are whole little-endian elements.

    Raises:
        ValueError: sizes of the two differ, or are no multiple of ``element_bytes``.
    """
    after = _elements(new, element_bytes)
    if old is None:
        return _smallest([], after, changed=after.size)
    before = _elements(old, element_bytes)
    if before.size != after.size:
        raise ValueError(f"old tensor has {before.size} elements, new one {after.size}")
    difference = before ^ after
    changed = int(np.count_nonzero(difference))
    if changed == 0:
        return Encoded("same", b"", 0)
    candidates: list[tuple[Encoding, bytes]] = [("xor-zstd", _compress(_to_planes(difference)))]
    # Beyond half, gaps cost a byte for each element that the xor planes hold in well under one.
    if 2 * changed <= after.size <= _MAX_SPARSE_ELEMENTS:
        candidates.append(("sparse-zstd", _encode_sparse(difference)))
    return _smallest(candidates, after, changed)


def decode(
    encoding: str, payload: Buffer, old: Buffer | None, *, num_bytes: int, element_bytes: int
) -> NDArray[np.uint8]:
    """Bytes of the new tensor as a fresh, writable flat array of ``num_bytes``; ``old`` is never written to.

    Raises:
        CorruptArtefactError: the payload is not one that ``encode`` gives for such a tensor.
    """
    data = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
    if encoding == "raw":
        _expect(len(data) == num_bytes, f"raw payload has {len(data)} bytes, the tensor {num_bytes}")
        return np.frombuffer(data, np.uint8).copy()
    if encoding == "raw-zstd":
        return np.frombuffer(_decompress(data, num_bytes, num_bytes), np.uint8).copy()
    _expect(old is not None, f"{encoding} needs the parent's tensor, which does not exist")
    assert old is not None
    before = np.frombuffer(old, np.uint8)
    _expect(before.size == num_bytes, f"the parent's tensor has {before.size} bytes, this one {num_bytes}")
    if encoding == "same":
        _expect(len(data) == 0, f"an unchanged tensor has a payload of {len(data)} bytes")
        return before.copy()
    if encoding == "xor-zstd":
        planes = np.frombuffer(_decompress(data, num_bytes, num_bytes), np.uint8)
        return _from_planes(planes, element_bytes) ^ before
    if encoding == "sparse-zstd":
        return _decode_sparse(data, before, element_bytes)
    raise CorruptArtefactError(f"unknown encoding {encoding!r}", mend="read this run with the milesbatch that wrote it")


def _smallest(candidates: list[tuple[Encoding, bytes]], new: NDArray[np.unsignedinteger], changed: int) -> Encoded:
    best = min((len(payload) for _, payload in candidates), default=new.nbytes)
    # Weights hardly compress by themselves: that is worth trying only where the difference did badly.
    if 2 * best >= new.nbytes:
        candidates = [*candidates, ("raw-zstd", _compress(new)), ("raw", new.tobytes())]
    encoding, payload = min(candidates, key=lambda candidate: len(candidate[1]))
    return Encoded(encoding, payload, changed)


# -- sparse ---------------------------------------------------------------------------------------------------------


def _encode_sparse(difference: NDArray[np.unsignedinteger]) -> bytes:
    positions = np.flatnonzero(difference)
    gaps = np.diff(positions, prepend=-1) - 1
    widest = int(gaps.max())
    gap_bytes = 1 if widest < 1 << 8 else 2 if widest < 1 << 16 else 4
    body = (
        _SPARSE_HEADER.pack(gap_bytes, positions.size),
        _to_planes(gaps.astype(_UNSIGNED[gap_bytes])).tobytes(),
        _to_planes(difference[positions]).tobytes(),
    )
    return _compress(b"".join(body))


def _decode_sparse(data: memoryview, before: NDArray[np.uint8], element_bytes: int) -> NDArray[np.uint8]:
    num_elements = before.size // element_bytes
    _expect(num_elements <= _MAX_SPARSE_ELEMENTS, f"{num_elements} elements are too many for a sparse delta")
    most = _SPARSE_HEADER.size + num_elements * (4 + element_bytes)
    body = _decompress(data, _SPARSE_HEADER.size, most)
    gap_bytes, count = _SPARSE_HEADER.unpack_from(body)
    _expect(gap_bytes in (1, 2, 4), f"gaps of {gap_bytes} bytes")
    expected = _SPARSE_HEADER.size + count * (gap_bytes + element_bytes)
    _expect(count <= num_elements and len(body) == expected, f"{count} changes of {num_elements} in {len(body)} bytes")
    planes = np.frombuffer(body, np.uint8, offset=_SPARSE_HEADER.size)
    gaps = _from_planes(planes[: count * gap_bytes], gap_bytes).view(_UNSIGNED[gap_bytes])
    values = _from_planes(planes[count * gap_bytes :], element_bytes).view(_UNSIGNED[element_bytes])
    positions = np.cumsum(gaps, dtype=np.uint64) + np.arange(count, dtype=np.uint64)
    _expect(count == 0 or int(positions[-1]) < num_elements, "a changed position lies beyond the end of the tensor")
    after = before.copy()
    after.view(_UNSIGNED[element_bytes])[positions.astype(np.int64)] ^= values
    return after


# -- planes and zstd ------------------------------------------------------------------------------------------------


def _elements(buffer: Buffer, element_bytes: int) -> NDArray[np.unsignedinteger]:
    if element_bytes not in _UNSIGNED:
        raise ValueError(f"elements of {element_bytes} bytes; allowed: {sorted(_UNSIGNED)}")
    flat = np.frombuffer(buffer, np.uint8)
    if flat.size % element_bytes:
        raise ValueError(f"{flat.size} bytes are not whole elements of {element_bytes} bytes")
    elements: NDArray[np.unsignedinteger] = flat.view(_UNSIGNED[element_bytes])
    return elements


def _to_planes(elements: NDArray[np.unsignedinteger]) -> NDArray[np.uint8]:
    """All first bytes, then all second bytes, and so on; shape [element_bytes, count]."""
    return np.ascontiguousarray(elements.view(np.uint8).reshape(-1, elements.itemsize).T)


def _from_planes(planes: NDArray[np.uint8], element_bytes: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(planes.reshape(element_bytes, -1).T).reshape(-1)


def _compress(data: bytes | NDArray[np.unsignedinteger]) -> bytes:
    view = data if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(view)


def _decompress(data: memoryview, least: int, most: int) -> bytes:
    """Decompress one zstd frame whose stated size is within bounds, checked before anything is allocated."""
    try:
        stated = zstandard.frame_content_size(data)
        _expect(least <= stated <= most, f"the compressed part states {stated} bytes, expected {least} to {most}")
        body = zstandard.ZstdDecompressor().decompress(data, max_output_size=stated, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _corrupt(f"zstd: {error}") from error
    _expect(len(body) == stated, f"the compressed part holds {len(body)} bytes, {stated} were stated")
    return body


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise _corrupt(what)


def _corrupt(what: str) -> CorruptArtefactError:
    return CorruptArtefactError(f"damaged weights payload: {what}", mend="run `milesbatch weights verify` on the run")
