"""Entries of routed experts: what is known, what is not, and how parts of a sequence become one."""

from __future__ import annotations

import numpy as np
import pytest

from milesbatch.trajectories.experts import MOST_EXPERTS, RoutedExperts, width_of

SHAPE = (3, 2)
WIDTH = width_of(*SHAPE)
NONE = b"\xff" * WIDTH


def rows(*firsts: int) -> RoutedExperts:
    """A row for each number, all of whose experts follow from it."""
    numbers = np.array([[[(first + 7 * i) % 300 for i in range(2)]] * 3 for first in firsts], np.int32)
    return RoutedExperts.of(numbers.reshape(len(firsts), *SHAPE))


def test_an_entry_is_little_endian_uint16_by_layer() -> None:
    numbers = np.arange(12, dtype=np.int32).reshape(2, *SHAPE) + 250
    made = RoutedExperts.of(numbers)
    assert (len(made), made.width) == (2, 12)
    for entry, wanted in zip(made.entries(), numbers, strict=True):
        assert np.frombuffer(entry, "<u2").reshape(SHAPE).tolist() == wanted.tolist()
    assert RoutedExperts.from_entries(made.entries()) == made


@pytest.mark.parametrize("bad", [-1, MOST_EXPERTS])
def test_a_number_that_is_no_expert_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=f"experts .*{bad}"):
        RoutedExperts.of(np.full((1, *SHAPE), bad, np.int32))


def test_parts_follow_each_other_and_what_nobody_said_is_not_known() -> None:
    whole = RoutedExperts(WIDTH, b"").then(0, rows(1, 2, 3), 4)
    assert whole.entries() == (*rows(1, 2, 3).entries(), NONE)
    longer = whole.then(3, rows(4, 5), 6)
    assert longer.entries() == (*rows(1, 2, 3, 4, 5).entries(), NONE)
    assert whole.then(3, None, 6).entries() == (*rows(1, 2, 3).entries(), NONE, NONE, NONE)
    assert RoutedExperts(WIDTH, b"").then(2, rows(9), 4).entries() == (NONE, NONE, *rows(9).entries(), NONE)


def test_cut_short_the_last_token_has_nothing_drawn_after_it() -> None:
    whole = RoutedExperts(WIDTH, b"").then(0, rows(1, 2, 3, 4), 5)
    assert whole.first(5) == whole
    assert whole.first(3).entries() == (*rows(1, 2).entries(), NONE)
    assert whole.last(2).entries() == (*rows(4).entries(), NONE)


@pytest.mark.parametrize(("width", "start", "count"), [(WIDTH + 1, 0, 1), (WIDTH, 3, 2)])
def test_rows_that_do_not_fit_are_refused(width: int, start: int, count: int) -> None:
    with pytest.raises(ValueError, match="do not go to"):
        RoutedExperts.unknown(WIDTH, 3).then(start, RoutedExperts.unknown(width, count), 4)


@pytest.mark.parametrize("entries", [(), (b"ab", b"abc")])
def test_entries_have_one_width(entries: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match="of one width"):
        RoutedExperts.from_entries(entries)
