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
class SegmentChanges:
    """Changes of all classes of a segment, lowest magnitudes first, one class behind the other.

    ``ends``: where in the lists each class ends, uint64; as many as there are classes.
    """

    gaps: Numbers
    values: Numbers
    ends: Counts
    lent: tuple[NDArray[Any], ...] = ()
    """Memory of the kernel's own, which goes back to it when these changes have been applied."""


def joined(changes: Sequence[ClassChanges]) -> SegmentChanges:
    """All classes in lists of their own."""
    ends = np.cumsum([of_class.gaps.size for of_class in changes], dtype=np.uint64)
    gaps = np.concatenate([of_class.gaps for of_class in changes])
    return SegmentChanges(gaps, np.concatenate([of_class.values for of_class in changes]), ends)


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """A segment's changes as an entropy coder takes them. Arrays of a kernel's ``pack`` are its own, until its next one in the
    same thread."""

    counts: Bytes
    """How many changes each class has, how many are exceptions, and which lists hold only their numbers that are not 0."""
    tokens: Bytes
    """One a number, at most 127; of all lists, one behind the other."""
    ends: tuple[int, ...]
    """Where each list's tokens end."""
    bits: Bytes
    """What the tokens do not say: for each class its directions, and then the lower bits of each list."""


@dataclass(frozen=True, slots=True)
class SegmentCounts:
    """What stands before a segment's tokens."""

    elements: int
    changes: int
    most_changes: int
    """Of one class."""
    tokens: int
    stored: int
    """Bytes that these tokens have in the payload."""
    at: int
    """Where in the payload they begin."""
    classes: Counts
    """Shape [classes, 5]: changes, exceptions (``changes + 1``: nothing is split), and for each of the three lists 0, or one
    more than the numbers in it that are not 0, when only these are there."""


class RefusedError(Exception):
    """Something that no encoder gives; the text says what."""


BEYOND = "a changed position lies beyond the end of its class"


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

    def close(self) -> None:
        """Nothing more will be asked: the memory of the changes may be used again."""
        ...


class Kernels(Protocol):
    """All loops. ``thresholds``: ascending, at least 1, at most the largest magnitude; class *c* holds the elements whose old
    bits without the sign reach exactly *c* of them."""

    name: str

    def scanner(self, thresholds: Numbers, capacity: int) -> Scanner: ...

    def applier(self, thresholds: Numbers, changes: SegmentChanges, elements: int) -> Applier:
        """For a segment of so many elements.

        Raises:
            RefusedError: a change lies beyond them.
        """
        ...

    def count(self, before: Elements, after: Elements, run: int, stride: int) -> tuple[Counts, Counts]:
        """Elements, and changed elements, for each of the 256 values of the eight highest bits below the sign, among the first
        ``run`` elements of every ``stride``."""
        ...

    def cut(self, elements: Counts, changes: Counts, weight: float, bits_for_a_class: float, most: int) -> Numbers:
        """First keys of the second and later classes (at most ``most``), for the fewest bits: N H(K / N) for each class of N
        elements with K changes, and ``bits_for_a_class``; each that was counted stands for ``weight`` elements."""
        ...

    def pack(self, changes: Sequence[ClassChanges]) -> PackedSegment: ...

    def counts(self, payload: Bytes, at: int, num_classes: int, most_elements: int, most_changes: int) -> SegmentCounts:
        """The counts of a segment that begins ``at`` there, all within these bounds.

        Raises:
            RefusedError: they are not, or the payload ends before them or before the tokens that they announce.
        """
        ...

    def unpack(
        self, counts: SegmentCounts, tokens: Bytes, payload: Bytes, at: int, largest: int
    ) -> tuple[SegmentChanges, int]:
        """The inverse of :meth:`pack`, for values of at most ``largest``: bits are in the payload from ``at`` on; also where
        they end. ``tokens`` has as many as ``counts`` says. The arrays are good until the applier that takes them is closed.

        Raises:
            RefusedError: this is nothing that :meth:`pack` gives.
        """
        ...


def key_shift(element_bytes: int) -> int:
    """How far the bits below the sign are shifted to keep the eight highest."""
    return max(0, 8 * element_bytes - 9)
