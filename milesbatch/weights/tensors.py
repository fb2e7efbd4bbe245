"""A tensor as raw bytes: dtype in safetensors spelling, shape, and a flat array of its little-endian bytes.

Owns the table of dtypes and the crossings between torch and bytes; torch is imported only there, so that reading,
checking and materialising need none. Invariant: bits are never interpreted, so NaN payloads and signed zeros survive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from milesbatch.records import digest_bytes

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]

ELEMENT_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip

_TORCH_NAMES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32",
    "I64": "int64", "U64": "uint64", "F64": "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RawTensor:
    """Raw bytes with their meaning. ``data`` is flat uint8 of exactly ``num_bytes(dtype, shape)`` elements."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    @property
    def memory(self) -> memoryview:
        """The bytes, without a copy."""
        return self.data.data

    @property
    def digest(self) -> str:
        """Digest of the raw bytes."""
        return digest_bytes(self.memory)


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A tensor whose bytes have not come to the host: contiguous, whole for any stream, and nobody writes to it any more."""

    name: str
    dtype: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def fetch(self) -> RawTensor:
        """All of it, in host memory of its own."""
        with own_stream(self.tensor.device):
            raw = from_torch(self.name, self.tensor)
        if self.tensor.device.type == "cpu":  # what crosses no bus is a view
            return RawTensor(raw.dtype, raw.shape, raw.data.copy())
        return raw


def element_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        ValueError: the dtype is unknown.
    """
    try:
        return ELEMENT_BYTES[dtype]
    except KeyError:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(sorted(ELEMENT_BYTES))}") from None


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a whole tensor; 1 element for the empty shape.

    Raises:
        ValueError: the dtype is unknown.
    """
    return element_bytes(dtype) * math.prod(shape)


def torch_dtype_name(dtype: str) -> str:
    """How torch and Hugging Face configurations spell a dtype: ``BF16`` -> ``bfloat16``."""
    return _TORCH_NAMES[dtype]


def from_torch(name: str, tensor: torch.Tensor) -> RawTensor:
    """View a tensor's bytes; a contiguous CPU tensor shares its memory, so copy ``data`` before keeping it.

    Raises:
        ValueError: the dtype has no safetensors spelling here; names the tensor.
    """
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return RawTensor(_dtype_name(name, tensor), tuple(tensor.shape), flat.numpy())


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On CUDA a stream beside the training's: on that one each answer comes behind all kernels that are queued there."""
    import torch

    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_stream_of(device)):
        yield


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def left_on_device(name: str, tensor: torch.Tensor) -> DeviceTensor:
    """The tensor where it is; one that is not contiguous is copied there.

    Raises:
        ValueError: as :func:`from_torch`.
    """
    return DeviceTensor(name, _dtype_name(name, tensor), tensor.detach().contiguous())


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    spelled = str(tensor.dtype).removeprefix("torch.")
    for dtype, torch_name in _TORCH_NAMES.items():
        if torch_name == spelled:
            return dtype
    raise ValueError(f"tensor {name} has dtype {spelled}, which cannot be stored; known: {list(_TORCH_NAMES.values())}")


def to_torch(tensor: RawTensor) -> torch.Tensor:
    """A torch tensor that shares memory with ``tensor.data``."""
    import torch

    dtype = getattr(torch, torch_dtype_name(tensor.dtype))
    if tensor.data.size == 0:
        # torch refuses to view an empty array as another dtype.
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.from_numpy(tensor.data).view(dtype).reshape(tensor.shape)
