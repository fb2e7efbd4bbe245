"""MLflow: one MLflow run over all incarnations of a run, found again by the tag ``milesbatch.run_id``.

Source: https://mlflow.org/docs/latest/python_api/mlflow.client.html
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from milesbatch.errors import StorageError
from milesbatch.store.run import OpenRun

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_TAG = "milesbatch.run_id"
_STEP_METRIC = "reward_mean"


class MlflowTracker:
    """Logs parameters once, metrics for each step, the recipe as an artefact."""

    def __init__(self, run: OpenRun, incarnation: int, uri: str) -> None:
        """Open the MLflow run of ``run``, or create it.

        Raises:
            StorageError: the tracking server or database cannot be used.
        """
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            if uri.startswith("sqlite:///"):
                Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            self._client: Any = MlflowClient(tracking_uri=uri)
            experiment = self._experiment(run)
            self._run_id = self._find(experiment, run) or self._create(experiment, run)
            self._client.set_terminated(self._run_id, "RUNNING")
            self._client.set_tag(self._run_id, "milesbatch.incarnation", str(incarnation))
        except (MlflowException, OSError) as error:
            raise StorageError(
                f"the MLflow store {uri} cannot be used: {error}",
                mend="check MLFLOW_TRACKING_URI, or set tracking.kind: none; training goes on without it",
            ) from error

    def last_step(self) -> int:
        history = self._client.get_metric_history(self._run_id, _STEP_METRIC)
        return max((metric.step for metric in history), default=0)

    def log_step(self, step: int, at: str, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        millis = int(datetime.fromisoformat(at).timestamp() * 1000)
        # The metric that last_step looks at goes last: a step that was logged by half is logged again.
        names = sorted(metrics, key=lambda name: (name == _STEP_METRIC, name))
        batch = [Metric(name, float(metrics[name]), millis, step) for name in names]
        self._client.log_batch(self._run_id, metrics=batch)

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run_id, _STATUS[status])

    def _experiment(self, run: OpenRun) -> str:
        name = run.recipe.tracking.experiment
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        artefacts = run.layout.tracking / "artifacts"
        return str(self._client.create_experiment(name, artifact_location=artefacts.resolve().as_uri()))

    def _find(self, experiment: str, run: OpenRun) -> str | None:
        query = f"tags.`{_TAG}` = '{run.record.run_id}'"
        runs = self._client.search_runs([experiment], query, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _create(self, experiment: str, run: OpenRun) -> str:
        created = self._client.create_run(experiment, tags={_TAG: run.record.run_id}, run_name=run.record.name)
        run_id = str(created.info.run_id)
        for name, value in flatten(run.recipe.model_dump(mode="json")):
            self._client.log_param(run_id, name, str(value)[:500])
        self._client.log_artifact(run_id, str(run.layout.recipe))
        return run_id


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping as dotted names."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
