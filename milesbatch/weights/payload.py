"""Parts that all encodings of weights share: the error, zstd within known bounds, numbers of variable length.

Owns no layout. Invariant: nothing is allocated on the word of a payload beyond what the caller allows.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from milesbatch.errors import CorruptArtefactError


class Change(Protocol):
    """One payload on its way into a tensor, piece by piece from front to end, in place."""

    @property
    def needs_old(self) -> bool:
        """Must the pieces hold the old elements? Else they may hold anything."""
        ...

    def apply(self, elements: NDArray[np.unsignedinteger[Any]], begin: int) -> None:
        """Turn the elements from ``begin`` on into new ones.

        Raises:
            CorruptArtefactError: the payload is not one for such a tensor; the elements are then undefined.
        """
        ...

    def finish(self) -> None:
        """Raises:
        CorruptArtefactError: the payload holds more than this tensor took, or other than it stated.
        """
        ...


def corrupt(what: str) -> CorruptArtefactError:
    """The error of a payload that no encoder gives."""
    return CorruptArtefactError(f"damaged weights payload: {what}", mend="run `milesbatch weights verify` on the run")


def expect(holds: bool, what: str) -> None:
    """Raises:
    CorruptArtefactError: unless ``holds``.
    """
    if not holds:
        raise corrupt(what)


def varint(number: int) -> bytes:
    """LEB128: seven bits a byte, lowest first, the highest bit set on all but the last byte."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class Cursor:
    """Reads a payload from front to end."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        """Bytes not yet read."""
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes.

        Raises:
            CorruptArtefactError: there are fewer.
        """
        expect(0 <= size <= self.left, f"it ends after {len(self._data)} bytes, inside a part of {size}")
        part = self._data[self._at : self._at + size]
        self._at += size
        return part

    def rest(self) -> memoryview:
        """All bytes not yet read; :meth:`take` what of them was used."""
        return self._data[self._at :]

    def number(self, most: int) -> int:
        """The next LEB128 number.

        Raises:
            CorruptArtefactError: it is larger than ``most``, or not whole.
        """
        number = shift = 0
        while True:
            (byte,) = self.take(1)
            number |= (byte & 0x7F) << shift
            expect(number <= most, f"a count of {number} where {most} is the most")
            if not byte & 0x80:
                return number
            shift += 7
            expect(shift < 63, "a number without end")


def decompress(data: memoryview, size: int) -> bytes:
    """One zstd frame that must hold exactly ``size`` bytes, stated in its header.

    Raises:
        CorruptArtefactError: it is none, or holds another number of bytes; found before more than that is allocated.
    """
    try:
        stated = zstandard.frame_content_size(data)
        expect(stated == size, f"the compressed part states {stated} bytes, expected {size}")
        body = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise corrupt(f"zstd: {error}") from error
    expect(len(body) == size, f"the compressed part holds {len(body)} bytes, {size} were stated")
    return body
