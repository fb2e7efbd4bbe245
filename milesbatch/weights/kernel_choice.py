"""Which loops this process uses: the compiled ones where they were built and compute right, numpy's elsewhere.

Owns the choice, made once in a process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import itertools
from pathlib import Path

import numpy as np

from milesbatch.weights.kernels import Bytes, ClassChanges, Elements, Kernels, RefusedError, joined
from milesbatch.weights.kernels_native import SIGNATURES, NativeKernels
from milesbatch.weights.kernels_numpy import NumpyKernels
from milesbatch.weights.payload import varint


@functools.cache
def kernels() -> Kernels:
    """The fastest kernels of this installation that compute right; chosen once in a process."""
    return choose()


def choose() -> Kernels:
    """Compiled loops, of the widest instruction set that agrees with numpy on a sample; else numpy.

    Compilers have spoiled such loops (GCC 12 at -O3, for AVX-512), and weights are no place to find that out.
    """
    library, trusted = _load(), NumpyKernels()
    if library is None:
        return trusted
    for most in (2, 1, 0):
        native = NativeKernels(library, most)
        if native.level == most and _agree(native, trusted):
            return native
    return trusted


def _agree(tried: Kernels, trusted: Kernels) -> bool:
    cases = itertools.product(
        (np.uint8, np.uint16, np.uint32), ([], [9], [9, 40], [9, 40, 100], [1, 2, 4, 9, 30, 60, 90])
    )
    for dtype, classes in cases:
        rng = np.random.default_rng(len(classes))
        thresholds = np.array(classes, np.uint32)
        old: Elements = rng.integers(0, 256, 64 * 20 + 21).astype(dtype)
        new: Elements = old + (rng.random(old.size) < 0.3).astype(dtype) * rng.integers(0, 200, old.size).astype(dtype)
        scanners = [kernels.scanner(thresholds, old.size) for kernels in (tried, trusted)]
        if not all(scanner.feed(old, new) for scanner in scanners):
            return False
        for one, other in zip(*(scanner.changes() for scanner in scanners), strict=True):
            if not (np.array_equal(one.gaps, other.gaps) and np.array_equal(one.values, other.values)):
                return False
        changes = scanners[1].changes()
        if not _same_lists(tried, trusted, changes):
            return False
        applier = tried.applier(thresholds, joined(changes), old.size)
        made = old.copy()
        applier.feed(made)
        if not applier.is_done() or not np.array_equal(made, new):
            return False
    return True


def _load() -> ctypes.CDLL | None:
    """The compiled loops; None where they were not built (there was no C compiler), or are of another machine or version."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_steps{suffix}")
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                continue
            if all(hasattr(library, name) for name in SIGNATURES):
                return library
    return None


def _same_lists(tried: Kernels, trusted: Kernels, changes: list[ClassChanges]) -> bool:
    one, other = tried.pack(changes), trusted.pack(changes)
    same = all(
        np.array_equal(getattr(one, part), getattr(other, part)) for part in ("counts", "tokens", "ends", "bits")
    )
    if not same:
        return False
    elements = max(127, sum(of_class.gaps.size for of_class in changes))
    payload = np.concatenate([_number(elements), other.counts, _number(other.tokens.size), other.tokens, other.bits])
    try:
        counts = tried.counts(payload, 0, len(changes), elements, elements)
        found, end = tried.unpack(counts, other.tokens, payload, counts.at + counts.stored, 2**32 - 1)
    except RefusedError:
        return False
    expected = joined(changes)
    return end == payload.size and all(
        np.array_equal(getattr(found, part), getattr(expected, part)) for part in ("gaps", "values", "ends")
    )


def _number(number: int) -> Bytes:
    return np.frombuffer(varint(number), np.uint8)
