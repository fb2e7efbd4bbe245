"""The inner loops: all implementations give the same arrays, and nothing that they are given leads them astray."""

from __future__ import annotations

import numpy as np
import pytest

from milesbatch.weights import kernel_choice
from milesbatch.weights.kernels import ClassChanges, Kernels
from milesbatch.weights.kernels_native import NativeKernels
from milesbatch.weights.kernels_numpy import NumpyKernels

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
    applier = tested.applier(thresholds, found)
    made = old.copy()
    for begin in (0, 64 * 5):
        applier.feed(made[begin : 64 * 5 if begin == 0 else old.size])
    assert applier.is_done()
    assert np.array_equal(made, new)


def test_more_changes_than_the_capacity_are_refused(tested: Kernels) -> None:
    old, new = _pair(np.uint16, 640, 1.0, seed=1)
    assert not tested.scanner(np.empty(0, np.uint32), 639).feed(old, new)
    assert tested.scanner(np.empty(0, np.uint32), 640).feed(old, new)


def test_counts_by_magnitude(tested: Kernels) -> None:
    for dtype in DTYPES:
        old, new = _pair(dtype, 5000, 0.1, seed=2)
        elements, changes = tested.count(old, new, 100, 100)
        assert elements.sum() == 5000 and changes.sum() == np.count_nonzero(old != new)
        for run, stride in ((100, 100), (64, 999), (5001, 5001), (1, 4999)):
            found, expected = tested.count(old, new, run, stride), NumpyKernels().count(old, new, run, stride)
            assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_numbers_of_every_size_survive(tested: Kernels) -> None:
    powers = np.array([1 << bit for bit in range(32)], np.uint32)
    numbers = np.concatenate([np.arange(40, dtype=np.uint32), powers - 1, powers, powers + 1, powers | powers >> 1])
    np.random.default_rng(0).shuffle(numbers)
    for count in (0, 1, 2, 7, numbers.size):
        tokens, bits = tested.tokenise(numbers[:count].copy())
        expected = NumpyKernels().tokenise(numbers[:count])
        assert tokens.tobytes() == expected[0].tobytes() and bits.tobytes() == expected[1].tobytes()
        found = tested.detokenise(tokens, np.concatenate([bits, np.full(3, 255, np.uint8)]))
        assert found is not None
        assert np.array_equal(found[0], numbers[:count]) and found[1] == bits.size
        if bits.size:
            assert tested.detokenise(tokens, bits[:-1]) is None
    assert tested.detokenise(np.array([128], np.uint8), np.zeros(9, np.uint8)) is None


def test_units_in_the_last_place_and_exceptions(tested: Kernels) -> None:
    rng = np.random.default_rng(1)
    for values in (
        [],
        [1],
        [2, 2, 1],
        [3],
        [9, 1, 1, 7, 65535],
        rng.choice([1, 2, 3, 400], 999, p=[0.4, 0.4, 0.1, 0.1]),
    ):
        array = np.array(values, np.uint32)
        bits, gaps, rest = tested.split(array)
        expected = NumpyKernels().split(array)
        assert all(np.array_equal(one, other) for one, other in zip((bits, gaps, rest), expected, strict=True))
        merged = tested.merge(bits, array.size, gaps, rest, 65535)
        assert merged is not None and np.array_equal(merged, array)
        if rest.size:
            assert tested.merge(bits, array.size, gaps + np.uint32(array.size), rest, 65535) is None
            assert tested.merge(bits, array.size, gaps, rest, max(3, int(rest.max()) + 2)) is None or not rest.max()
            assert tested.merge(bits, rest.size - 1, gaps, rest, 65535) is None
        if bits.size:
            assert tested.merge(bits[:-1], array.size, gaps, rest, 65535) is None


def test_changes_of_other_elements_stay_within_the_array(tested: Kernels) -> None:
    """Lists that do not fit end in ``is_done() == False`` or in other elements, never outside of them."""
    rng = np.random.default_rng(2)
    thresholds = np.array([100, 20_000], np.uint32)
    around = np.zeros(64 * 7 + 2, np.uint16)
    for _ in range(200):
        lists = [
            ClassChanges(*(rng.integers(1, 2 ** int(rng.integers(2, 32)), (2, size), dtype=np.uint32)))
            for size in rng.integers(0, 50, 3)
        ]
        around[:] = 7
        around[1:-1] = rng.integers(0, 65536, around.size - 2)
        applier = tested.applier(thresholds, lists)
        applier.feed(around[1:-1])
        applier.is_done()
        assert around[0] == around[-1] == 7


def test_loops_that_compute_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may have spoiled them: they are compared with numpy once, before they touch any weights."""
    assert isinstance(kernel_choice.choose(), NativeKernels)
    monkeypatch.setattr(
        NativeKernels, "tokenise", lambda self, numbers: (numbers.astype(np.uint8), np.zeros(0, np.uint8))
    )
    assert kernel_choice.choose().name == "numpy"
    monkeypatch.setattr(kernel_choice, "_load", lambda: None)
    assert kernel_choice.choose().name == "numpy"
