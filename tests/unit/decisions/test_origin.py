"""Where a fork begins: its groups, versions and fates go on counting where the parent's stood."""

from __future__ import annotations

import asyncio

import pytest
from builders import make_batch, make_recipe, make_ref
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.controller.hub import Hub
from milesbatch.decisions.batching import BatchRule
from milesbatch.decisions.fates import FateTable
from milesbatch.decisions.leases import LeaseTable
from milesbatch.decisions.origin import BEGINNING, Origin, origin_of
from milesbatch.decisions.resume import plan_resume
from milesbatch.decisions.retention import checkpoints_to_retire
from milesbatch.errors import CorruptArtefactError
from milesbatch.wire import messages as wire


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 9), st.integers(1, 9))
def test_with_the_same_numbers_a_fork_makes_the_steps_that_its_parent_would_have_made(
    size: int, stale: int, step: int, more: int
) -> None:
    parent = BatchRule(size, stale, bitwise=True)
    fork = BatchRule(size, stale, True, Origin(step, max(0, step - stale), step * size))
    groups = parent.groups_of_step(step + more)
    assert fork.groups_of_step(step + more) == groups
    for group in groups:
        assert (fork.step_of_group(group), fork.version_for(group)) == (step + more, parent.version_for(group))


@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 9), st.integers(0, 40))
def test_with_other_numbers_its_steps_follow_each_other_from_the_first_group_on(
    size: int, stale: int, step: int, first: int
) -> None:
    rule = BatchRule(size, stale, True, Origin(step, step, first))
    taken = [group for number in range(step + 1, step + 5) for group in rule.groups_of_step(number)]
    assert taken == list(range(first, first + 4 * size))
    assert all(step <= rule.version_for(group) < rule.step_of_group(group) for group in taken)


def test_fates_of_the_parent_count_and_cannot_be_given_again() -> None:
    table = FateTable.beginning_at(Origin(3, 2, 10, frozenset({12})))
    assert [group for group in range(8, 15) if table.is_pending(group)] == [10, 11, 13, 14]
    assert (table.last_step, table.stream_position) == (3, 13)
    table.add(make_batch(4, [make_ref(10), make_ref(11)]))
    assert (table.last_step, table.stream_position) == (4, 13)
    with pytest.raises(CorruptArtefactError, match="one is missing"):
        table.add(make_batch(1, [make_ref(20)]))
    for group in (3, 12):
        with pytest.raises(CorruptArtefactError, match=f"group {group} is trained"):
            table.add(make_batch(5, [make_ref(group)]))


def test_a_run_that_is_no_fork_begins_at_the_beginning() -> None:
    assert origin_of(None) == BEGINNING == Origin(0, 0, 0)
    assert not BEGINNING.has_decided(0) and BEGINNING.stream_position == 0


def leases(hub: Hub, count: int) -> list[tuple[int, ...]]:
    asked = (wire.LeaseRequest(name=f"rollout-{number}", wait_s=0.0, holding=()) for number in range(count))
    return [asyncio.run(hub.lease(request)).groups for request in asked]


def test_the_hub_hands_out_from_the_first_group_on_and_to_the_last_step() -> None:
    origin = Origin(6, 3, 24)
    hub = Hub(make_recipe(steps=7), origin)
    hub.restore(FateTable.beginning_at(origin), [], 6)
    assert leases(hub, 3) == [(24, 25), (26, 27), ()], "a step has two blocks, and there is one step"
    assert hub.last_step == 6


def test_a_block_in_which_a_relaxed_parent_stood_is_made_and_only_what_is_open_counts() -> None:
    origin = Origin(3, 3, 11, frozenset({12, 13, 15}))
    hub = Hub(make_recipe(determinism="relaxed"), origin)
    hub.restore(FateTable.beginning_at(origin), [], 3)
    assert leases(hub, 3) == [(10, 11), (14, 15), (16, 17)]
    commit = wire.CommitRequest(
        name="rollout-0",
        block=5,
        groups=(make_ref(10, 3), make_ref(11, 3)),
        response_tokens=1,
        generated_s=1.0,
        errors=(),
        episodes=4,
    )
    assert hub.commit(commit).accepted
    assert set(hub.ready) == {11}


def test_blocks_before_the_first_are_done() -> None:
    table = LeaseTable(2, first_block=5)
    assert table.is_done(4) and not table.is_done(5)


def test_a_fork_goes_back_to_its_first_checkpoint_where_another_run_begins_anew() -> None:
    assert plan_resume([], 6, -1).from_checkpoint is False
    plan = plan_resume([6, 8], 9, 9, 6)
    assert (plan.checkpoint_step, plan.is_published, list(plan.replayed)) == (8, True, [9])
    plan = plan_resume([6, 8], 9, 5, 6)
    assert (plan.checkpoint_step, plan.from_checkpoint, plan.is_published) == (6, True, False)
    with pytest.raises(CorruptArtefactError, match="checkpoint 6, with which this fork began"):
        plan_resume([8], 9, 5, 6)
    assert checkpoints_to_retire([6, 8, 10, 12], 2, None, 6) == (8,)
    assert checkpoints_to_retire([6, 8, 10, 12], 2, None) == (6, 8)
