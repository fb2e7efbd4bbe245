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

from milesbatch.weights.kernels import (
    MAX_THRESHOLDS,
    Applier,
    ClassChanges,
    Elements,
    Kernels,
    Numbers,
    PackedClass,
    PackedNumbers,
    TokenList,
    key_shift,
)
from milesbatch.weights.payload import Cursor, corrupt, expect, varint

LAYOUT = 1
"""First byte of every payload of this encoding."""

MAX_CLASSES = 5
"""More say little: against 4, 5 take 1.5 % fewer bytes of real updates, 8 take 2.3 % and a third of the speed."""

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
    weight = before.size / max(1, int(elements.sum()))
    cuts = kernels.cut(elements, changes, weight, _BITS_FOR_A_CLASS, MAX_CLASSES - 1)
    return cuts << np.uint32(key_shift(before.itemsize))


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
    packed = kernels.pack(changes)
    parts += [varint(packed.exceptions), packed.directions.tobytes()]
    for numbers in packed.numbers:
        if numbers.others is not None:
            parts += [varint(0), varint(numbers.plain.tokens.size)]
        _put_list(parts, numbers.plain)
        if numbers.others is not None:
            _put_list(parts, numbers.others)


def _put_list(parts: list[bytes], numbers: TokenList) -> None:
    """Tokens (compressed where that helps; a stored length of all tokens says that it did not) and then their bits."""
    if not numbers.tokens.size:
        return
    packed: bytes = _zstd().compressor.compress(numbers.tokens.data)
    if len(packed) >= numbers.tokens.size:
        packed = numbers.tokens.tobytes()
    parts += [varint(len(packed)), packed, varint(numbers.bits.size), numbers.bits.tobytes()]


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
    exceptions = cursor.number(num + 1)
    directions = np.frombuffer(cursor.take((max(0, num - exceptions) + 7) // 8), np.uint8)
    sizes = (num, num) if exceptions > num else (num, exceptions, exceptions)
    packed = PackedClass(num, exceptions, directions, tuple(_take_numbers(cursor, size) for size in sizes))
    changes = kernels.unpack(packed, (1 << 8 * element_bytes) - 1)
    if changes is None:
        raise corrupt("lists that no changes give")
    return changes


# -- numbers -------------------------------------------------------------------------------------------------------------


def _take_numbers(cursor: Cursor, num: int) -> PackedNumbers:
    if not num:
        return PackedNumbers(_NOTHING)
    if stored := cursor.number(num):
        return PackedNumbers(_take_list(cursor, num, stored))
    others = cursor.number(num)
    if not others:
        return PackedNumbers(_NOTHING, _NOTHING)
    plain = _take_list(cursor, others, cursor.number(others))
    return PackedNumbers(plain, _take_list(cursor, others, cursor.number(others)))


def _take_list(cursor: Cursor, num: int, length: int) -> TokenList:
    stored = cursor.take(length)
    if length < num:
        # A header of one byte 0: no content size. The decompressor would believe a stated one, and allocate it.
        expect(length > 0 and stored[0] == 0, "a frame with a header that no encoder writes")
        try:
            stored = memoryview(_zstd().decompressor.decompress(stored, max_output_size=num, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise corrupt(f"zstd: {error}") from error
    expect(len(stored) == num, f"{len(stored)} tokens where {num} are due")
    bits = cursor.take(cursor.number(4 * num))
    return TokenList(np.frombuffer(stored, np.uint8), np.frombuffer(bits, np.uint8))


_NOTHING = TokenList(np.empty(0, np.uint8), np.empty(0, np.uint8))


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
