"""steps-zstd: every bit pattern survives, both readers agree, damage is an error of the named kind."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milesbatch.errors import CorruptArtefactError
from milesbatch.weights import reference, steps
from milesbatch.weights.codec import apply, decode, encode, open_change
from milesbatch.weights.kernel_choice import kernels
from milesbatch.weights.kernels_numpy import NumpyKernels
from milesbatch.weights.payload import varint

WIDTHS = (1, 2, 4)
ADVERSARIAL = {
    1: [0x00, 0x80, 0x7F, 0xFF, 0x7E, 0x01, 0x81, 0x08, 0x88],
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x8001, 0x3F80, 0xBF7F, 0x7FFF, 0xFFFF],
    4: [0x0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC0DEAD, 0x1, 0x80000001, 0x3F800000, 0xFFFFFFFF],
}  # zeros, infinities, quiet and signalling NaN with payload, subnormals, one, the largest


def _encode(old: np.ndarray, new: np.ndarray, of: object = None) -> bytes | None:
    found = steps.encode_steps(old, new, kernels() if of is None else NumpyKernels(), lambda stop: None)
    return None if found is None else found[0]


def _decode(payload: bytes, old: np.ndarray) -> np.ndarray:
    flat = decode("steps-zstd", payload, old.view(np.uint8), num_bytes=old.nbytes, element_bytes=old.itemsize)
    return flat.view(old.dtype)


@given(st.sampled_from(WIDTHS), st.data())
@settings(max_examples=200, deadline=None)
def test_adversarial_bits_survive_in_both_readers(width: int, data: st.DataObject) -> None:
    patterns = st.sampled_from(ADVERSARIAL[width]) | st.integers(0, 2 ** (8 * width) - 1)
    count = data.draw(st.integers(1, 150))
    old = np.array(data.draw(st.lists(patterns, min_size=count, max_size=count)), f"<u{width}")
    new = np.array(data.draw(st.lists(patterns, min_size=count, max_size=count)), f"<u{width}")
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    new[keep] = old[keep]
    payload = _encode(old, new)
    assert payload is not None and payload == _encode(old, new, of=NumpyKernels)
    assert np.array_equal(_decode(payload, old), new)
    assert np.array_equal(reference.decode("steps-zstd", payload, old.view(np.uint8), width).view(old.dtype), new)


def _update(size: int, deviation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits of bfloat16 weights before and after a small update."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(size, np.float32) * np.float32(0.02)
    after = weights + rng.standard_normal(size, np.float32) * np.float32(deviation)
    old, new = ((array.view(np.uint32) >> 16).astype(np.uint16) for array in (weights, after))
    return old, new


@pytest.mark.parametrize("deviation", [0.0, 1e-8, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 4096, 300_001])
def test_updates_of_every_density_survive_in_both_readers(size: int, deviation: float) -> None:
    old, new = _update(size, deviation, size)
    payload = _encode(old, new)
    assert payload is not None
    assert np.array_equal(_decode(payload, old), new)
    assert np.array_equal(reference.decode("steps-zstd", payload, old.view(np.uint8), 2).view(np.uint16), new)


def test_a_sparse_update_takes_little_more_than_its_entropy_given_the_exponents() -> None:
    old, new = _update(2_000_000, 2.5e-7, 0)
    payload = _encode(old, new)
    assert payload is not None
    exponents, changed, bits = old >> 7 & 0xFF, old != new, 0.0
    for exponent in np.unique(exponents):
        mine = exponents == exponent
        n, k = mine.sum(), changed[mine].sum()
        if 0 < k < n:
            bits -= k * np.log2(k / n) + (n - k) * np.log2(1 - k / n)
            _, counts = np.unique(new[mine & changed].astype(int) - old[mine & changed], return_counts=True)
            bits -= (counts * np.log2(counts / k)).sum()
    assert 0.002 < changed.mean() < 0.03
    assert 8 * len(payload) < 1.09 * bits


def test_other_bits_than_those_of_the_parent_never_pass_for_the_new_version() -> None:
    old, new = _update(50_000, 1e-6, 1)
    encoded = encode(old.view(np.uint8), new.view(np.uint8), 2)
    assert encoded.encoding == "steps-zstd"
    for place in range(0, 50_000, 997):
        other = old.copy()
        other[place] ^= 0x4000  # of another class
        made = np.empty(other.nbytes, np.uint8)
        try:
            change = open_change("steps-zstd", encoded.payload, num_bytes=other.nbytes, element_bytes=2)
            digest = apply([change], other.view(np.uint8), made, 2)
        except CorruptArtefactError:
            continue
        assert digest != encoded.digest


def test_every_truncation_and_ten_thousand_flips_are_found() -> None:
    """By a named error, or by the digest; and the old tensor is as it was."""
    old, new = _update(20_000, 1.5e-6, 2)
    encoded = encode(old.view(np.uint8), new.view(np.uint8), 2)
    kept = old.copy()
    rng = np.random.default_rng(3)
    damaged = [encoded.payload[:length] for length in range(len(encoded.payload))]
    for _ in range(10_000):
        flipped = bytearray(encoded.payload)
        flipped[rng.integers(len(flipped))] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(flipped))
    errors = 0
    for payload in damaged:
        made = np.empty(old.nbytes, np.uint8)
        try:
            change = open_change("steps-zstd", payload, num_bytes=old.nbytes, element_bytes=2)
            digest = apply([change], old.view(np.uint8), made, 2)
        except CorruptArtefactError:
            errors += 1
        else:
            if digest == encoded.digest:  # a bit between two lists that nobody reads
                assert np.array_equal(made.view(np.uint16), new)
                continue
            with pytest.raises(ValueError, match="damaged weights"):
                found = reference.decode("steps-zstd", payload, old.view(np.uint8), 2)
                reference._check(np.array_equal(found, new.view(np.uint8)), "another tensor")
    assert errors > len(encoded.payload)
    assert np.array_equal(old, kept)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\3",
        b"\2\0\x14\0",  # another layout
        b"\4\0\x14\0",
        b"\3\x08" + bytes(32),  # too many thresholds
        b"\3\2\5",  # within them
        b"\3\1\0\x14\0\0",  # a threshold of 0
        b"\3\2\5\5\x14\0\0\0",  # not ascending
        b"\3\0\0\0",  # a segment without elements
        b"\3\0\x15\0",  # of more elements than there are
        b"\3\0\x0a\0",  # a part of the tensor that is no multiple of a piece
        b"\3\0\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # a count without end
        b"\3\0\x14\x15",  # more changes than elements
        b"\3\1\7\x14\x0a\0\x0b",  # more of them in all classes
        b"\3\0\x14\1\x18",  # a list of gaps with more numbers than it has
        b"\3\0\x14\1\0\3",  # more exceptions than changes
        b"\3\0\x14\1\0\1\3",  # another list with more numbers than it has
        b"\3\0\x14\1\0\0",  # the end before the tokens
        b"\3\0\x14\1\0\0\2\3\3",  # more bytes of tokens than tokens
        b"\3\0\x14\1\0\0\1\x14\1",  # a position beyond the end
        b"\3\0\x14\1\x15\0\1\1\0\0\0\1",  # beyond it by its shift
        b"\3\0\x14\1\x15\0\1\x7f" + bytes(9),  # a number of more than 32 bits
        b"\3\0\x14\1\0\0\1\x80\1",  # no token
        b"\3\0\x14\1\0\0\1\x10",  # no bits
        b"\3\0\x14\1\x08\0\1\0\0",  # no bits of a direction behind those of the shift
        b"\3\0\x14\1\0\1\0\0\3\0\1\0",  # an exception behind the last change
        b"\3\0\x14\0\0",  # something behind the end
    ],
)
def test_what_no_encoder_gives_is_refused(payload: bytes) -> None:
    with pytest.raises(CorruptArtefactError, match="damaged weights payload"):
        _decode(payload, np.zeros(20, np.uint16))


@pytest.mark.parametrize("width", WIDTHS)
def test_thresholds_are_keys_of_the_width(width: int) -> None:
    """Of one byte there are seven bits below the sign: such a class would never have an element."""
    old = np.array([0, 127 << 8 * width - 8], f"<u{width}")
    for key in (1, 127, 128, 255):
        payload = bytes([3, 1, key, 2, 0, 0])
        if width == 1 and key > 127:
            with pytest.raises(CorruptArtefactError, match="thresholds"):
                _decode(payload, old)
        else:
            assert np.array_equal(_decode(payload, old), old)
            assert np.array_equal(
                reference.decode("steps-zstd", payload, old.view(np.uint8), width), old.view(np.uint8)
            )


def test_a_payload_means_what_the_page_says() -> None:
    """By hand: two classes, from 1.0 on (the key of 0x3F80 is 127), a shift, an exception, both directions."""
    old = np.full(40, 0x4000, np.uint16)
    old[:10] = 0xBF00
    payload = bytes([3, 1, 127, 40])
    payload += bytes([2, 0, 1, 2])  # 2 changes, shift 0; 1 change, shift 2
    payload += bytes([1, 0, 0, 0])  # 1 exception, plain lists; none
    payload += bytes([5, 3, 4, 6, 0, 9])  # tokens as they are: gaps 3, 4 and 6; the exception is the first; 9
    payload += bytes([0b01, 0b1, 0b0])  # 2 bits of the shifted gap (1); +1; -1
    new = old.copy()
    new[3] += 6  # zigzag 12 is 9 and 3
    new[8] += 1
    new[10 + 6 * 4 + 1] -= 1
    assert np.array_equal(_decode(payload, old), new)
    assert np.array_equal(reference.decode("steps-zstd", payload, old.view(np.uint8), 2).view(np.uint16), new)


def test_stated_counts_allocate_nothing_beyond_the_tensor() -> None:
    huge = b"\3\0" + b"\x80\x80\x80\x04" + b"\xff\xff\x1f\0" + b"\xff\xff\x1f\0\0\5\0bcde"
    elements = np.zeros(1 << 23, np.uint16)
    with pytest.raises(CorruptArtefactError):
        _decode(huge, elements)


def test_lists_share_a_frame_whatever_their_lengths() -> None:
    """All gaps end a block, and each other list, but for short ones; classes and segments without changes have none."""
    old = np.concatenate([np.full(1 << 18, magnitude, np.uint16) for magnitude in (0x100, 0x1000, 0x2000, 0x3000)])
    rng = np.random.default_rng(5)
    for shares in ((0.2, 0.0, 0.01, 0.0), (0.0, 0.0005, 0.0, 0.9), (0.3, 0.1, 0.03, 0.01), (1e-5, 0, 0, 0)):
        new = old.copy()
        for part, share in zip(np.split(new, 4), shares, strict=True):
            changed = rng.random(part.size) < share
            part[changed] += rng.choice([1, 1, 1, 5, 200], int(changed.sum())).astype(np.uint16)
        payload = _encode(old, new)
        assert payload is not None and payload == _encode(old, new, of=NumpyKernels)
        assert np.array_equal(_decode(payload, old), new)
        assert np.array_equal(reference.decode("steps-zstd", payload, old.view(np.uint8), 2).view(np.uint16), new)


def test_more_than_one_segment_and_none_that_is_too_full() -> None:
    """Where much changes segments are shorter: a thread's lists stay as small as :data:`steps.CAPACITY` says."""
    rng = np.random.default_rng(6)
    old = rng.integers(0, 1 << 16, 3 * steps.CAPACITY + 77).astype(np.uint16)
    new = old + (rng.random(old.size) < 0.4).astype(np.uint16)
    payload = _encode(old, new)
    assert payload is not None
    assert np.array_equal(_decode(payload, old), new)
    assert np.array_equal(reference.decode("steps-zstd", payload, old.view(np.uint8), 2).view(np.uint16), new)


def test_classes_follow_the_magnitudes_that_change_often() -> None:
    old, new = _update(1_000_000, 1e-6, 4)
    thresholds = steps.choose_thresholds(old, new, kernels())
    assert 2 <= thresholds.size <= steps.MAX_CLASSES - 1
    shares = []
    for low, high in zip([0, *thresholds], [*thresholds, 1 << 15], strict=True):
        mine = ((old & 0x7FFF) >= low) & ((old & 0x7FFF) < high)
        shares.append((old != new)[mine].mean())
    assert all(low > 1.4 * high for low, high in itertools.pairwise(shares))
    assert steps.choose_thresholds(old, old, kernels()).size == 0


def test_the_reference_allocates_nothing_on_the_word_of_a_count() -> None:
    """Changes of a class beyond the segment, or beyond what a segment may have: refused before a list is made of them."""
    for elements, changes in ((16, 17), (16, 1 << 62), (1 << 23, (1 << 19) + 1)):
        payload = bytes([3, 0]) + varint(elements) + varint(changes) + varint(22)
        with pytest.raises(ValueError, match=f"{changes} changes"):
            reference.decode("steps-zstd", payload, np.zeros(2 * elements, np.uint8), 2)


def test_the_reference_as_a_command_has_one_line_for_what_it_cannot_read(tmp_path: Path) -> None:
    for words, expected in (([str(tmp_path), "99"], "error: policy version 99 of"), ([str(tmp_path), "x"], "usage: ")):
        with pytest.raises(SystemExit) as caught:
            reference.main(words)
        assert str(caught.value.code).startswith(expected) and "\n" not in str(caught.value.code)
