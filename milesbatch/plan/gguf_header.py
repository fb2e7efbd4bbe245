"""The beginning of a GGUF file: its numbers and the shapes of its tensors, without the data.

Never reads weights. Invariant: whatever does not fit the format is a ``ValueError`` before it is allocated.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 28


def read_header(path: Path) -> tuple[dict[str, float | str], dict[str, int]]:
    """Metadata (numbers and strings; arrays are passed over) and elements by tensor name.

    Raises:
        OSError: it cannot be read. ValueError, struct.error: it is no GGUF file of version 2 or 3.
    """
    with open(path, "rb") as stream:
        if stream.read(4) != b"GGUF" or _number(stream, "<I") not in (2, 3):
            raise ValueError("it is not a GGUF file of version 2 or 3")
        num_tensors, num_values = int(_number(stream, "<Q")), int(_number(stream, "<Q"))
        metadata: dict[str, float | str] = {}
        for _ in range(num_values):
            name = _string(stream)
            value = _value(stream, int(_number(stream, "<I")))
            if value is not None:
                metadata[name] = value
        tensors = {}
        for _ in range(num_tensors):
            name = _string(stream)
            dimensions = int(_number(stream, "<I"))
            if dimensions > 8:
                raise ValueError(f"tensor {name} has {dimensions} dimensions")
            tensors[name] = math.prod(int(_number(stream, "<Q")) for _ in range(dimensions))
            if len(stream.read(12)) != 12:  # type and place of the data
                raise ValueError("it ends inside its header")
        return metadata, tensors


def _value(stream: BinaryIO, kind: int) -> float | str | None:
    if kind == _STRING:
        return _string(stream)
    if kind in _NUMBERS:
        return _number(stream, _NUMBERS[kind])
    if kind != _ARRAY:
        raise ValueError(f"a value of the unknown kind {kind}")
    inner, count = int(_number(stream, "<I")), int(_number(stream, "<Q"))
    if inner in _NUMBERS:
        stream.seek(struct.calcsize(_NUMBERS[inner]) * count, 1)
    else:
        for _ in range(count):
            _value(stream, inner)
    return None


def _number(stream: BinaryIO, form: str) -> float:
    (value,) = struct.unpack(form, stream.read(struct.calcsize(form)))
    return float(value) if isinstance(value, float) else int(value)


def _string(stream: BinaryIO) -> str:
    length = int(_number(stream, "<Q"))
    if length > _LONGEST:
        raise ValueError(f"a text of {length} bytes")
    return stream.read(length).decode()
