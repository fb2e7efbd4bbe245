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

from milesbatch.weights.kernels import ClassChanges, Elements, Kernels
from milesbatch.weights.kernels_native import NativeKernels
from milesbatch.weights.kernels_numpy import NumpyKernels


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
            if not _same_lists(tried, trusted, one):
                return False
        applier = tried.applier(thresholds, scanners[1].changes())
        made = old.copy()
        applier.feed(made)
        if not applier.is_done() or not np.array_equal(made, new):
            return False
    return True


def _load() -> ctypes.CDLL | None:
    """The compiled loops; None where they were not built (no C compiler at installation) or are of another machine."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_steps{suffix}")
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                continue
    return None


def _same_lists(tried: Kernels, trusted: Kernels, changes: ClassChanges) -> bool:
    if not changes.gaps.size:
        return True
    one, other = tried.pack(changes), trusted.pack(changes)
    if one.exceptions != other.exceptions or not np.array_equal(one.directions, other.directions):
        return False
    for mine, theirs in zip(one.numbers, other.numbers, strict=True):
        for a, b in ((mine.plain, theirs.plain), (mine.others, theirs.others)):
            if a is None or b is None:
                if a is not b:
                    return False
            elif not (np.array_equal(a.tokens, b.tokens) and np.array_equal(a.bits, b.bits)):
                return False
    found = tried.unpack(other, 2**32 - 1)
    return (
        found is not None and np.array_equal(found.gaps, changes.gaps) and np.array_equal(found.values, changes.values)
    )
