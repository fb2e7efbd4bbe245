"""What a log ends in, events in words, and why a run started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_incarnation, make_layout

from milesbatch.report.endings import decisive_lines
from milesbatch.report.event_words import event_in_words
from milesbatch.report.status import cause_of_restart
from milesbatch.store.events import EventLog


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("a\nb\nc\nd\n", ["b", "c", "d"]),
        ("x\nerror: first\nerror: second\n  what to do: y\n", ["error: second", "  what to do: y"]),
        (
            "Traceback (most recent call last)\n  File\nKeyError\n",
            ["Traceback (most recent call last)", "  File", "KeyError"],
        ),
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]: X\nsrun: error: n1\n",
            ["[rank1]: Traceback (most recent call last):", "[rank1]: X"],
        ),
        ("Fatal Python error: Aborted\n\nThread 0x1\n", ["Fatal Python error: Aborted", "Thread 0x1"]),
        ("srun: error: n1: task 0: Killed\n", ["srun: error: n1: task 0: Killed"]),
    ],
)
def test_decisive_lines(text: str, lines: list[str]) -> None:
    assert list(decisive_lines(text)) == lines


def test_a_long_traceback_is_cut_in_its_middle() -> None:
    found = decisive_lines(
        "Traceback (most recent call last):\n" + "".join(f"  line {n}\n" for n in range(50)) + "KeyError: 3\n"
    )
    assert len(found) == 12 and found[0].startswith("Traceback") and found[-1] == "KeyError: 3"


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"event": "process_ended", "name": "t", "reason": "killed by SIGKILL"}, "t ended: killed by SIGKILL"),
        (
            {"event": "process_ended", "name": "t", "reason": "r", "host": "n1", "said": "a\nb"},
            "t ended on n1: r; it said: a / b",
        ),
        ({"event": "stopping", "text": "lost", "nodes": ["n1", "n2"]}, "stopping: lost (nodes n1, n2)"),
        ({"event": "stopping", "signal": "SIGTERM"}, "stopping signal=SIGTERM"),
        ({"event": "new_thing", "at": "x", "mono_s": 1, "answer": 42}, "new_thing answer=42"),
        (
            {"event": "train_step", "step": 3, "metrics": {"reward_mean": 0.5, "loss": 1}},
            "step 3: reward 0.500, loss +1.0000",
        ),
        ({"event": "train_step", "step": 3, "metrics": None}, "train_step step=3 metrics=None"),
    ],
)
def test_events_in_words(event: dict[str, Any], words: str) -> None:
    assert event_in_words(event) == words


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([], "the controller was lost without a word (killed, or its node died)"),
        ([("failed", {"error": "a\nb"})], "it failed: a"),
        ([("finished", {})], "more steps were asked for"),
        ([("stopped", {})], "it was stopped by a signal"),
        (
            [("stopping", {"cause": "signal", "text": "SIGTERM"}), ("stopped", {})],
            "it was stopped by a signal (SIGTERM)",
        ),
        (
            [("stopping", {"cause": "time_limit", "text": "the limit is near"}), ("stopped", {})],
            "it was stopped: the limit is near",
        ),
    ],
)
def test_cause_of_restart(tmp_path: Path, events: list[tuple[str, dict[str, Any]]], cause: str) -> None:
    layout = make_layout(tmp_path / "run")
    layout.incarnation(1).write_bytes(make_incarnation(1).to_bytes())
    log = EventLog(layout, "controller-0", 1)
    for name, fields in events:
        log.write(name, **fields)
    log.close()
    assert cause_of_restart(layout) == cause
