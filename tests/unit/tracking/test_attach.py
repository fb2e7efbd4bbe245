"""The report as an artefact of the MLflow run, and a policy version in the model registry, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import grow, make_run, past_incarnation
from mlflow import MlflowClient
from typer.testing import CliRunner

from milesbatch.cli.main import app
from milesbatch.errors import InputError
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import open_run
from milesbatch.tracking.attach import MlflowRun
from milesbatch.tracking.mlflow_tracker import MlflowTracker


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = make_run(tmp_path / "run")
    past_incarnation(layout)
    grow(layout, 2)
    (layout.model / "config.json").write_text("{}")
    return layout


@pytest.fixture
def client(layout: RunLayout) -> MlflowClient:
    """The run is tracked, in the database beside it."""
    layout.tracking.mkdir(exist_ok=True)
    uri = f"sqlite:///{layout.tracking / 'mlflow.db'}"
    MlflowTracker(open_run(layout, 1), 1, uri).close("finished")
    return MlflowClient(tracking_uri=uri)


def test_the_report_becomes_an_artefact(layout: RunLayout, client: MlflowClient, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(layout.root), "-o", str(page), "--no-audit", "--track"])
    assert done.exit_code == 0, done.exception
    artefacts = {found.path for found in client.list_artifacts(MlflowRun(layout).run_id)}
    assert artefacts == {"recipe.yaml", "page.html"}


def test_a_policy_version_is_registered_with_its_digest(layout: RunLayout, client: MlflowClient) -> None:
    for expected in ("1", "2"):
        words = ["weights", "register", str(layout.root), "--version", "1", "--name", "sums", "--json"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.exception
        found = client.get_model_version("sums", expected)
        assert found.tags["milesbatch.policy_version"] == "1"
        assert found.tags["milesbatch.weights_digest"] in done.stdout
    assert found.run_id == MlflowRun(layout).run_id
    files = {Path(item.path).name for item in client.list_artifacts(found.run_id, "policy-version-000001")}
    assert {"config.json", "model.safetensors"} <= files


def test_a_run_that_is_not_tracked_there_is_refused(layout: RunLayout, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not tracked in"):
        MlflowRun(layout)
    assert not (layout.tracking / "mlflow.db").exists(), "looking makes no database"
    bad = CliRunner().invoke(app, ["weights", "register", str(layout.root), "--version", "1", "--name", "a/b"])
    assert isinstance(bad.exception, InputError) and "'a/b'" in str(bad.exception)
