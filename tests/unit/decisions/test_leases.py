"""The lease table against a trivially right model: nothing is done twice, nothing is lost, everything in order."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from milesbatch.decisions.leases import CommitAnswer, Lease, LeaseTable

WORKERS = ["rollout-0", "rollout-1", "rollout-2"]
DURATION_S = 10.0

operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("take"), st.sampled_from(WORKERS), st.one_of(st.none(), st.integers(0, 12)), st.integers(0, 12)
        ),
        st.tuples(st.just("commit"), st.integers(0, 12)),
        st.tuples(st.just("tick"), st.sampled_from([0.0, 1.0, 9.0, 10.0])),
        st.tuples(st.just("end_worker"), st.sampled_from(WORKERS)),
        st.tuples(st.just("mark_done"), st.sets(st.integers(0, 12), max_size=3)),
    ),
    max_size=60,
)


class Model:
    """Three dictionaries and a search from zero."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.held: dict[int, tuple[str, float]] = {}

    def first_free(self) -> int:
        return next(block for block in range(1000) if block not in self.done and block not in self.held)

    def end(self, which: Any) -> list[int]:
        ended = sorted(block for block, (worker, until) in self.held.items() if which(worker, until))
        for block in ended:
            del self.held[block]
        return ended


@settings(max_examples=300)
@given(operations, st.integers(1, 4))
def test_against_the_model(moves: list[tuple[Any, ...]], size: int) -> None:
    table, model, now_s = LeaseTable(size), Model(), 0.0
    accepted: list[int] = []
    ids: set[int] = set()
    for name, *arguments in moves:
        if name == "take":
            worker, end, limit = arguments
            lease = table.take(worker, now_s, DURATION_S, lambda block, limit=limit: block < limit, end)
            expected = model.first_free()
            if expected >= limit or (end is not None and expected >= end):
                assert lease is None
            else:
                assert isinstance(lease, Lease)
                assert (lease.block, lease.worker, lease.expires_at_s) == (expected, worker, now_s + DURATION_S)
                assert lease.lease_id not in ids
                ids.add(lease.lease_id)
                model.held[expected] = (worker, now_s + DURATION_S)
        elif name == "commit":
            (block,) = arguments
            answer = table.commit(block)
            assert answer is (CommitAnswer.DUPLICATE if block in model.done else CommitAnswer.ACCEPTED)
            if answer is CommitAnswer.ACCEPTED:
                accepted.append(block)
            model.done.add(block)
            model.held.pop(block, None)
        elif name == "tick":
            now_s += arguments[0]
            assert table.expire(now_s) == model.end(lambda _, until, now_s=now_s: until <= now_s)
        elif name == "end_worker":
            assert table.end_worker(arguments[0]) == model.end(lambda who, _, gone=arguments[0]: who == gone)
        else:
            free = {block for block in arguments[0] if block not in model.held}
            table.mark_done(free)
            model.done |= free
        assert [block for block in range(20) if table.is_done(block)] == sorted(model.done)
        assert table.num_leased_groups == size * len(model.held)
        for worker in WORKERS:
            assert table.held_by(worker) == sorted(b for b, (who, _) in model.held.items() if who == worker)
    assert len(set(accepted)) == len(accepted)
    left = []  # whatever happened, the rest is handed out once each, in order
    table.expire(1e9)
    while (lease := table.take("rollout-0", now_s, DURATION_S, lambda _: True, 20)) is not None:
        left.append(lease.block)
    assert left == [block for block in range(20) if block not in model.done]


def test_blocks_and_groups() -> None:
    table = LeaseTable(4)
    assert table.groups(3) == range(12, 16)
    assert [table.block_of(group) for group in (0, 3, 4, 15)] == [0, 0, 1, 3]


def test_a_slow_worker_may_come_first_after_its_lease_ended() -> None:
    table = LeaseTable(2)
    table.take("rollout-0", 0.0, 1.0, lambda _: True)
    table.expire(1.0)
    again = table.take("rollout-1", 1.0, 1.0, lambda _: True)
    assert again is not None
    assert again.block == 0
    assert table.commit(0) is CommitAnswer.ACCEPTED
    assert table.commit(0) is CommitAnswer.DUPLICATE
    assert table.held_by("rollout-1") == []
    following = table.take("rollout-1", 1.0, 1.0, lambda _: True)
    assert following is not None
    assert following.block == 1
