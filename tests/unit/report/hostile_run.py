"""A run that brings along the worst texts it can: for tests that none of them becomes markup or script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from builders import commit_batch, make_incarnation, make_run, write_groups

from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.trajectory import Message

HOSTILE = (
    "</script><script>window.owned=1</script><img src=x onerror=window.owned=2>"
    '" onfocus="window.owned=3" \' \u202e @bad \x00'
)


def write_events(layout: RunLayout, process: str, incarnation: int, *events: dict[str, Any]) -> None:
    with open(layout.event_log(process, incarnation), "a") as stream:
        for number, event in enumerate(events):
            body = {"at": f"2026-03-01T12:00:{number:02d}Z", "mono_s": float(number), "process": process, **event}
            stream.write(json.dumps(body) + "\n")


def hostile_run(root: Path) -> RunLayout:
    """Everything that a run can bring along says the worst."""
    layout = make_run(root)
    layout.incarnation(1).write_bytes(make_incarnation(1, cause=HOSTILE, host=HOSTILE).to_bytes())
    messages = (Message("user", HOSTILE), Message(HOSTILE, HOSTILE, HOSTILE), Message("assistant", HOSTILE))
    rewards = {HOSTILE: 1.0}
    good = write_groups(layout, [0], messages=messages, rewards=rewards, prompt_id=HOSTILE)
    bad = write_groups(layout, [1], messages=messages, error=HOSTILE, rewards=rewards)
    commit_batch(layout, 1, [*good, *bad])
    figures = {"reward_mean": 0.5, "loss": HOSTILE, HOSTILE: 1.0, "reward/</script>": 0.5, "__proto__": 2.0}
    write_events(layout, "trainer-0", 1, {"event": "train_step", "step": 1, "metrics": figures})
    write_events(layout, "rollout-0", 1, {"event": "waiting_for_space", "error": HOSTILE + "\ud800"})
    write_events(
        layout, "controller-0", 1,
        {"event": "incarnation_started", "cause": HOSTILE, "quarantined": [[HOSTILE, HOSTILE]]},
        {"event": "process_started", "name": HOSTILE, "attempt": 1},
        {"event": "process_ended", "name": HOSTILE, "exit_code": 1, "reason": HOSTILE, "host": HOSTILE, "said": HOSTILE},
        {"event": "failed", "error": HOSTILE, "exit_code": 1},
    )  # fmt: skip
    layout.recipe.write_text(layout.recipe.read_text() + f"# {HOSTILE}\n")
    return layout
