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
MAX_SHIFT = 21
"""Lowest bits of all gaps of a class that are no part of its tokens; a segment has no more than 2^23 elements."""
SPARSE_FROM = (MAX_SHIFT + 1, 1, 1)
"""Counts of each list of a class from which on it has only its numbers that are not 0: so many more than these."""
NUM_KEYS = 256
"""Elements are counted by the eight highest bits below the sign, and"""
NUM_KINDS = 8
"""by how they change: not, or by a step whose size has 1, 2, ... bits; the last kind has all larger ones."""


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
    """How many changes each class has, how many are exceptions, the shift of its gaps, and which lists hold only their numbers
    that are not 0."""
    tokens: Bytes
    """One a number, at most 127; of all lists, one behind the other: first the gaps of all classes, then the others of each."""
    ends: tuple[int, ...]
    """Where the tokens of all lists of gaps end, and then those of each other list, if it has any."""
    bits: Bytes
    """What the tokens do not say: the lower bits of all gaps; for each class its directions, and those of its other lists."""


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
    """Shape [classes, 5]: changes, exceptions (``changes + 1``: nothing is split), and the count of each of the three lists
    (the shift of its tokens, which only the first has, or more than that when most of its numbers are 0)."""


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

    def count(self, before: Elements, after: Elements, run: int, stride: int) -> Counts:
        """Elements by key (the eight highest bits below the sign) and kind of change, among the first ``run`` elements of every
        ``stride``; shape [NUM_KEYS, NUM_KINDS]."""
        ...

    def cut(self, counts: Counts, weight: float, bits_for_a_class: float, most: int) -> Numbers:
        """First keys of the second and later classes (at most ``most``), for the fewest bits: for each class, the entropy of
        which elements change and of their kinds, and ``bits_for_a_class``. A counted element stands for ``weight`` elements."""
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
