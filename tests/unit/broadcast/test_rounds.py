"""Real groups over gloo: what arrives, and how long it costs when a member dies, hangs, is slow or never comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from rounds_made import HERE, Child, Worker, make_version, send_in_thread

from milesbatch.broadcast.attempt import Attempt
from milesbatch.broadcast.group import Group
from milesbatch.broadcast.rounds import UnansweredError
from milesbatch.errors import BroadcastError
from milesbatch.faults.points import set_hook

LONG_S = 60.0
"""A time limit that nothing may come near to."""


@pytest.fixture(autouse=True)
def no_hook() -> Iterator[None]:
    yield
    set_hook(None)


def a_group(workers: int) -> tuple[Group, str, list[Worker]]:
    group = Group.found(HERE, 1 + workers, LONG_S)
    return group, f"{HERE}:{group.port}", [Worker(rank) for rank in range(1, 1 + workers)]


def play(
    group: Group, address: str, workers: list[Worker], number: int, version: int, timeout_s: float = LONG_S
) -> tuple[Attempt[object], list[Attempt[object]]]:
    sender: Attempt[object] = send_in_thread(group, number, version, timeout_s)  # type: ignore[assignment]
    return sender, [w.take_part(address, group.size, number, timeout_s) for w in workers]  # type: ignore[misc]


def fails_within(attempt: Attempt[object], seconds: float) -> BroadcastError:
    with pytest.raises(BroadcastError) as caught:
        attempt.result(time.monotonic() + seconds)
    assert "given up" not in str(caught.value), "it hangs"
    return caught.value


def test_every_version_reaches_all_over_one_group() -> None:
    group, address, workers = a_group(3)
    for number, version in ((1, 5), (2, 6), (3, 7)):
        sender, receivers = play(group, address, workers, number, version)
        sent = sender.result(time.monotonic() + LONG_S)
        assert (sent.confirmed, dict(sent.refused)) == ((1, 2, 3), {})  # type: ignore[attr-defined]
        expected = {name: tensor.digest for name, tensor in make_version(version)[1].items()}
        for receiver in receivers:
            found = receiver.result(time.monotonic() + LONG_S)
            assert {name: tensor.digest for name, tensor in found.items()} == expected  # type: ignore[attr-defined]
    assert group._store.num_keys() < 30, "words of past rounds are forgotten"


def test_a_refusal_is_told() -> None:
    group, address, (worker,) = a_group(1)
    worker.refusal = "tensor embed is another one"
    sender, _ = play(group, address, [worker], 1, 5)
    sent = sender.result(time.monotonic() + LONG_S)
    assert (sent.confirmed, dict(sent.refused)) == ((), {1: worker.refusal})  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rank", "action", "timeout_s"), [(1, "kill", LONG_S), (3, "stop", 3.0)])
def test_a_worker_that_is_lost_in_the_middle(rank: int, action: str, timeout_s: float) -> None:
    """It is named, the others stop too, and the next group is made without it."""
    group, address, workers = a_group(3)
    child = Child(rank, address, 4, timeout_s, "broadcast.receiving", 5, action)
    try:
        child.ready()
        began_s = time.monotonic()
        child.go()
        sender, receivers = play(group, address, [w for w in workers if w.rank != rank], 1, 1, timeout_s)
        child.await_accident()
        error = fails_within(sender, 8.0)
        assert isinstance(error, UnansweredError)
        assert error.ranks == (rank,)
        for receiver in receivers:
            fails_within(receiver, 8.0)
        assert time.monotonic() - began_s < 12.0
    finally:
        child.end()
    group, address, workers = a_group(2)
    sender, receivers = play(group, address, workers, 2, 1)
    assert sender.result(time.monotonic() + LONG_S).confirmed == (1, 2)  # type: ignore[attr-defined]


def test_a_trainer_that_dies_in_the_middle() -> None:
    child = Child(0, "", 3, LONG_S, "broadcast.sending", 5, "kill")
    try:
        address = f"{HERE}:{child.ready()}"
        child.go()
        receivers = [Worker(rank).take_part(address, 3, 1, LONG_S) for rank in (1, 2)]
        child.await_accident()
        for receiver in receivers:
            fails_within(receiver, 8.0)  # type: ignore[arg-type]
    finally:
        child.end()


def slow_at(name: str, thread: str, seconds: float, nth: int = 5) -> Callable[[str], None]:
    passed = 0

    def hook(point: str) -> None:
        nonlocal passed
        if point == name and threading.current_thread().name == thread:
            passed += 1
            if passed == nth:
                time.sleep(seconds)

    return hook


def test_a_worker_that_is_too_slow_is_named() -> None:
    group, address, workers = a_group(2)
    set_hook(slow_at("broadcast.receiving", "worker-2", 6.0))
    began_s = time.monotonic()
    sender, receivers = play(group, address, workers, 1, 1, timeout_s=2.0)
    error = fails_within(sender, 6.0)
    assert isinstance(error, UnansweredError)
    assert error.ranks == (2,)
    fails_within(receivers[0], 3.0)
    assert time.monotonic() - began_s < 5.5


def test_a_worker_that_keeps_up_a_little_late_is_waited_for() -> None:
    group, address, workers = a_group(2)
    set_hook(slow_at("broadcast.receiving", "worker-2", 1.0))
    sender, receivers = play(group, address, workers, 1, 1)
    assert sender.result(time.monotonic() + LONG_S).confirmed == (1, 2)  # type: ignore[attr-defined]
    assert all(receiver.result(time.monotonic() + LONG_S) for receiver in receivers)


def test_a_worker_that_does_not_come_costs_a_part_of_the_time_and_no_bytes() -> None:
    group, address, workers = a_group(2)
    sent: list[str] = []
    set_hook(sent.append)
    began_s = time.monotonic()
    sender, (receiver,) = play(group, address, workers[:1], 1, 1, timeout_s=4.0)
    error = fails_within(sender, 4.0)
    assert isinstance(error, UnansweredError)
    assert error.ranks == (2,)
    assert "called the broadcast off" in fails_within(receiver, 1.0).what
    assert time.monotonic() - began_s < 3.5
    assert "broadcast.sending" not in sent


def test_work_that_hangs_is_given_up() -> None:
    hangs = threading.Event()
    attempt = Attempt("a collective", hangs.wait)
    with pytest.raises(BroadcastError, match=r"a collective did not end within .* given up"):
        attempt.result(time.monotonic() + 0.05)
    hangs.set()
    assert attempt.result(time.monotonic() + 5.0) is True
