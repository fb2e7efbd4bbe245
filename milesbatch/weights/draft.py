"""A version on its way: one rank's share of its tensors, their digests, and their differences to the version before.

Owns the encoding of a share and what its part of the manifest says; never writes. Invariant: a tensor that did not change is
the base's own array, so that a version costs memory only for what changed.

A share comes as bytes, or is still on the device that computed it. Then only what changed is fetched, where the device has the
base's tensor too and that pays; else the whole tensor. The payload is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from milesbatch.records import FileRef, TensorEntry
from milesbatch.weights.codec import Encoded, encode
from milesbatch.weights.device_diff import DriftError, crossed_bytes, encode_on_device
from milesbatch.weights.digest import TensorIdentity, weights_digest
from milesbatch.weights.folding import in_threads
from milesbatch.weights.tensors import DeviceTensor, RawTensor, element_bytes, from_torch, left_on_device

if TYPE_CHECKING:
    import torch

_WORTHWHILE = 0.8
"""A delta of at least this share of a full copy is not worth its chain: the full copy is published instead."""

Tensors = Mapping[str, RawTensor]
Share = Mapping[str, RawTensor | DeviceTensor]
"""One rank's tensors of a version that is to be published; nobody changes them any more."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's share of a committed version: in host memory, and what the device keeps of it besides."""

    version: int
    tensors: Tensors
    there: Mapping[str, DeviceTensor] = field(default_factory=dict)

    @classmethod
    def of(cls, version: int, share: Share) -> Snapshot:
        """Fetches what is on the device, and leaves it there too."""
        there = {name: tensor for name, tensor in share.items() if isinstance(tensor, DeviceTensor)}
        return cls(version, {name: fetched(tensor) for name, tensor in share.items()}, there)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a rank tells the others of its draft."""

    identities: tuple[TensorIdentity, ...]
    num_bytes: int
    delta_bytes: int
    can_be_delta: bool
    """Each of its tensors has a difference, and none of the base is missing."""


@dataclass(slots=True)
class Draft:
    """A rank's share, encoded."""

    tensors: dict[str, RawTensor] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    differences: dict[str, Encoded] = field(default_factory=dict)
    there: dict[str, DeviceTensor] = field(default_factory=dict)
    """What the device has of it."""
    crossed_bytes: int = 0
    """Bytes of the share that came to the host, or would have from a device: all of them but where only changes crossed."""
    drifts: list[str] = field(default_factory=list)
    """Tensors of which host and device had different versions, in words. They have no difference, so that followers get the
    device's bytes from a full copy."""

    def summary(self, base: Snapshot | None) -> Summary:
        return Summary(
            identities=tuple((name, t.dtype, t.shape, self.digests[name]) for name, t in self.tensors.items()),
            num_bytes=sum(tensor.data.size for tensor in self.tensors.values()),
            delta_bytes=sum(len(difference.payload) for difference in self.differences.values()),
            can_be_delta=base is not None and set(self.differences) == set(base.tensors) == set(self.tensors),
        )

    def delta_payload(self) -> dict[str, RawTensor]:
        """What a delta file holds: nothing of tensors that did not change."""
        return {
            name: RawTensor("U8", (len(difference.payload),), np.frombuffer(difference.payload, np.uint8))
            for name, difference in self.differences.items()
            if difference.encoding != "same"
        }

    def entries(self, has_delta: bool, file: FileRef | None) -> Iterator[TensorEntry]:
        """Entries of the manifest for this share, whose payload is in ``file``."""
        for name, tensor in sorted(self.tensors.items()):
            num_elements = tensor.data.size // element_bytes(tensor.dtype)
            difference = self.differences[name] if has_delta else Encoded("raw", b"", num_elements, self.digests[name])
            yield TensorEntry(
                name=name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                digest=self.digests[name],
                encoding=difference.encoding,
                changed=difference.changed,
                file=None if difference.encoding == "same" or file is None else file.path,
            )


@dataclass(frozen=True, slots=True)
class Whole:
    """The drafts of all ranks together, as far as decisions need them."""

    digest: str
    names: frozenset[str]
    num_bytes: int
    delta_bytes: int
    has_delta: bool
    """A delta is possible, and smaller than a full copy by enough."""


def together(summaries: Sequence[Summary]) -> Whole:
    """The version that the shares make.

    Raises:
        ValueError: a tensor is in two of them.
    """
    identities = [identity for summary in summaries for identity in summary.identities]
    num_bytes = sum(summary.num_bytes for summary in summaries)
    delta_bytes = sum(summary.delta_bytes for summary in summaries)
    return Whole(
        digest=weights_digest(identities),
        names=frozenset(identity[0] for identity in identities),
        num_bytes=num_bytes,
        delta_bytes=delta_bytes,
        has_delta=all(summary.can_be_delta for summary in summaries)
        and (delta_bytes < _WORTHWHILE * num_bytes or delta_bytes == 0),
    )


def copies(named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]) -> dict[str, RawTensor]:
    """Tensors in memory of their own, one alive at a time besides; aliases are passed over.

    Raises:
        ValueError: a name comes twice.
    """
    return _taken(named, tied, copy=True)


def owned(named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]) -> dict[str, RawTensor]:
    """As :func:`copies`, of tensors that nobody else writes to: without a copy."""
    return _taken(named, tied, copy=False)


def _taken(named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str], *, copy: bool) -> dict[str, RawTensor]:
    tensors: dict[str, RawTensor] = {}
    for name, tensor in _once(named, tied):
        raw = from_torch(name, tensor)
        tensors[name] = RawTensor(raw.dtype, raw.shape, raw.data.copy()) if copy else raw
    return tensors


def left_there(named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]) -> dict[str, DeviceTensor]:
    """As :func:`owned`, of tensors that stay on the device until it is known what of them changed."""
    return {name: left_on_device(name, tensor) for name, tensor in _once(named, tied)}


def _once(named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[str] = set()
    for name, tensor in named:
        if name in tied:
            continue
        if name in seen:
            raise ValueError(f"tensor {name} comes twice")
        seen.add(name)
        yield name, tensor


def fetched(tensor: RawTensor | DeviceTensor) -> RawTensor:
    """Its bytes in host memory."""
    return tensor.fetch() if isinstance(tensor, DeviceTensor) else tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """What became of one tensor."""

    raw: RawTensor
    digest: str
    difference: Encoded | None
    crossed_bytes: int
    drift: str | None = None


def make_draft(share: Share, base: Snapshot | None) -> Draft:
    """Encode every tensor against the base, several at a time. Arrays become the draft's; nobody may change them any more."""
    draft = Draft(there={name: tensor for name, tensor in share.items() if isinstance(tensor, DeviceTensor)})
    olds, theirs = ({}, {}) if base is None else (base.tensors, base.there)

    def part(item: tuple[str, RawTensor | DeviceTensor]) -> _Part:
        name, tensor = item
        old = olds.get(name)
        if old is None or (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
            return _whole(tensor)
        before = theirs.get(name)
        if isinstance(tensor, DeviceTensor) and before is not None:
            return _found_there(before, tensor, old) or _against(old, tensor)
        return _against(old, tensor)

    num_bytes = sum(_size(tensor) for tensor in share.values())
    for name, made in zip(share, in_threads(part, share.items(), num_bytes=num_bytes), strict=True):
        draft.tensors[name], draft.digests[name] = made.raw, made.digest
        draft.crossed_bytes += made.crossed_bytes
        if made.difference is not None:
            draft.differences[name] = made.difference
        if made.drift is not None:
            draft.drifts.append(made.drift)
    return draft


def _whole(tensor: RawTensor | DeviceTensor, drift: str | None = None) -> _Part:
    raw = fetched(tensor)
    return _Part(raw, raw.digest, None, raw.data.size, drift)


def _against(old: RawTensor, tensor: RawTensor | DeviceTensor) -> _Part:
    raw = fetched(tensor)
    made = encode(old.data, raw.data, element_bytes(raw.dtype))
    return _Part(old if made.encoding == "same" else raw, made.digest, made, raw.data.size)


def _found_there(before: DeviceTensor, tensor: DeviceTensor, old: RawTensor) -> _Part | None:
    """The difference as the device finds it; None when the whole tensor had better come."""
    if tensor.num_bytes <= crossed_bytes(0):
        return None
    try:
        found = encode_on_device(tensor.name, before.tensor, tensor.tensor, old.data)
    except DriftError as error:
        return _whole(tensor, error.what)
    if found is None:
        return None
    made, data = found
    raw = old if made.encoding == "same" else RawTensor(tensor.dtype, tensor.shape, data)
    return _Part(raw, made.digest, made, crossed_bytes(made.changed))


def _size(tensor: RawTensor | DeviceTensor) -> int:
    return tensor.num_bytes if isinstance(tensor, DeviceTensor) else tensor.data.size
