"""How the last steps went, and how long the rest will take, from the ends of the logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_run, past_incarnation

from milesbatch.cli.screen import rows
from milesbatch.report.status import run_status
from milesbatch.report.summary import recent_steps, seconds_left
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """Steps 1 to 3; then a restart that replays 3 and goes on to 4."""
    layout = make_run(tmp_path / "run")
    for steps in ((1, 2, 3), (3, 4)):
        log = EventLog(layout, "trainer-0", past_incarnation(layout))
        for step in steps:
            metrics = {"reward_mean": step / 10, "lag_mean": 1.0, "lag_max": 1.0}
            log.write("train_step", step=step, replayed=False, weights_digest="x", metrics=metrics)
    return layout


def test_each_step_once_and_only_the_last_ones(layout: RunLayout) -> None:
    assert [event["step"] for event in recent_steps(layout)] == [1, 2, 3, 4]
    assert [event["incarnation"] for event in recent_steps(layout)] == [1, 1, 1, 2]
    assert [event["step"] for event in recent_steps(layout, most=2)] == [3, 4]


def test_the_rest_takes_as_long_as_steps_took_without_the_restart() -> None:
    times = ("12:00:00", "12:00:02", "12:00:04", "12:05:00", "12:05:02")
    events = [{"at": f"2026-01-01T{time}.000000Z", "step": step} for step, time in enumerate(times, start=1)]
    assert seconds_left(events, 15) == 20.0
    assert seconds_left(events, 5) == 0.0
    assert seconds_left(events[:1], 15) is None and seconds_left([], 15) is None


def test_they_are_on_the_screen(layout: RunLayout) -> None:
    body = run_status(layout)
    assert body["rewards"] == [0.1, 0.2, 0.3, 0.4]
    assert body["seconds_left"] is None, "it does not run"
    assert body["disk_free_bytes"] > 0
    running = rows({**body, "seconds_left": 90.0, "step": 4, "steps": 8, "disk_free_bytes": 1 << 30})
    said = dict(running)
    assert said["step"] == "4 of 8  ██████████░░░░░░░░░░, about 0:01:30 left"
    assert said["disk"].startswith("only 1.0 GiB are free where the run lies; ")
    assert any("0.400 (from 0.100)" in text for _, text in running)
