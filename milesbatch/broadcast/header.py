"""What goes ahead of the bytes of a broadcast, and how tensors lie in them. Pure; no torch, no network.

All tensors of a version are one stream of bytes, widest elements first and then by name, without holes (so that each begins
at a multiple of its element size). The stream is cut into buckets of a fixed size: a bucket holds several small tensors, or a
part of a large one. Invariant: sender and receiver compute the same cut from the same header.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from milesbatch.errors import BroadcastError
from milesbatch.records import WeightsManifest
from milesbatch.weights.tensors import Bytes, RawTensor, element_bytes, num_bytes


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in the stream: bytes ``begin`` to ``end``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """Which version comes, of which tensors, with which digests, in buckets of which size."""

    version: int
    weights_digest: str
    bucket_bytes: int
    slots: tuple[Slot, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.slots[-1].end if self.slots else 0

    @property
    def num_buckets(self) -> int:
        return -(-self.num_bytes // self.bucket_bytes)

    def bounds(self, bucket: int) -> tuple[int, int]:
        """First byte of a bucket in the stream, and the one after its last."""
        begin = bucket * self.bucket_bytes
        return begin, min(begin + self.bucket_bytes, self.num_bytes)

    def to_bytes(self) -> bytes:
        rows = [[slot.name, slot.dtype, slot.shape, slot.digest] for slot in self.slots]
        body = {
            "version": self.version,
            "weights_digest": self.weights_digest,
            "bucket_bytes": self.bucket_bytes,
            "tensors": rows,
        }
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        """Read what :meth:`to_bytes` gave.

        Raises:
            BroadcastError: it is something else.
        """
        try:
            return _parse(json.loads(data))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BroadcastError(f"the header of a broadcast cannot be read: {error}") from error


def header_of(manifest: WeightsManifest, bucket_bytes: int) -> Header:
    """The header of a published version."""
    rows = [(entry.name, entry.dtype, entry.shape, entry.digest) for entry in manifest.tensors]
    return Header(manifest.version, manifest.weights_digest, bucket_bytes, _slots(rows))


def fill_bucket(header: Header, tensors: Mapping[str, RawTensor], bucket: int, buffer: Bytes) -> Bytes:
    """Copy the bytes of one bucket into ``buffer`` (flat uint8, at least ``bucket_bytes``); returns the part that is used.

    Raises:
        BroadcastError: ``tensors`` are not those of the header.
    """
    begin, end = header.bounds(bucket)
    for slot in header.slots:
        first, last = max(begin, slot.begin), min(end, slot.end)
        if first < last:
            tensor = tensors.get(slot.name)
            if tensor is None or tensor.data.size != slot.end - slot.begin:
                raise BroadcastError(f"tensor {slot.name} of policy version {header.version} is not there to be sent")
            buffer[first - begin : last - begin] = tensor.data[first - slot.begin : last - slot.begin]
    return buffer[: end - begin]


def tensors_in(header: Header, stream: Bytes) -> dict[str, RawTensor]:
    """Tensors that share memory with ``stream`` (flat uint8 of ``header.num_bytes``)."""
    return {slot.name: RawTensor(slot.dtype, slot.shape, stream[slot.begin : slot.end]) for slot in header.slots}


def new_stream(header: Header) -> Bytes:
    """Memory for all tensors of a version.

    Raises:
        BroadcastError: there is not as much memory.
    """
    try:
        return np.empty(header.num_bytes, np.uint8)
    except MemoryError as error:
        raise BroadcastError(f"no memory for {header.num_bytes} bytes of policy version {header.version}") from error


def _slots(rows: Iterable[tuple[str, str, tuple[int, ...], str]]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    begin = 0
    for name, dtype, shape, digest in sorted(rows, key=lambda row: (-element_bytes(row[1]), row[0])):
        end = begin + num_bytes(dtype, shape)
        slots.append(Slot(name, dtype, shape, digest, begin, end))
        begin = end
    return tuple(slots)


def _parse(body: dict[str, Any]) -> Header:
    rows = [(str(name), str(dtype), tuple(shape), str(digest)) for name, dtype, shape, digest in body["tensors"]]
    numbers = [body["version"], body["bucket_bytes"], *(size for _, _, shape, _ in rows for size in shape)]
    if not all(type(value) is int and value >= 0 for value in numbers) or body["bucket_bytes"] < 1:
        raise ValueError("a size that is not a whole number")
    if len({name for name, *_ in rows}) != len(rows):
        raise ValueError("a tensor comes twice")
    return Header(body["version"], str(body["weights_digest"]), body["bucket_bytes"], _slots(rows))
