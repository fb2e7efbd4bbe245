"""Every job state of Slurm, and what it means for a run."""

from __future__ import annotations

import pytest

from milesbatch.decisions.job_states import STATES, JobState, state_of

# "JOB STATE CODES" of squeue(1), Slurm 22.05 to 24.11, with the state flags that scontrol shows in their place.
OVER = {
    "BOOT_FAIL": JobState.NODE_FAILED,
    "CANCELLED": JobState.CANCELLED,
    "COMPLETED": JobState.SUCCEEDED,
    "DEADLINE": JobState.TIMED_OUT,
    "FAILED": JobState.FAILED,
    "LAUNCH_FAILED": JobState.NODE_FAILED,
    "NODE_FAIL": JobState.NODE_FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "PREEMPTED": JobState.PREEMPTED,
    "RECONFIG_FAIL": JobState.NODE_FAILED,
    "REVOKED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMED_OUT,
}
MAY_RUN = {
    "COMPLETING": JobState.ENDING,
    "CONFIGURING": JobState.PENDING,
    "PENDING": JobState.PENDING,
    "POWER_UP_NODE": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESIZING": JobState.LIVE,
    "RESV_DEL_HOLD": JobState.PENDING,
    "RUNNING": JobState.LIVE,
    "SIGNALING": JobState.LIVE,
    "SPECIAL_EXIT": JobState.PENDING,
    "STAGE_OUT": JobState.ENDING,
    "STOPPED": JobState.LIVE,
    "SUSPENDED": JobState.LIVE,
    "UPDATE_DB": JobState.ENDING,
}


def test_the_table_is_complete() -> None:
    assert {**OVER, **MAY_RUN} == STATES


@pytest.mark.parametrize("word", OVER)
def test_a_job_that_is_over_runs_no_more(word: str) -> None:
    state = state_of(word)
    assert state is OVER[word]
    assert state.is_over and not state.may_run


@pytest.mark.parametrize("word", MAY_RUN)
def test_a_job_that_may_run_is_not_over(word: str) -> None:
    state = state_of(word)
    assert state is MAY_RUN[word]
    assert state.may_run and not state.is_over


@pytest.mark.parametrize("word", ["", "   ", "EXPEDITING", "running?", "R", "0", "(null)"])
def test_what_is_not_in_the_table_is_neither_over_nor_running(word: str) -> None:
    state = state_of(word)
    assert state is JobState.UNKNOWN
    assert not state.is_over and not state.may_run


@pytest.mark.parametrize("word", ["CANCELLED by 1000", "CANCELLED+", " cancelled ", "Cancelled by 0"])
def test_words_around_a_state_do_not_matter(word: str) -> None:
    assert state_of(word) is JobState.CANCELLED


def test_each_state_is_over_or_may_run_but_unknown() -> None:
    for state in JobState:
        assert (state.is_over, state.may_run).count(True) == (0 if state is JobState.UNKNOWN else 1), state
