"""The ``steps-zstd`` encoding of a tensor that lives on an accelerator: found there, so that only what changed crosses the bus.

Owns the search for changes in torch operations; never the payload's layout (:mod:`milesbatch.weights.steps`), and never a
policy's version. Invariant: the payload is byte for byte that of :func:`milesbatch.weights.codec.encode` on the same bits.

The device holds the old elements beside the new ones (a second copy of this rank's share, in the stored dtype), the host the
old ones too. What crosses is eight bytes for each change, and a few hundred numbers for each tensor. The host then makes its
new copy by applying the payload, as every follower will, and hashes that. A sum over all words of the device's new elements
shows whether the two copies have drifted apart. Units: memory on the device beside the two copies is at most 64 bytes for
each element of a piece, 128 MiB, however many threads there are: one searches at a time, while others apply and hash. A tensor
that is not contiguous is copied first.

On CUDA the search has a stream of its own (:func:`milesbatch.weights.tensors.own_stream`), so both tensors must be whole before
it is called, as :meth:`milesbatch.backends.protocol.TrainerBackend.named_weights` has them.

The page behind this module is ``docs/format-weights.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from milesbatch.errors import CorruptArtefactError
from milesbatch.weights.codec import FEW, STEP_BYTES, Encoded, PayloadError, apply, open_change
from milesbatch.weights.kernel_choice import kernels
from milesbatch.weights.kernels import NUM_KEYS, NUM_KINDS, Bytes, ClassChanges, Counts, Numbers, key_shift
from milesbatch.weights.steps import SAMPLE_RUN, encode_parts, place_thresholds, sample_stride
from milesbatch.weights.tensors import own_stream

if TYPE_CHECKING:
    import torch

DEVICE_PIECE = 1 << 21
"""Elements that are compared at a time, which bounds the memory that this takes on the device."""

MOST_DEVICE_BYTES = 64 * DEVICE_PIECE
"""Of memory on the device, beside the two tensors."""

_one_at_a_time = threading.Lock()


class DriftError(CorruptArtefactError):
    """The host's copy of the version before is not what the device has."""


def crossed_bytes(changed: int) -> int:
    """Bytes that come from the device for a tensor with so many changes: the sample's counts, places and steps."""
    return NUM_KEYS * NUM_KINDS * 4 + 8 * changed


def encode_on_device(name: str, old: torch.Tensor, new: torch.Tensor, before: Bytes) -> tuple[Encoded, Bytes] | None:
    """The difference of two tensors of one dtype and shape on one device, and the new tensor's bytes on the host.

    ``before``: bytes of ``old`` on the host, flat uint8, not written to; it is what is returned when nothing changed. None:
    so much changed, or elements are so wide, that another encoding is better: copy the tensor and use the codec.

    Raises:
        ValueError: the two tensors, or ``before``, are not of the same size.
        DriftError: ``before`` is not what the device has as ``old``; names the tensor.
    """
    if (old.dtype, old.shape) != (new.dtype, new.shape) or before.size != new.numel() * new.element_size():
        raise ValueError(
            f"tensor {name}: {old.dtype} {tuple(old.shape)}, {new.dtype} {tuple(new.shape)}, {before.size} bytes"
        )
    if new.element_size() not in STEP_BYTES:
        return None
    with _turn(new.device):
        pair = _Pair(_bits(old), _bits(new))
        found = encode_parts(pair.size, pair.width, pair.thresholds(), pair.scan, kernels())
    if found is None:
        return None
    payload, changed = found
    if changed > FEW * pair.size or (changed and len(payload) >= before.size):
        return None
    encoding = "steps-zstd" if changed else "same"
    change = open_change(encoding, payload if changed else b"", num_bytes=before.size, element_bytes=pair.width)
    made = before if not changed else np.empty_like(before)
    try:
        digest = apply([change], before, made, pair.width)
    except PayloadError as error:
        raise _drifted(name, f"the changes do not fit it ({error.what})") from error
    assert digest is not None
    with _turn(new.device):
        _compare(name, pair.new, made)
    return Encoded("steps-zstd" if changed else "same", payload if changed else b"", changed, digest), made


@dataclass(frozen=True, slots=True)
class _Pair:
    """Bits of both tensors as flat signed integers of their width, on the device."""

    old: torch.Tensor
    new: torch.Tensor

    @property
    def size(self) -> int:
        return self.new.numel()

    @property
    def width(self) -> int:
        return self.new.element_size()

    def thresholds(self) -> Numbers:
        """As the codec chooses them: from the same sample, counted on the device."""
        counts = self._count(SAMPLE_RUN, sample_stride(self.size))
        return place_thresholds(counts, self.size, self.width, kernels())

    def _count(self, run: int, stride: int) -> Counts:
        import torch

        device = self.new.device
        starts = torch.arange(0, self.size, stride, device=device)
        places = (starts[:, None] + torch.arange(run, device=device)).reshape(-1)
        places = places[places < self.size]
        before, after = self.old[places], self.new[places]
        keys = _magnitudes(before) >> key_shift(self.width)
        sizes = 1 << torch.arange(NUM_KINDS - 1, device=device)
        kinds = torch.bucketize((after - before).long().abs(), sizes, right=True)
        counts = torch.bincount(keys * NUM_KINDS + kinds, minlength=NUM_KEYS * NUM_KINDS)
        return _to_host(counts.to(torch.int32)).astype(np.uint64).reshape(NUM_KEYS, NUM_KINDS)

    def scan(self, begin: int, stop: int, thresholds: Numbers, capacity: int) -> list[ClassChanges] | None:
        """Changes of each class among the elements from ``begin`` up to ``stop``; None: more than ``capacity``."""
        import torch

        device = self.new.device
        cuts = torch.from_numpy(thresholds.astype(np.int64)).to(device)
        passed = torch.zeros(len(thresholds) + 1, dtype=torch.int64, device=device)
        ranks: list[list[torch.Tensor]] = [[] for _ in range(len(thresholds) + 1)]
        values: list[list[torch.Tensor]] = [[] for _ in range(len(thresholds) + 1)]
        total = 0
        for before, after in self._pieces(begin, stop):
            places = torch.nonzero(before != after).reshape(-1)
            total += places.numel()
            if total > capacity:
                return None
            classes = torch.bucketize(_magnitudes(before), cuts, right=True, out_int32=True)
            steps, of_changes = _zigzag(before[places], after[places]), classes[places]
            for number in range(len(passed)):
                mine = of_changes == number
                so_far = torch.cumsum(classes == number, 0, dtype=torch.int32)
                ranks[number].append(so_far[places[mine]] - 1 + passed[number])
                values[number].append(steps[mine])
                passed[number] += so_far[-1]
        return [
            _class_changes(torch.cat(of_class), torch.cat(steps)) for of_class, steps in zip(ranks, values, strict=True)
        ]

    def _pieces(self, begin: int, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for at in range(begin, stop, DEVICE_PIECE):
            end = min(at + DEVICE_PIECE, stop)
            yield self.old[at:end], self.new[at:end]


@contextmanager
def _turn(device: torch.device) -> Iterator[None]:
    """Of the thread that may search on the device."""
    with _one_at_a_time, own_stream(device):
        yield


def _class_changes(ranks: torch.Tensor, values: torch.Tensor) -> ClassChanges:
    """Ranks are ascending, int64; both become 32 bits before they cross."""
    import torch

    gaps = torch.diff(ranks, prepend=ranks.new_full((1,), -1)) - 1
    both = _to_host(torch.stack([gaps, values]).to(torch.int32))
    gaps_there, values_there = both.view(np.uint32)
    return ClassChanges(np.ascontiguousarray(gaps_there), np.ascontiguousarray(values_there))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return tensor.detach().contiguous().reshape(-1).view(integers[tensor.element_size()])


def _magnitudes(bits: torch.Tensor) -> torch.Tensor:
    """Bits below the sign, int64."""
    return bits.long() & ((1 << (8 * bits.element_size() - 1)) - 1)


def _zigzag(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """New less old bits in their own width, as 2, 4, 6, ... for +1, +2, +3 and 1, 3, 5, ... for -1, -2, -3; int64."""
    step = (after - before).long()  # wraps around in the width, and keeps its sign
    return ((step << 1) ^ (step >> 63)) & ((1 << (8 * before.element_size())) - 1)


def _to_host(tensor: torch.Tensor) -> np.ndarray:
    """The one crossing of the bus."""
    return tensor.cpu().numpy()


def _compare(name: str, new: torch.Tensor, made: Bytes) -> None:
    import torch

    there, here = _sum(new.view(torch.uint8)), _sum(torch.from_numpy(made))
    if there != here:
        raise _drifted(
            name, f"with the changes it comes to a sum of {here:#x}, the device's new elements to {there:#x}"
        )


def _drifted(name: str, how: str) -> DriftError:
    return DriftError(
        f"tensor {name}: the host's copy of the version before is not what the device has: {how}",
        mend="copy the whole tensor from the device, and publish it as a keyframe",
    )


def _sum(data: torch.Tensor) -> int:
    """Of all words of 64 bits, wrapped around, and of the bytes behind them."""
    import torch

    words = data.numel() // 8 * 8
    if data.data_ptr() % 8:
        data = data.clone()
    total = int(data[words:].sum())
    for begin in range(0, words, 8 * DEVICE_PIECE):
        total += int(data[begin : min(begin + 8 * DEVICE_PIECE, words)].view(torch.int64).sum())
    return total & ((1 << 64) - 1)
