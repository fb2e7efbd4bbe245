"""A fork in MLflow, TensorBoard and W&B: its parent is named, its curve goes on where the parent's was left."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_follow_events import RECIPE, logged, run, write_steps  # noqa: F401 - a fixture

from milesbatch.recipe.load import dump_recipe
from milesbatch.records import ForkedFrom, RunRecord
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import OpenRun
from milesbatch.tracking.follow import follow
from milesbatch.tracking.mlflow_tracker import MlflowTracker
from milesbatch.tracking.tensorboard_tracker import TensorboardTracker
from milesbatch.tracking.wandb_tracker import WandbTracker


def forked(parent: str, root: Path, run_id: str, step: int) -> OpenRun:
    layout = RunLayout(root)
    for directory in layout.directories():
        directory.mkdir(parents=True)
    layout.recipe.write_text(dump_recipe(RECIPE))
    begin = ForkedFrom(
        run_id=parent,
        path="runs/parent",
        step=step,
        policy_version=step,
        weights_digest=None,
        checkpoint_digest=None,
        first_version=step,
        first_group=0,
    )
    record = RunRecord(
        run_id=run_id, name="curves", recipe_digest="", created_at="", fingerprints={}, forked_from=begin
    )
    return OpenRun(layout, record, RECIPE)


def track(each: OpenRun, steps: range, uri: str) -> None:
    write_steps(each, 1, steps, range(0), "finished")
    follow(each.layout, 1, lambda: MlflowTracker(each, 1, uri))


def mlflow_run(client: MlflowClient, run_id: str) -> Any:
    experiment = client.get_experiment_by_name("milesbatch")
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`milesbatch.run_id` = '{run_id}'")
    return found


def test_a_forks_mlflow_run_is_nested_under_its_parents_and_its_curve_goes_on_there(
    run: OpenRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    child = forked("curves-1", tmp_path / "child", "curves-2", 3)
    grandchild = forked("curves-2", tmp_path / "grandchild", "curves-3", 5)
    track(run, range(1, 7), uri)
    track(child, range(4, 7), uri)
    track(grandchild, range(6, 7), uri)
    client = MlflowClient(tracking_uri=uri)
    first, second, third = (mlflow_run(client, f"curves-{number}") for number in (1, 2, 3))
    assert "mlflow.parentRunId" not in first.data.tags and "milesbatch.parent_run_id" not in first.data.tags
    assert second.data.tags["mlflow.parentRunId"] == first.info.run_id
    assert second.data.tags["milesbatch.parent_run_id"] == "curves-1"
    assert second.data.tags["milesbatch.parent_step"] == "3"
    assert second.data.tags["milesbatch.parent_path"] == "runs/parent"
    assert third.data.tags["mlflow.parentRunId"] == second.info.run_id
    parents = logged(client, first.info.run_id, "reward_mean")
    childs = logged(client, second.info.run_id, "reward_mean")
    assert [step for step, _ in childs] == [4, 5, 6]
    assert [step for step, _ in [*parents[:3], *childs]] == list(range(1, 7)), "one curve with a seam at step 3"


def test_where_the_store_does_not_have_the_parent_its_name_is_there_and_it_is_nested_later(
    run: OpenRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    child = forked("curves-1", tmp_path / "child", "curves-2", 3)
    track(child, range(4, 6), uri)
    client = MlflowClient(tracking_uri=uri)
    tags = mlflow_run(client, "curves-2").data.tags
    assert tags["milesbatch.parent_run_id"] == "curves-1" and "mlflow.parentRunId" not in tags
    track(run, range(1, 7), uri)
    MlflowTracker(child, 2, uri)
    found = mlflow_run(client, "curves-2").data.tags["mlflow.parentRunId"]
    assert found == mlflow_run(client, "curves-1").info.run_id


def test_tensorboard_shows_the_parent_as_a_text_once(tmp_path: Path) -> None:
    place = tmp_path / "tensorboard"
    lineage = {"milesbatch.parent_run_id": "curves-1", "milesbatch.parent_step": "3"}
    for _ in range(2):
        TensorboardTracker(place, lineage).close("stopped")
    found = EventAccumulator(str(place))
    found.Reload()
    assert found.Tags()["tensors"] == ["milesbatch/forked from"]
    (event,) = found.Tensors("milesbatch/forked from")
    assert b"milesbatch.parent_run_id: curves-1" in event.tensor_proto.string_val[0]
    assert found.SummaryMetadata("milesbatch/forked from").plugin_data.plugin_name == "text"
    assert TensorboardTracker(place, lineage).last_step() == 0


def test_wandb_has_the_parent_in_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def init(**arguments: Any) -> Any:
        asked.update(arguments)
        return SimpleNamespace(define_metric=lambda *names, **more: None)

    monkeypatch.setattr(wandb, "init", init)
    parent = forked("curves-0", tmp_path / "parent", "curves-1", 2)
    WandbTracker(parent, tmp_path / "one")
    of_parent = asked["id"]
    WandbTracker(forked("curves-1", tmp_path / "child", "curves-2", 3), tmp_path / "two")
    assert asked["config"]["milesbatch.parent_wandb_id"] == of_parent != asked["id"]
    assert asked["config"]["milesbatch.parent_step"] == "3"
    assert json.dumps(asked["config"])
