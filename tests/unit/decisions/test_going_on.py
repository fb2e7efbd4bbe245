"""Whether a job starts again, is replaced, or ends; and when a run gives up."""

from __future__ import annotations

import pytest
from builders import make_incarnation
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.decisions.going_on import BY_HAND, Exclusions, Next, starts_without_progress, what_next
from milesbatch.decisions.job_states import JobState
from milesbatch.records import IncarnationRecord, Seal


def chosen(own_state: JobState, *, cancelled: bool = False, lost: bool = False, requeue: bool = True) -> Next:
    return what_next(cancelled=cancelled, nodes_lost=lost, may_requeue=requeue, own_state=own_state)


@pytest.mark.parametrize("state", JobState)
def test_only_a_job_that_slurm_is_not_ending_goes_on_by_itself(state: JobState) -> None:
    goes_on = state in (JobState.LIVE, JobState.UNKNOWN)
    otherwise = Next.REPLACE if state is JobState.TIMED_OUT else Next.END
    assert chosen(state) is (Next.REQUEUE if goes_on else otherwise)
    assert chosen(state, lost=True) is (Next.REPLACE if goes_on else otherwise)


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("lost", [False, True])
def test_a_cancelled_run_and_one_that_may_not_requeue_end(state: JobState, lost: bool) -> None:
    assert chosen(state, cancelled=True, lost=lost) is Next.END
    assert chosen(state, requeue=False, lost=lost) is Next.END


# -- starts without progress ------------------------------------------------------------------------------------------


def starts(*seen: tuple[int, str]) -> list[IncarnationRecord]:
    """Incarnations from the last batch that each found, and its cause."""
    return [
        make_incarnation(
            number, cause=cause, seal=Seal(last_batch=last, last_version=-1, checkpoints=(), trajectories=())
        )
        for number, (last, cause) in enumerate(seen, start=1)
    ]


@pytest.mark.parametrize(
    ("seen", "count"),
    [
        ([], 0),
        ([(0, "first")], 0),
        ([(0, "first"), (0, "lost")], 1),
        ([(0, "first"), (0, "lost"), (0, "lost"), (0, "lost")], 3),
        ([(0, "first"), (4, "lost")], 0),
        ([(0, "first"), (0, "lost"), (4, "lost"), (4, "lost")], 1),
        ([(4, "first"), (4, "lost"), (4, f"{BY_HAND}: `milesbatch resume`")], 0),
        ([(4, "first"), (4, f"{BY_HAND}: `milesbatch resume`"), (4, "lost"), (4, "lost")], 2),
        ([(4, "lost"), (4, "lost"), (4, "preempted by hand")], 2),
    ],
)
def test_starts_are_counted_back_to_a_new_step_or_a_person(seen: list[tuple[int, str]], count: int) -> None:
    assert starts_without_progress(starts(*seen)) == count


# -- excluded nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "limit", "lost", "wanted"),
    [
        ((), 4, ["n1"], ("n1",)),
        (("n1",), 4, ["n2", "n3"], ("n1", "n2", "n3")),
        (("n1", "n2"), 4, ["n1"], ("n2", "n1")),
        (("n1", "n2"), 2, ["n3"], ("n2", "n3")),
        (("n1",), 2, ["n2", "n3", "n4"], ("n3", "n4")),
        (("n1",), 1, [], ("n1",)),
        (("n1",), 0, ["n2"], ()),
        ((), 4, ["n1", "n1"], ("n1",)),
    ],
)
def test_the_oldest_exclusions_go_first(
    nodes: tuple[str, ...], limit: int, lost: list[str], wanted: tuple[str, ...]
) -> None:
    assert Exclusions(nodes, limit).plus(lost) == wanted


NODE = st.integers(0, 9).map(lambda index: f"n{index}")


@given(st.lists(NODE, unique=True), st.integers(0, 5), st.lists(NODE))
def test_exclusions_are_few_distinct_and_hold_what_was_lost_last(nodes: list[str], limit: int, lost: list[str]) -> None:
    found = Exclusions(tuple(nodes), limit).plus(lost)
    assert len(found) <= limit and len(set(found)) == len(found)
    assert set(found) <= {*nodes, *lost}
    newest = list(dict.fromkeys(lost))[-limit:] if limit else []
    assert set(newest) <= set(found)


@pytest.mark.parametrize("state", list(JobState))
def test_a_job_that_slurm_starts_again_is_left_to_it(state: JobState) -> None:
    """Its rollout jobs stay: the run goes on."""
    found = what_next(cancelled=False, nodes_lost=True, may_requeue=True, own_state=state, is_requeued=True)
    assert found is Next.LEAVE
    cancelled = what_next(cancelled=True, nodes_lost=False, may_requeue=True, own_state=state, is_requeued=True)
    assert cancelled is Next.END
