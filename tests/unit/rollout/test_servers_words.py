"""What a worker says while there is no space for its servers' weights, and that a stop ends the wait."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from milesbatch.errors import StoppedToContinue, StorageFullError
from milesbatch.rollout.listening import listener_of
from milesbatch.rollout.memory import Room
from milesbatch.store.patience import Patience
from milesbatch.wire.client import Pulse


class Events:
    def __init__(self) -> None:
        self.written: list[tuple[str, dict[str, Any]]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.written.append((event, fields))


@pytest.fixture
def pulse() -> Pulse:
    address = {"controller_url": "http://127.0.0.1:9", "token": "t", "process": "rollout-0.1", "incarnation": 1}
    return Pulse(SimpleNamespace(name="rollout-0", attempt=1, **address))  # type: ignore[arg-type]


def listening(pulse: Pulse, events: Events) -> tuple[Callable[[str], None], Callable[[], None]]:
    def tell(text: str) -> None:
        pulse.moved()

    listener = listener_of(pulse, events, tell)  # type: ignore[arg-type]
    assert listener.room is not None
    return listener.room, listener.sign


def test_the_wait_is_told_until_it_is_over_though_servers_show_signs_of_life(pulse: Pulse) -> None:
    events = Events()
    tell, sign = listening(pulse, events)
    tell("rollout.sglang.memory_dir: no space")
    moves = pulse._moves
    sign()
    assert pulse._moves > moves and pulse._trouble == "rollout.sglang.memory_dir: no space"
    assert events.written == [("waiting_for_space", {"error": "rollout.sglang.memory_dir: no space"})]
    pulse.moved()
    assert pulse._trouble == ""


def test_one_that_is_told_to_stop_does_not_wait_to_the_end(pulse: Pulse) -> None:
    tell, _ = listening(pulse, Events())
    tries: list[int] = []

    def action() -> None:
        tries.append(1)
        pulse.should_stop = len(tries) > 1
        raise StorageFullError("no space left for /mem")

    with pytest.raises(
        StoppedToContinue, match=r"stopped while waiting for space; .*memory_dir: no space left for /mem"
    ):
        Room(Patience(600, tell)).until_there(action)
    assert len(tries) == 2
