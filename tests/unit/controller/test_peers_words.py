"""What processes say of themselves is told once at each change."""

from __future__ import annotations

from typing import Any

from milesbatch.controller.peers_words import PeersWords
from milesbatch.wire.messages import Heartbeat


def beats(*said: dict[str, Any]) -> dict[str, Heartbeat]:
    base = {
        "attempt": 1,
        "host": "n1",
        "state": "starting",
        "policy_version": -1,
        "samples_in_flight": 0,
        "activity": 0,
    }
    return {one["name"]: Heartbeat(**(base | one)) for one in said}


def test_servers_that_start_and_work_are_told_once() -> None:
    words = PeersWords()
    starting = {"name": "rollout-0", "servers": "rollout-0.server-0 is starting"}
    assert words.changes(beats({"name": "rollout-0"})) == []
    assert words.changes(beats(starting)) == ["rollout-0: rollout-0.server-0 is starting"]
    assert words.changes(beats(starting)) == []
    assert words.changes(beats({"name": "rollout-0"})) == ["rollout-0: its servers work"]
    assert words.changes(beats({"name": "rollout-0"})) == []


def test_a_new_start_of_a_worker_tells_of_its_servers_anew() -> None:
    words = PeersWords()
    starting = {"name": "rollout-0", "servers": "rollout-0.server-0 is starting"}
    assert words.changes(beats(starting)) == words.changes(beats(starting | {"attempt": 2}))
    assert words.changes({}) == []
    assert len(words.changes(beats(starting | {"attempt": 2}))) == 1


def test_who_waits_for_space_and_who_goes_on() -> None:
    words = PeersWords()
    full = {"name": "trainer-0", "trouble": "no space left"}
    assert words.changes(beats(full, {"name": "rollout-0"})) == ["trainer-0: no space left"]
    assert words.in_trouble == {"trainer-0"}
    assert words.changes(beats(full | {"trouble": "still no space"})) == [], "the words may change"
    assert words.changes(beats({"name": "trainer-0"})) == ["trainer-0 goes on: there is space again"]
    words.changes(beats(full))
    assert words.changes({}) == [], "who has left goes on nowhere"
    assert words.in_trouble == set()
