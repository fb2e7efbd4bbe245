"""Weights & Biases: one W&B run over all incarnations; offline unless ``WANDB_MODE`` says otherwise (then ``wandb sync``).

Its own files are beside the run, under ``RUN/tracking/wandb``. An offline run cannot be asked for its last step, so this
keeps it in ``last-step``, some steps late: after a kill the last few steps are logged twice, never lost. W&B keeps the first.
Which versions' evaluations were logged is kept in ``wandb-evaluations``.
Source: https://docs.wandb.ai/ref/python/sdk/functions/init/
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from milesbatch.cluster.context import wandb_mode
from milesbatch.errors import StorageError
from milesbatch.recipe.dotted import dotted
from milesbatch.records import RunRecord, digest_bytes
from milesbatch.store.durable import make_directory, read_optional, replace_hint
from milesbatch.store.run import OpenRun
from milesbatch.tracking.evaluations import EvaluationEntry
from milesbatch.tracking.lineage import PARENT, lineage_of

_VERSION = "eval/version"
_LATE = 20
"""Steps that wandb's own process may still have in memory."""


class WandbTracker:
    """Logs the recipe as the run's configuration, and metrics for each step."""

    def __init__(self, run: OpenRun, directory: Path) -> None:
        """Raises:
        StorageError: the package is missing, or W&B cannot be reached or written to; so do all other methods.
        """
        make_directory(directory)
        self._marker = directory / "wandb-last-step"
        self._evaluations = directory / "wandb-evaluations"
        said = read_optional(self._marker) or b"0"
        self._last = self._newest = int(said) if said.isdigit() else 0
        self._waiting: deque[EvaluationEntry] = deque()
        with _using(directory):
            import wandb

            mode: Any = wandb_mode()  # W&B itself says which words it knows
            self._run: Any = wandb.init(
                project=run.recipe.tracking.experiment,
                name=run.record.name,
                id=_wandb_id(run.record.run_id),
                resume="allow",
                mode=mode,
                dir=str(directory),
                config={**dotted(run.recipe.model_dump(mode="json")), **_lineage(run.record)},
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
            )
            # An evaluation comes when its version is some steps old: its curves have an axis of their own.
            self._run.define_metric(_VERSION)
            self._run.define_metric("eval/*", step_metric=_VERSION)
        self._directory = directory

    def last_step(self) -> int:
        return self._last

    def log_step(self, step: int, at: str, metrics: dict[str, float]) -> None:
        entry = self._waiting.popleft() if self._waiting else None
        self._log(step, metrics, entry)
        if step - _LATE > self._last:
            self._last = step - _LATE
            replace_hint(self._marker, str(self._last).encode())

    def evaluated(self) -> frozenset[int]:
        words = (read_optional(self._evaluations) or b"").split()
        return frozenset(int(word) for word in words if word.isdigit())

    def log_evaluation(self, entry: EvaluationEntry) -> None:
        """W&B takes no row for a step that is over: an evaluation goes along with the next step, or after the last one."""
        self._waiting.append(entry)

    def close(self, status: str) -> None:
        """Evaluations that still wait when the run is only stopped are logged by the next start."""
        last = self._newest
        while self._waiting and status == "finished":
            self._log(self._newest + 1, {}, self._waiting.popleft())
        with _using(self._directory):
            self._run.finish(exit_code=1 if status == "failed" else 0)
        replace_hint(self._marker, str(last).encode())

    def _log(self, step: int, metrics: Mapping[str, float], entry: EvaluationEntry | None) -> None:
        with _using(self._directory):
            self._run.log({**metrics, **(_row(entry) if entry is not None else {})}, step=step)
        self._newest = step
        if entry is not None:  # after it: killed between, it is logged twice
            done = sorted({*self.evaluated(), entry.version})
            replace_hint(self._evaluations, " ".join(map(str, done)).encode())


def _wandb_id(run_id: str) -> str:
    return digest_bytes(run_id.encode()).removeprefix("xxh128:")[:16]


def _lineage(record: RunRecord) -> dict[str, str]:
    """Of a fork: the parent, and the id of its W&B run, by which it is found in the same project."""
    told = lineage_of(record)
    return {**told, "milesbatch.parent_wandb_id": _wandb_id(told[PARENT])} if told else {}


def _row(entry: EvaluationEntry) -> dict[str, Any]:
    import wandb

    table = wandb.Table(columns=list(entry.columns), data=[list(row) for row in entry.rows])
    return {_VERSION: entry.version, **entry.metrics, "eval/table": table}


@contextlib.contextmanager
def _using(directory: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        mend = "pip install 'milesbatch[wandb]', or set tracking.kind"
        raise StorageError(f"tracking.kind is wandb, and its package is missing: {error}", mend=mend) from error
    except _errors() as error:
        raise StorageError(
            f"W&B cannot be used in {directory}: {error}",
            mend="check WANDB_MODE and WANDB_API_KEY, or set tracking.kind: none; training goes on without it",
        ) from error


def _errors() -> tuple[type[Exception], ...]:
    """What a W&B that cannot be used raises."""
    import wandb

    return (wandb.errors.Error, OSError)
