"""The cut into buckets: nothing is lost or added, whatever the sizes; and a header that is something else is an error."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from rounds_made import manifest_of

from milesbatch.broadcast.header import Header, fill_bucket, header_of, new_stream, tensors_in
from milesbatch.errors import BroadcastError
from milesbatch.weights.tensors import RawTensor, element_bytes, num_bytes

DTYPES = ("BF16", "F32", "F64", "U8", "F8_E4M3")


def random_tensors(seed: int) -> dict[str, RawTensor]:
    chance = random.Random(seed)
    tensors = {}
    for number in range(chance.randint(1, 12)):
        dtype = chance.choice(DTYPES)
        shape = tuple(chance.choice((0, 1, 2, 3, 17, 300)) for _ in range(chance.randint(0, 2)))
        data = np.frombuffer(chance.randbytes(num_bytes(dtype, shape)), np.uint8).copy()
        tensors[f"t{number}"] = RawTensor(dtype, shape, data)
    return tensors


@pytest.mark.parametrize("seed", range(20))
def test_what_is_sent_bucket_by_bucket_is_what_comes_out(seed: int) -> None:
    tensors = random_tensors(seed)
    size = random.Random(seed).choice((1, 7, 64, 1000, 10**6))
    header = header_of(manifest_of(tensors), size)
    buffer, stream = np.empty(size, np.uint8), new_stream(Header.from_bytes(header.to_bytes()))
    for bucket in range(header.num_buckets):
        begin, end = header.bounds(bucket)
        assert 0 < end - begin <= size
        stream[begin:end] = fill_bucket(header, tensors, bucket, buffer)
    found = tensors_in(header, stream)
    assert {name: (t.dtype, t.shape, t.digest) for name, t in found.items()} == {
        name: (t.dtype, t.shape, t.digest) for name, t in tensors.items()
    }
    assert all(slot.begin % element_bytes(slot.dtype) == 0 for slot in header.slots), "torch views need this"


def test_both_sides_read_the_same_header() -> None:
    header = header_of(manifest_of(random_tensors(1)), 100)
    again = Header.from_bytes(header.to_bytes())
    assert again == header
    assert (again.version, again.bucket_bytes) == (3, 100)


def test_a_version_without_bytes_has_no_buckets() -> None:
    empty = {"none": RawTensor("F32", (0, 4), np.empty(0, np.uint8))}
    header = header_of(manifest_of(empty), 64)
    assert (header.num_bytes, header.num_buckets) == (0, 0)
    assert tensors_in(header, new_stream(header))["none"].shape == (0, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "3"},
        {"version": -1},
        {"bucket_bytes": 0},
        {"tensors": [["a", "F31", [2], "x"]]},
        {"tensors": [["a", "F32", [-2], "x"]]},
        {"tensors": [["a", "F32", [1.5], "x"]]},
        {"tensors": [["a", "F32", [1], "x"], ["a", "F32", [1], "x"]]},
        {"tensors": [["a", "F32"]]},
        {"tensors": 5},
    ],
)
def test_a_header_that_is_something_else_is_refused(change: dict[str, object]) -> None:
    body = json.loads(header_of(manifest_of(random_tensors(2)), 100).to_bytes())
    with pytest.raises(BroadcastError, match="header"):
        Header.from_bytes(json.dumps({**body, **change}).encode())
    with pytest.raises(BroadcastError, match="header"):
        Header.from_bytes(b"\xff{")


def test_tensors_that_are_not_those_of_the_header_are_not_sent() -> None:
    tensors = random_tensors(5)
    header = header_of(manifest_of(tensors), 10**6)
    name = next(name for name, tensor in tensors.items() if tensor.data.size)
    with pytest.raises(BroadcastError, match=name):
        fill_bucket(
            header, {**tensors, name: RawTensor("U8", (1,), np.zeros(0, np.uint8))}, 0, np.empty(10**6, np.uint8)
        )
