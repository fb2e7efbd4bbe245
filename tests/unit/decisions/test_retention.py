"""Retention over random histories: what anything could still need stays, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.decisions.retention import (
    Needs,
    checkpoints_to_retire,
    find_base,
    needed_versions,
    versions_to_retire,
)

steps = st.sets(st.integers(1, 60), max_size=12)


@given(steps, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 12)))
def test_the_newest_and_every_mth_checkpoint_stay_and_all_others_go(
    steps: set[int], keep: int, keep_every: int | None
) -> None:
    going = set(checkpoints_to_retire(steps, keep, keep_every))
    newest = {step for step in steps if sum(other > step for other in steps) < keep}
    for_ever = {step for step in steps if keep_every is not None and step % keep_every == 0}
    assert steps - going == newest | for_ever


@given(st.lists(st.integers(1, 3), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 7))
def test_a_checkpoint_that_is_kept_for_ever_is_never_deleted_later(gaps: list[int], keep: int, every: int) -> None:
    kept: set[int] = set()
    step = 0
    for gap in gaps:
        step += gap
        kept.add(step)
        kept -= set(checkpoints_to_retire(kept, keep, every))
        assert {s for s in range(1, step + 1) if s % every == 0} & _taken(gaps, step) <= kept
        assert len(kept - {s for s in kept if s % every == 0}) <= keep


def _taken(gaps: list[int], until: int) -> set[int]:
    steps, step = set(), 0
    for gap in gaps:
        step += gap
        steps.add(step)
    return {s for s in steps if s <= until}


@pytest.mark.parametrize(("keep", "keep_every"), [(0, None), (-1, 3), (1, 0), (2, -2)])
def test_a_rule_that_keeps_nothing_is_refused(keep: int, keep_every: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        checkpoints_to_retire([1, 2, 3], keep, keep_every)


# -- weights --------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, set[int], set[int], set[int]]:
    """Last version; versions with a full copy, those of them that are damaged; checkpoints."""
    last = draw(st.integers(1, 40))
    versions = st.integers(1, last)
    keyframes = {0, *draw(st.sets(versions, max_size=10))}
    damaged = draw(st.sets(st.sampled_from(sorted(keyframes)), max_size=2))
    return last, keyframes, damaged, draw(st.sets(versions, max_size=6))


def rebuildable(version: int, keyframes: set[int], gone: set[int]) -> bool:
    """A full copy at or below it, and everything between, is there."""
    while version >= 0 and version not in gone:
        if version in keyframes:
            return True
        version -= 1
    return False


@given(
    histories(),
    st.integers(1, 3),
    st.integers(0, 4),
    st.one_of(st.none(), st.integers(0, 40)),
    st.one_of(st.none(), st.lists(st.integers(0, 40), max_size=2)),
    st.data(),
)
def test_whatever_could_be_rebuilt_and_may_be_needed_still_can(
    history: tuple[int, set[int], set[int], set[int]],
    keep: int,
    staleness: int,
    workers: int | None,
    readers: list[int] | None,
    data: st.DataObject,
) -> None:
    last, keyframes, damaged, checkpoints = history
    needs = needed_versions(checkpoints, keep=keep, staleness=staleness, workers=workers, readers=readers)
    if needs is None:
        assert workers is None or readers is None or len(checkpoints) < keep
        return
    assert workers is not None and readers is not None
    oldest_kept = sorted(checkpoints)[-keep]
    assert needs.version <= min(oldest_kept - staleness - 1, workers, *readers)
    whole = keyframes - damaged
    base = find_base(needs.version, 0, whole.__contains__)
    if base is None:
        assert not any(0 < version <= needs.version for version in whole)
        return
    assert base in whole and base <= needs.version
    assert not any(base < version <= needs.version for version in whole), "the newest one is the base"
    going = versions_to_retire(base, set())
    assert list(going) == list(range(base))
    done = set(going[: data.draw(st.integers(0, len(going)))])  # a crash in the middle
    for version in range(needs.version, last + 1):
        assert not rebuildable(version, whole, set()) or rebuildable(version, whole, done)
    assert set(versions_to_retire(base, done)) == set(going) - done, "the next retirement goes on where it stopped"


@given(st.integers(0, 30), st.integers(0, 30), st.sets(st.integers(0, 30)))
def test_nothing_is_read_where_nothing_can_be_deleted(needed: int, oldest: int, keyframes: set[int]) -> None:
    asked: list[int] = []

    def is_whole(version: int) -> bool:
        asked.append(version)
        return version in keyframes

    base = find_base(needed, oldest, is_whole)
    assert all(oldest < version <= needed for version in asked)
    assert base is None or (base in keyframes and versions_to_retire(base, set(range(oldest))))


def test_by_hand() -> None:
    arguments = {"keep": 2, "staleness": 1, "readers": ()}
    assert needed_versions([10, 20, 30], workers=29, **arguments) == Needs(18, 20, 1)  # type: ignore[arg-type]
    assert needed_versions([10, 20, 30], workers=7, **arguments) == Needs(7, 20, 1)  # type: ignore[arg-type]
    assert needed_versions([10], workers=29, **arguments) is None  # type: ignore[arg-type]
    assert find_base(18, 0, lambda version: version % 10 == 0) == 10
    assert versions_to_retire(3, {0}) == (1, 2)
