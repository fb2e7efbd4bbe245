"""The format of weights read with plain numpy: the reference that the fast reader is compared with, and a start for a port.

Imports nothing of milesbatch, and favours plainness over speed: no pieces, no threads, no compiled loops. It checks every
digest on the way and raises ``ValueError`` for whatever does not fit. It takes the nearest keyframe and every delta after
it, and knows nothing of retired versions, fenced incarnations or other ways around damage. As a command:
``python -m milesbatch.weights.reference RUN VERSION``. The page behind it is ``docs/format-weights.md``.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Array = NDArray[Any]

_WIDTH = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
_WIDTH |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
_PART_BYTES = 1 << 24
_SEGMENT = 1 << 23
_CHANGES = 1 << 19


def read_version(run: Path, version: int) -> dict[str, Bytes]:
    """Raw little-endian bytes of every stored tensor of a policy version, by name.

    Raises:
        ValueError: something is damaged, or missing; names it.
    """
    directory = run / "weights" / f"{version:06d}"
    manifest = json.loads((directory / "manifest.json").read_bytes())
    keyframe = manifest["keyframe"]
    if keyframe is not None:
        full = {keyframe, *manifest.get("keyframe_shards", ())}
        files = [entry for entry in manifest["files"] if entry["path"] in full]
        tensors = _read_files(directory, files)
    else:
        before = read_version(run, manifest["parent"])
        payloads = _read_files(directory, manifest["files"])
        tensors = {}
        for entry in manifest["tensors"]:
            name, width = entry["name"], _WIDTH[entry["dtype"]]
            payload = b"" if entry["encoding"] == "same" else payloads[name].tobytes()
            tensors[name] = decode(entry["encoding"], payload, before[name], width)
    for entry in manifest["tensors"]:
        _check(_digest(tensors[entry["name"]]) == entry["digest"], f"{directory}: tensor {entry['name']}")
    return tensors


def decode(encoding: str, payload: bytes, old: Bytes, width: int) -> Bytes:
    """New bytes of one tensor of ``width`` bytes an element.

    Raises:
        ValueError: the payload does not fit.
    """
    if encoding == "same":
        return old.copy()
    if encoding == "raw":
        _check(len(payload) == old.size, "size of a raw payload")
        return np.frombuffer(payload, np.uint8).copy()
    if encoding == "raw-zstd":
        return np.concatenate([np.empty(0, np.uint8), *_parts(payload, old.size)])
    if encoding == "xor-zstd":
        planes = [part.reshape(width, -1).T.reshape(-1) for part in _parts(payload, old.size)]
        return np.concatenate([np.empty(0, np.uint8), *planes]) ^ old
    if encoding == "steps-zstd":
        return _decode_steps(payload, old, width)
    raise ValueError(f"unknown encoding {encoding}")


# -- steps-zstd -----------------------------------------------------------------------------------------------------------


def _decode_steps(payload: bytes, old: Bytes, width: int) -> Bytes:
    elements = old.view(f"<u{width}").copy()
    _check(len(payload) >= 2, "it ends too early")
    layout, num_thresholds = payload[0], payload[1]
    _check(layout == 3, f"layout {layout}")
    reader = _Reader(payload, 2)
    # Thresholds are the highest bits of magnitudes: eight, of elements of one byte seven.
    thresholds = np.frombuffer(reader.take(num_thresholds), np.uint8).astype(np.int64) << max(0, 8 * width - 9)
    sign_off = elements.dtype.type((1 << (8 * width - 1)) - 1)
    begin = 0
    while begin < elements.size:
        size = reader.number()
        _check(0 < size <= min(_SEGMENT, elements.size - begin), f"segment of {size} elements")
        segment = elements[begin : begin + size]
        # A class is how many thresholds the old bits without their sign reach.
        classes = np.searchsorted(thresholds, segment & sign_off, side="right")
        counts = [_Class(reader, min(size, _CHANGES)) for _ in range(num_thresholds + 1)]
        _check(sum(of_class.changes for of_class in counts) <= min(size, _CHANGES), "more changes than a segment has")
        for of_class in counts:
            of_class.take_exceptions(reader)
        reader.take_tokens(sum(of_list.tokens for of_class in counts for of_list in [of_class.gaps, *of_class.values]))
        gaps = [reader.numbers(of_class.gaps) for of_class in counts]
        for number, of_class in enumerate(counts):
            _change(segment, np.flatnonzero(classes == number), gaps[number], _steps(reader, of_class))
        begin += size
    _check(reader.at == len(payload), "bytes behind the end")
    return elements.view(np.uint8)


@dataclass
class _List:
    """How many numbers; how many lowest bits of them are no part of the tokens; when most of them are 0, how many are not."""

    size: int
    shift: int = 0
    others: int | None = None

    @property
    def tokens(self) -> int:
        return self.size if self.others is None else 2 * self.others

    @classmethod
    def take(cls, reader: _Reader, size: int, most_shift: int = 0) -> _List:
        count = reader.number() if size else 0
        _check(count <= size + most_shift + 1, "more numbers than there are")
        return cls(size, count) if count <= most_shift else cls(size, 0, count - most_shift - 1)


class _Class:
    """Counts of a class: what its lists are."""

    def __init__(self, reader: _Reader, most: int) -> None:
        self.changes = reader.number()
        _check(self.changes <= most, f"{self.changes} changes, {most} are the most")  # before anything is allocated
        self.gaps = _List.take(reader, self.changes, most_shift=21)
        self.values: list[_List] = []

    def take_exceptions(self, reader: _Reader) -> None:
        exceptions = reader.number() if self.changes else 0
        _check(exceptions <= self.changes + 1, "more exceptions than changes")
        sizes = [self.changes] if exceptions > self.changes else [exceptions, exceptions]
        self.values = [_List.take(reader, size) for size in sizes]


def _steps(reader: _Reader, counts: _Class) -> Array:
    """New bits minus old bits for each change."""
    if len(counts.values) == 1:
        return _unzigzag(reader.numbers(counts.values[0]) + 1)
    num_units = counts.changes - counts.values[0].size
    bits = np.frombuffer(reader.take((num_units + 7) // 8), np.uint8)
    exception_gaps, exceptions = (reader.numbers(of_list) for of_list in counts.values)
    places = np.cumsum(exception_gaps) + np.arange(exceptions.size)
    _check(not places.size or int(places[-1]) < counts.changes, "an exception behind the last change")
    zigzag = np.empty(counts.changes, np.int64)
    is_exception = np.zeros(counts.changes, bool)
    is_exception[places] = True
    zigzag[~is_exception] = 1 + np.unpackbits(bits, count=num_units, bitorder="little").astype(np.int64)
    zigzag[is_exception] = exceptions + 3
    return _unzigzag(zigzag)


def _change(segment: Array, members: Array, gaps: Array, steps: Array) -> None:
    ranks = np.cumsum(gaps) + np.arange(gaps.size)
    _check(not ranks.size or int(ranks[-1]) < members.size, "a change behind the end of its class")
    segment[members[ranks]] += steps.astype(segment.dtype)  # modulo 2 to the width


def _unzigzag(zigzag: Array) -> Array:
    return np.where(zigzag % 2, -(zigzag + 1) // 2, zigzag // 2)


class _Reader:
    """A payload from front to end."""

    def __init__(self, payload: bytes, at: int = 0) -> None:
        self._payload, self.at = payload, at
        self._tokens = np.empty(0, np.int64)

    def take(self, size: int) -> bytes:
        _check(0 <= size <= len(self._payload) - self.at, "it ends too early")
        self.at += size
        return self._payload[self.at - size : self.at]

    def number(self) -> int:
        """LEB128."""
        number = shift = 0
        while True:
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
            _check(shift < 63, "a number without end")

    def take_tokens(self, count: int) -> None:
        """All tokens of a segment."""
        stored = self.take(self.number()) if count else b""
        if len(stored) < count:
            frame = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
            _check(stored[:1] == b"\0", "a frame that states its size")
            try:
                stored = frame.decompress(stored, max_output_size=count)
            except zstandard.ZstdError as error:
                raise ValueError(f"damaged weights: zstd: {error}") from error
        _check(len(stored) == count, "tokens")
        self._tokens = np.frombuffer(stored, np.uint8).astype(np.int64)

    def numbers(self, of: _List) -> Array:
        """The next list; where most are 0, only the others with their places."""
        if of.others is None:
            return self._plain(of.size, of.shift)
        numbers = np.zeros(of.size, np.int64)
        places = np.cumsum(self._plain(of.others, 0)) + np.arange(of.others)
        _check(not of.others or int(places[-1]) < of.size, "a number behind the end of its list")
        numbers[places] = self._plain(of.others, 0) + 1
        return numbers

    def _plain(self, count: int, shift: int) -> Array:
        """The next tokens with the bits that they do not say."""
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        _check(not count or int(tokens.max()) <= 127, "token above 127")
        # Tokens below 16 are the number itself; then 4 tokens for each power of two from 16 on.
        num_bits = np.where(tokens < 16, 0, 2 + (tokens - 16) // 4) + shift
        total = int(num_bits.sum())
        bits = np.unpackbits(np.frombuffer(self.take((total + 7) // 8), np.uint8), count=total, bitorder="little")
        numbers: Array = np.where(tokens < 16, tokens, 4 + tokens % 4) << num_bits
        at = 0
        for place in np.flatnonzero(num_bits):
            width = int(num_bits[place])
            numbers[place] += int((bits[at : at + width].astype(np.int64) << np.arange(width)).sum())
            at += width
        _check(not count or int(numbers.max()) < 1 << 32, "a number of more than 32 bits")
        return numbers


# -- files ------------------------------------------------------------------------------------------------------------------


def _parts(payload: bytes, size: int) -> Iterator[Bytes]:
    """Contents of the frames, each of 16 MiB of the tensor but the last."""
    reader = _Reader(payload)
    for begin in range(0, size, _PART_BYTES):
        num = min(_PART_BYTES, size - begin)
        frame = reader.take(reader.number())
        try:
            _check(zstandard.frame_content_size(frame) == num, "size of a part")
            body = zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError as error:
            raise ValueError(f"zstd: {error}") from error
        yield np.frombuffer(body, np.uint8)
    _check(reader.at == len(payload), "bytes behind the end")


def _read_files(directory: Path, files: list[dict[str, Any]]) -> dict[str, Bytes]:
    """Arrays of safetensors files (https://huggingface.co/docs/safetensors), after the comparison of their digests."""
    arrays: dict[str, Bytes] = {}
    for entry in files:
        data = np.fromfile(directory / entry["path"], np.uint8)
        _check(data.size == entry["bytes"] and _digest(data) == entry["digest"], f"{directory / entry['path']}")
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        for name, value in header.items():
            if name != "__metadata__":
                begin, end = value["data_offsets"]
                arrays[name] = data[8 + length + begin : 8 + length + end]
    return arrays


def _digest(data: Bytes) -> str:
    return "xxh128:" + xxhash.xxh3_128_hexdigest(np.ascontiguousarray(data).data)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"damaged weights: {what}")


def main(arguments: list[str]) -> None:
    if len(arguments) != 2 or not arguments[1].isdecimal():
        sys.exit("usage: python -m milesbatch.weights.reference RUN VERSION")
    try:
        tensors = read_version(Path(arguments[0]), int(arguments[1]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"error: policy version {arguments[1]} of {arguments[0]} cannot be read: {error}")
    for name, tensor in sorted(tensors.items()):
        print(f"{_digest(tensor)}  {tensor.size:>12}  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
