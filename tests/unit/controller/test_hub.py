"""The hub: rebuilt from disk, safe to tell things twice, and never stuck. No network."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from builders import (
    commit_batch,
    make_layout,
    make_recipe,
    make_ref,
    past_incarnation,
    publish,
    save_unfinished,
    write_groups,
)

from milesbatch.controller.hub import Hub
from milesbatch.decisions.fates import FateTable
from milesbatch.records import GroupRef
from milesbatch.store.survey import read_incarnations, survey
from milesbatch.trajectories.groups import group_refs
from milesbatch.wire import messages as wire


def make_hub(published: int = 0, **changes: Any) -> Hub:
    hub = Hub(make_recipe(**changes))
    hub.publish(wire.Published(version=published))
    return hub


def relaxed(published: int = 0, **changes: Any) -> Hub:
    return make_hub(published, determinism="relaxed", **changes)


def lease(hub: Hub, name: str = "rollout-0", wait_s: float = 0.0) -> wire.LeaseAnswer:
    holding = tuple(hub._leases.held_by(name))
    return asyncio.run(hub.lease(wire.LeaseRequest(name=name, wait_s=wait_s, holding=holding)))


def batch(hub: Hub, step: int, wait_s: float = 0.0) -> wire.BatchAnswer:
    return asyncio.run(hub.batch(wire.BatchRequest(step=step, wait_s=wait_s)))


def request(block: int, version: int = 0, file: str = "a", errors: int = 0, size: int = 2) -> wire.CommitRequest:
    groups = [make_ref(group, version) for group in range(block * size, (block + 1) * size)]
    return wire.CommitRequest(
        name="rollout-0",
        block=block,
        groups=tuple(group.model_copy(update={"path": f"{file}{block}"}) for group in groups),
        response_tokens=10,
        generated_s=1.0,
        errors=tuple(f"error {i}" for i in range(errors)),
        episodes=4,
    )


def record(hub: Hub, step: int) -> None:
    answer = batch(hub, step)
    assert answer.ready
    ids = [group.group_id for group in (*answer.trained, *answer.rejected)]
    hub.recorded(wire.Recorded(step=step, group_ids=tuple(ids)))


def beat(hub: Hub, activity: int, state: str = "generating", attempt: int = 1, name: str = "rollout-0") -> None:
    hub.heartbeat(
        wire.Heartbeat(
            name=name, attempt=attempt, host="h", state=state, policy_version=0, samples_in_flight=3, activity=activity
        )
    )


# -- leases ---------------------------------------------------------------------------------------------------------


def test_bitwise_leases_wait_for_their_version() -> None:
    hub = Hub(make_recipe())
    assert lease(hub) == wire.LeaseAnswer()
    hub.publish(wire.Published(version=0))
    # Staleness 1: steps 1 and 2 are made by version 0, step 3 by version 1.
    assert [lease(hub).groups for _ in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert lease(hub).groups == ()
    hub.publish(wire.Published(version=1))
    answer = lease(hub)
    assert (answer.groups, answer.version, answer.block) == ((8, 9), 1, 4)


def test_a_late_message_does_not_turn_the_version_back() -> None:
    hub = make_hub(3)
    hub.publish(wire.Published(version=1))
    assert hub.published == 3


def test_bitwise_leases_end_with_the_last_step() -> None:
    hub = make_hub(99, steps=2)
    assert [lease(hub).block for _ in range(5)] == [0, 1, 2, 3, -1]


def test_relaxed_leases_are_bounded_and_name_the_newest_version() -> None:
    hub = relaxed(5)
    answers = [lease(hub) for _ in range(6)]
    assert [answer.block for answer in answers] == [0, 1, 2, 3, -1, -1]
    assert {answer.version for answer in answers[:4]} == {5}


def test_a_lost_worker_and_a_lease_that_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = make_hub(rollout={"lease_s": 5.0})
    assert lease(hub, "rollout-0").block == 0
    assert lease(hub, "rollout-1").block == 1
    assert hub.forget("rollout-0") == [0]
    assert hub.forget("rollout-0") == []
    assert lease(hub, "rollout-2").block == 0
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 10.0)
    assert [lease(hub, "rollout-2").block for _ in range(3)] == [0, 1, 2]


def test_a_lease_names_what_earlier_incarnations_began(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    newer, older = (save_unfinished(layout, range(2, 4), incarnation=i) for i in (2, 1))
    odd = save_unfinished(layout, range(4, 5))
    hub = relaxed()
    hub.restore(FateTable(), (), 0, [newer, older, odd])
    answers = [lease(hub, name) for name in ("rollout-0", "rollout-1", "rollout-2")]
    assert [(answer.block, answer.saved) for answer in answers] == [(0, ()), (1, (str(newer), str(older))), (2, ())]
    assert {answer.step for answer in answers} == {1}
    hub.forget("rollout-1")
    assert lease(hub, "rollout-3").saved == (str(newer), str(older)), "whoever is handed the block goes on with it"
    assert hub.commit(request(1)).accepted
    hub.forget("rollout-0")
    assert [lease(hub, "rollout-3").saved for _ in range(2)] == [(), ()]


def test_a_lease_says_which_step_comes_next() -> None:
    hub = relaxed(5)
    for block in range(2):
        lease(hub)
        assert hub.commit(request(block, version=5)).accepted
    hub.last_step = 5
    record(hub, 6)
    assert lease(hub).step == 7


def test_bitwise_leases_name_nothing_that_was_begun(tmp_path: Path) -> None:
    hub = make_hub()
    hub.restore(FateTable(), (), 0, [save_unfinished(make_layout(tmp_path / "run"), range(2))])
    assert lease(hub).saved == ()


def test_stop_and_end() -> None:
    for act in (Hub.stop, Hub.finish):
        hub = make_hub()
        act(hub)
        assert lease(hub).stop
        assert lease(hub).is_over is (act is Hub.finish), "what is begun is worth saving unless the run is finished"
    hub = make_hub()
    hub.stop()
    assert hub.heartbeat(
        wire.Heartbeat(
            name="rollout-0", attempt=1, host="h", state="waiting", policy_version=0, samples_in_flight=0, activity=0
        )
    ).stop


def test_a_stop_waits_until_every_worker_has_heard_of_it() -> None:
    """A worker of another job is nobody's child here: the controller must not be gone before it has told it."""
    hub = relaxed()
    for name in ("rollout-0", "rollout-5000", "trainer-0"):
        beat(hub, 0, name=name)
    assert lease(hub, "rollout-7").groups
    beat(hub, 0, name="rollout-7")
    hub.stop()
    assert sorted(hub.workers_to_tell()) == ["rollout-0", "rollout-5000", "rollout-7"]
    beat(hub, 1, name="rollout-5000")
    assert lease(hub, "rollout-7").stop
    assert hub.workers_to_tell() == ["rollout-0"]
    hub.forget("rollout-0")
    assert hub.workers_to_tell() == []


# -- commits --------------------------------------------------------------------------------------------------------


def test_the_second_file_of_a_block_is_refused() -> None:
    hub = make_hub()
    lease(hub)
    assert hub.commit(request(0)).accepted
    assert not hub.commit(request(0, file="b")).accepted
    assert {group.path for group in hub.ready.values()} == {"a0"}


def test_the_accepted_commit_may_be_told_again_at_any_time() -> None:
    """Also when its groups have their fates: a refusal would quarantine a file that a batch record names."""
    hub = make_hub()
    for block in (0, 1):
        assert hub.commit(request(block)).accepted
    assert hub.commit(request(0)).accepted
    record(hub, 1)
    assert hub.ready == {}
    assert hub.commit(request(0)).accepted
    assert not hub.commit(request(0, file="b")).accepted
    assert hub.ready == {}


def test_a_commit_without_groups_is_no_crash() -> None:
    hub = make_hub()
    hub.commit(request(0))
    assert not hub.commit(request(0).model_copy(update={"groups": ()})).accepted


def test_a_commit_under_a_lease_that_was_given_to_another() -> None:
    hub = make_hub()
    lease(hub, "rollout-0")
    hub.forget("rollout-0")
    assert lease(hub, "rollout-1").block == 0
    assert hub.commit(request(0)).accepted
    assert lease(hub, "rollout-1").block == 1


def test_failures_are_counted_over_a_window() -> None:
    hub = make_hub(environment={"failed_window": 8})
    assert hub.failures.share() == 0.0
    hub.commit(request(0, errors=4))
    hub.commit(request(0, errors=4, file="b"))  # refused: not counted
    hub.commit(request(1, errors=2))
    assert hub.failures.share() == 0.75
    hub.commit(request(2))
    hub.commit(request(3))
    assert hub.failures.share() == 0.0
    assert hub.failures.first_error == "error 0"
    assert len(hub.failures.window) == hub.failures.window.maxlen


# -- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_is_the_same_until_it_is_recorded() -> None:
    hub = make_hub()
    assert batch(hub, 1) == wire.BatchAnswer(ready=False, missing=4)
    for block in (1, 0, 2):
        hub.commit(request(block))
    first = batch(hub, 1)
    assert [group.group_id for group in first.trained] == [0, 1, 2, 3]
    assert batch(hub, 1) == first
    assert batch(hub, 2).missing == 2
    for _ in range(2):
        hub.recorded(wire.Recorded(step=1, group_ids=(0, 1, 2, 3)))
    assert (hub.last_step, sorted(hub.ready)) == (1, [4, 5])


def test_a_relaxed_run_with_late_groups_comes_to_its_end() -> None:
    """Group 0 is so late that it is stale for the last step; its place must be given to another."""
    hub = relaxed(steps=3, rollout={"groups_per_lease": 1})
    late = lease(hub, "rollout-9")
    assert late.groups == (0,)
    for step in (1, 2):
        while not batch(hub, step).ready:
            answer = lease(hub)
            assert answer.groups
            hub.commit(request(answer.block, hub.published, size=1))
        record(hub, step)
        hub.publish(wire.Published(version=step))
    while (answer := lease(hub)).groups:
        hub.commit(request(answer.block, hub.published, size=1))
    hub.commit(request(0, 0, size=1))
    for _ in range(8):
        if (answer := lease(hub)).groups:
            hub.commit(request(answer.block, hub.published, size=1))
    last = batch(hub, 3)
    assert last.ready
    assert [(group.group_id, group.reason) for group in last.rejected] == [(0, "stale")]


# -- waiting --------------------------------------------------------------------------------------------------------


def test_long_polls_wake_at_once() -> None:
    async def scenario() -> None:
        hub = Hub(make_recipe())
        began_s = time.monotonic()
        leases = [
            asyncio.create_task(hub.lease(wire.LeaseRequest(name=f"rollout-{i}", wait_s=20.0, holding=())))
            for i in range(3)
        ]
        step = asyncio.create_task(hub.batch(wire.BatchRequest(step=1, wait_s=20.0)))
        meeting = asyncio.create_task(hub.rendezvous(wire.Rendezvous(attempt=2, address=None, wait_s=20.0)))
        await asyncio.sleep(0.01)
        hub.publish(wire.Published(version=0))
        assert sorted([(await task).block for task in leases]) == [0, 1, 2]
        hub.commit(request(0))
        await asyncio.sleep(0.01)
        assert not step.done()
        hub.commit(request(1))
        assert (await step).ready
        await hub.rendezvous(wire.Rendezvous(attempt=1, address="old", wait_s=0.0))
        await asyncio.sleep(0.01)
        assert not meeting.done()
        await hub.rendezvous(wire.Rendezvous(attempt=2, address="new", wait_s=0.0))
        assert (await meeting).address == "new"
        idle = asyncio.create_task(hub.batch(wire.BatchRequest(step=2, wait_s=20.0)))
        await asyncio.sleep(0.01)
        hub.stop()
        assert not (await idle).ready
        assert time.monotonic() - began_s < 5.0

    asyncio.run(scenario())


def test_long_polls_end() -> None:
    began_s = time.monotonic()
    assert lease(Hub(make_recipe()), wait_s=0.1) == wire.LeaseAnswer()
    assert not batch(Hub(make_recipe()), 1, wait_s=0.1).ready
    answer = asyncio.run(Hub(make_recipe()).rendezvous(wire.Rendezvous(attempt=1, address=None, wait_s=0.1)))
    assert answer.address is None
    assert 0.25 < time.monotonic() - began_s < 3.0


# -- heartbeats -----------------------------------------------------------------------------------------------------


def test_standing_still_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    hub = make_hub()

    def active_at(at_s: float, activity: int, state: str = "generating", attempt: int = 1) -> float:
        now[0] = at_s
        beat(hub, activity, state, attempt)
        assert hub.peers["rollout-0"].seen_at_s == at_s
        return hub.peers["rollout-0"].active_at_s

    assert active_at(1000.0, 5) == 1000.0
    assert active_at(1002.0, 5) == 1000.0  # alive, but it stands still
    assert active_at(1004.0, 6) == 1004.0
    assert active_at(1006.0, 6, "training") == 1004.0
    assert active_at(1008.0, 6, "waiting") == 1008.0  # waiting is never a hang
    assert active_at(1010.0, 6) == 1008.0
    assert active_at(1012.0, 6, attempt=2) == 1012.0  # another process


def test_what_people_see() -> None:
    hub = make_hub()
    assert hub.waiting_for() == "the trainer to start"
    beat(hub, 0, "loading", name="trainer-0")
    assert hub.waiting_for() == "the trainer (loading)"
    beat(hub, 0, "waiting", name="trainer-0")
    beat(hub, 0)
    hub.commit(request(0))
    assert "2 groups to come" in hub.waiting_for()
    peer = hub.peers["rollout-0"]
    hub.heartbeat(peer.beat.model_copy(update={"servers": "rollout-0.server-1 is starting"}))
    assert hub.waiting_for().endswith("2 groups to come, 3 samples in flight; rollout-0.server-1 is starting")
    assert hub.status().workers[0]["servers"] == "rollout-0.server-1 is starting"
    status = hub.status()
    assert (status.state, status.ready_groups) == ("running", 2)
    assert [worker["name"] for worker in status.workers] == ["rollout-0"]
    assert status.tokens_per_s > 0
    hub.stop()
    assert hub.status().state == "draining"
    hub.finish()
    assert hub.status().state == "finished"


def test_what_lies_between_rollout_and_training() -> None:
    """Two leases of two groups each, and one finished block of which the next step may take nothing."""
    hub = relaxed(4)
    hub.recorded(wire.Recorded(step=4, group_ids=()))
    beat(hub, 4)
    beat(hub, 4, name="rollout-1")
    blocks = [lease(hub, name).block for name in ("rollout-0", "rollout-0", "rollout-1")]
    hub.commit(request(blocks[0], version=2))
    status = hub.status()
    assert (status.ready_groups, status.stale_groups, status.leased_groups, status.leases) == (2, 2, 4, 2)
    held = {worker["name"]: (worker["leases"], worker["groups_in_flight"]) for worker in status.workers}
    assert held == {"rollout-0": (1, 2), "rollout-1": (1, 2)}
    hub.forget("rollout-1")
    assert (hub.status().leased_groups, len(hub.status().workers)) == (2, 1)


# -- from disk ------------------------------------------------------------------------------------------------------


def restored(root: Path, **changes: Any) -> Hub:
    """A hub after a take-over that found steps 1 and 2 recorded, blocks 4 and 6 waiting, and version 1 published."""
    layout = make_layout(root)
    past_incarnation(layout)
    publish(layout, [0, 1])
    for step in (1, 2):
        commit_batch(layout, step, write_groups(layout, range(4 * step - 4, 4 * step)))
    write_groups(layout, [8, 9], version=1)
    write_groups(layout, [12, 13], version=1)
    found = survey(layout, read_incarnations(layout))
    ready: list[GroupRef] = [ref for name in found.ready_files for ref in group_refs(layout.trajectory(name))]
    hub = Hub(make_recipe(**changes))
    hub.restore(found.fates, ready, found.last_version)
    return hub


def test_restored_state(tmp_path: Path) -> None:
    hub = restored(tmp_path / "run")
    assert (hub.published, hub.last_step) == (1, 2)
    assert sorted(hub.ready) == [8, 9, 12, 13]
    assert [lease(hub).block for _ in range(2)] == [5, -1]  # 4 and 6 are done; 7 needs version 2
    assert not hub.commit(request(0, file="b")).accepted
    assert not hub.commit(request(4, file="b")).accepted
    assert hub.commit(request(5, 1)).accepted
    assert [group.group_id for group in batch(hub, 3).trained] == [8, 9, 10, 11]


def test_relaxed_restart_counts_what_was_found(tmp_path: Path) -> None:
    hub = restored(tmp_path / "run", determinism="relaxed")
    assert [lease(hub).block for _ in range(3)] == [5, 7, -1]


def test_a_block_that_is_partly_decided_is_made_again_for_the_rest(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    past_incarnation(layout)
    commit_batch(layout, 1, write_groups(layout, [0]))
    found = survey(layout, read_incarnations(layout))
    hub = Hub(make_recipe(determinism="relaxed"))
    hub.restore(found.fates, [], 0)
    assert lease(hub).groups == (0, 1)
    assert hub.commit(request(0)).accepted
    assert sorted(hub.ready) == [1]


def test_nothing_to_restore() -> None:
    hub = Hub(make_recipe())
    hub.restore(FateTable(), [], -1)
    assert (hub.published, hub.last_step, hub.ready) == (-1, 0, {})
    assert lease(hub).groups == ()


def test_messages_are_strict() -> None:
    with pytest.raises(ValueError):
        wire.Recorded.model_validate_json('{"step": 1, "group_ids": [1], "more": 2}')
    for message in (request(1, errors=1), batch(make_hub(), 1), wire.Ok()):
        assert type(message).model_validate_json(message.model_dump_json()) == message


def test_a_lease_whose_reply_was_lost_is_given_again() -> None:
    hub = make_hub()
    first = asyncio.run(hub.lease(wire.LeaseRequest(name="rollout-0", wait_s=0.0, holding=())))
    again = asyncio.run(hub.lease(wire.LeaseRequest(name="rollout-0", wait_s=0.0, holding=())))
    assert again == first
    other = asyncio.run(hub.lease(wire.LeaseRequest(name="rollout-0", wait_s=0.0, holding=(first.block,))))
    assert other.block == first.block + 1


def test_an_unreachable_version_is_named_to_the_trainer_until_it_is_published_again() -> None:
    hub = make_hub(2)
    said = wire.Unreachable(name="rollout-0", version=1, what="flipped", wait_s=0.0)
    assert asyncio.run(hub.report_unreachable(said)).pending
    assert asyncio.run(hub.batch(wire.BatchRequest(step=9, wait_s=60.0))).unreachable == (1,)
    hub.publish(wire.Published(version=2))
    assert list(hub.unreachable) == [1], "bitwise workers need exactly this version"
    hub.publish(wire.Published(version=1))
    again = said.model_copy(update={"what": ""})
    assert not asyncio.run(hub.report_unreachable(again)).pending
    assert hub.published == 2


def test_without_bitwise_mode_a_newer_version_mends_an_unreachable_one() -> None:
    hub = relaxed(2)
    assert asyncio.run(
        hub.report_unreachable(wire.Unreachable(name="rollout-0", version=1, what="flipped", wait_s=0.0))
    ).pending
    hub.publish(wire.Published(version=3))
    assert not hub.unreachable


def test_who_waits_for_lost_groups_hears_of_unreachable_versions() -> None:
    """The worker that is to make them again may need a version whose files are gone."""
    hub = make_hub(4)
    question = wire.RegenerateRequest(groups=(8,), wait_s=0.0)
    assert asyncio.run(hub.regenerate(question)) == wire.RegenerateAnswer(groups=())
    asyncio.run(hub.report_unreachable(wire.Unreachable(name="rollout-0", version=1, what="retired", wait_s=0.0)))
    assert asyncio.run(hub.regenerate(question)).unreachable == (1,)


def test_a_worker_that_is_given_up_gets_no_block_with_its_last_question() -> None:
    """Its poll is still open when it is forgotten; what it were given would be held until the lease runs out."""

    async def story() -> tuple[wire.LeaseAnswer, wire.LeaseAnswer]:
        hub = make_hub(-1)
        poll = asyncio.create_task(hub.lease(wire.LeaseRequest(name="rollout-7000", wait_s=20.0, holding=())))
        await asyncio.sleep(0)
        hub.forget("rollout-7000")
        hub.publish(wire.Published(version=0))
        dead = await poll
        return dead, await hub.lease(wire.LeaseRequest(name="rollout-7001", wait_s=0.0, holding=()))

    dead, other = asyncio.run(story())
    assert (dead.groups, dead.stop) == ((), False)
    assert other.block == 0


def test_an_idle_worker_tells_its_version_with_the_question_for_a_lease() -> None:
    """Its next heartbeat may come after the last checkpoint; and in bitwise mode it may go back to an older version."""
    hub = make_hub(9, rollout={"workers": 1})
    holds(hub, "rollout-0", 3)
    for version in (7, 4):
        question = wire.LeaseRequest(name="rollout-0", wait_s=0.0, holding=(), policy_version=version)
        asyncio.run(hub.lease(question))
        assert hub.oldest_held() == version
    unknown = wire.LeaseRequest(name="rollout-0", wait_s=0.0, holding=())
    asyncio.run(hub.lease(unknown))
    assert hub.oldest_held() == 4


# -- what workers hold, for retention -------------------------------------------------------------------------------


def holds(hub: Hub, name: str, version: int, state: str = "generating") -> None:
    hub.heartbeat(
        wire.Heartbeat(
            name=name, attempt=1, host="h", state=state, policy_version=version, samples_in_flight=0, activity=0
        )
    )


def test_the_oldest_version_that_a_worker_holds() -> None:
    hub = make_hub(9, rollout={"workers": 2})
    for name in ("rollout-0", "rollout-1"):
        hub.started(name, 1)
    assert hub.oldest_held() is None, "nobody has been heard of"
    holds(hub, "rollout-0", 7)
    holds(hub, "trainer-0", 2)
    assert hub.oldest_held() is None, "one was started and not heard of"
    holds(hub, "rollout-1", -1, "starting")
    assert hub.oldest_held() is None, "it may begin with any version"
    holds(hub, "rollout-1", -1, "generating")
    assert hub.oldest_held() is None, "it is just reading its first version"
    holds(hub, "rollout-1", 5)
    assert hub.oldest_held() == 5
    holds(hub, "rollout-7", 4)
    assert hub.oldest_held() == 4, "one that joined"


def test_a_lost_worker_holds_nothing_until_it_is_started_again() -> None:
    hub = make_hub(9, rollout={"workers": 2})
    for name, version in (("rollout-0", 7), ("rollout-1", 5)):
        hub.started(name, 1)
        holds(hub, name, version)
    hub.forget("rollout-1")
    assert hub.oldest_held() == 7, "its node may be gone for long"
    hub.started("rollout-1", 2)
    assert hub.oldest_held() is None
    hub.forget("rollout-1")
    hub.forget("rollout-0")
    assert hub.oldest_held() == 9


def test_workers_that_wait_for_their_first_lease_hold_nothing() -> None:
    hub = make_hub(9, rollout={"workers": 2})
    holds(hub, "rollout-0", -1, "waiting")
    holds(hub, "rollout-1", -1, "waiting")
    assert hub.oldest_held() == 9
    holds(hub, "rollout-1", 8)
    assert hub.oldest_held() == 8
