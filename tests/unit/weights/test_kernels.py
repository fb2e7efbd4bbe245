"""The inner loops: all implementations give the same arrays, and nothing that they are given leads them astray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from milesbatch.weights import kernel_choice
from milesbatch.weights.kernels import (
    MAX_SHIFT,
    NUM_KEYS,
    NUM_KINDS,
    ClassChanges,
    Kernels,
    PackedSegment,
    RefusedError,
    SegmentChanges,
    joined,
)
from milesbatch.weights.kernels_native import NativeKernels
from milesbatch.weights.kernels_numpy import NumpyKernels
from milesbatch.weights.payload import varint

DTYPES = (np.uint8, np.uint16, np.uint32)


def _native(most: int) -> NativeKernels:
    library = kernel_choice._load()
    assert library is not None, "the compiled loops are not built: `make setup` builds them where there is a C compiler"
    return NativeKernels(library, most)


@pytest.fixture(params=["numpy", 0, 1, 2])
def tested(request: pytest.FixtureRequest) -> Kernels:
    return NumpyKernels() if request.param == "numpy" else _native(request.param)


def _pair(dtype: type, size: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    largest = int(np.iinfo(dtype).max)
    old = rng.integers(0, largest, size, dtype=dtype, endpoint=True)
    new = old.copy()
    where = rng.random(size) < share
    steps = rng.choice([1, largest, 2, largest - 4, largest // 2], int(where.sum())).astype(dtype)
    new[where] += steps  # wraps around, also over the sign
    return old, new


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("num_thresholds", [0, 1, 3, 7])
def test_changes_are_those_of_numpy_and_are_applied(
    tested: Kernels, dtype: type, share: float, num_thresholds: int
) -> None:
    largest = int(np.iinfo(dtype).max) // 2
    thresholds = np.linspace(1, largest, num_thresholds + 2)[1:-1].astype(np.uint32)
    old, new = _pair(dtype, 64 * 11 + 29, share, seed=num_thresholds)
    found, expected = [], []
    for kernels, lists in ((tested, found), (NumpyKernels(), expected)):
        scanner = kernels.scanner(thresholds, old.size)
        for begin in (0, 64 * 3, 64 * 10):
            stop = {0: 64 * 3, 64 * 3: 64 * 10}.get(begin, old.size)
            assert scanner.feed(old[begin:stop], new[begin:stop])
        lists += scanner.changes()
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.gaps, other.gaps)
        assert np.array_equal(one.values, other.values)
    assert sum(change.gaps.size for change in found) == np.count_nonzero(old != new)
    applier = tested.applier(thresholds, joined(found), old.size)
    made = old.copy()
    for begin in (0, 64 * 5):
        applier.feed(made[begin : 64 * 5 if begin == 0 else old.size])
    assert applier.is_done()
    applier.close()
    assert np.array_equal(made, new)


def test_more_changes_than_the_capacity_are_refused(tested: Kernels) -> None:
    old, new = _pair(np.uint16, 640, 1.0, seed=1)
    assert not tested.scanner(np.empty(0, np.uint32), 639).feed(old, new)
    assert tested.scanner(np.empty(0, np.uint32), 640).feed(old, new)


def test_counts_by_magnitude_and_size_of_the_step(tested: Kernels) -> None:
    for dtype in DTYPES:
        old, new = _pair(dtype, 5000, 0.1, seed=2)
        counts = tested.count(old, new, 100, 100)
        assert counts.sum() == 5000 and counts[:, 1:].sum() == np.count_nonzero(old != new)
        for run, stride in ((100, 100), (64, 999), (5001, 5001), (1, 4999)):
            found, expected = tested.count(old, new, run, stride), NumpyKernels().count(old, new, run, stride)
            assert found.shape == (NUM_KEYS, NUM_KINDS) and np.array_equal(found, expected)
        steps = [0, 1, -1, 2, -3, 4, 63, -64, 127, -128]
        zeros = np.zeros(len(steps), dtype)
        kinds = tested.count(zeros, np.array(steps).astype(dtype), 1000, 1000)[0]
        assert kinds.tolist() == [1, 2, 2, 1, 0, 0, 1, 3]


def _tuples(packed: PackedSegment) -> list[object]:
    return [packed.counts.tolist(), packed.tokens.tolist(), packed.ends, packed.bits.tolist()]


ELEMENTS = 1 << 40


def _payload(packed: PackedSegment) -> np.ndarray:
    """As the encoding lays it out, with the tokens as they are."""
    stored = varint(packed.tokens.size) if packed.tokens.size else b""
    head = varint(ELEMENTS) + packed.counts.tobytes() + stored
    return np.frombuffer(head + packed.tokens.tobytes() + packed.bits.tobytes(), np.uint8)


def _unpack(kernels: Kernels, payload: np.ndarray, num_classes: int, largest: int) -> SegmentChanges:
    counts = kernels.counts(payload, 0, num_classes, ELEMENTS, ELEMENTS)
    assert counts.elements == ELEMENTS and counts.stored == counts.tokens
    behind = counts.at + counts.stored
    found, end = kernels.unpack(counts, payload[counts.at : behind], payload, behind, largest)
    if end != payload.size:
        raise RefusedError("bytes behind the end")
    return found


def _lists() -> Iterator[ClassChanges]:
    rng = np.random.default_rng(1)
    powers = np.array([1 << bit for bit in range(32)], np.uint32)
    numbers = np.concatenate([np.arange(40, dtype=np.uint32), powers - 1, powers, powers + 1, powers | powers >> 1])
    rng.shuffle(numbers)
    for count in (1, 2, 7, numbers.size):
        yield ClassChanges(numbers[:count].copy(), np.full(count, 2, np.uint32))
        yield ClassChanges(np.zeros(count, np.uint32), np.maximum(numbers[:count], 1).astype(np.uint32))
    yield ClassChanges((rng.random(999) < 0.1).astype(np.uint32) * 7, np.ones(999, np.uint32))  # most gaps are 0
    for mean in (2, 5, 6, 90, 5000, 1 << 20, (1 << 22) - 1, 1 << 30):  # each with a shift of its own
        yield ClassChanges(rng.integers(0, 2 * mean, 300).astype(np.uint32), np.ones(300, np.uint32))
    for share in (0.0, 0.1, 0.5, 0.501, 0.9, 1.0):  # of exceptions
        values = np.where(rng.random(1000) < share, rng.integers(3, 400, 1000), rng.integers(1, 3, 1000))
        yield ClassChanges(rng.integers(0, 90, 1000).astype(np.uint32), values.astype(np.uint32))


def test_lists_survive_and_are_those_of_numpy(tested: Kernels) -> None:
    nothing = ClassChanges(np.empty(0, np.uint32), np.empty(0, np.uint32))
    for changes in _lists():
        for segment in ([changes], [nothing, changes, nothing], [changes, changes], [nothing]):
            packed = tested.pack(segment)
            payload = _payload(packed)
            assert _tuples(packed) == _tuples(NumpyKernels().pack(segment))
            found, expected = _unpack(tested, payload, len(segment), 2**32 - 1), joined(segment)
            for part in ("gaps", "values", "ends"):
                assert np.array_equal(getattr(found, part), getattr(expected, part))
            largest = int(expected.values.max(initial=0))
            if largest > 3:
                _unpack(tested, payload, len(segment), largest)
                with pytest.raises(RefusedError):
                    _unpack(tested, payload, len(segment), largest - 1)


def test_lists_that_nothing_packs_to_are_refused(tested: Kernels) -> None:
    """Every truncation is; of what is changed, all that does not fit, and the rest gives lists of the sizes that are stated."""
    rng = np.random.default_rng(3)
    refused = 0
    for changes in _lists():
        payload = _payload(tested.pack([changes, changes]))
        for length in range(0, payload.size, max(1, payload.size // 100)):
            with pytest.raises(RefusedError):
                _unpack(tested, payload[:length].copy(), 2, 65535)
        for _ in range(100):
            other = payload.copy()
            other[rng.integers(len(varint(ELEMENTS)), other.size)] = rng.integers(256)
            try:
                found = _unpack(tested, other, 2, 65535)
            except RefusedError:
                refused += 1
            except AssertionError:
                continue  # it says that the tokens are compressed
            else:
                assert found.gaps.size == found.values.size == int(found.ends[-1])
    assert refused > 50


def test_gaps_of_all_classes_have_tokens_of_one_distribution(tested: Kernels) -> None:
    """However seldom a class changes: what is above a mean of 5.6 goes to the bits."""
    rng = np.random.default_rng(8)
    ones = np.ones(2000, np.uint32)
    means = (6, 60, 600, 6000, 60_000)
    segment = [ClassChanges((rng.geometric(1 / mean, 2000) - 1).astype(np.uint32), ones) for mean in means]
    packed = tested.pack(segment)
    assert packed.ends == (10_000,) and packed.tokens.size == 10_000
    shares = [np.bincount(tokens, minlength=40)[:40] / 2000 for tokens in np.split(packed.tokens, 5)]
    assert max(np.abs(share - shares[0]).max() for share in shares) < 0.15
    counts = tested.counts(_payload(packed), 0, 5, ELEMENTS, ELEMENTS)
    assert counts.classes[:, 2].tolist() == [0, 4, 7, 11, 14]
    largest = tested.pack([ClassChanges(np.full(2, 2**32 - 1, np.uint32), ones[:2])])
    assert tested.counts(_payload(largest), 0, 1, ELEMENTS, ELEMENTS).classes[0, 2] == MAX_SHIFT


def test_numbers_of_more_than_32_bits_are_refused(tested: Kernels) -> None:
    """A token, and a shift that takes it beyond."""
    for token, shift, fits in ((127, 0, True), (127, 1, False), (43, 21, True), (44, 21, False), (2, 21, True)):
        width = shift + (token // 4 - 2 if token >= 16 else 0)
        bits = np.zeros((width + 7) // 8, np.uint8)
        payload = np.frombuffer(varint(ELEMENTS) + bytes([1, shift, 0, 1, token]) + bits.tobytes() + b"\0", np.uint8)
        if fits:
            leading = token if token < 16 else 4 + token % 4
            assert _unpack(tested, payload, 1, 65535).gaps.tolist() == [leading << width]
        else:
            with pytest.raises(RefusedError, match="lists that no changes give"):
                _unpack(tested, payload, 1, 65535)


def test_classes_begin_where_they_save_most(tested: Kernels) -> None:
    rng = np.random.default_rng(4)
    for seed in range(30):
        counts = np.zeros((NUM_KEYS, NUM_KINDS), np.uint64)
        keys = rng.choice(NUM_KEYS, int(rng.integers(1, 60)), replace=False)
        counts[keys, 0] = rng.integers(1, 10_000, keys.size)
        changed = keys[rng.random(keys.size) < 0.7] if seed else keys[:0]
        counts[changed, 1:] = rng.integers(0, 3000, (changed.size, NUM_KINDS - 1)) >> np.arange(NUM_KINDS - 1)
        for most in (0, 1, 4, 7):
            cuts = tested.cut(counts, 32.0, 300.0, most)
            expected = NumpyKernels().cut(counts, 32.0, 300.0, most)
            assert cuts.tolist() == expected.tolist()
            assert len(cuts) <= most and np.all(np.diff(cuts.astype(int)) > 0)
            assert all(counts[key].any() for key in cuts) and 0 not in np.searchsorted(np.sort(keys), cuts)
    assert tested.cut(np.zeros_like(counts), 32.0, 300.0, 7).size == 0


def test_classes_are_cut_where_steps_differ_too(tested: Kernels) -> None:
    """Elements that change equally often, but the smaller ones by many units."""
    counts = np.zeros((NUM_KEYS, NUM_KINDS), np.uint64)
    counts[100:120, 0] = 1000
    counts[100:107, 5] = counts[107:120, 1] = 300
    assert tested.cut(counts, 1.0, 100.0, 4).tolist() == [107]
    counts[100:107, 1], counts[100:107, 5] = 300, 0
    assert tested.cut(counts, 1.0, 100.0, 4).size == 0


def test_changes_of_other_elements_stay_within_the_array(tested: Kernels) -> None:
    """Lists that do not fit end in ``is_done() == False`` or in other elements, never outside of them."""
    rng = np.random.default_rng(2)
    thresholds = np.array([100, 20_000], np.uint32)
    around = np.zeros(64 * 7 + 2, np.uint16)
    for _ in range(200):
        lists = [
            ClassChanges(*(rng.integers(1, 2 ** int(rng.integers(2, 32)), (2, size), dtype=np.uint32) % most))
            for size, most in zip(rng.integers(0, 50, 3), rng.choice([8, 1 << 31], 3), strict=True)
        ]
        around[:] = 7
        around[1:-1] = rng.integers(0, 65536, around.size - 2)
        try:
            applier = tested.applier(thresholds, joined(lists), around.size - 2)
        except RefusedError:
            continue  # a change beyond the segment
        applier.feed(around[1:-1])
        applier.is_done()
        applier.close()
        assert around[0] == around[-1] == 7


def test_memory_that_is_used_again_holds_nothing_of_before(tested: Kernels) -> None:
    """Several deltas at a time, of tensors large and small, in one thread."""
    rng = np.random.default_rng(7)
    thresholds = np.array([5_000, 20_000], np.uint32)
    for size in (64 * 50, 64 * 3 + 1, 64 * 2000, 10, 64 * 700):
        versions = [rng.integers(0, 65536, size).astype(np.uint16)]
        appliers = []
        for _ in range(3):
            new = versions[-1] + (rng.random(size) < 0.2).astype(np.uint16)
            scanner = tested.scanner(thresholds, size)
            assert scanner.feed(versions[-1], new)
            payload = _payload(tested.pack(scanner.changes()))
            appliers.append(tested.applier(thresholds, _unpack(tested, payload, 3, 65535), size))
            versions.append(new)
        made = versions[0].copy()
        for applier in appliers:
            applier.feed(made)
            assert applier.is_done()
            applier.close()
        assert np.array_equal(made, versions[-1])


def test_loops_that_compute_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may have spoiled them: they are compared with numpy once, before they touch any weights."""
    assert isinstance(kernel_choice.choose(), NativeKernels)
    cut_short = lambda self, changes: replace(NumpyKernels().pack(changes), ends=())  # noqa: E731
    monkeypatch.setattr(NativeKernels, "pack", cut_short)
    assert kernel_choice.choose().name == "numpy"
    monkeypatch.setattr(kernel_choice, "_load", lambda: None)
    assert kernel_choice.choose().name == "numpy"
