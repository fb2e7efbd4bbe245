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
Counts = NDArray[np.uint64]
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


@dataclass(frozen=True, slots=True)
class TokenList:
    """Numbers below 2^32 as one token each (at most 127) and the bits that the tokens do not say, in whole bytes."""

    tokens: Bytes
    bits: Bytes


@dataclass(frozen=True, slots=True)
class PackedNumbers:
    """One list of numbers: as it is, or, where most are 0, the zeros before each other number, and these others less 1."""

    plain: TokenList
    others: TokenList | None = None


@dataclass(frozen=True, slots=True)
class PackedClass:
    """The changes of one class as lists that an entropy coder takes. Arrays of a kernel's ``pack`` are its own, until its next
    one in the same thread."""

    size: int
    """Changes."""
    exceptions: int
    """How many of them are more than one unit in the last place; ``size + 1`` when these are so many that nothing is split."""
    directions: Bytes
    """A bit for each that is no exception: set for +1, clear for -1. Empty when nothing is split."""
    numbers: tuple[PackedNumbers, ...]
    """Gaps; then all values less 1, or else the gaps between exceptions, and the exceptions less 3."""


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

    def count(self, before: Elements, after: Elements, run: int, stride: int) -> tuple[Counts, Counts]:
        """Elements, and changed elements, for each of the 256 values of the eight highest bits below the sign, among the first
        ``run`` elements of every ``stride``."""
        ...

    def cut(self, elements: Counts, changes: Counts, weight: float, bits_for_a_class: float, most: int) -> Numbers:
        """First keys of the second and later classes (at most ``most``), for the fewest bits: N H(K / N) for each class of N
        elements with K changes, and ``bits_for_a_class``; each that was counted stands for ``weight`` elements."""
        ...

    def pack(self, changes: ClassChanges) -> PackedClass:
        """``changes`` has at least one."""
        ...

    def unpack(self, packed: PackedClass, largest: int) -> ClassChanges | None:
        """The inverse, for values of at most ``largest``; None when this is nothing that :meth:`pack` gives."""
        ...


def key_shift(element_bytes: int) -> int:
    """How far the bits below the sign are shifted to keep the eight highest."""
    return max(0, 8 * element_bytes - 9)
