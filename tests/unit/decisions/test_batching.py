"""Which groups a step takes: a pure function in bitwise mode, never stale and never stuck in relaxed mode."""

from __future__ import annotations

import random

import pytest
from builders import make_ref
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.decisions.batching import BatchRule, choose_batch, missing_groups
from milesbatch.records import GroupRef

numbers = st.integers(1, 6)
staleness = st.integers(0, 3)
ready_groups = st.dictionaries(st.integers(0, 40), st.integers(-1, 8), max_size=25).map(
    lambda found: {group: make_ref(group, version) for group, version in found.items()}
)


@given(numbers, staleness, st.integers(1, 8), ready_groups)
def test_bitwise_takes_exactly_the_window(size: int, stale: int, step: int, ready: dict[int, GroupRef]) -> None:
    rule = BatchRule(size, stale, bitwise=True)
    window = range((step - 1) * size, step * size)
    assert rule.groups_of_step(step) == window
    assert all(rule.step_of_group(group) == step for group in window)
    choice = choose_batch(rule, step, ready)
    assert missing_groups(rule, step, ready) == [group for group in window if group not in ready]
    if set(window) <= set(ready):
        assert choice is not None
        assert choice.trained == tuple(ready[group] for group in window)
        assert choice.rejected == ()
    else:
        assert choice is None


@given(numbers, staleness, st.integers(1, 8), ready_groups)
def test_relaxed_takes_fresh_groups_and_rejects_stale_ones(
    size: int, stale: int, step: int, ready: dict[int, GroupRef]
) -> None:
    rule = BatchRule(size, stale, bitwise=False)
    fresh = [group for group in sorted(ready) if step - 1 - ready[group].version_min <= stale]
    choice = choose_batch(rule, step, ready)
    assert missing_groups(rule, step, ready) == []
    if len(fresh) < size:
        assert choice is None
        return
    assert choice is not None
    assert [group.group_id for group in choice.trained] == fresh[:size]
    assert {group.group_id for group in choice.rejected} == set(ready) - set(fresh)
    assert all(rejection.reason == "stale" for rejection in choice.rejected)
    assert all(rejection.digest == ready[rejection.group_id].digest for rejection in choice.rejected)


@given(numbers, staleness, st.integers(0, 60), st.integers(-1, 9), st.integers(0, 9), st.integers(0, 40))
def test_who_may_start(size: int, stale: int, group: int, published: int, left: int, waiting: int) -> None:
    bitwise, relaxed = BatchRule(size, stale, True), BatchRule(size, stale, False)
    version = bitwise.version_for(group)
    assert 0 <= version <= group // size
    assert group // size - version <= stale  # the step that trains it starts from version group // size
    assert bitwise.may_start(group, published=published, steps_left=left, waiting=waiting) == (published >= version)
    may = relaxed.may_start(group, published=published, steps_left=left, waiting=waiting)
    assert may == (published >= 0 and waiting < size * min(stale + 1, left))


@given(numbers, staleness)
def test_bitwise_never_waits_for_itself(size: int, stale: int) -> None:
    """All groups of step k need a version that exists before step k trains."""
    rule = BatchRule(size, stale, True)
    for step in range(1, 9):
        assert {rule.version_for(group) for group in rule.groups_of_step(step)} == {max(0, step - 1 - stale)}


@given(size=st.sampled_from([1, 2, 4]), stale=staleness, steps=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_a_relaxed_run_always_comes_to_its_end(size: int, stale: int, steps: int, seed: int) -> None:
    """Groups finish in any order, some very late. Nothing else may happen at the end than that the last step trains."""
    rule, dice = BatchRule(size, stale, bitwise=False), random.Random(seed)
    ready: dict[int, GroupRef] = {}
    running: dict[int, int] = {}
    decided: set[int] = set()
    step, next_group = 0, 0
    for _ in range(2000):
        if step == steps:
            return
        moves = [group for group in running if dice.random() < 0.9 or len(running) == 1]
        fresh = sum(not rule.is_stale(group, step + 1) for group in ready.values())
        if rule.may_start(next_group, published=step, steps_left=steps - step, waiting=len(running) + fresh):
            running[next_group] = step
            next_group += 1
        elif (choice := choose_batch(rule, step + 1, ready)) is not None:
            names = [group.group_id for group in (*choice.trained, *choice.rejected)]
            assert len(choice.trained) == size
            assert not decided.intersection(names)
            decided.update(names)
            for name in names:
                del ready[name]
            step += 1
        else:
            assert running, f"stuck before step {step + 1} with {sorted(ready)}"
            group = dice.choice(moves or list(running))
            ready[group] = make_ref(group, running.pop(group), step)
    pytest.fail("the run does not end")
