"""The inner loops of the ``steps-zstd`` encoding: what they do, whoever does it.

Owns the interface; never a format (that is :mod:`milesbatch.weights.steps`). Invariant: all implementations give the same
arrays for the same input, and none reads or writes outside of the arrays that it is given, whatever is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
Elements = NDArray[np.unsignedinteger[Any]]
"""Flat unsigned elements of 1, 2 or 4 bytes: the bits of a tensor."""

MAX_THRESHOLDS = 7
NUM_KEYS = 256
"""Elements are counted by the eight highest bits below the sign."""


@dataclass(frozen=True, slots=True)
class ClassChanges:
    """Changes of the elements of one class, in order of position; both arrays have one entry a change.

    ``gaps``: elements *of this class* between the last change (or the beginning) and this one. ``values``: new bits minus old
    bits in the width of the element, zigzag: 2 for +1, 1 for -1, 4 for +2, 3 for -2; never 0.
    """

    gaps: Numbers
    values: Numbers


class Scanner(Protocol):
    """Finds the changes of a stretch of elements that is handed over in pieces; each but the last a multiple of 64."""

    def feed(self, before: Elements, after: Elements) -> bool:
        """Take the next piece; False: more changes than the capacity, nothing of this stretch is usable."""
        ...

    def changes(self) -> list[ClassChanges]:
        """For each class, lowest magnitudes first. The arrays are the scanner's own until the next scan of this thread."""
        ...


class Applier(Protocol):
    """Makes changes in place, piece by piece; each but the last a multiple of 64 elements."""

    def feed(self, elements: Elements) -> None: ...

    def is_done(self) -> bool:
        """Was every change made? False: the elements are not those that the changes were found in."""
        ...


class Kernels(Protocol):
    """All loops. ``thresholds``: ascending, at least 1, at most the largest magnitude; class *c* holds the elements whose old
    bits without the sign reach exactly *c* of them."""

    name: str

    def scanner(self, thresholds: Numbers, capacity: int) -> Scanner: ...

    def applier(self, thresholds: Numbers, changes: Sequence[ClassChanges]) -> Applier: ...

    def count(
        self, before: Elements, after: Elements, run: int, stride: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Elements, and changed elements, for each of the 256 values of the eight highest bits below the sign, among the first
        ``run`` elements of every ``stride``."""
        ...

    def tokenise(self, numbers: Numbers) -> tuple[Bytes, Bytes]:
        """Numbers below 2^32 as one token each (at most 127) and the bits that the tokens do not say."""
        ...

    def detokenise(self, tokens: Bytes, bits: Bytes) -> tuple[Numbers, int] | None:
        """Numbers, and how many bytes of ``bits`` they took; None when these are no tokens or there are too few bits."""
        ...

    def split(self, values: Numbers) -> tuple[Bytes, Numbers, Numbers]:
        """Zigzag values as: a bit for each 1 (clear) or 2 (set); for each other one the values before it since the last
        such, and itself less 3."""
        ...

    def merge(self, bits: Bytes, num: int, gaps: Numbers, rest: Numbers, largest: int) -> Numbers | None:
        """The inverse, for ``num`` values of at most ``largest``; None when it is not one."""
        ...


def key_shift(element_bytes: int) -> int:
    """How far the bits below the sign are shifted to keep the eight highest."""
    return max(0, 8 * element_bytes - 9)
