"""Figures of a drill from event logs and records that are made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from milesbatch.drill.evidence import Event, Fired, Outcome
from milesbatch.drill.measure import compare, measure


def at(mono_s: float, process: str, event: str, **fields: Any) -> Event:
    return {"mono_s": mono_s, "process": process, "event": event, **fields}


def ended(mono_s: float, name: str, exit_code: int = -9) -> Event:
    return at(mono_s, "controller-0", "process_ended", name=name, exit_code=exit_code)


def step(mono_s: float, number: int, *, replayed: bool = False) -> Event:
    return at(mono_s, "trainer-0", "train_step", step=number, replayed=replayed)


KILLED = [
    step(1.0, 1),
    step(2.0, 2),
    ended(3.5, "trainer-0"),
    step(8.0, 1, replayed=True),
    step(9.0, 2, replayed=True),
    step(10.25, 3),
    step(11.0, 4),
]


def test_a_killed_rank() -> None:
    found = measure(Fired("trainer-0", 7, 3.0), "kill", "trainer-0", KILLED)
    assert (found.detected_s, found.resumed_s, found.steps_replayed) == (0.5, 7.25, 2)


def test_the_other_rank_may_be_seen_first() -> None:
    assert measure(Fired("trainer-1", 7, 3.0), "kill", "trainer-1", KILLED).detected_s == 0.5


def test_what_happened_before_does_not_count() -> None:
    found = measure(Fired("trainer-0", 7, 10.5), "kill", "trainer-0", KILLED)
    assert (found.detected_s, found.resumed_s, found.steps_replayed) == (None, 0.5, 0)


def test_nothing_after_the_last_step_is_not_zero() -> None:
    found = measure(Fired("trainer-0", 7, 11.5), "kill", "trainer-0", KILLED)
    assert (found.detected_s, found.resumed_s, found.steps_replayed) == (None, None, 0)


def test_a_process_that_ends_well_is_no_sign() -> None:
    events = [ended(2.0, "rollout-1", 0), ended(3.0, "rollout-1")]
    assert measure(Fired("rollout-1", 1, 1.0), "stop", "rollout-1", events).detected_s == 2.0


def test_a_worker_is_no_trainer() -> None:
    assert measure(Fired("rollout-1", 1, 1.0), "kill", "rollout", [ended(2.0, "trainer-0")]).detected_s is None


@pytest.mark.parametrize(
    ("action", "role", "fired", "event"),
    [
        ("power_cut", "trainer-0", Fired("drill", 0, 1.0), at(5.0, "controller-0", "incarnation_started")),
        ("kill", "controller", Fired("controller-0", 3, 1.0), at(5.0, "controller-0", "incarnation_started")),
        ("zombie", "trainer-0", Fired("trainer-0", 3, 1.0), at(5.0, "controller-0", "incarnation_started")),
        ("preempt", "trainer-0", Fired("drill", 0, 1.0), at(5.0, "controller-0", "stopping", signal="SIGTERM")),
        ("enospc", "rollout", Fired("rollout-1", 3, 1.0), at(5.0, "rollout-1", "waiting_for_space")),
        ("enospc", "trainer-0", Fired("trainer-0", 3, 1.0), ended(5.0, "trainer-0", 93)),
        (
            "delay",
            "rollout-1",
            Fired("rollout-1", 3, 1.0),
            at(5.0, "rollout-1", "trajectories_committed", accepted=False),
        ),
        ("partition", "rollout-1", Fired("rollout-1", 3, 1.0), ended(5.0, "rollout-1", 75)),
    ],
)
def test_the_sign_of_each_fault(action: str, role: str, fired: Fired, event: Event) -> None:
    others = [
        at(2.0, "rollout-0", "trajectories_committed", accepted=True),
        at(3.0, "rollout-0", "waiting_for_space"),
        ended(4.0, "rollout-0", 0),
    ]
    assert measure(fired, action, role, [*others, event]).detected_s == 4.0
    assert measure(fired, action, role, others).detected_s is None


def test_the_step_that_a_preempted_run_finishes_is_no_resumption() -> None:
    events = [
        at(1.5, "controller-0", "stopping", signal="SIGTERM"),
        step(3.0, 4),
        at(5.0, "controller-0", "incarnation_started"),
        step(9.0, 5),
    ]
    found = measure(Fired("drill", 0, 1.0), "preempt", "trainer-0", events)
    assert (found.detected_s, found.resumed_s) == (0.5, 8.0)
    assert measure(Fired("trainer-0", 0, 1.0), "delay", "trainer-0", events).resumed_s == 2.0
    assert measure(Fired("trainer-0", 0, 1.0, "weights/000002/x"), "flip", "trainer-0", events[:2]).resumed_s == 2.0


def test_damage_is_found_where_it_is_named() -> None:
    fired = Fired("drill", 0, 1.0, "checkpoints/000003/shards.i000001/__0_0.distcp")
    other = at(2.0, "controller-0", "incarnation_started", quarantined=[["weights/000003/manifest.json", "damaged"]])
    named = at(
        4.0, "controller-0", "incarnation_started", quarantined=[["checkpoints/000003/manifest.json", "damaged"]]
    )
    assert measure(fired, "flip", "trainer-0", [other, named]).detected_s == 3.0
    assert measure(fired, "flip", "trainer-0", [other]).detected_s is None


UNBROKEN = Outcome({0: "trained(1)", 1: "trained(1)", 2: "rejected(stale, 2)"}, 0, {0: "a", 1: "b", 2: "c"})


def outcome(**changes: Any) -> Outcome:
    values = {"fates": UNBROKEN.fates, "repeated": 0, "digests": UNBROKEN.digests, "damaged": (), **changes}
    return Outcome(**values)


def test_equal_runs_have_no_differences() -> None:
    found = compare(outcome(), UNBROKEN, True)
    assert (found.groups_lost, found.groups_repeated, found.digest_equal, found.differences) == (0, 0, True, ())


@pytest.mark.parametrize(
    ("changes", "lost", "repeated", "equal", "words"),
    [
        ({"fates": {0: "trained(1)", 2: "rejected(stale, 2)"}}, 1, 0, True, "1 groups have no fate, the first is 1"),
        ({"repeated": 2}, 0, 2, True, "2 groups have more than one fate"),
        ({"fates": {**UNBROKEN.fates, 1: "trained(2)"}}, 0, 0, True, r"group 1 is trained\(2\), and was trained\(1\)"),
        ({"fates": {**UNBROKEN.fates, 9: "trained(2)"}}, 0, 0, True, "group 9 is .* was without one"),
        ({"digests": {0: "a", 1: "X", 2: "Y"}}, 0, 0, False, "weights of version 1 are X,.* run b"),
        ({"digests": {0: "a", 1: "b"}}, 0, 0, False, "weights of version 2 are None"),
        ({"damaged": ("batches/000002.json: ...",)}, 0, 0, True, "batches/000002.json"),
    ],
)
def test_each_difference_is_said(changes: dict[str, Any], lost: int, repeated: int, equal: bool, words: str) -> None:
    import re

    found = compare(outcome(**changes), UNBROKEN, True)
    assert (found.groups_lost, found.groups_repeated, found.digest_equal) == (lost, repeated, equal)
    assert len(found.differences) == 1 and re.search(words, found.differences[0])


def test_relaxed_runs_promise_no_digest() -> None:
    found = compare(outcome(digests={0: "z"}, fates={7: "trained(1)"}), UNBROKEN, False)
    assert (found.digest_equal, found.groups_lost, found.differences) == (None, 0, ())
    assert compare(outcome(repeated=1), UNBROKEN, False).differences == ("1 groups have more than one fate",)
