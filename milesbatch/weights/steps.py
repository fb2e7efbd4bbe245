"""The ``steps-zstd`` encoding: which elements changed, said in terms of what the receiver already has.

Owns that payload's layout; never decides whether it is the best one (that is :mod:`milesbatch.weights.codec`). Invariant:
:class:`StepsChange` makes of the same old bits, with what :func:`encode_steps` gave, bit for bit the new tensor. With any other
payload it says so, or gives other elements of the same number, whose digest the caller compares; it allocates no more
than a small multiple of the elements.

An optimizer step at low precision changes an element when the update exceeds half a unit in its last place, so small
elements change often and large ones seldom: the probability about doubles from each binade to the one below. The receiver
knows the old magnitudes. So elements are sorted into a few classes by old magnitude, and a change is told as the number
of unchanged elements of its own class before it. Nine of ten changes are one unit in the last place: these are a bit; the
others are exceptions, told apart. Numbers become tokens, which zstd's entropy stage codes, and bits that it could not improve.
How often a class changes is taken out of its gaps before (as a shift), so that one table of that stage serves all classes.

The page behind this module is ``docs/format-weights.md``, which has the layout byte by byte.
"""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import zstandard

from milesbatch.weights.kernels import (
    BEYOND,
    MAX_THRESHOLDS,
    Applier,
    Bytes,
    ClassChanges,
    Counts,
    Elements,
    Kernels,
    Numbers,
    PackedSegment,
    RefusedError,
    key_shift,
)
from milesbatch.weights.payload import corrupt, expect, varint

LAYOUT = 3
"""First byte of every payload of this encoding."""

MAX_CLASSES = 5
"""More say little: against 4, 5 take 1.5 % fewer bytes of real updates, 8 take 2.3 % and a third of the speed."""

PIECE = 1 << 18
"""Elements between two updates of the digest: a piece stays in the processor's cache from one use to the other."""

SEGMENT = 1 << 23
"""Most elements that one set of lists covers; bounds how far a gap reaches."""

CAPACITY = 1 << 19
"""Most changes of a segment, which bounds a thread's memory; where there are more, segments are shorter."""

Reached = Callable[[int], None]
"""Told after each piece how many elements are done, while that piece is still in the processor's cache."""

SAMPLE_RUN, _SAMPLE_RUNS, _SAMPLE_SHARE, _MOST_RUNS = 1024, 16, 32, 256
"""The sample: runs of so many elements, at least so many of them, one element in so many, but at most so many runs."""
_BITS_FOR_A_CLASS = 150.0
"""What one more class costs: its counts, and tables for its exceptions. With less there are more classes, which take time."""
_TOKENS_FOR_A_TABLE = 256
"""Lists with fewer tokens than that share a block, and so a table, with those behind them; the last ones with those before."""


Scan = Callable[[int, int, Numbers, int], "list[ClassChanges] | None"]
"""Changes of each class, given the first element, the end, the thresholds and the capacity; None when there are more."""


def encode_steps(before: Elements, after: Elements, kernels: Kernels, reached: Reached) -> tuple[bytes, int] | None:
    """Payload, and number of changed elements; None when so many changed that another encoding is better.

    ``before``, ``after``: the same number of elements of 1, 2 or 4 bytes. ``reached`` may hear of a place twice.
    """

    def scan(begin: int, stop: int, thresholds: Numbers, capacity: int) -> list[ClassChanges] | None:
        scanner = kernels.scanner(thresholds, capacity)
        for piece in range(begin, stop, PIECE):
            end = min(piece + PIECE, stop)
            if not scanner.feed(before[piece:end], after[piece:end]):
                return None
            reached(end)
        return scanner.changes()

    thresholds = choose_thresholds(before, after, kernels)
    return encode_parts(before.size, before.itemsize, thresholds, scan, kernels)


def encode_parts(
    size: int, element_bytes: int, thresholds: Numbers, scan: Scan, kernels: Kernels
) -> tuple[bytes, int] | None:
    """As :func:`encode_steps`, of ``size`` elements, wherever they are: ``scan`` finds their changes."""
    payload = io.BytesIO()  # grows in place: joining parts would take the payload twice
    payload.write(bytes([LAYOUT, len(thresholds), *(thresholds >> np.uint32(key_shift(element_bytes))).tolist()]))
    begin, length, changed = 0, SEGMENT, 0
    while begin < size:
        stop = min(begin + length, size)
        changes = scan(begin, stop, thresholds, CAPACITY)
        if changes is None:
            length //= 2
            if length <= CAPACITY:
                return None
            continue
        payload.writelines([varint(stop - begin), *pack_segment(changes, kernels)])
        changed += sum(of_class.gaps.size for of_class in changes)
        begin = stop
    return payload.getvalue(), changed


class StepsChange:
    """A payload of this encoding on its way into a tensor; a :class:`milesbatch.weights.payload.Change`."""

    needs_old = True

    def __init__(self, payload: memoryview, size: int, element_bytes: int, kernels: Kernels) -> None:
        """Raises:
        CorruptArtefactError: its beginning does not fit such elements.
        """
        self._payload, self._left, self._kernels = np.frombuffer(payload, np.uint8), size, kernels
        self._largest = (1 << 8 * element_bytes) - 1
        self._thresholds = np.array(_take_thresholds(payload, element_bytes), np.uint32)
        self._at = 2 + len(self._thresholds)
        self._applier: Applier | None = None
        self._segment_left = 0

    def apply(self, elements: Elements, begin: int) -> None:
        """``begin`` is a multiple of :data:`PIECE`, and ``elements`` that many, or the rest of the tensor."""
        if self._segment_left == 0:
            self._open_segment()
        assert self._applier is not None
        self._applier.feed(elements)
        self._segment_left -= elements.size

    def finish(self) -> None:
        self._close_segment()
        expect(self._left == 0, f"{self._left} elements have no segment")
        left = self._payload.size - self._at
        expect(left == 0, f"{left} bytes follow its end")

    def _open_segment(self) -> None:
        self._close_segment()
        payload, kernels, num_classes = self._payload, self._kernels, len(self._thresholds) + 1
        try:
            counts = kernels.counts(payload, self._at, num_classes, min(SEGMENT, self._left), CAPACITY)
            size, behind = counts.elements, counts.at + counts.stored
            is_whole = size > 0 and (size % PIECE == 0 or size == self._left)
            expect(is_whole, f"a segment of {size} elements where {self._left} are left")
            tokens = _decompress(payload[counts.at : behind], counts.tokens)
            changes, self._at = kernels.unpack(counts, tokens, payload, behind, self._largest)
            self._applier = kernels.applier(self._thresholds, changes, size)
        except RefusedError as error:
            raise corrupt(str(error)) from error
        self._segment_left = size
        self._left -= size

    def _close_segment(self) -> None:
        if self._applier is None:
            return
        expect(self._applier.is_done(), BEYOND)
        self._applier.close()
        self._applier = None


def choose_thresholds(before: Elements, after: Elements, kernels: Kernels) -> Numbers:
    """Old magnitudes at which a new class begins, from a sample; at most ``MAX_CLASSES - 1`` of them, ascending."""
    counts = kernels.count(before, after, SAMPLE_RUN, sample_stride(before.size))
    return place_thresholds(counts, before.size, before.itemsize, kernels)


def sample_stride(size: int) -> int:
    """The sample of so many elements: the first :data:`SAMPLE_RUN` of every stretch of this length."""
    num_runs = max(_SAMPLE_RUNS, size // (_SAMPLE_SHARE * SAMPLE_RUN))
    return max(SAMPLE_RUN, size // min(num_runs, _MOST_RUNS))


def place_thresholds(counts: Counts, size: int, element_bytes: int, kernels: Kernels) -> Numbers:
    """Thresholds for a sample's counts by key and kind of change (:meth:`milesbatch.weights.kernels.Kernels.count`).

    They minimise the entropy of the positions and of the steps' kinds: most exceptions are in the smallest elements.
    """
    weight = size / max(1, int(counts.sum()))
    cuts = kernels.cut(counts, weight, _BITS_FOR_A_CLASS, MAX_CLASSES - 1)
    return cuts << np.uint32(key_shift(element_bytes))


# -- one segment ------------------------------------------------------------------------------------------------------


def pack_segment(changes: Sequence[ClassChanges], kernels: Kernels) -> list[bytes]:
    """What follows a segment's count of elements in the payload: counts, tokens through the entropy stage, bits."""
    packed = kernels.pack(changes)
    parts = [packed.counts.tobytes()]
    if packed.tokens.size:
        stored = _compress(packed)
        parts += [varint(len(stored)), stored]
    return [*parts, packed.bits.tobytes()]


def _compress(packed: PackedSegment) -> bytes:
    """One frame with a block for all gaps, and one for each other list: they are spread differently, and each block may have
    its own table. As they are, when that is no longer: a stored length of all tokens says so."""
    stream = _zstd().compressor.compressobj()
    begin, frame, tokens = 0, [], packed.tokens.data
    for end in packed.ends[:-1]:
        if min(end - begin, len(tokens) - end) >= _TOKENS_FOR_A_TABLE:
            frame += [stream.compress(tokens[begin:end]), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
            begin = end
    frame += [stream.compress(tokens[begin:]), stream.flush()]
    stored = b"".join(frame)
    return stored if len(stored) < packed.tokens.size else packed.tokens.tobytes()


def _decompress(stored: Bytes, num: int) -> Bytes:
    if stored.size == num:
        return stored
    # A header of one byte 0: no content size. The decompressor would believe a stated one, and allocate it.
    expect(stored.size > 0 and stored[0] == 0, "a frame with a header that no encoder writes")
    try:
        tokens = _zstd().decompressor.decompress(stored.data, max_output_size=num, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise corrupt(f"zstd: {error}") from error
    expect(len(tokens) == num, f"{len(tokens)} tokens where {num} are due")
    return np.frombuffer(tokens, np.uint8)


def _take_thresholds(payload: memoryview, element_bytes: int) -> tuple[int, ...]:
    expect(len(payload) >= 2, f"it ends after {len(payload)} bytes")
    layout, num = payload[0], payload[1]
    expect(layout == LAYOUT, f"layout {layout} of steps-zstd; this reader knows {LAYOUT}")
    expect(num <= MAX_THRESHOLDS, f"{num} thresholds; {MAX_THRESHOLDS} are the most")
    expect(len(payload) >= 2 + num, f"it ends after {len(payload)} bytes, within its {num} thresholds")
    keys, most = tuple(payload[2 : 2 + num]), min(255, (1 << 8 * element_bytes - 1) - 1)
    ascend = all(low < high for low, high in itertools.pairwise((0, *keys, most + 1)))
    expect(ascend, f"thresholds {list(keys)} for elements of {element_bytes} bytes")
    return tuple(key << key_shift(element_bytes) for key in keys)


class _Zstd(threading.local):
    """A thread's contexts, kept: making them costs more than compressing a small list.

    Frames have neither magic number nor content size: the layout says both. Tokens have no matches worth looking for, so
    the parameters ask for the cheapest search of the longest ones; what remains is the entropy stage.
    """

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1, min_match=7, hash_log=6, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)


_contexts = _Zstd()


def _zstd() -> _Zstd:
    return _contexts
