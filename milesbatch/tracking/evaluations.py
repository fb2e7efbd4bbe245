"""Evaluations on their way to a tracker: found by their records, whoever made them.

Owns: which evaluations belong to the run's curves (those on the prompts of the recipe), and their form as a table.
Never: which of them were logged (the tracker knows). Invariant: a record is handed over once by one process, and a
damaged one never.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milesbatch.errors import MilesbatchError
from milesbatch.evaluation.figures import metrics_of
from milesbatch.evaluation.reader import OF_RECIPE, evaluated_versions, read_evaluation, record_paths
from milesbatch.records import EvaluationRecord
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.reader import read_table

EVALUATED = "eval/samples"
"""The metric by which a tracker knows that an evaluation was logged; it is logged last."""
_COLUMNS = (
    "prompt_id",
    "sample_index",
    "prompt",
    "response",
    "answer",
    "reward",
    "finish_reason",
    "response_tokens",
    "error",
)
_MOST_ROWS = 500
_LONGEST_TEXT = 2000


@dataclass(frozen=True, slots=True)
class EvaluationEntry:
    """One evaluation as a tracker takes it."""

    version: int
    at: str
    metrics: Mapping[str, float]
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """The first samples, in order; long texts are cut."""

    def ordered_names(self) -> list[str]:
        """Metrics, the one that marks the evaluation as logged last."""
        return sorted(self.metrics, key=lambda name: (name == EVALUATED, name))

    def table(self) -> dict[str, Any]:
        """As MLflow's page reads tables."""
        return {"columns": list(self.columns), "data": [list(row) for row in self.rows]}


class EvaluationWatch:
    """New evaluations of one run, each once."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._seen: set[str] = set()

    def new(self) -> list[EvaluationEntry]:
        """Those that were not there at the last look, by version; what cannot be read is left for the next look."""
        found = []
        try:
            paths = [
                path for version in evaluated_versions(self._layout) for path in record_paths(self._layout, version)
            ]
        except MilesbatchError:
            return []
        for path in paths:
            key = f"{path.parent.name}/{path.name}"
            if key in self._seen:
                continue
            try:
                record = read_evaluation(path)
                entry = self._entry(record) if record.name == OF_RECIPE else None
            except MilesbatchError:
                continue
            self._seen.add(key)
            if entry is not None:
                found.append(entry)
        return found

    def _entry(self, record: EvaluationRecord) -> EvaluationEntry:
        metrics = {**metrics_of(record.figures), EVALUATED: float(record.figures.samples)}
        return EvaluationEntry(record.version, record.started_at, metrics, _COLUMNS, self._rows(record))

    def _rows(self, record: EvaluationRecord) -> list[list[Any]]:
        (ref,) = record.files
        table = read_table(self._layout.evaluation(record.version) / ref.path, digest=ref.digest)
        return [_row(row) for row in table.slice(0, _MOST_ROWS).to_pylist()]


def _row(row: Mapping[str, Any]) -> list[Any]:
    messages = row["messages"]
    asked = "\n".join(message["content"] for message in messages[:-1])
    texts = (asked, messages[-1]["content"] if messages else "", str(json.loads(row["env"]).get("answer", "")))
    prompt, response, answer = (_cut(text) for text in texts)
    plain = [row["prompt_id"], row["sample_index"], prompt, response, answer, row["reward"], row["finish_reason"]]
    return [*plain, row["response_tokens"], row["error"]]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
