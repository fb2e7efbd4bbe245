"""The beginning of a large run that benchmarks fill with made trajectories: the real files, and nothing has run."""

from __future__ import annotations

from pathlib import Path

from milesbatch.recipe.models import ArithmeticData, MadeModel, Recipe
from milesbatch.records import IncarnationRecord, RunRecord, Seal
from milesbatch.store.clock import utc_now
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.durable import create_exclusively
from milesbatch.store.layout import RunLayout


def begin_run(
    root: Path,
    name: str,
    steps: int,
    *,
    samples: int,
    groups_per_lease: int,
    groups_per_step: int,
    fingerprints: dict[str, str],
) -> tuple[RunLayout, RunRecord]:
    """A run of ``steps`` steps at ``root`` with its first incarnation, on another host; staleness 1."""
    layout = RunLayout(root)
    recipe = Recipe.model_validate(
        {
            "name": name,
            "steps": steps,
            "model": MadeModel().model_dump(),
            "data": ArithmeticData().model_dump(),
            "rollout": {"samples_per_group": samples, "groups_per_lease": groups_per_lease, "staleness": 1},
            "trainer": {"groups_per_step": groups_per_step},
        }
    )
    lay_out(layout, recipe)
    record = commit_run(layout, recipe, fingerprints)
    incarnation = IncarnationRecord(
        incarnation=1, host="elsewhere", pid=1, process_started="other:1", job_id="1", restart_count=0, cause="first",
        started_at=utc_now(), seal=Seal(last_batch=0, last_version=-1, checkpoints=(), trajectories=()),
    )  # fmt: skip
    create_exclusively(layout.incarnation(1), incarnation.to_bytes())
    return layout, record
