"""Where a trainer starts, when a role is given up, and where randomness comes from."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.decisions.restarts import RestartPolicy, Verdict
from milesbatch.decisions.resume import ResumePlan, plan_resume
from milesbatch.decisions.seeds import derive_seed


@given(st.sets(st.integers(1, 20)), st.integers(0, 20), st.integers(-1, 20))
def test_a_plan_makes_every_version_that_is_missing(checkpoints: set[int], last_batch: int, last_version: int) -> None:
    plan = plan_resume(sorted(checkpoints, reverse=True), last_batch, last_version)
    assert plan.last_batch == last_batch
    assert list(plan.replayed) == list(range(plan.checkpoint_step + 1, last_batch + 1))
    usable = [step for step in checkpoints if step <= last_batch and step <= last_version]
    assert plan.from_checkpoint == bool(usable)
    assert plan.checkpoint_step == max(usable, default=0)
    made = {0} if not plan.from_checkpoint else set()
    made |= set(plan.replayed)
    assert set(range(last_version + 1, last_batch + 1)) <= made | {0}


def test_plans_by_hand() -> None:
    assert plan_resume([], 0, -1) == ResumePlan(0, False, 0)
    assert plan_resume([2, 4], 5, 5) == ResumePlan(4, True, 5)
    assert plan_resume([2, 4], 5, 3) == ResumePlan(2, True, 5)
    assert plan_resume([4], 5, 3) == ResumePlan(0, False, 5)
    assert plan_resume([4], 3, 9) == ResumePlan(0, False, 3)


@given(st.integers(0, 4), st.integers(0, 3))
def test_restarts_are_counted_by_role_and_given_back_by_progress(limit: int, rounds: int) -> None:
    policy = RestartPolicy(limit)
    for _ in range(rounds + 1):
        for _ in range(limit):
            assert policy.judge("trainer", -signal.SIGKILL) is Verdict.RESTART
        assert policy.judge("trainer", 1) is Verdict.STOP_NO_PROGRESS
        assert policy.judge("rollout", 1) is (Verdict.RESTART if limit else Verdict.STOP_NO_PROGRESS)
        policy.progressed()


@pytest.mark.parametrize("limit", [0, 3])
def test_deaths_that_no_restart_mends(limit: int) -> None:
    policy = RestartPolicy(limit)
    assert policy.judge("rollout", 2) is Verdict.STOP_INPUT
    assert policy.judge("rollout", 2, is_fenced=True) is Verdict.STOP_FENCED
    assert policy.judge("rollout", 75, is_fenced=True) is Verdict.STOP_FENCED
    for _ in range(limit):  # they have not used any restart up
        assert policy.judge("rollout", 75) is Verdict.RESTART


def test_seeds_are_what_they_always_were() -> None:
    """Changing one of these makes every run that exists draw other samples after its next restart."""
    assert derive_seed(0, "sample", 0, 0) == 4976625286128621725
    assert derive_seed(1, "sample", 17, 3) == 6037880429623757350
    assert derive_seed(2**31 - 1, "prompt") == 4837909284899164131


def test_seeds_are_distinct_and_in_range() -> None:
    seeds = [
        derive_seed(run, purpose, group, sample)
        for run in range(4)
        for purpose in ("sample", "prompt")
        for group in range(100)
        for sample in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({derive_seed(0, "a", 1), derive_seed(0, "a", 1, 0), derive_seed(0, "a"), derive_seed(1, "a")}) == 4
