"""A run of many steps as its files would be: made from a seed, without training anything.

Three incarnations, eight workers, faults, a jump of the reward at a known step, and trajectories of every step.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from builders import commit_batch, make_incarnation, make_run, make_trajectory, unfenced

from milesbatch.records import GroupRef, Rejection, Seal, digest_bytes
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.groups import group_refs
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.trajectories.writer import write_trajectories

BEGIN = datetime(2026, 3, 1, 12, tzinfo=UTC)
STEP_S = 20.0
GROUPS = 4


@dataclass
class Pen:
    """Writes events at given seconds since the beginning."""

    layout: RunLayout
    lines: dict[tuple[str, int], list[tuple[float, dict[str, Any]]]]

    def write(self, process: str, incarnation: int, at_s: float, event: str, **fields: Any) -> None:
        moment = (BEGIN + timedelta(seconds=at_s)).isoformat().replace("+00:00", "Z")
        body = {"at": moment, "mono_s": round(1000 + at_s, 4), "event": event, "process": process}
        self.lines.setdefault((process, incarnation), []).append((at_s, {**body, "incarnation": incarnation, **fields}))

    def close(self) -> None:
        for (process, incarnation), lines in self.lines.items():
            text = "".join(json.dumps(line) + "\n" for _, line in sorted(lines, key=lambda pair: pair[0]))
            self.layout.event_log(process, incarnation).write_text(text)


def figures(step: int, jump_at: int, chance: random.Random) -> dict[str, float]:
    """What a train step says; the reward rises by 0.3 at ``jump_at``."""
    level = 0.3 + 0.0001 * step + (0.3 if step >= jump_at else 0.0)
    reward = min(1.0, max(0.0, chance.gauss(level, 0.03)))
    return {
        "reward_mean": reward, "reward_std": 0.4, "length_mean": 200 + step / 10 + chance.gauss(0, 5),
        "truncated_share": 0.02, "failed": float(step % 50 == 0), "groups_trained": 8.0, "groups_rejected": 0.0,
        "lag_mean": 1.0 + 0.2 * chance.random(), "lag_max": 2.0, "step": float(step), "loss": chance.gauss(0.02, 0.01),
        "grad_norm": abs(chance.gauss(2, 0.5)), "learning_rate": 1e-4, "entropy": 1.2 * 0.9995**step, "kl": step * 1e-5,
        "clip_share": 0.01, "ratio_mean": 1.0, "ratio_max": 1.4, "logprob_difference_mean": 0.01,
        "logprob_difference_max": 0.2, "samples": 64.0, "tokens": 16000.0, "loss_tokens": 12000.0, "microbatches": 2.0,
        "seconds": 8.0, "wait_s": 6.0, "train_s": 9.0, "publish_s": 2.0, "weights_bytes": 4e8,
        "weights_changed_share": 0.6, "weights_publish_s": 1.8,
    }  # fmt: skip


def make_long_run(root: Path, *, steps: int = 1000, workers: int = 8, jump_at: int = 600, seed: int = 1) -> RunLayout:
    """The run directory; what a step trained on and what was written down about it agree."""
    layout = make_run(root)
    chance = random.Random(seed)
    pen = Pen(layout, {})
    cuts = [0, steps * 2 // 5, steps * 3 // 4, steps]
    at_s = 0.0
    for incarnation in (1, 2, 3):
        first, last = cuts[incarnation - 1] + 1, cuts[incarnation]
        _begin(pen, incarnation, first, at_s, workers)
        at_s += 60
        for step in range(first, last + 1):
            at_s += STEP_S
            _step(pen, incarnation, step, at_s, figures(step, jump_at, chance), workers)
        if incarnation == 1:
            pen.write("controller-0", 1, at_s - 500, "process_ended", name="rollout-1", exit_code=-9,
                      reason="killed by SIGKILL", host="node-3", said="out of memory", leases_freed=[7])  # fmt: skip
            pen.write("controller-0", 1, at_s - 495, "process_started", name="rollout-1", pid=9, attempt=2)
            pen.write("rollout-1", 1, at_s - 480, "ready", seconds=15)
        if incarnation == 2:
            pen.write("controller-0", 2, at_s - 1, "stopping", cause="time_limit", text="the time limit is near")
            pen.write("controller-0", 2, at_s, "stopped", step=last, cause="time_limit", text="")
        at_s += 600
    pen.write("controller-0", 3, at_s - 600, "finished", step=steps)
    pen.close()
    _experience(layout, steps)
    return layout


def _begin(pen: Pen, incarnation: int, first: int, at_s: float, workers: int) -> None:
    seal = Seal(last_batch=first - 1, last_version=first - 1, checkpoints=(), trajectories=())
    changes = {"steps": 1000} if incarnation == 3 else {}
    cause = "first" if incarnation == 1 else "the controller was lost without a word"
    record = make_incarnation(incarnation, cause=cause, seal=seal, recipe_changes=changes)
    pen.layout.incarnation(incarnation).write_bytes(record.to_bytes())
    pen.write("controller-0", incarnation, at_s, "incarnation_started", cause=cause, last_batch=first - 1,
              last_version=first - 1, checkpoints=[], ready_files=0, quarantined=[])  # fmt: skip
    for name in ("trainer-0", "trainer-1", *(f"rollout-{n}" for n in range(workers))):
        pen.write("controller-0", incarnation, at_s + 1, "process_started", name=name, pid=1, attempt=1)
        pen.write(name, incarnation, at_s + 50, "ready", seconds=49)


def _step(pen: Pen, incarnation: int, step: int, at_s: float, metrics: dict[str, float], workers: int) -> None:
    pen.write(
        "trainer-0", incarnation, at_s, "train_step", step=step, replayed=False, weights_digest="", metrics=metrics
    )
    if step % 10 == 0:
        pen.write("trainer-0", incarnation, at_s + 0.5, "checkpoint_started", step=step, stall_s=0.4)
        pen.write("trainer-0", incarnation, at_s + 9, "checkpoint_committed", step=step)
    for worker in range(workers):
        name = f"rollout-{worker}"
        pen.write(name, incarnation, at_s + 1, "weights_activated", version=step, prepared_s=0.8, paused_s=0.02)
        pen.write(name, incarnation, at_s + 15 + worker / 10, "trajectories_committed", path="x", block=step * workers + worker,
                  accepted=True, tokens=2000, generated_s=13.0, failed=0)  # fmt: skip


def _reject(ref: GroupRef) -> Rejection:
    return Rejection(group_id=ref.group_id, reason="stale", path=ref.path, digest=ref.digest)


def _experience(layout: RunLayout, steps: int, steps_per_file: int = 50) -> None:
    for first in range(1, steps + 1, steps_per_file):
        many = range(first, min(first + steps_per_file, steps + 1))
        groups = range((first - 1) * GROUPS, (many[-1]) * GROUPS)
        rows = [
            make_trajectory(group, sample, max(0, group // GROUPS - (1 + group % 2)))
            for group in groups
            for sample in range(2)
        ]
        metadata = FileMetadata("run-1", digest_bytes(b"tokenizer"), digest_bytes(b"template"))
        name, _ = write_trajectories(
            layout,
            rows,
            incarnation=1,
            worker="rollout-0",
            metadata=metadata,
            before_commit=unfenced,
            samples_per_group=2,
        )
        refs = group_refs(layout.trajectory(name))
        for step in many:
            own = refs[(step - first) * GROUPS : (step - first + 1) * GROUPS]
            rejected = [_reject(own[-1])] if step % 20 == 0 else []
            commit_batch(layout, step, own[: len(own) - len(rejected)], rejected=rejected)
