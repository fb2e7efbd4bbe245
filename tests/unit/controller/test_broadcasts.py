"""Who is ready, who is called, and what a worker hears of a version that is on its way. No network."""

from __future__ import annotations

import asyncio
import time

import pytest
from builders import make_recipe

from milesbatch.controller.broadcasts import Broadcasts
from milesbatch.controller.hub import Hub
from milesbatch.wire import messages as wire

A, B = "rollout-0.1", "rollout-1.1"


def poll(roster: Broadcasts, process: str, after: int = -1, wait_s: float = 0.0) -> wire.BroadcastCall:
    return asyncio.run(roster.poll(wire.BroadcastPoll(process=process, after=after, wait_s=wait_s)))


def begin(
    roster: Broadcasts, *processes: str, version: int = 1, generation: int = -1, within_s: float = 9.0
) -> wire.BroadcastBegun:
    return roster.begin(
        wire.BroadcastBegin(version=version, processes=processes, generation=generation, store="h:1", within_s=within_s)
    )


def coming(roster: Broadcasts, process: str, version: int) -> int:
    return roster.question(wire.BroadcastQuestion(process=process, version=version)).round


def test_who_asks_is_ready_and_is_called_with_its_rank() -> None:
    roster = Broadcasts()
    assert roster.members().processes == ()
    assert poll(roster, B).round == -1
    assert poll(roster, A).round == -1
    assert roster.members().processes == (A, B)
    begun = begin(roster, A, B)
    call = poll(roster, B)
    assert (call.round, call.generation, call.rank, call.size, call.store) == (
        begun.round,
        begun.generation,
        2,
        3,
        "h:1",
    )
    assert 8.0 < call.within_s <= 9.0
    assert poll(roster, B, after=begun.round).round == -1, "it was heard of"


def test_a_worker_that_waits_hears_of_the_round_at_once() -> None:
    async def both() -> float:
        roster = Broadcasts()
        waits = asyncio.create_task(roster.poll(wire.BroadcastPoll(process=A, after=-1, wait_s=30.0)))
        await asyncio.sleep(0)
        began_s = time.monotonic()
        begin(roster, A)
        assert (await waits).round == 1
        return time.monotonic() - began_s

    assert asyncio.run(both()) < 1.0


def test_a_group_is_kept_or_counted_on() -> None:
    roster = Broadcasts()
    first = begin(roster, A)
    assert begin(roster, A, generation=first.generation).generation == first.generation
    again = begin(roster, A, B)
    assert again.generation == first.generation + 1
    assert again.round == first.round + 2


def test_a_begin_whose_answer_was_lost_is_told_again() -> None:
    roster = Broadcasts()
    assert begin(roster, A) == begin(roster, A)
    assert begin(roster, A, version=2) != begin(roster, A, version=3)


def test_members_of_a_round_are_ready_again_when_it_ended_well_or_when_they_ask() -> None:
    roster = Broadcasts()
    poll(roster, A), poll(roster, B)
    begun = begin(roster, A, B)
    assert roster.members().processes == ()
    assert poll(roster, A).round == begun.round
    assert roster.members().processes == (), "it is busy now"
    roster.end(wire.BroadcastEnd(round=begun.round, confirmed=(A,)))
    assert roster.members().processes == (A,)
    poll(roster, B, after=begun.round)
    assert roster.members().processes == (A, B)


def test_a_worker_that_is_silent_is_not_asked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    roster = Broadcasts()
    poll(roster, A)
    later_s = time.monotonic() + 60
    monkeypatch.setattr("milesbatch.controller.broadcasts.time.monotonic", lambda: later_s)
    assert roster.members().processes == ()


def test_only_what_is_on_its_way_to_this_process_is_coming() -> None:
    roster = Broadcasts()
    begun = begin(roster, A, version=7)
    assert coming(roster, A, 7) == begun.round
    assert coming(roster, A, 6) == coming(roster, B, 7) == -1
    roster.end(wire.BroadcastEnd(round=begun.round - 1))
    assert coming(roster, A, 7) == begun.round, "another round ended"
    roster.end(wire.BroadcastEnd(round=begun.round))
    assert coming(roster, A, 7) == -1


def test_a_round_that_nobody_ends_ends_with_its_time() -> None:
    roster = Broadcasts()
    begin(roster, A, version=7, within_s=0.01)
    time.sleep(0.02)
    assert coming(roster, A, 7) == -1
    assert poll(roster, A).round == -1


def test_the_lost_are_forgotten_and_with_the_trainer_what_it_sent() -> None:
    hub = Hub(make_recipe())
    poll(hub.broadcasts, A), poll(hub.broadcasts, B)
    hub.forget("rollout-0")
    assert hub.broadcasts.members().processes == (B,)
    begin(hub.broadcasts, B, version=1)
    hub.forget("trainer-1")
    assert coming(hub.broadcasts, B, 1) > 0
    hub.forget("trainer-0")
    assert coming(hub.broadcasts, B, 1) == -1


def test_nobody_is_asked_for_a_version_that_was_published_before_or_in_a_run_that_stops() -> None:
    hub = Hub(make_recipe())
    poll(hub.broadcasts, A)
    hub.publish(wire.Published(version=4))
    asked = [hub.broadcast_members(wire.BroadcastMembersRequest(version=v)).processes for v in (3, 4, 5)]
    assert asked == [(), (), (A,)]
    hub.stop()
    assert hub.broadcast_members(wire.BroadcastMembersRequest(version=5)).processes == ()
