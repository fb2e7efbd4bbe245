"""Times of events on one clock, whatever was done to the clocks of the hosts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from events_made import BEGIN_S, at
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.timeline.clock import times_of, unix_seconds
from milesbatch.timeline.numbers import duration, number, whole


def events(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"at": at(wall), "mono_s": mono} for wall, mono in pairs]


def test_jitter_of_the_wall_clock_is_smoothed_by_the_monotonic_one() -> None:
    found = times_of(events((0, 100), (1.3, 101), (2, 102), (3, 103)))
    assert [round(time - BEGIN_S, 3) for time in found] == [0, 1, 2, 3]


def test_a_clock_that_was_set_back_never_makes_time_go_back() -> None:
    found = times_of(events((0, 100), (1, 101), (-3600, 102), (-3599, 103)))
    assert found == sorted(found) and found[3] - found[2] == pytest.approx(1)


def test_another_boot_begins_anew() -> None:
    found = times_of(events((0, 90_000), (1, 90_001), (500, 3), (501, 4)))
    assert [round(time - BEGIN_S, 3) for time in found] == [0, 1, 500, 501]


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e7)), max_size=30))
def test_never_backwards(pairs: list[tuple[float, float]]) -> None:
    found = times_of(events(*pairs))
    assert len(found) == len(pairs) and all(b - a >= -1e-3 for a, b in pairwise(found))


@pytest.mark.parametrize("value", [None, 7, "yesterday", "", [], "2026-13-01T00:00:00Z"])
def test_what_is_no_time(value: object) -> None:
    assert unix_seconds(value) is None


def test_a_time_without_a_zone_is_utc() -> None:
    assert unix_seconds("2026-03-01T12:00:00") == unix_seconds("2026-03-01T12:00:00Z") == BEGIN_S


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf"), 10**400, [1]])
def test_what_is_no_number(value: object) -> None:
    assert number(value) is None and duration(value) == 0.0


def test_numbers() -> None:
    assert (number(3), duration(-1.0), duration(2), whole(7), whole(7.0), whole(True)) == (3.0, 0.0, 2.0, 7, None, None)
