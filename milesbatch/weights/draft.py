"""A version on its way: one rank's share of its tensors, their digests, and their differences to the version before.

Owns the encoding of a share and what its part of the manifest says; never writes. Invariant: a tensor that did not change is
the base's own array, so that a version costs memory only for what changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from milesbatch.records import FileRef, TensorEntry
from milesbatch.weights.codec import Encoded, encode
from milesbatch.weights.digest import TensorIdentity, weights_digest
from milesbatch.weights.folding import in_threads
from milesbatch.weights.tensors import RawTensor, element_bytes, from_torch

if TYPE_CHECKING:
    import torch

_WORTHWHILE = 0.8
"""A delta of at least this share of a full copy is not worth its chain: the full copy is published instead."""

Tensors = Mapping[str, RawTensor]


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

    def summary(self, base: Tensors | None) -> Summary:
        return Summary(
            identities=tuple((name, t.dtype, t.shape, self.digests[name]) for name, t in self.tensors.items()),
            num_bytes=sum(tensor.data.size for tensor in self.tensors.values()),
            delta_bytes=sum(len(difference.payload) for difference in self.differences.values()),
            can_be_delta=base is not None and set(self.differences) == set(base) == set(self.tensors),
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
    for name, tensor in named:
        if name in tied:
            continue
        if name in tensors:
            raise ValueError(f"tensor {name} comes twice")
        raw = from_torch(name, tensor)
        tensors[name] = RawTensor(raw.dtype, raw.shape, raw.data.copy()) if copy else raw
    return tensors


def make_draft(tensors: Tensors, base: Tensors | None) -> Draft:
    """Encode every tensor against the base, several at a time. Arrays become the draft's; nobody may change them any more."""
    draft, olds = Draft(), base or {}

    def difference(item: tuple[str, RawTensor]) -> Encoded | str:
        name, raw = item
        old = olds.get(name)
        if old is None or (old.dtype, old.shape) != (raw.dtype, raw.shape):
            return raw.digest
        return encode(old.data, raw.data, element_bytes(raw.dtype))

    num_bytes = sum(tensor.data.size for tensor in tensors.values())
    found = in_threads(difference, tensors.items(), num_bytes=num_bytes)
    for (name, raw), made in zip(tensors.items(), found, strict=True):
        if isinstance(made, str):
            draft.tensors[name], draft.digests[name] = raw, made
            continue
        draft.tensors[name] = olds[name] if made.encoding == "same" else raw
        draft.differences[name], draft.digests[name] = made, made.digest
    return draft
