"""Lossless encodings of one tensor against its older bits: pure functions over byte arrays, no I/O, no torch.

Owns the choice of the encoding; never decides what is a keyframe. Invariant: :func:`apply` of what :func:`encode` gave, on the
same old bits, is bit for bit the new tensor; anything else given to it is a :class:`CorruptArtefactError` or an array of the
right size (whose digest the caller compares), never a crash or an allocation beyond what the shape allows.

============== =======================================================================================================
``same``        nothing is stored
``steps-zstd``  which elements changed, in terms of their old magnitude, and by how much (:mod:`milesbatch.weights.steps`)
``xor-zstd``    zstd of the byte planes of ``old xor new``
``raw-zstd``    zstd of the new bytes
``raw``         the new bytes
============== =======================================================================================================

Both directions go over a tensor once, piece by piece: what is compared or changed is hashed while it is in the processor's
cache. Any number of consecutive deltas is applied in the same one pass. The page behind this module is
``docs/format-weights.md``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from milesbatch.errors import CorruptArtefactError
from milesbatch.weights.kernel_choice import kernels
from milesbatch.weights.kernels import Bytes, Elements
from milesbatch.weights.payload import Change, Cursor, corrupt, decompress, expect, varint
from milesbatch.weights.steps import PIECE, StepsChange, encode_steps

Encoding = Literal["raw", "same", "steps-zstd", "xor-zstd", "raw-zstd"]
Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]

PART_BYTES = 1 << 24
"""``xor-zstd`` and ``raw-zstd`` hold one zstd frame for each so many bytes of the tensor."""

_LEVEL = 1
_UNSIGNED: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
STEP_BYTES = (1, 2, 4)
"""Widths of elements that ``steps-zstd`` is for."""

FEW = 1 / 16
"""Up to this share of changed elements no other encoding was ever smaller (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor's difference. ``changed`` counts elements whose bits differ; without an old tensor, all of them. ``digest`` is
    that of the new bytes."""

    encoding: Encoding
    payload: bytes
    changed: int
    digest: str


def encode(old: Buffer | None, new: Buffer, element_bytes: int) -> Encoded:
    """Encode ``new`` against ``old``, or for itself when ``old`` is None.

    Few changes are ``steps-zstd``; where there are many, the smallest of all encodings. Units: ``element_bytes`` is 1, 2, 4
    or 8; both buffers are whole little-endian elements. Memory beyond the payload: at most 64 MiB, whatever the tensor.

    Raises:
        ValueError: sizes of the two differ, or are no multiple of ``element_bytes``.
    """
    after = _elements(new, element_bytes)
    hashing = _Hashing(after)
    if old is None:
        return _smallest([], after, after.size, hashing)
    before = _elements(old, element_bytes)
    if before.size != after.size:
        raise ValueError(f"old tensor has {before.size} elements, new one {after.size}")
    if element_bytes in STEP_BYTES and (found := encode_steps(before, after, kernels(), hashing.reach)) is not None:
        payload, changed = found
        if changed == 0:
            return Encoded("same", b"", 0, hashing.digest())
        if changed <= FEW * after.size and len(payload) < after.nbytes:
            return Encoded("steps-zstd", payload, changed, hashing.digest())
        candidates: list[tuple[Encoding, bytes]] = [("steps-zstd", payload)]
    else:
        candidates, changed = [], _count_changes(before, after)
        if changed == 0:
            return Encoded("same", b"", 0, hashing.digest())
    candidates.append(("xor-zstd", _join(_compress(_to_planes(b ^ a)) for b, a in _parts(before, after))))
    return _smallest(candidates, after, changed, hashing)


def decode(
    encoding: str, payload: Buffer, old: Buffer | None, *, num_bytes: int, element_bytes: int
) -> NDArray[np.uint8]:
    """Bytes of the new tensor as a fresh, writable flat array of ``num_bytes``; ``old`` is never written to.

    Raises:
        CorruptArtefactError: the payload is not one that ``encode`` gives for such a tensor.
    """
    change = open_change(encoding, payload, num_bytes=num_bytes, element_bytes=element_bytes)
    before = None if old is None else np.frombuffer(old, np.uint8)
    if change.needs_old:
        expect(before is not None, f"{encoding} needs the parent's tensor, which does not exist")
        assert before is not None
        expect(before.size == num_bytes, f"the parent's tensor has {before.size} bytes, this one {num_bytes}")
    new = np.empty(num_bytes, np.uint8)
    apply([change], before, new, element_bytes, wants_digest=False)
    return new


def open_change(encoding: str, payload: Buffer, *, num_bytes: int, element_bytes: int) -> Change:
    """A payload to apply, once, to a tensor of ``num_bytes``. It must stay unchanged until then.

    Raises:
        CorruptArtefactError: it is not for such a tensor, as far as its beginning shows.
    """
    data = np.frombuffer(payload, np.uint8).data
    if encoding == "raw":
        return _Raw(data, num_bytes)
    if encoding == "raw-zstd":
        return _RawZstd(data, num_bytes)
    if encoding == "same":
        return _Same(data)
    if encoding == "xor-zstd":
        return _XorZstd(data, num_bytes, element_bytes)
    if encoding == "steps-zstd":
        expect(element_bytes in STEP_BYTES, f"steps-zstd for elements of {element_bytes} bytes")
        return StepsChange(data, num_bytes // element_bytes, element_bytes, kernels())
    raise corrupt(f"unknown encoding {encoding!r}")


def apply(
    changes: Sequence[Change], old: Bytes | None, new: Bytes, element_bytes: int, *, wants_digest: bool = True
) -> str | None:
    """Write to ``new`` what ``old`` becomes by ``changes``, oldest first, in one pass; ``old`` may be ``new`` itself.

    Returns the digest of the new bytes, if it is wanted. ``old`` is None only when the first change needs none.

    Raises:
        PayloadError: a payload is none for these elements; ``new`` is then undefined.
    """
    after = _elements(new, element_bytes)
    before = None if old is None or old is new else _elements(old, element_bytes)
    hashing = _Hashing(after)
    for begin in range(0, after.size, PIECE):
        piece = after[begin : begin + PIECE]
        if before is not None and changes[0].needs_old:
            np.copyto(piece, before[begin : begin + PIECE])
        for place, change in enumerate(changes):
            try:
                change.apply(piece, begin)
            except CorruptArtefactError as error:
                raise PayloadError(error, place) from error
        if wants_digest:
            hashing.reach(begin + piece.size)
    for place, change in enumerate(changes):
        try:
            change.finish()
        except CorruptArtefactError as error:
            raise PayloadError(error, place) from error
    return hashing.digest() if wants_digest else None


class PayloadError(CorruptArtefactError):
    """A payload does not fit the elements that it meets; ``place`` says which of the changes it was."""

    def __init__(self, error: CorruptArtefactError, place: int) -> None:
        super().__init__(error.what, mend=error.mend)
        self.place = place


# -- the simple encodings ---------------------------------------------------------------------------------------------


class _Same:
    needs_old = True

    def __init__(self, data: memoryview) -> None:
        expect(len(data) == 0, f"an unchanged tensor has a payload of {len(data)} bytes")

    def apply(self, elements: Elements, begin: int) -> None:
        pass

    def finish(self) -> None:
        pass


class _Raw:
    needs_old = False

    def __init__(self, data: memoryview, num_bytes: int) -> None:
        expect(len(data) == num_bytes, f"raw payload has {len(data)} bytes, the tensor {num_bytes}")
        self._data = np.frombuffer(data, np.uint8)

    def apply(self, elements: Elements, begin: int) -> None:
        at = begin * elements.itemsize
        elements.view(np.uint8)[:] = self._data[at : at + elements.nbytes]

    def finish(self) -> None:
        pass


class _Parts:
    """Frames that each hold :data:`PART_BYTES` of the tensor, the last one what is left."""

    def __init__(self, data: memoryview, num_bytes: int) -> None:
        self._cursor, self._left, self._part, self._begin = Cursor(data), num_bytes, np.empty(0, np.uint8), 0

    def piece(self, at: int, size: int) -> Bytes:
        """Bytes ``at`` and on of the tensor; asked for in order, never across two parts."""
        if at == self._begin + self._part.size:
            num = min(PART_BYTES, self._left)
            frame = self._cursor.take(self._cursor.number(self._cursor.left))
            self._part, self._begin = self.opened(np.frombuffer(decompress(frame, num), np.uint8)), at
            self._left -= num
        return self._part[at - self._begin : at - self._begin + size]

    def opened(self, part: Bytes) -> Bytes:
        return part

    def finish(self) -> None:
        expect(self._cursor.left == 0, f"{self._cursor.left} bytes follow its end")


class _RawZstd(_Parts):
    needs_old = False

    def apply(self, elements: Elements, begin: int) -> None:
        elements.view(np.uint8)[:] = self.piece(begin * elements.itemsize, elements.nbytes)


class _XorZstd(_Parts):
    needs_old = True

    def __init__(self, data: memoryview, num_bytes: int, element_bytes: int) -> None:
        super().__init__(data, num_bytes)
        self._element_bytes = element_bytes

    def opened(self, part: Bytes) -> Bytes:
        return _from_planes(part, self._element_bytes)

    def apply(self, elements: Elements, begin: int) -> None:
        elements.view(np.uint8)[:] ^= self.piece(begin * elements.itemsize, elements.nbytes)


def _smallest(
    candidates: list[tuple[Encoding, bytes]], new: NDArray[np.unsignedinteger], changed: int, hashing: _Hashing
) -> Encoded:
    best = min((len(payload) for _, payload in candidates), default=new.nbytes)
    # Weights hardly compress by themselves: that is worth trying only where the difference did badly.
    if 2 * best >= new.nbytes:
        candidates = [*candidates, ("raw-zstd", _join(_compress(part) for part, _ in _parts(new, new)))]
        candidates.append(("raw", new.tobytes()))
    encoding, payload = min(candidates, key=lambda candidate: len(candidate[1]))
    return Encoded(encoding, payload, changed, hashing.digest())


# -- bytes ------------------------------------------------------------------------------------------------------------


class _Hashing:
    """The digest of a tensor, fed as far as the work on it has come."""

    def __init__(self, elements: Elements) -> None:
        self._bytes, self._width = elements.view(np.uint8), elements.itemsize
        self._hash, self._done = xxhash.xxh3_128(), 0

    def reach(self, num_elements: int) -> None:
        """Hash up to here; what was hashed before is not hashed again."""
        if (stop := num_elements * self._width) > self._done:
            self._hash.update(self._bytes[self._done : stop].data)
            self._done = stop

    def digest(self) -> str:
        self.reach(self._bytes.size // self._width)
        return f"xxh128:{self._hash.hexdigest()}"


def _elements(buffer: Buffer, element_bytes: int) -> NDArray[np.unsignedinteger]:
    if element_bytes not in _UNSIGNED:
        raise ValueError(f"elements of {element_bytes} bytes; allowed: {sorted(_UNSIGNED)}")
    flat = np.frombuffer(buffer, np.uint8)
    if flat.size % element_bytes:
        raise ValueError(f"{flat.size} bytes are not whole elements of {element_bytes} bytes")
    elements: NDArray[np.unsignedinteger] = flat.view(_UNSIGNED[element_bytes])
    return elements


def _parts(before: Elements, after: Elements) -> Iterator[tuple[Elements, Elements]]:
    length = PART_BYTES // after.itemsize
    for begin in range(0, after.size, length):
        yield before[begin : begin + length], after[begin : begin + length]


def _count_changes(before: Elements, after: Elements) -> int:
    return sum(int(np.count_nonzero(b != a)) for b, a in _parts(before, after))


def _join(frames: Iterator[bytes]) -> bytes:
    payload = io.BytesIO()  # grows in place: joining parts would take the payload twice
    payload.writelines(part for frame in frames for part in (varint(len(frame)), frame))
    return payload.getvalue()


def _to_planes(elements: NDArray[np.unsignedinteger]) -> NDArray[np.uint8]:
    """All first bytes, then all second bytes, and so on; shape [element_bytes, count]."""
    return np.ascontiguousarray(elements.view(np.uint8).reshape(-1, elements.itemsize).T)


def _from_planes(planes: NDArray[np.uint8], element_bytes: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(planes.reshape(element_bytes, -1).T).reshape(-1)


def _compress(data: NDArray[np.unsignedinteger]) -> bytes:
    view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(view)
