"""Weights & Biases: one W&B run over all incarnations; offline unless ``WANDB_MODE`` says otherwise (then ``wandb sync``).

Its own files are beside the run, under ``RUN/tracking/wandb``. An offline run cannot be asked for its last step, so this
keeps it in ``last-step``, some steps late: after a kill the last few steps are logged twice, never lost. W&B keeps the first.
Source: https://docs.wandb.ai/ref/python/sdk/functions/init/
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milesbatch.cluster.context import wandb_mode
from milesbatch.errors import StorageError
from milesbatch.recipe.dotted import dotted
from milesbatch.records import digest_bytes
from milesbatch.store.durable import make_directory, read_optional, replace_hint
from milesbatch.store.run import OpenRun

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
        said = read_optional(self._marker) or b"0"
        self._last = int(said) if said.isdigit() else 0
        with _using(directory):
            import wandb

            mode: Any = wandb_mode()  # W&B itself says which words it knows
            self._run: Any = wandb.init(
                project=run.recipe.tracking.experiment,
                name=run.record.name,
                id=digest_bytes(run.record.run_id.encode()).removeprefix("xxh128:")[:16],
                resume="allow",
                mode=mode,
                dir=str(directory),
                config=dotted(run.recipe.model_dump(mode="json")),
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
            )
        self._directory = directory

    def last_step(self) -> int:
        return self._last

    def log_step(self, step: int, at: str, metrics: dict[str, float]) -> None:
        with _using(self._directory):
            self._run.log(metrics, step=step)
        if step - _LATE > self._last:
            self._last = step - _LATE
            replace_hint(self._marker, str(self._last).encode())

    def close(self, status: str) -> None:
        with _using(self._directory):
            last = int(self._run.step)
            self._run.finish(exit_code=1 if status == "failed" else 0)
        replace_hint(self._marker, str(last).encode())


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
