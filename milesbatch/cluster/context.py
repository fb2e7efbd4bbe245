"""The only reader of ``os.environ``: what a process was told by whoever started it. Read once, then passed on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from milesbatch.errors import InputError

_PREFIX = "MILESBATCH_ROLE_"


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Who this process is: one rank or worker of one incarnation, and where its controller listens."""

    run_directory: Path
    role: str
    """``trainer``, ``rollout`` or ``tracking``."""
    index: int
    count: int
    """Processes of this role (the world size for trainer ranks)."""
    incarnation: int
    attempt: int
    """How often this role was started in this incarnation, from 1; ranks of one attempt meet each other only."""
    controller_url: str
    token: str
    """Shared secret of this incarnation; a process of another incarnation is refused by it."""
    parent_pid: int
    heartbeat_s: float

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    def to_environment(self) -> dict[str, str]:
        return {_PREFIX + field.upper(): str(getattr(self, field)) for field in self.__dataclass_fields__}

    @classmethod
    def from_environment(cls) -> RoleContext:
        """Read what the launcher set.

        Raises:
            InputError: started by hand, without a launcher.
        """
        try:
            get = {field: os.environ[_PREFIX + field.upper()] for field in cls.__dataclass_fields__}
        except KeyError as error:
            raise InputError(
                f"{error.args[0]} is not set: this process was not started by a controller",
                mend="start the run with `milesbatch run RECIPE`; it starts the roles itself",
            ) from None
        return cls(
            run_directory=Path(get["run_directory"]),
            role=get["role"],
            index=int(get["index"]),
            count=int(get["count"]),
            incarnation=int(get["incarnation"]),
            attempt=int(get["attempt"]),
            controller_url=get["controller_url"],
            token=get["token"],
            parent_pid=int(get["parent_pid"]),
            heartbeat_s=float(get["heartbeat_s"]),
        )


def runs_directory() -> Path:
    """Where runs live that are given by name: ``$MILESBATCH_RUNS``, default ``./runs``."""
    return Path(os.environ.get("MILESBATCH_RUNS", "runs"))


def cache_directory() -> Path:
    """Where made models and downloads are kept: ``$MILESBATCH_CACHE``, default ``~/.cache/milesbatch``."""
    return Path(os.environ.get("MILESBATCH_CACHE", "~/.cache/milesbatch")).expanduser()


def fault_plan_path() -> Path | None:
    """``$MILESBATCH_FAULTS``: a fault plan (for drills and tests only), or None."""
    text = os.environ.get("MILESBATCH_FAULTS")
    return Path(text) if text else None


def mlflow_uri(default: str) -> str:
    """``$MLFLOW_TRACKING_URI``, or ``default``."""
    return os.environ.get("MLFLOW_TRACKING_URI") or default


def child_environment(threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a role process: this one's, with the thread counts that make its arithmetic repeatable."""
    count = str(threads)
    fixed = {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "MKL_DYNAMIC": "FALSE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **fixed, **extra}
