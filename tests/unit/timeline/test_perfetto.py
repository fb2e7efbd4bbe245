"""The trace as Perfetto itself reads it: its trace processor finds every slice, arrow, instant and counter, and no error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import make_layout
from events_made import step, write
from perfetto_page import PerfettoPage, perfetto_page
from test_trace import trace_of

from milesbatch.store.layout import RunLayout
from milesbatch.timeline.trace import trace_bytes

ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


@pytest.fixture(scope="module")
def page() -> Iterator[PerfettoPage]:
    with perfetto_page() as found:
        yield found


def of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_two_faults(page: PerfettoPage, faulty: RunLayout) -> None:
    trace = trace_of(faulty)
    page.open(trace_bytes(trace))
    assert page.query(ERRORS) == []
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in of(trace, "M") if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in of(trace, "M") if e["name"] == "process_name"}
    rows = page.query(
        "select s.name, s.ts, s.dur, s.depth, t.name as thread, p.name as process from slice s"
        " join thread_track k on s.track_id = k.id join thread t using (utid) join process p using (upid) where s.dur > 0"
    )
    told = Counter((row["name"], row["ts"], row["dur"], row["thread"], row["process"]) for row in rows)
    ours = Counter(
        (e["name"], 1000 * e["ts"], 1000 * e["dur"], threads[e["pid"], e["tid"]], processes[e["pid"]])
        for e in of(trace, "X")
    )
    assert told == ours and ours.total() > 10
    assert {row["depth"] for row in rows} == {0}, "slices of a thread are apart: none was pushed below another one"
    instants = page.query("select s.name, s.ts from slice s where s.dur = 0")
    assert Counter((row["name"], row["ts"]) for row in instants) == Counter(
        (e["name"], 1000 * e["ts"]) for e in of(trace, "i")
    )


def test_why_a_worker_died_is_among_the_arguments_of_its_instant(page: PerfettoPage, faulty: RunLayout) -> None:
    page.open(trace_bytes(trace_of(faulty)))
    (death,) = page.query(
        "select extract_arg(arg_set_id, 'args.who') as who, extract_arg(arg_set_id, 'args.then') as result from slice"
        " where dur = 0 and name like 'died: %rollout%' or (dur = 0 and extract_arg(arg_set_id, 'args.who') = 'rollout-1')"
    )
    assert death["who"] == "rollout-1" and "ready after" in death["result"]


def test_many_steps(page: PerfettoPage, tmp_path: Path) -> None:
    """Arrows from where a version was published to where it was activated; counters; leases that are open at once."""
    layout = make_layout(tmp_path / "run")
    write(layout, "trainer-0", 1, *((4.0 * n, "train_step", step(n)) for n in range(1, 300)))
    activated = [
        (4.0 * n + 1, "weights_activated", {"version": n, "prepared_s": 0.2, "paused_s": 0.1}) for n in range(1, 300)
    ]
    done = [
        (4.0 * n + 2, "trajectories_committed", {"block": n, "tokens": 1, "generated_s": 9.0, "failed": 0})
        for n in range(10, 300)
    ]
    write(layout, "rollout-0", 1, (1, "ready", {"seconds": 1}), *sorted([*activated, *done]))
    trace = trace_of(layout)
    page.open(trace_bytes(trace))
    assert page.query(ERRORS) == []
    flows = page.query(
        "select o.name as source, o.ts + o.dur - i.ts as late, i.name as sink from flow f"
        " join slice o on f.slice_out = o.id join slice i on f.slice_in = i.id"
    )
    assert len(flows) == len(of(trace, "s")) == 299
    assert {(row["source"], row["sink"]) for row in flows} == {("publishing", "weights")}
    counted = page.query(
        "select t.name, count(*) as number, max(c.value) as largest from counter c join counter_track t on c.track_id = t.id"
        " group by t.name"
    )
    ours = [(f"{e['name']} value", e["args"]["value"]) for e in of(trace, "C")]
    assert {row["name"]: row["number"] for row in counted} == dict(Counter(name for name, _ in ours))
    assert [(row["name"], row["largest"]) for row in counted] == [("reward_mean value", max(ours)[1])]
    generating = page.query("select count(*) as number, max(depth) as depth from slice where name = 'generating'")
    assert generating == [{"number": sum(e["name"] == "generating" for e in of(trace, "X")), "depth": 0}]


def test_perfetto_tells_of_errors(page: PerfettoPage, faulty: RunLayout) -> None:
    """The checks above can fail: slices that overlap without being nested are an error there, too."""
    trace = trace_of(faulty)
    training = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "training"]
    training[0]["dur"] += 250_000
    page.open(trace_bytes(trace))
    rows = page.query("select max(depth) as depth from slice where name in ('training', 'publishing')")
    assert page.query(ERRORS) != [] or rows[0]["depth"] > 0
