"""The compiled loops of :mod:`milesbatch.weights.kernels`, called through ctypes, which gives up the interpreter's lock.

Owns the crossing to C (``native/steps.c``) and a thread's lists. Why C and not numba:
``docs/decisions/0007-c-for-the-weights-loops.md``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milesbatch.weights.kernels import (
    BEYOND,
    MAX_THRESHOLDS,
    NUM_KEYS,
    NUM_KINDS,
    Applier,
    Bytes,
    ClassChanges,
    Counts,
    Elements,
    Numbers,
    PackedSegment,
    RefusedError,
    Scanner,
    SegmentChanges,
    SegmentCounts,
    key_shift,
)


class NativeKernels:
    """The loops of ``native/steps.c``. ctypes gives up the interpreter's lock for the time of each call."""

    def __init__(self, library: ctypes.CDLL, most: int = 2) -> None:
        """``most``: highest instruction set to use; 0 any machine, 1 AVX2, 2 AVX-512."""
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        self.level = int(library.steps_level(most))
        self.name = f"native ({('portable', 'AVX2', 'AVX-512')[self.level]})"
        self._scratch = _Scratch()

    def scanner(self, thresholds: Numbers, capacity: int) -> Scanner:
        gaps, values, addresses = self._scratch.lists(len(thresholds) + 1, capacity)
        return _NativeScanner(self._library, thresholds, gaps, values, addresses)

    def applier(self, thresholds: Numbers, changes: SegmentChanges, elements: int) -> Applier:
        return _NativeApplier(self._library, thresholds, changes, elements, self._scratch)

    def count(self, before: Elements, after: Elements, run: int, stride: int) -> Counts:
        counts = np.zeros((NUM_KEYS, NUM_KINDS), np.uint64)
        self._library.steps_count(
            before.itemsize, _at(before), _at(after), before.size, run, stride, key_shift(before.itemsize), _at(counts)
        )  # fmt: skip
        return counts

    def cut(self, counts: Counts, weight: float, bits_for_a_class: float, most: int) -> Numbers:
        cuts = np.empty(MAX_THRESHOLDS, np.uint32)
        num = self._library.steps_cut(_at(counts), weight, bits_for_a_class, most, _at(cuts))
        return cuts[:num]

    def pack(self, changes: Sequence[ClassChanges]) -> PackedSegment:
        sizes = [of_class.gaps.size for of_class in changes]
        if isinstance(changes, _Found):
            of_gaps, of_values = changes.addresses
        else:
            of_gaps, of_values = [_at(each.gaps) for each in changes], [_at(each.values) for each in changes]
        (counts, tokens, ends, bits, found), addresses, numbers = self._scratch.packing(sum(sizes))
        lists = np.array([sizes, of_gaps, of_values], np.uint64)
        at, row = _at(lists), 8 * len(sizes)
        self._library.steps_pack(len(sizes), at, at + row, at + 2 * row, numbers, *addresses)
        num_counts, num_ends, num_bits = found.tolist()
        of_stretches = tuple(ends[:num_ends].tolist())
        num_tokens = of_stretches[-1] if of_stretches else 0
        return PackedSegment(counts[:num_counts], tokens[:num_tokens], of_stretches, bits[:num_bits])

    def counts(self, payload: Bytes, at: int, num_classes: int, most_elements: int, most_changes: int) -> SegmentCounts:
        table = np.empty(5 * num_classes + 6, np.uint64)
        classes, found = table[6:].reshape(num_classes, 5), _at(table)
        table[5] = at
        _expect(self._library.steps_counts(
            _at(payload), payload.size, found + 40, most_elements, most_changes, num_classes, found + 48, found
        ))  # fmt: skip
        elements, changes, most, tokens, stored, behind = table[:6].tolist()
        return SegmentCounts(elements, changes, most, tokens, stored, behind, classes)

    def unpack(
        self, counts: SegmentCounts, tokens: Bytes, payload: Bytes, at: int, largest: int
    ) -> tuple[SegmentChanges, int]:
        num_classes, num = len(counts.classes), counts.changes
        gaps, values = self._scratch.take(num)
        ends = np.empty(num_classes + 1, np.uint64)
        ends[num_classes] = at
        _expect(self._library.steps_unpack(
            _at(payload), payload.size, _at(ends) + 8 * num_classes, num_classes, _at(counts.classes), _at(tokens), largest,
            self._scratch.numbers(4 * counts.most_changes), _at(gaps), _at(values), _at(ends),
        ))  # fmt: skip
        return SegmentChanges(gaps[:num], values[:num], ends[:num_classes], lent=(gaps, values)), int(ends[num_classes])


class _Found(list[ClassChanges]):
    """A scanner's changes, and where their lists are: to ask numpy for an address takes longer than to pack a small list."""

    addresses: tuple[list[int], list[int]]


class _NativeScanner:
    def __init__(
        self, library: ctypes.CDLL, thresholds: Numbers, gaps: Numbers, values: Numbers, addresses: tuple[int, int]
    ) -> None:
        self._scan, self._thresholds, self._gaps, self._values = library.steps_scan, thresholds, gaps, values
        self._states, self._addresses = np.zeros((3, len(gaps)), np.uint64), addresses
        at, row = _at(self._states), 8 * len(gaps)
        self._fixed = (
            _at(thresholds), len(thresholds), at, at + row, at + 2 * row, gaps.shape[1], *addresses
        )  # fmt: skip

    def feed(self, before: Elements, after: Elements) -> bool:
        return not self._scan(before.itemsize, _at(before), _at(after), before.size, *self._fixed)

    def changes(self) -> list[ClassChanges]:
        rows = zip(self._states[2].tolist(), self._gaps, self._values, strict=True)
        found = _Found(ClassChanges(gaps[:count], values[:count]) for count, gaps, values in rows)
        num_classes, row_bytes = self._gaps.shape[0], 4 * self._gaps.shape[1]
        gaps_at, values_at = ([first + row_bytes * c for c in range(num_classes)] for first in self._addresses)
        found.addresses = (gaps_at, values_at)
        return found


class _NativeApplier:
    """Gaps have become maps: which elements of a class change is then found without a branch that nothing can predict."""

    def __init__(
        self, library: ctypes.CDLL, thresholds: Numbers, changes: SegmentChanges, elements: int, scratch: _Scratch
    ) -> None:
        num_classes, map_bytes = len(changes.ends), elements // 8 + 16
        self._maps, self._scratch = scratch.take_zeros(num_classes * map_bytes), scratch
        maps, self._changes, self._left = _at(self._maps), changes, elements
        self._mapped = (num_classes, _at(changes.ends), _at(changes.gaps))
        if library.steps_map(*self._mapped, elements, maps, map_bytes):
            raise RefusedError(BEYOND)
        self._apply, self._unmap, self._ends = library.steps_apply, library.steps_unmap, changes.ends.tolist()
        self._states = np.array([[0] * num_classes, [0, *self._ends[:-1]]], np.uint64)
        self._thresholds = thresholds  # its address alone would not keep it
        at = _at(self._states)
        self._fixed = (
            _at(thresholds), len(thresholds), at, at + 8 * num_classes, maps, map_bytes, _at(changes.values)
        )  # fmt: skip

    def feed(self, elements: Elements) -> None:
        self._left -= elements.size
        assert self._left >= 0, "the maps end with the segment"
        self._apply(elements.itemsize, _at(elements), elements.size, *self._fixed)

    def is_done(self) -> bool:
        return bool(self._states[1].tolist() == self._ends)

    def close(self) -> None:
        self._unmap(*self._mapped, *self._fixed[4:6])
        self._scratch.give_back(self._maps, self._changes.lent)


_PackingRoom = tuple[Bytes, Bytes, Counts, Bytes, Counts]
"""Counts, tokens, ends of stretches, bits, and how many of each."""


class _Scratch(threading.local):
    """Memory for the work of one thread, kept: fresh pages for each tensor cost more than the loops themselves."""

    def __init__(self) -> None:
        self._gaps = self._values = np.empty((0, 0), np.uint32)
        self._lists_at = (0, 0)
        self._numbers = np.empty(1 << 14, np.uint32)
        self._numbers_at = _at(self._numbers)
        self._packing = self._room(1 << 12)
        self._free: list[tuple[NDArray[Any], ...]] = []
        self._zeros: list[Bytes] = []

    def lists(self, num_classes: int, capacity: int) -> tuple[Numbers, Numbers, tuple[int, int]]:
        """Two arrays of shape [num_classes, capacity], and their addresses. Pages that no scan touched take no memory."""
        if self._gaps.shape[1] != capacity or len(self._gaps) < num_classes:
            self._gaps, self._values = (np.empty((MAX_THRESHOLDS + 1, capacity), np.uint32) for _ in range(2))
            self._lists_at = (_at(self._gaps), _at(self._values))
        return self._gaps[:num_classes], self._values[:num_classes], self._lists_at

    def numbers(self, num: int) -> int:
        """Address of so many."""
        if self._numbers.size < num:
            self._numbers = np.empty(num, np.uint32)
            self._numbers_at = _at(self._numbers)
        return self._numbers_at

    def packing(self, num: int) -> tuple[_PackingRoom, tuple[int, ...], int]:
        """Room for ``steps_pack`` of ``num`` changes: arrays for what it gives, their addresses, and that of numbers."""
        if self._packing[0][1].size < 3 * num:
            self._packing = self._room(num)
        return *self._packing, self.numbers(3 * num + 1)

    def take(self, num: int) -> tuple[Numbers, Numbers]:
        """Two arrays of at least ``num``. Several are in use at a time when several deltas are applied in one pass."""
        if self._free and self._free[-1][0].size >= num:
            gaps, values = self._free.pop()
            return gaps, values
        room = max(num, 1 << 16)
        return np.empty(room, np.uint32), np.empty(room, np.uint32)

    def take_zeros(self, num_bytes: int) -> Bytes:
        if self._zeros and self._zeros[-1].size >= num_bytes:
            return self._zeros.pop()
        return np.zeros(max(num_bytes, 1 << 16), np.uint8)

    def give_back(self, zeros: Bytes, lists: tuple[NDArray[Any], ...]) -> None:
        self._zeros = [*self._zeros[: _MOST_FREE - 1], zeros]
        if lists:
            self._free = [*self._free[: _MOST_FREE - 1], lists]

    @staticmethod
    def _room(num: int) -> tuple[_PackingRoom, tuple[int, ...]]:
        classes = MAX_THRESHOLDS + 1
        room = (
            np.empty(50 * classes, np.uint8), np.empty(3 * num, np.uint8), np.empty(1 + 2 * classes, np.uint64),
            np.empty(13 * num + 32 * classes, np.uint8), np.empty(3, np.uint64),
        )  # fmt: skip
        return room, tuple(_at(array) for array in room)


def _expect(refused: int) -> None:
    if refused:
        raise RefusedError(_REASONS[refused])


_REASONS = {1: "it ends too early", 2: "a count that is larger than it can be", 3: "lists that no changes give"}
_MOST_FREE = 2
"""Sets of lists that a thread keeps."""

_int, _size, _number, _pointer = ctypes.c_int, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "steps_level": (_int, [_int]),
    "steps_scan": (_int, [_int, _pointer, _pointer, _size, _pointer, _int, *[_pointer] * 3, _size, _pointer, _pointer]),
    "steps_map": (_int, [_int, _pointer, _pointer, _size, _pointer, _size]),
    "steps_unmap": (None, [_int, _pointer, _pointer, _pointer, _size]),
    "steps_apply": (None, [_int, _pointer, _size, _pointer, _int, _pointer, _pointer, _pointer, _size, _pointer]),
    "steps_cut": (_int, [_pointer, ctypes.c_double, ctypes.c_double, _int, _pointer]),
    "steps_pack": (None, [_int, *[_pointer] * 9]),
    "steps_counts": (_int, [_pointer, _size, _pointer, _size, _size, _int, _pointer, _pointer]),
    "steps_unpack": (_int, [_pointer, _size, _pointer, _int, _pointer, _pointer, _number, *[_pointer] * 4]),
    "steps_count": (None, [_int, _pointer, _pointer, _size, _size, _size, _int, _pointer]),
}


_interface = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_DATA_AT = 40
"""Of the data's address in that C structure, where pointers have eight bytes: after two, nd (int), typekind (char), itemsize,
flags (int), shape and strides (pointers)."""


def _at(array: NDArray[Any]) -> int:
    """Where its elements are. By numpy's array interface as a C structure (https://numpy.org/doc/stable/reference/arrays.interface.html),
    which takes a quarter of the time of the one in Python: a small tensor's encoding asks a dozen times."""
    assert array.flags.c_contiguous, "only whole arrays go to C"
    return ctypes.c_uint64.from_address(_interface(array.__array_struct__, None) + _DATA_AT).value
