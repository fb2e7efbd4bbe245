"""The codec: lossless for every bit pattern, smallest encoding, and damage is an error of the named kind."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from milesbatch.errors import CorruptArtefactError
from milesbatch.records import digest_bytes
from milesbatch.weights.codec import PART_BYTES, apply, decode, encode, open_change
from milesbatch.weights.payload import varint
from milesbatch.weights.steps import PIECE, SEGMENT

WIDTHS = (1, 2, 4, 8)


def roundtrip(old: bytes | None, new: bytes, width: int) -> str:
    encoded = encode(old, new, width)
    decoded = decode(encoded.encoding, encoded.payload, old, num_bytes=len(new), element_bytes=width)
    assert decoded.tobytes() == new
    assert decoded.flags.writeable and decoded.dtype == np.uint8
    if old is not None:
        pairs = zip(np.frombuffer(old, f"V{width}"), np.frombuffer(new, f"V{width}"), strict=True) if new else ()
        assert encoded.changed == sum(a.tobytes() != b.tobytes() for a, b in pairs)
    return encoded.encoding


@given(st.sampled_from(WIDTHS), st.data())
@settings(max_examples=150, deadline=None)
def test_any_pair_of_bits_survives(width: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 60))
    old = data.draw(st.binary(min_size=count * width, max_size=count * width))
    new = data.draw(st.binary(min_size=count * width, max_size=count * width))
    roundtrip(old, new, width)
    roundtrip(None, new, width)
    roundtrip(old, old, width)


@given(st.sampled_from(WIDTHS), st.integers(0, 2**32), st.floats(0, 1), st.sampled_from([300, 3_000, 70_000]))
@settings(max_examples=60, deadline=None)
def test_sparse_changes_survive(width: int, seed: int, density: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, count * width, dtype=np.uint8)
    new = old.copy()
    rows = new.reshape(-1, width)
    where = rng.random(count) < density**6
    rows[where] ^= rng.integers(0, 256, rows[where].shape, dtype=np.uint8)
    encoded = encode(old, new, width)
    decoded = decode(encoded.encoding, encoded.payload, old, num_bytes=new.size, element_bytes=width)
    assert np.array_equal(decoded, new)
    assert len(encoded.payload) <= new.size


@pytest.mark.parametrize("gap", [10, 1_000, 100_000])
def test_gaps_of_every_width(gap: int) -> None:
    old = np.random.default_rng(0).integers(0, 256, (gap * 3 + 5) * 2, dtype=np.uint8)
    new = old.copy()
    new.view("<u2")[[gap, gap * 2, gap * 3 + 4]] ^= 0x8001
    encoded = encode(old, new, 2)
    assert (encoded.encoding, encoded.changed) == ("steps-zstd", 3)
    assert len(encoded.payload) < 60
    assert np.array_equal(decode("steps-zstd", encoded.payload, old, num_bytes=new.size, element_bytes=2), new)


def test_each_encoding_is_chosen_where_it_is_the_smallest() -> None:
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, 40_000, dtype=np.uint8)
    small_steps = old.copy()
    small_steps[0::4] ^= rng.integers(1, 4, 10_000, dtype=np.uint8)
    assert roundtrip(old.tobytes(), old.tobytes(), 4) == "same"
    assert roundtrip(old.tobytes(), small_steps.tobytes(), 4) == "xor-zstd"
    assert roundtrip(old.tobytes(), bytes(40_000), 4) == "raw-zstd"
    assert roundtrip(old.tobytes(), rng.bytes(40_000), 4) == "raw"
    assert roundtrip(b"", b"", 4) == "same"


def test_special_floats_keep_their_bits() -> None:
    patterns = [0x7FC00001, 0xFFC0DEAD, 0x7F800001, 0x80000000, 0x00000000, 0x7F800000, 0xFF800000, 0x00000001]
    new = struct.pack(f"<{len(patterns)}I", *patterns)
    for old in (bytes(len(new)), new[::-1], new):
        roundtrip(old, new, 4)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 elements, new one 1"):
        encode(bytes(8), bytes(4), 4)
    with pytest.raises(ValueError, match="not whole elements"):
        encode(None, bytes(6), 4)
    with pytest.raises(ValueError, match="elements of 3 bytes"):
        encode(None, bytes(6), 3)


def _cases() -> list[tuple[str, bytes, bytes]]:
    rng = np.random.default_rng(2)
    old = rng.integers(0, 256, 8_000, dtype=np.uint8)
    sparse, dense = old.copy(), old.copy()
    sparse.view("<u4")[::97] += 1
    dense[0::4] ^= 1
    cases = []
    for new in (sparse, dense, np.zeros_like(old), rng.integers(0, 256, 8_000, dtype=np.uint8)):
        encoded = encode(old, new, 4)
        cases.append((encoded.encoding, encoded.payload, old.tobytes()))
    return cases


def test_every_truncation_is_corrupt() -> None:
    seen = set()
    for encoding, payload, old in _cases():
        seen.add(encoding)
        for length in {0, 1, 4, 5, len(payload) // 2, len(payload) - 1}:
            with pytest.raises(CorruptArtefactError):
                decode(encoding, payload[:length], old, num_bytes=8_000, element_bytes=4)
        with pytest.raises(CorruptArtefactError):
            decode(encoding, payload + b"\0", old, num_bytes=8_000, element_bytes=4)
    assert seen == {"steps-zstd", "xor-zstd", "raw-zstd", "raw"}


def test_flipped_bits_give_an_error_or_an_array_of_the_right_size() -> None:
    errors = 0
    for encoding, payload, old in _cases():
        for bit in range(0, min(len(payload), 400) * 8):
            damaged = bytearray(payload)
            damaged[bit // 8] ^= 1 << bit % 8
            try:
                decoded = decode(encoding, bytes(damaged), old, num_bytes=8_000, element_bytes=4)
            except CorruptArtefactError:
                errors += 1
            else:
                assert decoded.size == 8_000
    assert errors > 100


@given(st.sampled_from(["same", "raw", "raw-zstd", "xor-zstd", "steps-zstd", "huffman"]), st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_arbitrary_payload_never_crashes(encoding: str, payload: bytes) -> None:
    for body in (payload, zstandard.compress(payload)):
        with contextlib.suppress(CorruptArtefactError):
            assert decode(encoding, body, bytes(40), num_bytes=40, element_bytes=4).size == 40


@pytest.mark.parametrize("encoding", ["raw-zstd", "xor-zstd"])
def test_a_bomb_is_refused_by_its_stated_size(encoding: str) -> None:
    bomb = zstandard.compress(bytes(50_000_000))
    unstated = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(40))
    for frame in (bomb, unstated):
        with pytest.raises(CorruptArtefactError, match="states"):
            decode(encoding, varint(len(frame)) + frame, bytes(40), num_bytes=40, element_bytes=4)


def test_the_digest_is_that_of_the_new_bytes() -> None:
    rng = np.random.default_rng(3)
    for count in (0, 1, 63, 64, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 65):
        old = rng.integers(0, 256, count * 2, dtype=np.uint8)
        for share in (0.0, 0.01, 1.0):
            new = old.copy()
            new.view("<u2")[rng.random(count) < share] += 1
            encoded = encode(old, new, 2)
            assert encoded.digest == digest_bytes(new.tobytes())
            change = open_change(encoded.encoding, encoded.payload, num_bytes=new.size, element_bytes=2)
            made = np.empty_like(old)
            assert apply([change], old, made, 2) == encoded.digest
            assert np.array_equal(made, new)


def test_a_chain_is_applied_in_one_pass_and_in_place() -> None:
    rng = np.random.default_rng(4)
    versions = [rng.integers(0, 256, 2 * (2 * PIECE + 77), dtype=np.uint8)]
    payloads = []
    for share in (0.01, 1.0, 0.0, 0.2, 0.001):
        new = versions[-1].copy()
        elements = new.view("<u2")
        elements[rng.random(elements.size) < share] += 1
        payloads.append(encode(versions[-1], new, 2))
        versions.append(new)
    assert {payload.encoding for payload in payloads} >= {"steps-zstd", "same"}
    changes = [open_change(p.encoding, p.payload, num_bytes=versions[0].size, element_bytes=2) for p in payloads]
    copy = versions[0].copy()
    assert apply(changes, copy, copy, 2) == payloads[-1].digest
    assert np.array_equal(copy, versions[-1])


def test_large_tensors_are_cut_into_parts() -> None:
    """More than one part of xor-zstd and raw-zstd, more than one segment of steps-zstd: at bounds and in between."""
    rng = np.random.default_rng(5)
    old = np.zeros(2 * PART_BYTES + 6, np.uint8)
    ones = old.copy()
    ones.view("<u2")[:] = rng.integers(0, 2, ones.size // 2)
    tiny_steps = old.copy()
    tiny_steps.view("<u2")[[0, SEGMENT - 1, SEGMENT, 2 * SEGMENT, 2 * SEGMENT + 2]] += 1
    half = old.copy()
    half.view("<u2")[: SEGMENT // 2] += 1  # too many changes for a whole segment
    for new, expected in ((ones, "xor-zstd"), (tiny_steps, "steps-zstd"), (half, "xor-zstd")):
        encoded = encode(old, new, 2)
        assert encoded.encoding == expected
        assert np.array_equal(decode(encoded.encoding, encoded.payload, old, num_bytes=new.size, element_bytes=2), new)
    alone = encode(None, ones, 2)
    assert alone.encoding == "raw-zstd"
    assert np.array_equal(decode("raw-zstd", alone.payload, None, num_bytes=ones.size, element_bytes=2), ones)


@pytest.mark.long
def test_a_tensor_of_more_than_four_gib_takes_little_more_than_its_payload() -> None:
    """Its pages are those of the system that hold zeros, but for the changed ones: it takes no such memory itself."""
    num_elements = (1 << 31) + 4_321
    old, new = np.zeros(num_elements, np.uint16), np.zeros(num_elements, np.uint16)
    places = np.array([0, SEGMENT - 1, (1 << 31) - 1, 1 << 31, num_elements - 1])
    new[places] += np.array([1, 2, 3, 0xFFFF, 1], np.uint16)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of earlier tests (proc(5))
    peak = _peak_kib()
    encoded = encode(old.view(np.uint8), new.view(np.uint8), 2)
    assert (encoded.encoding, encoded.changed) == ("steps-zstd", places.size)
    change = open_change(encoded.encoding, encoded.payload, num_bytes=old.nbytes, element_bytes=2)
    assert apply([change], old.view(np.uint8), old.view(np.uint8), 2) == encoded.digest
    assert np.array_equal(old[places], new[places]) and np.count_nonzero(old) == places.size
    assert _peak_kib() - peak < 64 * 1024


def _peak_kib() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
