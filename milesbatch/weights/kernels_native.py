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
    Elements,
    Numbers,
    Scanner,
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

    def count(
        self, before: Elements, after: Elements, run: int, stride: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        elements, changes = np.zeros(NUM_KEYS, np.uint64), np.zeros(NUM_KEYS, np.uint64)
        self._library.steps_count(
            _int(before.itemsize), _at(before), _at(after), _size(before.size), _size(run), _size(stride),
            _int(key_shift(before.itemsize)), _at(elements), _at(changes),
        )  # fmt: skip
        return elements, changes

    def tokenise(self, numbers: Numbers) -> tuple[Bytes, Bytes]:
        tokens, bits = np.empty(numbers.size, np.uint8), np.empty(4 * numbers.size + 8, np.uint8)
        num_bits = self._library.steps_tokenise(_at(numbers), _size(numbers.size), _at(tokens), _at(bits))
        return tokens, bits[: (num_bits + 7) // 8]

    def detokenise(self, tokens: Bytes, bits: Bytes) -> tuple[Numbers, int] | None:
        numbers = np.empty(tokens.size, np.uint32)
        used = self._library.steps_detokenise(
            _at(tokens), _size(tokens.size), _at(bits), _size(bits.size), _at(numbers)
        )
        return None if used < 0 else (numbers, (used + 7) // 8)

    def split(self, values: Numbers) -> tuple[Bytes, Numbers, Numbers]:
        bits = np.zeros((values.size + 7) // 8, np.uint8)
        gaps, rest = np.empty(values.size, np.uint32), np.empty(values.size, np.uint32)
        num = self._library.steps_split(_at(values), _size(values.size), _at(bits), _at(gaps), _at(rest))
        return bits[: (values.size - num + 7) // 8], gaps[:num], rest[:num]

    def merge(self, bits: Bytes, num: int, gaps: Numbers, rest: Numbers, largest: int) -> Numbers | None:
        if bits.size < (num - rest.size + 7) // 8 or rest.size > num:
            return None
        values = np.empty(num, np.uint32)
        failed = self._library.steps_merge(
            _at(bits), _size(num), _at(gaps), _at(rest), _size(rest.size), ctypes.c_uint32(largest), _at(values)
        )
        return None if failed else values


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

    def lists(self, num_classes: int, capacity: int) -> tuple[Numbers, Numbers]:
        """Two arrays of shape [num_classes, capacity]. Pages that no scan touched take no memory."""
        if self._gaps.shape[1] != capacity or len(self._gaps) < num_classes:
            self._gaps, self._values = (np.empty((MAX_THRESHOLDS + 1, capacity), np.uint32) for _ in range(2))
        return self._gaps[:num_classes], self._values[:num_classes]


_RESULTS: dict[str, Any] = {
    "steps_level": ctypes.c_int,
    "steps_scan": ctypes.c_int,
    "steps_apply": None,
    "steps_tokenise": ctypes.c_uint64,
    "steps_detokenise": ctypes.c_int64,
    "steps_split": ctypes.c_uint64,
    "steps_merge": ctypes.c_int,
    "steps_count": None,
}
_NEVER = 1 << 62
_int = ctypes.c_int
_size = ctypes.c_uint64


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous, "only whole arrays go to C"
    return ctypes.c_void_p(array.__array_interface__["data"][0])
