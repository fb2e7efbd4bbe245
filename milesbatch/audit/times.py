"""Where the seconds went, from the event logs: diagnosis only, so that a missing or torn log is never a violation.

Owns the sums; never compares clocks of two hosts. The page behind it is ``docs/audit.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milesbatch.audit.findings import Findings
from milesbatch.ids import parse_number
from milesbatch.store.entries import listed
from milesbatch.store.events import read_events
from milesbatch.store.layout import RunLayout

CAUSES = ("generating", "training", "waiting", "replaying", "restarting", "starting", "checkpointing")


@dataclass(slots=True)
class Times:
    """Sums over the life of a run. ``generating`` is worker seconds; all others are those of trainer rank 0."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    replayed: list[int] = field(default_factory=list)
    """Step of each replay, in order of time."""
    checkpoints: set[int] = field(default_factory=set)
    """Steps whose checkpoint the log says was committed."""

    def rounded(self) -> dict[str, float]:
        return {cause: round(seconds, 3) for cause, seconds in self.seconds.items()}


def add_up_times(layout: RunLayout, findings: Findings) -> Times:
    """Read all event logs that there are."""
    times = Times()
    trainers: list[tuple[int, Path]] = []
    for path in listed(layout.events):
        process, _, incarnation = path.name.removesuffix(".jsonl").rpartition(".i")
        if process.startswith("rollout-"):
            for event in _events(path, findings):
                if event.get("event") == "trajectories_committed":
                    times.seconds["generating"] += _number(event.get("generated_s"))
        elif process == "trainer-0":
            try:
                trainers.append((parse_number(incarnation), path))
            except ValueError:
                continue
    is_first = True
    for _, path in sorted(trainers):
        is_first = _add_trainer(path, is_first, times, findings)
    return times


def _add_trainer(path: Path, is_first: bool, times: Times, findings: Findings) -> bool:
    """Sum up one log of trainer 0; returns whether the next start is still the first one that worked."""
    ready_at_s: float | None = None
    for event in _events(path, findings):
        kind = event.get("event")
        if kind == "ready":
            cause = "starting" if is_first else "restarting"
            times.seconds[cause] += _number(event.get("seconds"))
            ready_at_s = _number(event.get("mono_s"))
        elif kind == "train_step":
            busy_s = _add_step(event, times)
            if ready_at_s is not None:  # between ready and the first step: loading, and publishing version 0
                cause = "starting" if is_first else "restarting"
                times.seconds[cause] += max(_number(event.get("mono_s")) - ready_at_s - busy_s, 0.0)
                ready_at_s, is_first = None, False
        elif kind == "checkpoint_started":
            times.seconds["checkpointing"] += _number(event.get("stall_s"))
        elif kind == "checkpoint_committed" and isinstance(event.get("step"), int):
            times.checkpoints.add(event["step"])
    return is_first


def _add_step(event: Mapping[str, Any], times: Times) -> float:
    metrics = event.get("metrics")
    if not isinstance(metrics, dict):
        return 0.0
    waited_s = _number(metrics.get("wait_s"))
    worked_s = _number(metrics.get("train_s")) + _number(metrics.get("publish_s"))
    if event.get("replayed") is True:
        times.seconds["replaying"] += waited_s + worked_s
        if isinstance(event.get("step"), int):
            times.replayed.append(event["step"])
    else:
        times.seconds["waiting"] += waited_s
        times.seconds["training"] += worked_s
    return waited_s + worked_s


def _events(path: Path, findings: Findings) -> Iterator[dict[str, Any]]:
    try:
        for event, _ in read_events(path):
            yield event
    except (OSError, RecursionError) as error:
        findings.note("diagnosis", path, f"it cannot be read ({error})")


def _number(value: object) -> float:
    """A finite number that is not negative; 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15
    return float(value) if is_number else 0.0  # type: ignore[arg-type]
