"""The inner loops: all implementations give the same arrays, and nothing that they are given leads them astray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from milesbatch.weights import kernel_choice
from milesbatch.weights.kernels import ClassChanges, Kernels, PackedClass, TokenList
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


def _tuples(packed: PackedClass) -> list[object]:
    lists = [each for numbers in packed.numbers for each in (numbers.plain, numbers.others)]
    parts = [None if each is None else (each.tokens.tolist(), each.bits.tolist()) for each in lists]
    return [packed.size, packed.exceptions, packed.directions.tolist(), parts]


def _lists() -> Iterator[ClassChanges]:
    rng = np.random.default_rng(1)
    powers = np.array([1 << bit for bit in range(32)], np.uint32)
    numbers = np.concatenate([np.arange(40, dtype=np.uint32), powers - 1, powers, powers + 1, powers | powers >> 1])
    rng.shuffle(numbers)
    for count in (1, 2, 7, numbers.size):
        yield ClassChanges(numbers[:count].copy(), np.full(count, 2, np.uint32))
        yield ClassChanges(np.zeros(count, np.uint32), np.maximum(numbers[:count], 1).astype(np.uint32))
    yield ClassChanges((rng.random(999) < 0.1).astype(np.uint32) * 7, np.ones(999, np.uint32))  # most gaps are 0
    for share in (0.0, 0.1, 0.5, 0.501, 0.9, 1.0):  # of exceptions
        values = np.where(rng.random(1000) < share, rng.integers(3, 400, 1000), rng.integers(1, 3, 1000))
        yield ClassChanges(rng.integers(0, 90, 1000).astype(np.uint32), values.astype(np.uint32))


def test_lists_survive_and_are_those_of_numpy(tested: Kernels) -> None:
    for changes in _lists():
        packed = tested.pack(changes)
        assert _tuples(packed) == _tuples(NumpyKernels().pack(changes))
        found = tested.unpack(packed, 2**32 - 1)
        assert found is not None
        assert np.array_equal(found.gaps, changes.gaps) and np.array_equal(found.values, changes.values)
        largest = int(changes.values.max())
        if largest > 3:
            assert tested.unpack(packed, largest) is not None
            assert tested.unpack(packed, largest - 1) is None


def test_lists_that_nothing_packs_to_are_refused(tested: Kernels) -> None:
    """Sizes are right, as whoever reads them sees to that; contents are anything."""
    rng = np.random.default_rng(3)
    refused = 0
    for changes in _lists():
        packed = tested.pack(changes)
        for number, numbers in enumerate(packed.numbers):
            for name in ("plain", "others"):
                found = getattr(numbers, name)
                if found is None or not found.tokens.size:
                    continue
                for tokens, bits in (
                    (rng.integers(0, 256, found.tokens.size).astype(np.uint8), found.bits),
                    (np.full_like(found.tokens, 127), found.bits),
                    (found.tokens, found.bits[:-1]),
                    (found.tokens, np.append(found.bits, np.uint8(0))),
                ):
                    other = replace(numbers, **{name: TokenList(tokens.copy(), bits.copy())})
                    lists = (*packed.numbers[:number], other, *packed.numbers[number + 1 :])
                    made = tested.unpack(replace(packed, numbers=lists), 65535)
                    refused += made is None
                    assert made is None or made.gaps.size == packed.size
    assert refused > 50


def test_classes_begin_where_they_save_most(tested: Kernels) -> None:
    rng = np.random.default_rng(4)
    for seed in range(30):
        elements, changes = np.zeros(256, np.uint64), np.zeros(256, np.uint64)
        keys = rng.choice(256, int(rng.integers(1, 60)), replace=False)
        elements[keys] = rng.integers(1, 10_000, keys.size)
        changes[keys] = rng.integers(0, elements[keys] + 1) if seed else 0
        for most in (0, 1, 4, 7):
            cuts = tested.cut(elements, changes, 32.0, 300.0, most)
            expected = NumpyKernels().cut(elements, changes, 32.0, 300.0, most)
            assert cuts.tolist() == expected.tolist()
            assert len(cuts) <= most and np.all(np.diff(cuts.astype(int)) > 0)
            assert all(elements[key] for key in cuts) and 0 not in np.searchsorted(np.sort(keys), cuts)


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
    cut_short = lambda self, changes: replace(NumpyKernels().pack(changes), exceptions=0)  # noqa: E731
    monkeypatch.setattr(NativeKernels, "pack", cut_short)
    assert kernel_choice.choose().name == "numpy"
    monkeypatch.setattr(kernel_choice, "_load", lambda: None)
    assert kernel_choice.choose().name == "numpy"
