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
    MAX_THRESHOLDS,
    NUM_KEYS,
    Applier,
    Bytes,
    ClassChanges,
    Counts,
    Elements,
    Numbers,
    PackedClass,
    PackedNumbers,
    Scanner,
    TokenList,
    key_shift,
)


class NativeKernels:
    """The loops of ``native/steps.c``. ctypes gives up the interpreter's lock for the time of each call."""

    def __init__(self, library: ctypes.CDLL, most: int = 2) -> None:
        """``most``: highest instruction set to use; 0 any machine, 1 AVX2, 2 AVX-512."""
        for name, result in _RESULTS.items():
            getattr(library, name).restype = result
        self._library = library
        self.level = int(library.steps_level(ctypes.c_int(most)))
        self.name = f"native ({('portable', 'AVX2', 'AVX-512')[self.level]})"
        self._scratch = _Scratch()

    def scanner(self, thresholds: Numbers, capacity: int) -> Scanner:
        return _NativeScanner(self._library, thresholds, *self._scratch.lists(len(thresholds) + 1, capacity))

    def applier(self, thresholds: Numbers, changes: Sequence[ClassChanges]) -> Applier:
        return _NativeApplier(self._library, thresholds, changes)

    def count(self, before: Elements, after: Elements, run: int, stride: int) -> tuple[Counts, Counts]:
        elements, changes = np.zeros(NUM_KEYS, np.uint64), np.zeros(NUM_KEYS, np.uint64)
        self._library.steps_count(
            _int(before.itemsize), _at(before), _at(after), _size(before.size), _size(run), _size(stride),
            _int(key_shift(before.itemsize)), _at(elements), _at(changes),
        )  # fmt: skip
        return elements, changes

    def cut(self, elements: Counts, changes: Counts, weight: float, bits_for_a_class: float, most: int) -> Numbers:
        cuts = np.empty(MAX_THRESHOLDS, np.uint32)
        num = self._library.steps_cut(
            _at(elements),
            _at(changes),
            ctypes.c_double(weight),
            ctypes.c_double(bits_for_a_class),
            _int(most),
            _at(cuts),
        )
        return cuts[:num]

    def pack(self, changes: ClassChanges) -> PackedClass:
        num = changes.gaps.size
        numbers, tokens, bits, directions = self._scratch.packing(num)
        packed = np.empty((3, 5), np.uint64)
        exceptions = int(self._library.steps_pack(
            _at(changes.gaps), _at(changes.values), _size(num), _at(numbers), _at(tokens), _at(bits), _at(directions),
            _at(packed),
        ))  # fmt: skip
        reader = _Lists(tokens, bits)
        used = 2 if exceptions > num else 3
        lists = tuple(reader.numbers(*row) for row in packed[:used].tolist())
        return PackedClass(num, exceptions, directions[: max(0, num - exceptions + 7) // 8], lists)

    def unpack(self, packed: PackedClass, largest: int) -> ClassChanges | None:
        num, rows, tokens, bits = packed.size, np.zeros((3, 5), np.uint64), [], []
        for row, numbers in zip(rows, packed.numbers, strict=False):
            lists = [numbers.plain] if numbers.others is None else [numbers.plain, numbers.others]
            row[0] = len(lists) - 1
            for column, each in enumerate(lists):
                row[1 + 2 * column : 3 + 2 * column] = each.tokens.size, each.bits.size
                tokens.append(each.tokens)
                bits.append(each.bits)
        all_tokens, all_bits = np.concatenate(tokens), np.concatenate(bits)
        gaps, values, scratch = np.empty(num, np.uint32), np.empty(num, np.uint32), np.empty(4 * num, np.uint32)
        failed = self._library.steps_unpack(
            _at(rows), _size(num), _size(packed.exceptions), _at(all_tokens), _at(all_bits), _at(packed.directions),
            ctypes.c_uint32(largest), _at(scratch), _at(gaps), _at(values),
        )  # fmt: skip
        return None if failed else ClassChanges(gaps, values)


class _Lists:
    """Takes lists from the front of what ``steps_pack`` wrote."""

    def __init__(self, tokens: Bytes, bits: Bytes) -> None:
        self._tokens, self._bits, self._token, self._bit = tokens, bits, 0, 0

    def numbers(self, is_sparse: int, first: int, first_bytes: int, second: int, second_bytes: int) -> PackedNumbers:
        plain = self._list(first, first_bytes)
        return PackedNumbers(plain, self._list(second, second_bytes) if is_sparse else None)

    def _list(self, num: int, num_bytes: int) -> TokenList:
        found = TokenList(self._tokens[self._token : self._token + num], self._bits[self._bit : self._bit + num_bytes])
        self._token += num
        self._bit += num_bytes
        return found


class _NativeScanner:
    def __init__(self, library: ctypes.CDLL, thresholds: Numbers, gaps: Numbers, values: Numbers) -> None:
        self._scan, self._thresholds, self._gaps, self._values = library.steps_scan, thresholds, gaps, values
        self._runs, self._counts = np.zeros(len(gaps), np.uint64), np.zeros(len(gaps), np.uint64)
        self._fixed = (
            _at(thresholds), _int(len(thresholds)), _at(self._runs), _at(self._counts), _size(gaps.shape[1]), _at(gaps),
            _at(values),
        )  # fmt: skip

    def feed(self, before: Elements, after: Elements) -> bool:
        overflow = self._scan(_int(before.itemsize), _at(before), _at(after), _size(before.size), *self._fixed)
        return not overflow

    def changes(self) -> list[ClassChanges]:
        rows = zip(self._counts.tolist(), self._gaps, self._values, strict=True)
        return [ClassChanges(gaps[:count], values[:count]) for count, gaps, values in rows]


class _NativeApplier:
    def __init__(self, library: ctypes.CDLL, thresholds: Numbers, changes: Sequence[ClassChanges]) -> None:
        self._apply = library.steps_apply
        gaps = np.concatenate([change.gaps for change in changes])
        values = np.concatenate([change.values for change in changes])
        self._ends = np.cumsum([change.gaps.size for change in changes], dtype=np.uint64)
        self._cursors = np.concatenate([np.zeros(1, np.uint64), self._ends[:-1]])
        ahead = np.array([c.gaps[0] if c.gaps.size else _NEVER for c in changes], np.uint64)
        self._arrays = (thresholds, ahead, gaps, values)  # addresses alone would not keep them
        self._fixed = (
            _at(thresholds), _int(len(thresholds)), _at(ahead), _at(self._cursors), _at(self._ends), _at(gaps), _at(values)
        )  # fmt: skip

    def feed(self, elements: Elements) -> None:
        self._apply(_int(elements.itemsize), _at(elements), _size(elements.size), *self._fixed)

    def is_done(self) -> bool:
        return bool(np.array_equal(self._cursors, self._ends))


class _Scratch(threading.local):
    """Lists for the scans of one thread, kept: fresh memory for each tensor costs more than the scan itself."""

    def __init__(self) -> None:
        self._gaps = self._values = np.empty((0, 0), np.uint32)
        self._packing = self._make(1 << 12)

    def lists(self, num_classes: int, capacity: int) -> tuple[Numbers, Numbers]:
        """Two arrays of shape [num_classes, capacity]. Pages that no scan touched take no memory."""
        if self._gaps.shape[1] != capacity or len(self._gaps) < num_classes:
            self._gaps, self._values = (np.empty((MAX_THRESHOLDS + 1, capacity), np.uint32) for _ in range(2))
        return self._gaps[:num_classes], self._values[:num_classes]

    def packing(self, num: int) -> tuple[Numbers, Bytes, Bytes, Bytes]:
        """Room for ``steps_pack`` of ``num`` changes: numbers, tokens, bits, directions."""
        if self._packing[1].size < 3 * num:
            self._packing = self._make(num)
        return self._packing

    @staticmethod
    def _make(num: int) -> tuple[Numbers, Bytes, Bytes, Bytes]:
        return (
            np.empty(3 * num, np.uint32), np.empty(3 * num, np.uint8), np.empty(12 * num + 32, np.uint8),
            np.empty(num // 8 + 1, np.uint8),
        )  # fmt: skip


_RESULTS: dict[str, Any] = {
    "steps_level": ctypes.c_int,
    "steps_scan": ctypes.c_int,
    "steps_apply": None,
    "steps_cut": ctypes.c_int,
    "steps_pack": ctypes.c_uint64,
    "steps_unpack": ctypes.c_int,
    "steps_count": None,
}
_NEVER = 1 << 62
_int = ctypes.c_int
_size = ctypes.c_uint64


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous, "only whole arrays go to C"
    return ctypes.c_void_p(array.__array_interface__["data"][0])
