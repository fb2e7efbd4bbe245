"""Payload files: readable by the safetensors library, and nothing but the committed bytes is accepted."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from milesbatch.errors import CorruptArtefactError
from milesbatch.records import FileRef, digest_bytes
from milesbatch.weights.tensorfile import read_rows, read_tensors, view_tensors, write_tensors
from milesbatch.weights.tensors import RawTensor, from_torch, to_torch

BITS = torch.tensor([0x7FC1, 0xFFC0, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001], dtype=torch.int32)


def samples() -> dict[str, torch.Tensor]:
    return {
        "bf16": BITS.to(torch.uint16).view(torch.bfloat16),
        "f16": BITS.to(torch.uint16).view(torch.float16),
        "f32": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.empty(2, 0, 3),
        "columns": torch.arange(12.0).reshape(3, 4).t(),
        "bool": torch.tensor([True, False, True]),
        "fp8": torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn),
    }


def write(path: Path, tensors: dict[str, RawTensor]) -> FileRef:
    with open(path, "wb") as stream:
        write_tensors(stream, tensors)
    return ref(path)


def ref(path: Path) -> FileRef:
    return FileRef(path=path.name, bytes=path.stat().st_size, digest=digest_bytes(path.read_bytes()))


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_every_dtype_comes_back_bit_for_bit_here_and_in_the_safetensors_library(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.safetensors", samples()
    written = write(path, {name: from_torch(name, tensor) for name, tensor in tensors.items()})
    ours = {name: to_torch(raw) for name, raw in read_tensors(path, written).items()}
    theirs = load_file(path)
    assert set(ours) == set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        assert bits(ours[name]) == bits(theirs[name]) == bits(tensor), name


def test_the_same_tensors_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    raw = {name: from_torch(name, tensor) for name, tensor in samples().items()}
    first = write(tmp_path / "a", raw)
    assert write(tmp_path / "b", dict(reversed(raw.items()))).digest == first.digest


def test_to_torch_shares_memory() -> None:
    raw = RawTensor("F32", (2,), np.zeros(8, np.uint8))
    to_torch(raw)[1] = 1.0
    assert raw.data.tobytes() == struct.pack("<2f", 0, 1)


def test_a_dtype_that_cannot_be_stored_names_the_tensor() -> None:
    with pytest.raises(ValueError, match=r"tensor w has dtype complex64"):
        from_torch("w", torch.zeros(2, dtype=torch.complex64))


def test_data_that_does_not_fit_its_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'w' cannot be stored"):
        write(tmp_path / "a", {"w": RawTensor("F32", (3,), np.zeros(8, np.uint8))})
    with pytest.raises(ValueError, match="__metadata__"):
        write(tmp_path / "a", {"__metadata__": RawTensor("U8", (1,), np.zeros(1, np.uint8))})


def test_truncation_and_every_flipped_byte_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a"
    written = write(path, {"w": RawTensor("F32", (6,), np.arange(24, dtype=np.uint8))})
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptArtefactError, match=str(path)):
            read_tensors(path, written)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(CorruptArtefactError, match=str(path)):
            read_tensors(path, written)
    path.unlink()
    with pytest.raises(CorruptArtefactError, match="missing"):
        read_tensors(path, written)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"w": 1}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"w": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]}}',
        b'{"w": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}',
        json.dumps({"w": {"dtype": "U8", "shape": ["x"], "data_offsets": [0, 4]}}).encode(),
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4.0]}}',
        b'{"w": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
        b"\xff\xfe",
    ],
)
def test_a_header_that_lies_is_corrupt_even_with_the_right_digest(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")
    refused(path)


def test_a_header_longer_than_the_file_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for data in (b"", b"\1\2", struct.pack("<Q", 2**60) + b"{}"):
        path.write_bytes(data)
        refused(path)


def refused(path: Path) -> None:
    """By whoever reads it: whole, its header alone, or mapped."""
    data = np.frombuffer(path.read_bytes(), np.uint8)
    for read in (lambda: read_tensors(path, ref(path)), lambda: read_rows(path), lambda: view_tensors(path, data)):
        with pytest.raises(CorruptArtefactError, match=str(path)):
            read()


def test_a_file_can_be_looked_at_without_being_read(tmp_path: Path) -> None:
    """The header alone, and tensors as views that write to what is mapped."""
    path = tmp_path / "a"
    write(path, {name: from_torch(name, tensor) for name, tensor in samples().items()})
    expected = read_tensors(path, ref(path))
    assert {(name, dtype, shape, size) for name, dtype, shape, size in read_rows(path)} == {
        (name, t.dtype, t.shape, t.data.size) for name, t in expected.items()
    }
    views = view_tensors(path, np.memmap(path, np.uint8, "r+"))
    assert {name: (t.dtype, t.shape, t.data.tobytes()) for name, t in views.items()} == {
        name: (t.dtype, t.shape, t.data.tobytes()) for name, t in expected.items()
    }
    views["f32"].data[:] = 7
    assert read_tensors(path, ref(path))["f32"].data.tolist() == [7] * 16
    with pytest.raises(CorruptArtefactError, match="missing"):
        read_rows(tmp_path / "b")
