"""The answers of one evaluation as counted trajectories, so that all that looks at trajectories can look at them.

Owns: which file, and that its groups have no fate: no step trains on them. Never changes anything. Invariant: they are never in
the same scan as trajectories of training. The page behind it is ``docs/evaluation.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from milesbatch.analysis.counted import PENDING, Counted
from milesbatch.analysis.history import NO_REASON
from milesbatch.evaluation.reader import find_evaluation, read_evaluations
from milesbatch.store.layout import RunLayout


@dataclass(frozen=True, slots=True)
class EvaluationLayout(RunLayout):
    """A run whose trajectories are those of an evaluation of ``version``."""

    version: int

    @property
    def trajectories(self) -> Path:
        return self.evaluation(self.version)


def count_evaluation(layout: RunLayout, version: int) -> Counted:
    """The evaluation of a policy version: on the recipe's own prompts if there is one, else the latest.

    Raises:
        InputError: the version has not been evaluated.
        CorruptArtefactError: its record is damaged.
    """
    record = find_evaluation(layout, version)
    number = record.settings.num_prompts
    return Counted(
        layout=EvaluationLayout(layout.root, version),
        files=[ref.path for ref in record.files],
        group_id=np.arange(number, dtype=np.int64),
        file=np.zeros(number, np.int32),
        step=np.full(number, PENDING, np.int64),
        reason=np.full(number, NO_REASON, np.int8),
        samples=np.full(number, record.settings.samples_per_prompt, np.int64),
        version_min=np.full(number, version, np.int64),
        version_max=np.full(number, version, np.int64),
        steps=[],
    )


def evaluation_table(layout: RunLayout) -> Any:
    """All evaluations that can be read as a ``pyarrow.Table``, one row each; a damaged one is told by an audit."""
    records, _ = read_evaluations(layout)
    figures = [record.figures for record in records]
    return pa.table(
        {
            "version": pa.array([record.version for record in records], pa.int64()),
            "name": pa.array([record.name for record in records], pa.string()),
            "settings": pa.array([record.settings.digest for record in records], pa.string()),
            "started_at": pa.array([record.started_at for record in records], pa.string()).cast(
                pa.timestamp("us", "UTC")
            ),
            "seconds": pa.array([record.seconds for record in records], pa.float64()),
            "prompts": pa.array([record.settings.num_prompts for record in records], pa.int64()),
            "samples": pa.array([one.samples for one in figures], pa.int64()),
            "failed": pa.array([one.failed for one in figures], pa.int64()),
            "reward_mean": pa.array([one.reward_mean for one in figures], pa.float64()),
            "reward_std": pa.array([one.reward_std for one in figures], pa.float64()),
            "reward_best_mean": pa.array([one.reward_best_mean for one in figures], pa.float64()),
            "length_mean": pa.array([one.length_mean for one in figures], pa.float64()),
        }
    )
