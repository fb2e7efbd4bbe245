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

The page behind this module is ``docs/format-weights.md``, which has the layout byte by byte.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import zstandard
from numpy.typing import NDArray

from milesbatch.weights.kernels import MAX_THRESHOLDS, Applier, ClassChanges, Elements, Kernels, Numbers, key_shift
from milesbatch.weights.payload import Cursor, corrupt, expect, varint

LAYOUT = 1
"""First byte of every payload of this encoding."""

MAX_CLASSES = 4
"""More say little: 4 classes take 1.05 times the bytes of one for each exponent; 8 take 1.02 and halve the speed."""

PIECE = 1 << 18
"""Elements between two updates of the digest: a piece stays in the processor's cache from one use to the other."""

SEGMENT = 1 << 23
"""Most elements that one set of lists covers; bounds how far a gap reaches."""

CAPACITY = 1 << 20
"""Most changes of a segment, which bounds a thread's memory; where there are more, segments are shorter."""

Reached = Callable[[int], None]
"""Told after each piece how many elements are done, while that piece is still in the processor's cache."""

_SAMPLE_RUN, _SAMPLE_RUNS, _SAMPLE_SHARE, _MOST_RUNS = 1024, 32, 32, 256
"""The sample: runs of so many elements, at least so many of them, one element in so many, but at most so many runs."""
_BITS_FOR_A_CLASS = 300.0
"""What one more class costs: its counts, and the tables of the entropy stage."""


def encode_steps(before: Elements, after: Elements, kernels: Kernels, reached: Reached) -> tuple[bytes, int] | None:
    """Payload, and number of changed elements; None when so many changed that another encoding is better.

    ``before``, ``after``: the same number of elements of 1, 2 or 4 bytes. ``reached`` may hear of a place twice.
    """
    thresholds = choose_thresholds(before, after, kernels)
    parts = [bytes([LAYOUT, len(thresholds)]), thresholds.astype("<u4").tobytes()]
    begin, length, changed = 0, SEGMENT, 0
    while begin < before.size:
        stop = min(begin + length, before.size)
        changes = _scan(before, after, begin, stop, thresholds, kernels, reached)
        if changes is None:
            length //= 2
            if length <= CAPACITY:
                return None
            continue
        parts.append(varint(stop - begin))
        for of_class in changes:
            _put_class(parts, of_class, kernels)
            changed += of_class.gaps.size
        begin = stop
    return b"".join(parts), changed


class StepsChange:
    """A payload of this encoding on its way into a tensor; a :class:`milesbatch.weights.payload.Change`."""

    needs_old = True

    def __init__(self, payload: memoryview, size: int, element_bytes: int, kernels: Kernels) -> None:
        """Raises:
        CorruptArtefactError: its beginning does not fit such elements.
        """
        self._cursor, self._left, self._element_bytes, self._kernels = Cursor(payload), size, element_bytes, kernels
        self._thresholds = _take_thresholds(self._cursor, element_bytes)
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
        expect(self._cursor.left == 0, f"{self._cursor.left} bytes follow its end")

    def _open_segment(self) -> None:
        self._close_segment()
        size = self._cursor.number(min(SEGMENT, self._left))
        is_whole = size > 0 and (size % PIECE == 0 or size == self._left)
        expect(is_whole, f"a segment of {size} elements where {self._left} are left")
        changes = _take_classes(self._cursor, len(self._thresholds) + 1, size, self._element_bytes, self._kernels)
        self._applier = self._kernels.applier(self._thresholds, changes)
        self._segment_left = size
        self._left -= size

    def _close_segment(self) -> None:
        is_done = self._applier is None or self._applier.is_done()
        expect(is_done, "a changed position lies beyond the end of its class")


def choose_thresholds(before: Elements, after: Elements, kernels: Kernels) -> Numbers:
    """Old magnitudes at which a new class begins, from a sample; at most ``MAX_CLASSES - 1`` of them, ascending.

    They minimise the entropy of the positions: the sum over classes of N H(K / N) for K changes among N elements.
    """
    num_runs = max(_SAMPLE_RUNS, before.size // (_SAMPLE_SHARE * _SAMPLE_RUN))
    stride = max(_SAMPLE_RUN, before.size // min(num_runs, _MOST_RUNS))
    elements, changes = kernels.count(before, after, _SAMPLE_RUN, stride)
    keys = np.flatnonzero(elements)
    if not changes.any() or len(keys) < 2:
        return np.empty(0, np.uint32)
    weight = before.size / elements.sum()
    cuts = _best_cuts(elements[keys] * weight, changes[keys] * weight)
    return (keys[cuts] << key_shift(before.itemsize)).astype(np.uint32)


def _best_cuts(elements: NDArray[np.float64], changes: NDArray[np.float64]) -> list[int]:
    """First keys of the second and later classes, by dynamic programming over all ways to cut the keys into classes."""
    totals = np.concatenate([np.zeros((1, 2)), np.cumsum(np.stack([elements, changes], axis=1), axis=0)])
    num = totals[None, :, 0] - totals[:, None, 0]  # [i, j]: of the keys from i up to, without, j
    hit = totals[None, :, 1] - totals[:, None, 1]
    share = (hit + 0.5) / (np.maximum(num, 0) + 1.0)
    share = np.clip(share, 1e-12, 1 - 1e-12)
    cost = -(hit * np.log2(share) + (num - hit) * np.log2(1 - share)) + _BITS_FOR_A_CLASS
    cost[np.tril_indices(len(cost))] = np.inf
    best, came_from = [cost[0]], [np.zeros(len(cost), np.int64)]
    for _ in range(MAX_CLASSES - 1):
        through = best[-1][:, None] + cost
        came_from.append(np.argmin(through, axis=0))
        best.append(np.min(through, axis=0))
    cuts: list[int] = []
    end = len(cost) - 1
    for number in range(int(np.argmin([row[-1] for row in best])), 0, -1):
        end = int(came_from[number][end])
        cuts.insert(0, end)
    return cuts


def _scan(
    before: Elements, after: Elements, begin: int, stop: int, thresholds: Numbers, kernels: Kernels, reached: Reached
) -> list[ClassChanges] | None:
    scanner = kernels.scanner(thresholds, CAPACITY)
    for piece in range(begin, stop, PIECE):
        end = min(piece + PIECE, stop)
        if not scanner.feed(before[piece:end], after[piece:end]):
            return None
        reached(end)
    return scanner.changes()


# -- one class of one segment -----------------------------------------------------------------------------------------


def _put_class(parts: list[bytes], changes: ClassChanges, kernels: Kernels) -> None:
    parts.append(varint(changes.gaps.size))
    if not changes.gaps.size:
        return
    bits, gaps, rest = kernels.split(changes.values)
    parts.append(varint(rest.size))
    _put_numbers(parts, changes.gaps, kernels)
    parts.append(bits.tobytes())
    _put_numbers(parts, gaps, kernels)
    _put_numbers(parts, rest, kernels)


def _take_classes(
    cursor: Cursor, num_classes: int, size: int, element_bytes: int, kernels: Kernels
) -> list[ClassChanges]:
    classes: list[ClassChanges] = []
    left = min(size, CAPACITY)
    for _ in range(num_classes):
        num = cursor.number(left)
        left -= num
        classes.append(_take_class(cursor, num, element_bytes, kernels))
    return classes


def _take_class(cursor: Cursor, num: int, element_bytes: int, kernels: Kernels) -> ClassChanges:
    if not num:
        return ClassChanges(np.empty(0, np.uint32), np.empty(0, np.uint32))
    num_rest = cursor.number(num)
    gaps = _take_numbers(cursor, num, kernels)
    bits = np.frombuffer(cursor.take((num - num_rest + 7) // 8), np.uint8)
    rest_gaps, rest = _take_numbers(cursor, num_rest, kernels), _take_numbers(cursor, num_rest, kernels)
    values = kernels.merge(bits, num, rest_gaps, rest, (1 << 8 * element_bytes) - 1)
    if values is None:
        raise corrupt("an exception beyond the changes of its class, or too large for an element")
    return ClassChanges(gaps, values)


# -- numbers -------------------------------------------------------------------------------------------------------------


def _put_numbers(parts: list[bytes], numbers: Numbers, kernels: Kernels) -> None:
    """Tokens (compressed where that helps; a stored length of all tokens says that it did not) and then their bits."""
    if not numbers.size:
        return
    tokens, bits = kernels.tokenise(numbers)
    packed: bytes = _zstd().compressor.compress(tokens.data)
    if len(packed) >= tokens.size:
        packed = tokens.tobytes()
    parts += [varint(len(packed)), packed, bits.tobytes()]


def _take_numbers(cursor: Cursor, num: int, kernels: Kernels) -> Numbers:
    if not num:
        return np.empty(0, np.uint32)
    stored = cursor.take(cursor.number(num))
    if len(stored) < num:
        try:
            stored = memoryview(_zstd().decompressor.decompress(stored, max_output_size=num, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise corrupt(f"zstd: {error}") from error
    expect(len(stored) == num, f"{len(stored)} tokens where {num} are due")
    found = kernels.detokenise(np.frombuffer(stored, np.uint8), np.frombuffer(cursor.rest(), np.uint8))
    if found is None:
        raise corrupt("a token that no number has, or fewer bits than its tokens need")
    cursor.take(found[1])
    return found[0]


def _take_thresholds(cursor: Cursor, element_bytes: int) -> Numbers:
    layout, num = cursor.take(2)
    expect(layout == LAYOUT, f"layout {layout} of steps-zstd; this reader knows {LAYOUT}")
    expect(num <= MAX_THRESHOLDS, f"{num} thresholds; {MAX_THRESHOLDS} are the most")
    thresholds = np.frombuffer(cursor.take(4 * num), "<u4").astype(np.uint32)
    largest = (1 << 8 * element_bytes - 1) - 1
    ascend = num == 0 or (
        thresholds[0] >= 1 and thresholds[-1] <= largest and bool((np.diff(thresholds.astype(np.int64)) > 0).all())
    )
    expect(bool(ascend), f"thresholds {thresholds.tolist()} for elements of {element_bytes} bytes")
    return thresholds


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
