"""The loops of :mod:`milesbatch.weights.kernels` in numpy, for installations without a C compiler. About ten times slower.

Owns nothing; gives the same arrays as the compiled loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milesbatch.weights.kernels import NUM_KEYS, Bytes, ClassChanges, Elements, Numbers, key_shift


class NumpyKernels:
    """Satisfies :class:`milesbatch.weights.kernels.Kernels`."""

    name = "numpy"

    def scanner(self, thresholds: Numbers, capacity: int) -> _NumpyScanner:
        return _NumpyScanner(thresholds, capacity)

    def applier(self, thresholds: Numbers, changes: Sequence[ClassChanges]) -> _NumpyApplier:
        return _NumpyApplier(thresholds, changes)

    def count(
        self, before: Elements, after: Elements, run: int, stride: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        places = (np.arange(0, before.size, stride)[:, None] + np.arange(run)).reshape(-1)
        places = places[places < before.size]
        keys = (_magnitudes(before[places]) >> key_shift(before.itemsize)).astype(np.int64)
        elements = np.bincount(keys, minlength=NUM_KEYS)
        changes = np.bincount(keys[before[places] != after[places]], minlength=NUM_KEYS)
        return elements.astype(np.uint64), changes.astype(np.uint64)

    def tokenise(self, numbers: Numbers) -> tuple[Bytes, Bytes]:
        is_large = numbers >= 16
        width = _bit_widths(numbers[is_large])
        tokens = numbers.astype(np.uint8)
        tokens[is_large] = 16 + (width - 4) * 4 + ((numbers[is_large] >> (width - 2)) & 3)
        return tokens, _pack(numbers[is_large], width - 2)

    def detokenise(self, tokens: Bytes, bits: Bytes) -> tuple[Numbers, int] | None:
        if tokens.size and int(tokens.max()) > 127:
            return None
        numbers = tokens.astype(np.uint32)
        is_large = tokens >= 16
        large = numbers[is_large] - 16
        width = large // 4 + 4
        low = _unpack(bits, width - 2)
        if low is None:
            return None
        numbers[is_large] = (np.uint32(1) << width) | ((large % 4) << (width - 2)) | low
        return numbers, (int((width - 2).sum()) + 7) // 8

    def split(self, values: Numbers) -> tuple[Bytes, Numbers, Numbers]:
        places = np.flatnonzero(values > 2)
        gaps = (np.diff(places, prepend=-1) - 1).astype(np.uint32)
        bits = np.packbits((values[values <= 2] == 2), bitorder="little")
        return bits, gaps, (values[places] - 3).astype(np.uint32)

    def merge(self, bits: Bytes, num: int, gaps: Numbers, rest: Numbers, largest: int) -> Numbers | None:
        places = np.cumsum(gaps, dtype=np.uint64) + np.arange(gaps.size, dtype=np.uint64)
        if rest.size > num or bits.size < (num - rest.size + 7) // 8:
            return None
        if rest.size and (int(places[-1]) >= num or int(rest.max()) > largest - 3):
            return None
        is_step = np.ones(num, bool)
        is_step[places.astype(np.int64)] = False
        values = np.empty(num, np.uint32)
        values[is_step] = 1 + np.unpackbits(bits, count=num - rest.size, bitorder="little")
        values[~is_step] = rest + 3
        return values


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


def _unpack(bits: Bytes, widths: Numbers) -> Numbers | None:
    total = int(widths.sum())
    if total > 8 * bits.size:
        return None
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
