"""Differences found by torch operations: byte for byte those of the codec, and little crosses to the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from milesbatch.errors import CorruptArtefactError
from milesbatch.weights import device_diff, steps
from milesbatch.weights.codec import encode
from milesbatch.weights.device_diff import encode_on_device

DTYPES = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32, torch.int8: np.uint8}


def _pair(dtype: torch.dtype, size: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All bit patterns, among them NaN with payload and both zeros; steps wrap around, also over the sign."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]
    largest = int(np.iinfo(kind).max)
    scale = rng.choice([largest, largest // 3, largest // 50 + 1], size)
    old = (rng.random(size) * scale).astype(kind)
    new = old.copy()
    where = rng.random(size) < share * (old < largest // 4)
    new[where] += rng.choice([1, largest, 2, largest - 4, largest // 2], int(where.sum())).astype(kind)
    old_torch, new_torch = (torch.from_numpy(array.view(np.uint8)).view(dtype) for array in (old, new))
    return old_torch, new_torch


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.03])
@pytest.mark.parametrize("size", [1, 65, 5_000, (1 << 18) + 333])
def test_the_payload_is_that_of_the_codec(
    dtype: torch.dtype, share: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_diff, "DEVICE_PIECE", 1 << 16)  # several for one segment
    old, new = _pair(dtype, size, share, size)
    before = _bytes(old).copy()
    expected = encode(before, _bytes(new), old.element_size())
    found = encode_on_device("w", old, new, before)
    if found is None:
        assert expected.encoding != "same" and expected.changed > 0 and share > 0 and size < 5_000
        return
    encoded, made = found
    assert encoded == expected
    assert np.array_equal(made, _bytes(new)) and np.array_equal(before, _bytes(old))
    assert (made is before) == (expected.encoding == "same")


def test_several_segments_and_shorter_ones_where_much_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SEGMENT", 1 << 20)
    monkeypatch.setattr(steps, "CAPACITY", 1 << 13)
    old, new = _pair(torch.bfloat16, (3 << 18) + 5, 0.02, 3)
    new[1 << 18 : (1 << 18) + 4000] = 7.0
    before = _bytes(old).copy()
    found = encode_on_device("w", old, new, before)
    assert found is not None and found[0] == encode(before, _bytes(new), 2)


def test_tensors_that_are_not_contiguous_or_of_many_dimensions() -> None:
    old, new = _pair(torch.bfloat16, 4096, 0.03, 4)
    old, new = old.reshape(64, 64).T, new.reshape(64, 64).T
    before = _bytes(old).copy()
    found = encode_on_device("w", old, new, before)
    assert found is not None and found[0] == encode(before, _bytes(new), 2)


def test_only_what_changed_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = []
    to_host = device_diff._to_host
    monkeypatch.setattr(device_diff, "_to_host", lambda tensor: crossed.append(tensor.nbytes) or to_host(tensor))
    old, new = _pair(torch.bfloat16, 1 << 20, 0.01, 5)
    found = encode_on_device("w", old, new, _bytes(old).copy())
    assert found is not None and found[0].changed > 1000
    assert sum(crossed) == 8 * found[0].changed + 8192


def test_where_another_encoding_is_better_there_is_none() -> None:
    old, _ = _pair(torch.bfloat16, 1 << 16, 0.0, 6)
    assert encode_on_device("w", old, torch.full_like(old, 3.0), _bytes(old).copy()) is None
    wide = torch.zeros(10, dtype=torch.float64)
    assert encode_on_device("w", wide, wide + 1, _bytes(wide).copy()) is None


def test_a_host_copy_that_drifted_is_found() -> None:
    old, new = _pair(torch.bfloat16, 1 << 16, 0.01, 7)
    for place in (0, 70_001, 131_071):
        before = _bytes(old).copy()
        before[place] ^= 1
        with pytest.raises(CorruptArtefactError, match="tensor w:"):
            encode_on_device("w", old, new, before)
    with pytest.raises(ValueError, match="tensor w:"):
        encode_on_device("w", old, new[:-1], _bytes(old).copy())
