"""The experts that tokens of a sequence went through, in a mixture-of-experts model: one entry for each token.

Owns the form of an entry: little-endian uint16 [layers, experts of a token], as wide for each token of a model; all ones
where it is not known. Never: files, models or servers. Invariant: entry i says which experts token i went through when token
i + 1 was drawn (for the prompt: when the response's first one was); what an engine computed later, under other weights, is
never put in its place. So the last token, after which none was drawn, has no known entry. The page behind it is
``docs/format-trajectories.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_UNKNOWN_BYTE = b"\xff"
_ENTRY = np.dtype("<u2")
MOST_EXPERTS = int(np.iinfo(_ENTRY).max)
"""Of a layer; the highest number of the type means that it is not known."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Entries of consecutive tokens, ``width`` bytes each, one after the other."""

    width: int
    data: bytes

    def __post_init__(self) -> None:
        if self.width < 1 or len(self.data) % self.width:
            raise ValueError(f"{len(self.data)} bytes are no entries of {self.width} bytes")

    def __len__(self) -> int:
        return len(self.data) // self.width

    @classmethod
    def unknown(cls, width: int, count: int) -> RoutedExperts:
        """Of ``count`` tokens of which nothing is known."""
        return cls(width, _UNKNOWN_BYTE * (width * count))

    @classmethod
    def of(cls, numbers: NDArray[np.int32]) -> RoutedExperts:
        """Of experts' numbers [tokens, layers, experts of a token].

        Raises:
            ValueError: a number is none of an expert.
        """
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < MOST_EXPERTS):
            raise ValueError(f"experts {numbers.min()} to {numbers.max()}; 0 to {MOST_EXPERTS - 1} can be stored")
        return cls(width_of(*numbers.shape[1:]), numbers.astype(_ENTRY).tobytes())

    @classmethod
    def from_entries(cls, entries: Sequence[bytes]) -> RoutedExperts:
        """Inverse of :meth:`entries`.

        Raises:
            ValueError: there are none, or of several widths.
        """
        widths = {len(entry) for entry in entries}
        if len(widths) != 1:
            raise ValueError(f"{len(entries)} entries of {sorted(widths)} bytes; there must be some, of one width")
        return cls(widths.pop(), b"".join(entries))

    def entries(self) -> tuple[bytes, ...]:
        """One for each token."""
        return tuple(self.data[start : start + self.width] for start in range(0, len(self.data), self.width))

    def first(self, count: int) -> RoutedExperts:
        """Of the first ``count`` tokens, of which the last has nothing drawn after it."""
        if count < 1 or count >= len(self):
            return self
        return RoutedExperts(self.width, self.data[: (count - 1) * self.width] + _UNKNOWN_BYTE * self.width)

    def last(self, count: int) -> RoutedExperts:
        """Of the last ``count`` tokens, as they are."""
        return RoutedExperts(self.width, self.data[len(self.data) - count * self.width :])

    def then(self, start: int, rows: RoutedExperts | None, length: int) -> RoutedExperts:
        """Of ``length`` tokens: these before ``start``, then ``rows`` as far as they go; the others are not known.

        Raises:
            ValueError: ``rows`` are of another width, or too many.
        """
        if rows is not None and (rows.width != self.width or start + len(rows) > length):
            raise ValueError(f"{len(rows)} entries of {rows.width} bytes do not go to {start} of {length} tokens")
        kept = self.data[: start * self.width]
        missing = start - len(kept) // self.width
        data = kept + _UNKNOWN_BYTE * (missing * self.width) + (b"" if rows is None else rows.data)
        return RoutedExperts(self.width, data + _UNKNOWN_BYTE * (length * self.width - len(data)))


def width_of(layers: int, experts_per_token: int) -> int:
    """Bytes of an entry."""
    return layers * experts_per_token * _ENTRY.itemsize
