"""The loops of :mod:`milesbatch.weights.kernels` in numpy, for installations without a C compiler. About ten times slower.

Owns nothing; gives the same arrays as the compiled loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milesbatch.weights.kernels import (
    NUM_KEYS,
    Bytes,
    ClassChanges,
    Counts,
    Elements,
    Numbers,
    PackedClass,
    PackedNumbers,
    TokenList,
    key_shift,
)


class NumpyKernels:
    """Satisfies :class:`milesbatch.weights.kernels.Kernels`."""

    name = "numpy"

    def scanner(self, thresholds: Numbers, capacity: int) -> _NumpyScanner:
        return _NumpyScanner(thresholds, capacity)

    def applier(self, thresholds: Numbers, changes: Sequence[ClassChanges]) -> _NumpyApplier:
        return _NumpyApplier(thresholds, changes)

    def count(self, before: Elements, after: Elements, run: int, stride: int) -> tuple[Counts, Counts]:
        places = (np.arange(0, before.size, stride)[:, None] + np.arange(run)).reshape(-1)
        places = places[places < before.size]
        keys = (_magnitudes(before[places]) >> key_shift(before.itemsize)).astype(np.int64)
        elements = np.bincount(keys, minlength=NUM_KEYS)
        changes = np.bincount(keys[before[places] != after[places]], minlength=NUM_KEYS)
        return elements.astype(np.uint64), changes.astype(np.uint64)

    def cut(self, elements: Counts, changes: Counts, weight: float, bits_for_a_class: float, most: int) -> Numbers:
        keys = np.flatnonzero(elements)
        if not changes.any():
            return np.empty(0, np.uint32)
        num, hit = (np.concatenate([[0.0], np.cumsum(counts[keys] * weight)]) for counts in (elements, changes))
        n, k = num[None, :] - num[:, None], hit[None, :] - hit[:, None]  # [i, j]: of the keys from i up to, without, j
        n[np.tril_indices(len(n))] = 0.0
        share = np.clip((k + 0.5) / (n + 1.0), 1e-300, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            cost = bits_for_a_class - (k * np.log2(share) + (n - k) * np.log2(1 - share))
        cost[np.tril_indices(len(cost))] = np.inf
        best, came_from = [cost[0]], [np.zeros(len(cost), np.int64)]
        for _ in range(most):
            through = best[-1][:, None] + cost
            came_from.append(np.argmin(through, axis=0))
            best.append(np.min(through, axis=0))
        cuts: list[int] = []
        end = len(cost) - 1
        for number in range(int(np.argmin([row[-1] for row in best])), 0, -1):
            end = int(came_from[number][end])
            cuts.insert(0, end)
        return keys[cuts].astype(np.uint32)

    def pack(self, changes: ClassChanges) -> PackedClass:
        num, values = changes.gaps.size, changes.values
        places = np.flatnonzero(values > 2)
        if 2 * places.size > num:
            whole = (_pack_numbers(changes.gaps), _pack_numbers(values - np.uint32(1)))
            return PackedClass(num, num + 1, np.empty(0, np.uint8), whole)
        directions = np.packbits((values[values <= 2] == 2), bitorder="little")
        gaps = (np.diff(places, prepend=-1) - 1).astype(np.uint32)
        lists = (_pack_numbers(changes.gaps), _pack_numbers(gaps), _pack_numbers(values[places] - np.uint32(3)))
        return PackedClass(num, places.size, directions, lists)

    def unpack(self, packed: PackedClass, largest: int) -> ClassChanges | None:
        num, exceptions = packed.size, packed.exceptions
        gaps = _unpack_numbers(packed.numbers[0], num)
        if exceptions == num + 1:
            values = _unpack_numbers(packed.numbers[1], num)
            if gaps is None or values is None or int(values.max()) >= largest:
                return None
            return ClassChanges(gaps, values + np.uint32(1))
        between = _unpack_numbers(packed.numbers[1], exceptions)
        rest = _unpack_numbers(packed.numbers[2], exceptions)
        if gaps is None or between is None or rest is None:
            return None
        values = _merge(packed.directions, num, between, rest, largest)
        return None if values is None else ClassChanges(gaps, values)


def _merge(bits: Bytes, num: int, gaps: Numbers, rest: Numbers, largest: int) -> Numbers | None:
    places = _places(gaps, num)
    if places is None or (rest.size and int(rest.max()) > largest - 3):
        return None
    values = np.empty(num, np.uint32)
    is_step = np.ones(num, bool)
    is_step[places] = False
    values[is_step] = 1 + np.unpackbits(bits, count=num - rest.size, bitorder="little")
    values[~is_step] = rest + 3
    return values


def _places(gaps: Numbers, num: int) -> NDArray[np.int64] | None:
    places = np.cumsum(gaps, dtype=np.uint64) + np.arange(gaps.size, dtype=np.uint64)
    return None if gaps.size and int(places[-1]) >= num else places.astype(np.int64)


def _pack_numbers(numbers: Numbers) -> PackedNumbers:
    places = np.flatnonzero(numbers)
    if 2 * places.size >= numbers.size:
        return PackedNumbers(tokenise(numbers))
    gaps = (np.diff(places, prepend=-1) - 1).astype(np.uint32)
    return PackedNumbers(tokenise(gaps), tokenise(numbers[places] - np.uint32(1)))


def _unpack_numbers(packed: PackedNumbers, num: int) -> Numbers | None:
    plain = _detokenise(packed.plain)
    if packed.others is None or plain is None:
        return plain
    others, places = _detokenise(packed.others), _places(plain, num)
    if others is None or places is None:
        return None
    numbers = np.zeros(num, np.uint32)
    numbers[places] = others + np.uint32(1)
    return numbers


def tokenise(numbers: Numbers) -> TokenList:
    """Below 16 the token is the number; above, four tokens for each power of two, and the lower bits apart."""
    is_large = numbers >= 16
    width = _bit_widths(numbers[is_large])
    tokens = numbers.astype(np.uint8)
    tokens[is_large] = 16 + (width - 4) * 4 + ((numbers[is_large] >> (width - 2)) & 3)
    return TokenList(tokens, _pack(numbers[is_large], width - 2))


def _detokenise(packed: TokenList) -> Numbers | None:
    tokens = packed.tokens
    if tokens.size and int(tokens.max()) > 127:
        return None
    numbers = tokens.astype(np.uint32)
    is_large = tokens >= 16
    large = numbers[is_large] - 16
    width = large // 4 + 4
    if (int((width - 2).sum()) + 7) // 8 != packed.bits.size:
        return None
    low = _unpack(packed.bits, width - 2)
    numbers[is_large] = (np.uint32(1) << width) | ((large % 4) << (width - 2)) | low
    return numbers


class _NumpyScanner:
    def __init__(self, thresholds: Numbers, capacity: int) -> None:
        self._thresholds, self._capacity, self._total = thresholds, capacity, 0
        self._runs = [0] * (len(thresholds) + 1)
        self._found: list[list[ClassChanges]] = [[] for _ in self._runs]

    def feed(self, before: Elements, after: Elements) -> bool:
        changed = before != after
        self._total += int(np.count_nonzero(changed))
        if self._total > self._capacity:
            return False
        classes = np.searchsorted(self._thresholds, _magnitudes(before), side="right")
        for number, run in enumerate(self._runs):
            members = np.flatnonzero(classes == number)
            ranks = np.flatnonzero(changed[members])
            gaps = np.diff(ranks, prepend=-1) - 1
            gaps[:1] += run
            places = members[ranks]
            self._found[number].append(ClassChanges(gaps.astype(np.uint32), _zigzag(before[places], after[places])))
            self._runs[number] = run + members.size if not ranks.size else members.size - int(ranks[-1]) - 1
        return True

    def changes(self) -> list[ClassChanges]:
        empty = [np.empty(0, np.uint32)]
        return [
            ClassChanges(
                np.concatenate(empty + [f.gaps for f in found]), np.concatenate(empty + [f.values for f in found])
            )
            for found in self._found
        ]


class _NumpyApplier:
    def __init__(self, thresholds: Numbers, changes: Sequence[ClassChanges]) -> None:
        self._thresholds, self._changes = thresholds, changes
        self._ranks = [np.cumsum(c.gaps, dtype=np.int64) + np.arange(c.gaps.size) for c in changes]
        self._passed, self._done = [0] * len(changes), [0] * len(changes)

    def feed(self, elements: Elements) -> None:
        classes = np.searchsorted(self._thresholds, _magnitudes(elements), side="right")
        for number, ranks in enumerate(self._ranks):
            members = np.flatnonzero(classes == number)
            first, passed = self._done[number], self._passed[number]
            last = int(np.searchsorted(ranks, passed + members.size))
            places = members[ranks[first:last] - passed]
            elements[places] += _unzigzag(self._changes[number].values[first:last], elements.dtype)
            self._done[number], self._passed[number] = last, passed + members.size

    def is_done(self) -> bool:
        return self._done == [ranks.size for ranks in self._ranks]


def _magnitudes(elements: Elements) -> Elements:
    return elements & elements.dtype.type((1 << 8 * elements.itemsize - 1) - 1)


def _zigzag(before: Elements, after: Elements) -> Numbers:
    bits = 8 * before.itemsize
    step = after - before
    sign = np.where(step >> (bits - 1), step.dtype.type((1 << bits) - 1), step.dtype.type(0))
    return ((step << 1) ^ sign).astype(np.uint32)


def _unzigzag(values: Numbers, dtype: np.dtype[Any]) -> Elements:
    narrow = values.astype(dtype)
    sign = np.where(narrow & 1, dtype.type((1 << 8 * dtype.itemsize) - 1), dtype.type(0))
    steps: Elements = ((narrow >> 1) ^ sign).astype(dtype)
    return steps


def _bit_widths(numbers: Numbers) -> Numbers:
    """Place of the highest set bit; exact, as every 32-bit number is one in double precision."""
    return (np.frexp(numbers.astype(np.float64))[1] - 1).astype(np.uint32)


def _pack(numbers: Numbers, widths: Numbers) -> Bytes:
    """The lowest ``widths`` bits of each number, one after the other, lowest first."""
    which, bit = _each_bit(widths)
    return np.packbits(((numbers[which] >> bit) & 1).astype(np.uint8), bitorder="little")


def _unpack(bits: Bytes, widths: Numbers) -> Numbers:
    total = int(widths.sum())
    which, bit = _each_bit(widths)
    values = np.unpackbits(bits, count=total, bitorder="little").astype(np.uint32) << bit
    return (
        np.bincount(which, values, minlength=widths.size).astype(np.uint32)
        if total
        else np.zeros(widths.size, np.uint32)
    )


def _each_bit(widths: Numbers) -> tuple[NDArray[np.int64], Numbers]:
    which = np.repeat(np.arange(widths.size), widths)
    starts = np.cumsum(widths, dtype=np.int64) - widths
    return which, (np.arange(which.size) - starts[which]).astype(np.uint32)
