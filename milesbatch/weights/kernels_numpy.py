"""The loops of :mod:`milesbatch.weights.kernels` in numpy, for installations without a C compiler. About ten times slower.

Owns nothing; gives the same arrays as the compiled loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milesbatch.weights.kernels import (
    BEYOND,
    MAX_SHIFT,
    NUM_KEYS,
    NUM_KINDS,
    SPARSE_FROM,
    Bytes,
    ClassChanges,
    Counts,
    Elements,
    Numbers,
    PackedSegment,
    RefusedError,
    SegmentChanges,
    SegmentCounts,
    joined,
    key_shift,
)
from milesbatch.weights.payload import varint


class NumpyKernels:
    """Satisfies :class:`milesbatch.weights.kernels.Kernels`."""

    name = "numpy"

    def scanner(self, thresholds: Numbers, capacity: int) -> _NumpyScanner:
        return _NumpyScanner(thresholds, capacity)

    def applier(self, thresholds: Numbers, changes: SegmentChanges, elements: int) -> _NumpyApplier:
        return _NumpyApplier(thresholds, changes, elements)

    def count(self, before: Elements, after: Elements, run: int, stride: int) -> Counts:
        places = (np.arange(0, before.size, stride)[:, None] + np.arange(run)).reshape(-1)
        places = places[places < before.size]
        old, new = before[places], after[places]
        keys = (_magnitudes(old) >> key_shift(before.itemsize)).astype(np.int64)
        zigzag = _zigzag(old, new)
        kinds = np.searchsorted(_KINDS, (zigzag >> 1) + (zigzag & 1), side="right")
        counts = np.bincount(keys * NUM_KINDS + kinds, minlength=NUM_KEYS * NUM_KINDS)
        return counts.astype(np.uint64).reshape(NUM_KEYS, NUM_KINDS)

    def cut(self, counts: Counts, weight: float, bits_for_a_class: float, most: int) -> Numbers:
        keys, counts = _joined_keys(counts)
        if not counts[:, 1:].any():
            return np.empty(0, np.uint32)
        totals = np.concatenate([np.zeros((1, NUM_KINDS)), np.cumsum(counts * weight, axis=0)])
        kinds = np.maximum(totals[None, :] - totals[:, None], 0.0)  # [i, j]: of the keys from i up to, without, j
        n, k = kinds.sum(axis=-1), kinds[..., 1:].sum(axis=-1)
        share = np.clip((k + 0.5) / (n + 1.0), 1e-300, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            cost = bits_for_a_class + _n_log_n(k) - _n_log_n(kinds[..., 1:]).sum(axis=-1)
            cost -= k * np.log2(share) + (n - k) * np.log2(1 - share)
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

    def pack(self, changes: Sequence[ClassChanges]) -> PackedSegment:
        to = _Packing()
        for of_class in changes:
            to.counts.append(varint(of_class.gaps.size))
            to.numbers(of_class.gaps, 0)
        to.end()
        for of_class in changes:
            _pack_values(to, of_class.values)
        tokens = np.concatenate([np.empty(0, np.uint8), *to.tokens])
        bits = np.concatenate([np.empty(0, np.uint8), *to.bits])
        return PackedSegment(np.frombuffer(b"".join(to.counts), np.uint8), tokens, tuple(to.ends), bits)

    def counts(self, payload: Bytes, at: int, num_classes: int, most_elements: int, most_changes: int) -> SegmentCounts:
        reader = _Counts(payload, at)
        elements = reader.take(most_elements)
        left = min(elements, most_changes)
        classes, tokens = np.zeros((num_classes, 5), np.uint64), 0
        for of_class in classes:
            of_class[0] = num = reader.take(left)
            left -= num
            of_class[2], more = reader.take_list(num, 0)
            tokens += more
        for of_class in classes:
            if not (num := int(of_class[0])):
                continue
            of_class[1] = exceptions = reader.take(num + 1)
            for number, size in enumerate(_list_sizes(num, exceptions)[1:], start=1):
                of_class[2 + number], more = reader.take_list(size, number)
                tokens += more
        stored = reader.take(tokens) if tokens else 0
        if stored > payload.size - reader.at:
            raise RefusedError("it ends too early")
        changes = classes[:, 0]
        return SegmentCounts(elements, int(changes.sum()), int(changes.max()), tokens, stored, reader.at, classes)

    def unpack(
        self, counts: SegmentCounts, tokens: Bytes, payload: Bytes, at: int, largest: int
    ) -> tuple[SegmentChanges, int]:
        source = _Unpacking(tokens, payload[at:])
        classes = counts.classes.tolist()
        gaps = [source.numbers(num, 0, count) for num, _, count, *_ in classes]
        values = [_unpack_values(source, of_class, largest) for of_class in classes]
        changes = [ClassChanges(*lists) for lists in zip(gaps, values, strict=True)]
        return joined(changes), payload.size - source.bits.size


# -- one class --------------------------------------------------------------------------------------------------------


class _Packing:
    def __init__(self) -> None:
        self.counts: list[bytes] = []
        self.tokens: list[Bytes] = []
        self.bits: list[Bytes] = []
        self.ends: list[int] = []

    def numbers(self, numbers: Numbers, number: int) -> None:
        """The list of this number of a class."""
        if not numbers.size:
            return
        places = np.flatnonzero(numbers)
        if 2 * places.size >= numbers.size:
            shift = _shift_of(numbers) if number == 0 else 0
            self.counts.append(varint(shift))
            self._plain(numbers, shift)
            return
        self.counts.append(varint(SPARSE_FROM[number] + places.size))
        self._plain((np.diff(places, prepend=-1) - 1).astype(np.uint32), 0)
        self._plain(numbers[places] - np.uint32(1), 0)

    def end(self) -> None:
        """Of a stretch, if there were any tokens since the last one."""
        end = sum(tokens.size for tokens in self.tokens)
        if end > (self.ends[-1] if self.ends else 0):
            self.ends.append(end)

    def _plain(self, numbers: Numbers, shift: int) -> None:
        tokens, bits = tokenise(numbers, shift)
        self.tokens.append(tokens)
        self.bits.append(bits)


def _shift_of(gaps: Numbers) -> int:
    """For a mean of 2.8 to 5.6 without so many bits: all lists then have tokens of nearly one distribution."""
    total, shift = int(gaps.sum(dtype=np.uint64)), 0
    while shift < MAX_SHIFT and 8 * total > (45 * gaps.size) << shift:
        shift += 1
    return shift


def _pack_values(to: _Packing, values: Numbers) -> None:
    if not values.size:
        return
    places = np.flatnonzero(values > 2)
    if 2 * places.size > values.size:
        to.counts.append(varint(values.size + 1))
        to.numbers(values - np.uint32(1), 1)
        to.end()
        return
    to.counts.append(varint(places.size))
    to.bits.append(np.packbits((values[values <= 2] == 2), bitorder="little"))
    to.numbers((np.diff(places, prepend=-1) - 1).astype(np.uint32), 1)
    to.end()
    to.numbers(values[places] - np.uint32(3), 2)
    to.end()


class _Counts:
    def __init__(self, payload: Bytes, at: int) -> None:
        self._payload, self.at = payload, at

    def take(self, most: int) -> int:
        number = 0
        for shift in range(0, 63, 7):
            if self.at >= self._payload.size:
                raise RefusedError("it ends too early")
            byte = int(self._payload[self.at])
            self.at += 1
            number |= (byte & 0x7F) << shift
            if number > most:
                break
            if not byte & 0x80:
                return number
        raise RefusedError("a count that is larger than it can be")

    def take_list(self, size: int, number: int) -> tuple[int, int]:
        """The count of a list, and how many tokens it has."""
        first = SPARSE_FROM[number]
        count = self.take(size + first) if size else 0
        return count, size if count < first else 2 * (count - first)


def _list_sizes(num: int, exceptions: int) -> tuple[int, int, int]:
    return (num, num, 0) if exceptions > num else (num, exceptions, exceptions)


def _joined_keys(counts: Counts) -> tuple[NDArray[np.int64], Counts]:
    """Keys that occur, and their counts; neighbours without any change are one."""
    keys = np.flatnonzero(counts.any(axis=1))
    is_changed = counts[keys, 1:].sum(axis=1) > 0
    was_changed = np.concatenate([np.ones(1, bool), is_changed[:-1]])[: keys.size]
    first = np.flatnonzero(is_changed | was_changed)
    return keys[first], np.add.reduceat(counts[keys], first) if keys.size else counts[keys]


def _n_log_n(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    return counts * np.log2(np.maximum(counts, 1e-300))


_NO_LIST = "lists that no changes give"
_KINDS = 1 << np.arange(NUM_KINDS - 1, dtype=np.uint32)
"""Sizes of steps from which on another bit is needed."""


class _Unpacking:
    def __init__(self, tokens: Bytes, bits: Bytes) -> None:
        self._tokens, self.bits = tokens, bits

    def take_bits(self, num_bytes: int) -> Bytes:
        if num_bytes > self.bits.size:
            raise RefusedError("it ends too early")
        taken, self.bits = self.bits[:num_bytes], self.bits[num_bytes:]
        return taken

    def numbers(self, num: int, number: int, count: int) -> Numbers:
        """The list of this number of a class, with this count."""
        num_others = count - SPARSE_FROM[number]
        if num_others < 0:
            return self._plain(num, count)
        gaps, others = self._plain(num_others, 0), self._plain(num_others, 0)
        places = _places(gaps, num)
        numbers = np.zeros(num, np.uint32)
        numbers[places] = others + np.uint32(1)
        return numbers

    def _plain(self, num: int, shift: int) -> Numbers:
        tokens, self._tokens = self._tokens[:num], self._tokens[num:]
        if tokens.size and int(tokens.max()) > 127:
            raise RefusedError(_NO_LIST)
        leading, width = tokens.astype(np.uint64), np.full(num, shift, np.uint32)
        is_large = tokens >= 16
        width[is_large] += tokens[is_large] // 4 - np.uint32(2)
        leading[is_large] = 4 + leading[is_large] % 4
        num_bytes = (int(width.sum()) + 7) // 8
        if num_bytes > self.bits.size:
            raise RefusedError(_NO_LIST)
        numbers = (leading << width.astype(np.uint64)) | _unpack(self.take_bits(num_bytes), width)
        if num and int(numbers.max()) >> 32:
            raise RefusedError(_NO_LIST)
        return numbers.astype(np.uint32)


def _unpack_values(source: _Unpacking, counts: list[int], largest: int) -> Numbers:
    num, exceptions, _, *lists = counts
    if exceptions > num:
        values = source.numbers(num, 1, lists[0])
        if num and int(values.max()) >= largest:
            raise RefusedError(_NO_LIST)
        return values + np.uint32(1)
    bits = source.take_bits((num - exceptions + 7) // 8)
    between, rest = (source.numbers(exceptions, number, lists[number - 1]) for number in (1, 2))
    return _merge(bits, num, between, rest, largest)


def _merge(bits: Bytes, num: int, gaps: Numbers, rest: Numbers, largest: int) -> Numbers:
    places = _places(gaps, num)
    if rest.size and int(rest.max()) > largest - 3:
        raise RefusedError(_NO_LIST)
    values = np.empty(num, np.uint32)
    is_step = np.ones(num, bool)
    is_step[places] = False
    values[is_step] = 1 + np.unpackbits(bits, count=num - rest.size, bitorder="little")
    values[~is_step] = rest + 3
    return values


def _places(gaps: Numbers, num: int) -> NDArray[np.int64]:
    places = np.cumsum(gaps, dtype=np.uint64) + np.arange(gaps.size, dtype=np.uint64)
    if gaps.size and int(places[-1]) >= num:
        raise RefusedError(_NO_LIST)
    return places.astype(np.int64)


def tokenise(numbers: Numbers, shift: int) -> tuple[Bytes, Bytes]:
    """Without ``shift`` bits: below 16 the token is the number; above, four tokens for each power of two. Other bits apart."""
    upper = numbers >> np.uint32(shift)
    is_large = upper >= 16
    below = _bit_widths(upper[is_large]) - 2
    tokens, width = upper.astype(np.uint8), np.full(numbers.size, shift, np.uint32)
    tokens[is_large] = 16 + (below - 2) * 4 + ((upper[is_large] >> below) & 3)
    width[is_large] += below
    return tokens, _pack(numbers, width)


# -- scanning and applying --------------------------------------------------------------------------------------------


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
    def __init__(self, thresholds: Numbers, changes: SegmentChanges, elements: int) -> None:
        self._thresholds = thresholds
        cuts = changes.ends[:-1].astype(np.int64)
        self._values = np.split(changes.values, cuts)
        self._ranks = [np.cumsum(g, dtype=np.int64) + np.arange(g.size) for g in np.split(changes.gaps, cuts)]
        if any(ranks.size and ranks[-1] >= elements for ranks in self._ranks):
            raise RefusedError(BEYOND)
        self._passed, self._done = [0] * len(self._ranks), [0] * len(self._ranks)

    def feed(self, elements: Elements) -> None:
        classes = np.searchsorted(self._thresholds, _magnitudes(elements), side="right")
        for number, ranks in enumerate(self._ranks):
            members = np.flatnonzero(classes == number)
            first, passed = self._done[number], self._passed[number]
            last = int(np.searchsorted(ranks, passed + members.size))
            places = members[ranks[first:last] - passed]
            elements[places] += _unzigzag(self._values[number][first:last], elements.dtype)
            self._done[number], self._passed[number] = last, passed + members.size

    def is_done(self) -> bool:
        return self._done == [ranks.size for ranks in self._ranks]

    def close(self) -> None:
        pass


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


def _unpack(bits: Bytes, widths: Numbers) -> Counts:
    """The inverse; at most 50 bits a number."""
    total = int(widths.sum())
    if not total:
        return np.zeros(widths.size, np.uint64)
    which, bit = _each_bit(widths)
    values = np.unpackbits(bits, count=total, bitorder="little").astype(np.uint64) << bit
    return np.bincount(which, values, minlength=widths.size).astype(np.uint64)  # exact: doubles have 53 bits


def _each_bit(widths: Numbers) -> tuple[NDArray[np.int64], Numbers]:
    which = np.repeat(np.arange(widths.size), widths)
    starts = np.cumsum(widths, dtype=np.int64) - widths
    return which, (np.arange(which.size) - starts[which]).astype(np.uint32)
