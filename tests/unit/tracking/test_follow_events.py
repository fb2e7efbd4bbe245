"""Tracking: one MLflow run over all incarnations, every step once, whatever was killed or replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from milesbatch.errors import StorageError
from milesbatch.recipe.load import dump_recipe
from milesbatch.recipe.models import Recipe
from milesbatch.records import RunRecord
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import OpenRun
from milesbatch.tracking.follow import follow
from milesbatch.tracking.mlflow_tracker import MlflowTracker

RECIPE = Recipe.model_validate(
    {"name": "curves", "steps": 6, "model": {"kind": "made"}, "data": {"kind": "arithmetic"}}
)


@pytest.fixture
def run(tmp_path: Path) -> OpenRun:
    layout = RunLayout(tmp_path / "run")
    for directory in layout.directories():
        directory.mkdir(parents=True)
    layout.recipe.write_text(dump_recipe(RECIPE))
    record = RunRecord(run_id="curves-1", name="curves", recipe_digest="", created_at="", fingerprints={})
    return OpenRun(layout, record, RECIPE)


def write_steps(run: OpenRun, incarnation: int, steps: range, replayed: range, ending: str | None) -> None:
    trainer = EventLog(run.layout, "trainer-0", incarnation)
    controller = EventLog(run.layout, "controller-0", incarnation)
    for step in steps:
        metrics = {"reward_mean": step / 10, "loss": -step / 100, "reward/exact": 0.5}
        trainer.write("train_step", step=step, replayed=step in replayed, metrics=metrics)
    if ending is not None:
        controller.write(ending)


def logged(client: MlflowClient, run_id: str, metric: str) -> list[tuple[int, float]]:
    return [(entry.step, round(entry.value, 6)) for entry in client.get_metric_history(run_id, metric)]


def test_one_mlflow_run_over_incarnations_with_each_step_once(run: OpenRun) -> None:
    uri = f"sqlite:///{run.layout.tracking / 'mlflow.db'}"
    # The first incarnation was killed: its tracker never saw the end and had logged only what was there at the time.
    write_steps(run, 1, range(1, 4), range(0), None)
    first = MlflowTracker(run, 1, uri)
    first.log_step(1, "2026-01-01T00:00:00.000000Z", {"reward_mean": 0.1, "loss": -0.01, "reward/exact": 0.5})
    # The second one replays steps 2 and 3 and goes on to the end.
    write_steps(run, 2, range(2, 7), range(2, 4), "finished")
    follow(run.layout, 2, lambda: MlflowTracker(run, 2, uri))

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("milesbatch")
    (only,) = client.search_runs([experiment.experiment_id])
    assert only.info.status == "FINISHED"
    assert only.data.tags["milesbatch.run_id"] == "curves-1"
    assert only.data.params["rollout.samples_per_group"] == "8"
    assert logged(client, only.info.run_id, "reward_mean") == [(step, step / 10) for step in range(1, 7)]
    assert logged(client, only.info.run_id, "loss") == [(step, -step / 100) for step in range(1, 7)]
    assert [artifact.path for artifact in client.list_artifacts(only.info.run_id)] == ["recipe.yaml"]


def test_a_tracking_place_that_cannot_be_used_is_named(run: OpenRun) -> None:
    with pytest.raises(StorageError, match="MLFLOW_TRACKING_URI"):
        MlflowTracker(run, 1, "sqlite:////proc/no/such/place.db")
