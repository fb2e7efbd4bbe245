"""Events of a run that never was, at given seconds: for tests of what is told about them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from milesbatch.store.layout import RunLayout

BEGIN = datetime(2026, 3, 1, 12, tzinfo=UTC)
BEGIN_S = BEGIN.timestamp()


def at(seconds: float) -> str:
    return (BEGIN + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def write(layout: RunLayout, process: str, incarnation: int, *events: tuple[Any, ...]) -> None:
    """Append events: each is (seconds since the beginning, name, more fields or nothing)."""
    with open(layout.event_log(process, incarnation), "a") as stream:
        for seconds, name, *more in events:
            common = {"at": at(seconds), "mono_s": 500 + seconds, "event": name, "process": process}
            stream.write(json.dumps({**common, "incarnation": incarnation, **(more[0] if more else {})}) + "\n")


def step(
    number: int, *, wait_s: float = 1.0, train_s: float = 2.0, publish_s: float = 0.5, **more: Any
) -> dict[str, Any]:
    """Fields of a ``train_step``; ``more`` goes into its figures, but for ``replayed``."""
    replayed = more.pop("replayed", False)
    figures = {"reward_mean": 0.5, "wait_s": wait_s, "train_s": train_s, "publish_s": publish_s, **more}
    return {"step": number, "replayed": replayed, "weights_digest": "", "metrics": figures}


def two_faults(layout: RunLayout) -> None:
    """One incarnation in which worker 1 and then trainer 0 is killed, and a second one after the controller was lost."""
    died = {"exit_code": -9, "reason": "killed by SIGKILL", "host": "node-7"}
    write(
        layout, "controller-0", 1,
        (0, "incarnation_started", {"cause": "first", "last_batch": 0, "last_version": -1, "quarantined": []}),
        *((1, "process_started", {"name": name, "pid": 1, "attempt": 1}) for name in ("trainer-0", "trainer-1", "rollout-1")),
        (30, "process_ended", {"name": "rollout-1", **died, "said": "out of memory", "leases_freed": [4, 5]}),
        (31, "process_started", {"name": "rollout-1", "pid": 2, "attempt": 2}),
        (40, "process_ended", {"name": "trainer-0", **died, "said": "", "leases_freed": []}),
        (42, "process_started", {"name": "trainer-0", "pid": 3, "attempt": 2}),
        (42, "process_started", {"name": "trainer-1", "pid": 4, "attempt": 2}),
    )  # fmt: skip
    write(
        layout, "trainer-0", 1,
        (10, "ready", {"seconds": 8}), (15, "train_step", step(1)), (20, "train_step", step(2)),
        (21, "checkpoint_started", {"step": 2, "stall_s": 0.5}), (24, "checkpoint_committed", {"step": 2}),
        (50, "ready", {"seconds": 7}), (56, "train_step", step(3, replayed=True)), (60, "train_step", step(4)),
    )  # fmt: skip
    write(layout, "trainer-1", 1, (10, "ready", {"seconds": 8}), (50, "ready", {"seconds": 7}))
    write(
        layout, "rollout-1", 1,
        (8, "ready", {"seconds": 6}), (9, "weights_activated", {"version": 0, "prepared_s": 0.4, "paused_s": 0.1}),
        (14, "trajectories_committed", {"block": 0, "tokens": 40, "generated_s": 4, "failed": 1, "accepted": True}),
        (16, "weights_activated", {"version": 1, "prepared_s": 0.4, "paused_s": 0.1}),
        (39, "ready", {"seconds": 6}),
    )  # fmt: skip
    write(
        layout, "controller-0", 2,
        (100, "incarnation_started",
         {"cause": "lost without a word", "last_batch": 4, "last_version": 4, "quarantined": [["weights/5", "torn"]]}),
        (110, "stopping", {"cause": "time_limit", "text": "the time limit is near", "nodes": ["n1"]}),
        (112, "process_ended", {"name": "rollout-1", "exit_code": 1, "reason": "exit status 1"}),
        (115, "stopped", {"step": 4}),
    )  # fmt: skip
    fired = {"fault": "worker", "process": "rollout-1", "pid": 1, "at": at(29.9), "mono_s": 1}
    (layout.events / "fault.worker.fired").write_text(json.dumps(fired))
