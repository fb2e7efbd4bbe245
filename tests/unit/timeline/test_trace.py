"""The trace is one that Perfetto can read: fields and types of its events, nested slices, unique ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_layout
from events_made import step, write

from milesbatch.store.layout import RunLayout
from milesbatch.timeline.evidence import read_evidence
from milesbatch.timeline.slices import tell
from milesbatch.timeline.trace import trace_bytes, trace_document
from milesbatch.timeline.troubles import find_troubles

_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "dur": int, "args": dict},
    "i": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "s": str},
    "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "id": int},
    "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "id": int, "bp": str},
    "C": {"name": str, "pid": int, "tid": int, "ts": int, "args": dict},
}


def trace_of(layout: RunLayout) -> dict[str, Any]:
    evidence = read_evidence(layout, 0)
    story = tell(evidence)
    document = trace_document("run-1", evidence, story, find_troubles(evidence, story))
    return dict(json.loads(trace_bytes(document)))


def check(trace: dict[str, Any]) -> None:
    """The rules of the format."""
    events = trace["traceEvents"]
    for event in events:
        for name, kind in _FIELDS[event["ph"]].items():
            assert isinstance(event[name], kind), (event, name)
        assert event.get("ts", 0) >= 0 and event.get("dur", 1) > 0
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    _check_nesting([event for event in events if event["ph"] == "X"])
    _check_names(events)
    _check_flows(events)


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in slices:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for own in threads.values():
        open_until: list[int] = []
        for event in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def _check_names(events: list[dict[str, Any]]) -> None:
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    assert len(named) == sum(e["ph"] == "M" for e in events)
    for event in events:
        if event["ph"] in "Xsfi":
            assert ("process_name", event["pid"], 0) in named and ("thread_name", event["pid"], event["tid"]) in named


def _check_flows(events: list[dict[str, Any]]) -> None:
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(begins) == sum(e["ph"] == "s" for e in events) and begins.keys() == ends.keys()
    slices = [e for e in events if e["ph"] == "X"]
    for flow in [*begins.values(), *ends.values()]:
        place = flow["pid"], flow["tid"]
        assert any((s["pid"], s["tid"]) == place and s["ts"] <= flow["ts"] <= s["ts"] + s["dur"] for s in slices), flow
    assert all(begins[number]["ts"] <= ends[number]["ts"] for number in begins)


def test_two_faults(faulty: RunLayout) -> None:
    trace = trace_of(faulty)
    check(trace)
    events = trace["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert titles == ["run", "controller-0", "trainer-0 (node-7)", "trainer-1", "rollout-1 (node-7)"]
    assert len([e for e in events if e["ph"] == "i"]) == 6
    assert [e["name"] for e in events if e["ph"] == "s"] == ["version 1"]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"reward_mean"}
    spans = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["cat"] == "incarnation"]
    assert spans == [("incarnation 1", 0, 60_000_000), ("incarnation 2", 100_000_000, 15_000_000)]


def test_leases_that_are_open_at_once_have_threads_of_their_own(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    done = [
        (second, "trajectories_committed", {"block": second, "tokens": 1, "generated_s": 6.0, "failed": 0})
        for second in range(10, 30, 2)
    ]
    write(layout, "rollout-0", 1, (1, "ready", {"seconds": 1}), *done)
    trace = trace_of(layout)
    check(trace)
    threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"generating 1", "generating 2", "generating 3"} <= threads and "generating 5" not in threads


def test_every_slice_of_the_story_is_in_the_trace(faulty: RunLayout) -> None:
    story = tell(read_evidence(faulty, 0))
    named = [e["cat"] for e in trace_of(faulty)["traceEvents"] if e["ph"] == "X"]
    for activity in {piece.activity for piece in story.slices}:
        assert named.count(activity) == sum(piece.activity == activity for piece in story.slices)


def test_a_run_without_events(tmp_path: Path) -> None:
    trace = trace_of(make_layout(tmp_path / "run"))
    check(trace)
    assert {e["ph"] for e in trace["traceEvents"]} == {"M"}


def test_the_rules_can_fail(faulty: RunLayout) -> None:
    trace = trace_of(faulty)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "training"]
    slices[0]["dur"] += 250_000  # half of what comes next
    with pytest.raises(AssertionError):
        check(trace)


def test_many_steps(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    write(layout, "trainer-0", 1, *((4.0 * n, "train_step", step(n)) for n in range(1, 300)))
    write(
        layout, "rollout-0", 1,
        *((4.0 * n + 1, "weights_activated", {"version": n, "prepared_s": 0.2, "paused_s": 0.1}) for n in range(1, 300)),
    )  # fmt: skip
    trace = trace_of(layout)
    check(trace)
    assert sum(e["ph"] == "f" for e in trace["traceEvents"]) == 299
