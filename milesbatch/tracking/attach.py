"""Putting files of a run into its MLflow run, and policy versions into MLflow's model registry; when a person asks for it.

Owns: finding the MLflow run by the tag that tracking gave it. Never: metrics. Source:
https://mlflow.org/docs/latest/python_api/mlflow.client.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milesbatch.cluster.context import limit_mlflow_waits, mlflow_uri
from milesbatch.errors import InputError
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_run_record
from milesbatch.tracking.mlflow_tracker import find_tracked, using_store

_MEND = "check MLFLOW_TRACKING_URI"


class MlflowRun:
    """The MLflow run that a run is tracked as."""

    def __init__(self, layout: RunLayout, beside: str = "") -> None:
        """``beside`` is the URI of the database beside the run, for a caller that spells it otherwise than by its path.

        Raises:
        InputError: MLflow is not installed, or the run is not tracked at ``MLFLOW_TRACKING_URI`` (or beside the run).
        StorageError: the tracking server or database cannot be used; so do the methods.
        """
        limit_mlflow_waits()
        self._uri = mlflow_uri(beside or f"sqlite:///{(layout.tracking / 'mlflow.db').resolve()}")
        if self._uri.startswith("sqlite:///") and not Path(self._uri.removeprefix("sqlite:///")).is_file():
            raise _untracked(layout, self._uri)
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise InputError("mlflow is not installed here", mend="pip install 'milesbatch[train]'") from error
        with using_store(self._uri, _MEND):
            self._client: Any = MlflowClient(tracking_uri=self._uri)
            experiments = [experiment.experiment_id for experiment in self._client.search_experiments()]
            record = read_run_record(layout)
            found = None if record is None else find_tracked(self._client, experiments, record.run_id)
        if found is None:
            raise _untracked(layout, self._uri)
        self.run_id = found

    def add_files(self, files: Sequence[Path]) -> None:
        """Add ``files`` as artefacts, in place of earlier ones of the same names."""
        with using_store(self._uri, _MEND):
            for file in files:
                self._client.log_artifact(self.run_id, str(file))

    def register_model(self, directory: Path, name: str, version: int, digest: str) -> str:
        """Upload a model directory and make it the next version of the registered model ``name``; returns that version.

        Its tags say which policy version it is, and the digest of its weights.
        """
        place = f"policy-version-{version:06d}"
        tags = {"milesbatch.policy_version": str(version), "milesbatch.weights_digest": digest}
        with using_store(self._uri, _MEND):
            self._client.log_artifacts(self.run_id, str(directory), place)
            if not self._client.search_registered_models(f"name = '{name}'"):
                self._client.create_registered_model(name)
            root = self._client.get_run(self.run_id).info.artifact_uri
            made = self._client.create_model_version(name, f"{root}/{place}", self.run_id, tags=tags)
        return str(made.version)


def _untracked(layout: RunLayout, uri: str) -> InputError:
    return InputError(
        f"{layout.root} is not tracked in {uri}",
        mend="set MLFLOW_TRACKING_URI to where it is tracked (the recipe's tracking.kind must be mlflow)",
    )
