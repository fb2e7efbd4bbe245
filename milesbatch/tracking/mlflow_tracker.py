"""MLflow: one MLflow run over all incarnations of a run, found again by the tag ``milesbatch.run_id``.

That of a fork says by tags which run and step it began with, and is nested under the parent's where the store has that.
Source: https://mlflow.org/docs/latest/python_api/mlflow.client.html
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from milesbatch.cluster.context import limit_mlflow_waits
from milesbatch.errors import StorageError
from milesbatch.recipe.dotted import dotted
from milesbatch.store.run import OpenRun
from milesbatch.tracking.evaluations import EVALUATED, EvaluationEntry
from milesbatch.tracking.lineage import PARENT, lineage_of

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_NESTED_TAG = "mlflow.parentRunId"
"""By which MLflow's page shows one run under another."""
RUN_TAG = "milesbatch.run_id"
"""By which the MLflow run of a run is found again."""
_STEP_METRIC = "reward_mean"
_TABLES_TAG = "mlflow.loggedArtifacts"
"""By which MLflow's page finds tables. Source: MlflowClient.log_table, which appends where this replaces."""
_LOCK_S = 10.0
"""How long another program may hold the database."""


class MlflowTracker:
    """Logs parameters once, metrics for each step and evaluation, the recipe and evaluation tables as artefacts."""

    def __init__(self, run: OpenRun, incarnation: int, uri: str) -> None:
        """Open the MLflow run of ``run``, or create it.

        Raises:
            StorageError: the tracking server or database cannot be used; so do all other methods.
        """
        limit_mlflow_waits()
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._uri = uri
        if uri.startswith("sqlite:///") and not set(uri) & set("?%#"):
            check_writable(Path(uri.removeprefix("sqlite:///")))
        from mlflow import MlflowClient

        with using_store(self._uri):
            self._client: Any = MlflowClient(tracking_uri=uri)
            experiment = self._experiment(run)
            self._run_id = find_tracked(self._client, [experiment], run.record.run_id) or self._create(experiment, run)
            self._client.set_terminated(self._run_id, "RUNNING")
            self._client.set_tag(self._run_id, "milesbatch.incarnation", str(incarnation))
            self._nest(run)

    def last_step(self) -> int:
        with using_store(self._uri):
            history = self._client.get_metric_history(self._run_id, _STEP_METRIC)
        return max((metric.step for metric in history), default=0)

    def log_step(self, step: int, at: str, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        millis = int(datetime.fromisoformat(at).timestamp() * 1000)
        # The metric that last_step looks at goes last: a step that was logged by half is logged again.
        names = sorted(metrics, key=lambda name: (name == _STEP_METRIC, name))
        batch = [Metric(name, float(metrics[name]), millis, step) for name in names]
        with using_store(self._uri):
            self._client.log_batch(self._run_id, metrics=batch)

    def evaluated(self) -> frozenset[int]:
        with using_store(self._uri):
            history = self._client.get_metric_history(self._run_id, EVALUATED)
        return frozenset(metric.step for metric in history)

    def log_evaluation(self, entry: EvaluationEntry) -> None:
        """The table comes first and the metric that :meth:`evaluated` looks at last; logged by half, it is logged again."""
        from mlflow.entities import Metric

        millis = int(datetime.fromisoformat(entry.at).timestamp() * 1000)
        name = f"evaluations/version-{entry.version:06d}.json"
        batch = [Metric(key, float(entry.metrics[key]), millis, entry.version) for key in entry.ordered_names()]
        with using_store(self._uri):
            self._client.log_dict(self._run_id, entry.table(), name)
            self._name_table(name)
            self._client.log_batch(self._run_id, metrics=batch)

    def _name_table(self, name: str) -> None:
        tags = self._client.get_run(self._run_id).data.tags
        listed = json.loads(tags.get(_TABLES_TAG, "[]"))
        if all(entry.get("path") != name for entry in listed):
            self._client.set_tag(self._run_id, _TABLES_TAG, json.dumps([*listed, {"path": name, "type": "table"}]))

    def close(self, status: str) -> None:
        with using_store(self._uri):
            self._client.set_terminated(self._run_id, _STATUS[status])

    def _experiment(self, run: OpenRun) -> str:
        name = run.recipe.tracking.experiment
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        artefacts = run.layout.tracking / "artifacts"
        return str(self._client.create_experiment(name, artifact_location=artefacts.resolve().as_uri()))

    def _nest(self, run: OpenRun) -> None:
        """At each start: the parent may have been tracked in this store only since."""
        parent = lineage_of(run.record).get(PARENT)
        if parent is None or _NESTED_TAG in self._client.get_run(self._run_id).data.tags:
            return
        experiments = [experiment.experiment_id for experiment in self._client.search_experiments()]
        if (found := find_tracked(self._client, experiments, parent)) is not None:
            self._client.set_tag(self._run_id, _NESTED_TAG, found)

    def _create(self, experiment: str, run: OpenRun) -> str:
        tags = {RUN_TAG: run.record.run_id, **lineage_of(run.record)}
        created = self._client.create_run(experiment, tags=tags, run_name=run.record.name)
        run_id = str(created.info.run_id)
        for name, value in dotted(run.recipe.model_dump(mode="json")).items():
            self._client.log_param(run_id, name, str(value)[:500])
        self._client.log_artifact(run_id, str(run.layout.recipe))
        return run_id


@contextlib.contextmanager
def using_store(uri: str, mend: str = "") -> Iterator[None]:
    """Turns what MLflow raises into ``StorageError``."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, OSError) as error:
        raise _unusable(uri, error, mend) from error


def find_tracked(client: Any, experiments: Sequence[str], run_id: str) -> str | None:
    """The MLflow run that ``run_id`` is tracked as, in one of ``experiments``."""
    runs = client.search_runs(experiments, f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
    return str(runs[0].info.run_id) if runs else None


def check_writable(database: Path) -> None:
    """Return when ``database`` can be written now. MLflow itself would try for minutes before it said what is wrong.

    Raises:
        StorageError: it is locked, read-only or damaged, or cannot be made.
    """
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(database, timeout=_LOCK_S, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except (sqlite3.Error, OSError) as error:
        raise _unusable(str(database.absolute()), error) from error


def _unusable(place: str, error: Exception, mend: str = "") -> StorageError:
    return StorageError(
        f"the MLflow store {place} cannot be used: {error}",
        mend=mend or "check MLFLOW_TRACKING_URI, or set tracking.kind: none; training goes on without it",
    )
