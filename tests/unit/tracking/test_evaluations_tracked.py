"""Evaluations in the trackers: each once, at its version, whoever made it and whatever was killed."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from builders import START, evaluate_version, flip, make_settings
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from test_follow_events import run, write_steps  # noqa: F401 - a fixture
from test_other_trackers import quickly, scalars  # noqa: F401 - a fixture

from milesbatch.errors import StorageError
from milesbatch.evaluation.reader import record_paths
from milesbatch.store.run import OpenRun
from milesbatch.tracking.evaluations import EvaluationEntry, EvaluationWatch
from milesbatch.tracking.follow import follow
from milesbatch.tracking.mlflow_tracker import MlflowTracker
from milesbatch.tracking.tensorboard_tracker import TensorboardTracker
from milesbatch.tracking.wandb_tracker import WandbTracker


def evaluated(run: OpenRun, *rewards: float, every: int = 2) -> None:  # noqa: F811
    for place, reward in enumerate(rewards):
        started = START + timedelta(minutes=place)
        evaluate_version(run.layout, place * every, (reward, 0.0), started=started, env={"answer": "2"})


def test_new_ones_are_found_once_and_a_damaged_one_later(run: OpenRun) -> None:  # noqa: F811
    watch = EvaluationWatch(run.layout)
    assert watch.new() == []
    evaluated(run, 0.5, 1.0)
    evaluate_version(run.layout, 2, name="hard", settings=make_settings(2, prompts=b"hard"))
    (path,) = record_paths(run.layout, 0)
    flip(path, 40)
    assert [entry.version for entry in watch.new()] == [2], "those of the recipe's own prompts"
    flip(path, 40)
    (entry,) = watch.new()
    assert (entry.version, entry.metrics["eval/reward_mean"], entry.metrics["eval/reward/answer"]) == (0, 0.25, 0.25)
    assert entry.ordered_names()[-1] == "eval/samples"
    row = dict(zip(entry.columns, entry.rows[0], strict=True))
    assert (row["prompt"], row["response"], row["answer"], row["reward"]) == ("1+1=", "2", "2", 0.5)
    assert watch.new() == []


def test_mlflow_has_each_once_with_its_table_over_two_starts(run: OpenRun) -> None:  # noqa: F811
    uri = f"sqlite:///{run.layout.tracking / 'mlflow.db'}"
    write_steps(run, 1, range(1, 4), range(0), "stopped")
    evaluated(run, 0.5, 1.0)
    follow(run.layout, 1, lambda: MlflowTracker(run, 1, uri))
    write_steps(run, 2, range(3, 7), range(3, 4), "finished")
    evaluated(run, 0.5, 1.0, 0.25)
    follow(run.layout, 2, lambda: MlflowTracker(run, 2, uri))
    client = MlflowClient(tracking_uri=uri)
    (only,) = client.search_runs([client.get_experiment_by_name("milesbatch").experiment_id])
    history = client.get_metric_history(only.info.run_id, "eval/reward_mean")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.25), (2, 0.5), (4, 0.125)]
    names = [artifact.path for artifact in client.list_artifacts(only.info.run_id, "evaluations")]
    assert names == [f"evaluations/version-{version:06d}.json" for version in (0, 2, 4)]
    tables = json.loads(only.data.tags["mlflow.loggedArtifacts"])
    assert [table["path"] for table in tables] == names
    place = download_artifacts(run_id=only.info.run_id, artifact_path=names[1], tracking_uri=uri)
    body = json.loads(Path(place).read_text())
    assert dict(zip(body["columns"], body["data"][0], strict=True))["reward"] == 1.0


def test_tensorboard_has_each_once_over_two_starts(run: OpenRun) -> None:  # noqa: F811
    place = run.layout.tracking / "tensorboard"
    write_steps(run, 1, range(1, 4), range(0), "stopped")
    evaluated(run, 0.5)
    follow(run.layout, 1, lambda: TensorboardTracker(place))
    write_steps(run, 2, range(4, 7), range(0), "finished")
    evaluated(run, 0.5, 1.0)
    follow(run.layout, 2, lambda: TensorboardTracker(place))
    assert scalars(place, "eval/reward_mean") == [(0, 0.25), (2, 0.5)]
    assert [step for step, _ in scalars(place, "reward_mean")] == [1, 2, 3, 4, 5, 6]


def test_wandb_logs_them_along_with_steps_and_loses_no_step(
    run: OpenRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: list[tuple[int, dict[str, object]]] = []

    def tracker() -> WandbTracker:
        made = WandbTracker(run, run.layout.tracking)
        log = made._run.log

        def noted(row: dict[str, object], step: int) -> None:
            logged.append((step, row))
            log(row, step=step)

        monkeypatch.setattr(made._run, "log", noted)
        return made

    write_steps(run, 1, range(1, 3), range(0), "stopped")
    evaluated(run, 0.5, 1.0, 0.25)
    follow(run.layout, 1, tracker)
    assert [(step, row.get("eval/version")) for step, row in logged] == [(1, 0), (2, 2)]
    write_steps(run, 2, range(3, 4), range(0), "finished")
    evaluated(run, 0.5, 1.0, 0.25, 0.0)
    follow(run.layout, 2, tracker)
    assert [(step, row.get("eval/version")) for step, row in logged[2:]] == [(3, 4), (4, 6)]
    assert [row["reward_mean"] for _, row in logged if "reward_mean" in row] == [0.1, 0.2, 0.3]
    assert (run.layout.tracking / "wandb-evaluations").read_text() == "0 2 4 6"
    assert (run.layout.tracking / "wandb-last-step").read_bytes() == b"3"


class Flaky:
    """A place that fails at its first evaluation."""

    def __init__(self) -> None:
        self.failures = 1
        self.steps: list[int] = []
        self.versions: list[int] = []

    def last_step(self) -> int:
        return max(self.steps, default=0)

    def evaluated(self) -> frozenset[int]:
        return frozenset(self.versions)

    def log_step(self, step: int, at: str, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def log_evaluation(self, entry: EvaluationEntry) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageError("the server does not answer")
        self.versions.append(entry.version)

    def close(self, status: str) -> None:
        """Nothing to do."""


@pytest.mark.usefixtures("quickly")
def test_a_server_that_is_away_gets_them_later(run: OpenRun, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    write_steps(run, 1, range(1, 4), range(0), "finished")
    evaluated(run, 0.5, 1.0)
    place = Flaky()
    follow(run.layout, 1, lambda: place)
    assert (place.steps, place.versions) == ([1, 2, 3], [0, 2])
    assert "3 steps, 2 evaluations wait: the server does not answer" in capfd.readouterr().err
