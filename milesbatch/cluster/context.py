"""The only reader of ``os.environ``: what a process was told by whoever started it. Read once, then passed on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from milesbatch.errors import InputError
from milesbatch.recipe.shipped import shipped_sites

_PREFIX = "MILESBATCH_ROLE_"
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""What Slurm sets for GPUs of NVIDIA and of AMD."""


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Who this process is: one rank or worker of one incarnation, and where its controller listens."""

    run_directory: Path
    role: str
    """``trainer``, ``rollout``, ``tracking`` or ``evaluation``."""
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
    """The process to die with; 0 when another means (a Slurm step) ends this one."""
    heartbeat_s: float
    address: str = "127.0.0.1"
    """Under which other nodes reach this process's node."""
    device_slice: str = ""
    """``first:count`` of the visible devices that are this process's (a count of 0: none); empty: all of them."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def process(self) -> str:
        """Name and attempt: another start is another process."""
        return f"{self.name}.{self.attempt}"

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
            address=get["address"],
            device_slice=get["device_slice"],
        )


def narrow_devices(device_slice: str) -> None:
    """Leave this process its own GPUs of those that its step may use; before torch is imported.

    Raises:
        InputError: its step has fewer GPUs than were asked for.
    """
    if not device_slice:
        return
    first, count = (int(part) for part in device_slice.split(":"))
    # Where Slurm names no devices, they are numbered from 0 in each step.
    for variable in [name for name in _DEVICES if os.environ.get(name)] or _DEVICES[:1]:
        given = os.environ.get(variable)
        visible = given.split(",") if given else [str(index) for index in range(first + count)]
        if len(visible) < first + count:
            raise InputError(
                f"this process is to use GPUs {first} to {first + count - 1} of its node, but {variable} is {given}",
                mend="make slurm.trainer.gpus_per_task or slurm.rollout.gpus_per_task fit the nodes",
            )
        os.environ[variable] = ",".join(visible[first : first + count])


def site_name() -> str | None:
    """``$MILESBATCH_SITE``: the site that is used when none is given."""
    return os.environ.get("MILESBATCH_SITE") or None


def site_directories() -> tuple[Path, ...]:
    """Where site files are looked for, the user's own first."""
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return (configuration / "milesbatch" / "sites", shipped_sites())


@dataclass(frozen=True, slots=True)
class JobContext:
    """The Slurm job that this process was started in, as its environment tells."""

    job_id: str
    """Of the whole job (the leader's, in a heterogeneous job)."""
    restart_count: int
    node: str
    """Name of the node that this process runs on."""
    node_lists: tuple[str, ...]
    """Nodes of each component in Slurm's short form (``n[1-3]``); one when the job is not heterogeneous."""

    @property
    def is_het(self) -> bool:
        return len(self.node_lists) > 1


def job_context() -> JobContext | None:
    """None outside of a Slurm job."""
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        return None
    components = int(os.environ.get("SLURM_HET_SIZE", "1"))
    if components > 1:
        lists = tuple(os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"] for index in range(components))
    else:
        lists = (os.environ["SLURM_JOB_NODELIST"],)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return JobContext(job_id, restarts, os.environ.get("SLURMD_NODENAME", ""), lists)


def expand_path(text: str) -> Path:
    """A path with ``~`` and ``$VARIABLES`` of this process's user filled in.

    Raises:
        InputError: a variable in it is not set.
    """
    expanded = os.path.expandvars(text)
    if "$" in expanded:
        raise InputError(f"a variable in the path {text} is not set", mend="set it, or write the path out")
    return Path(expanded).expanduser()


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


def wandb_mode() -> str:
    """``$WANDB_MODE``; not set: ``offline``, so that a compute node without a network is no reason to fail."""
    return os.environ.get("WANDB_MODE") or "offline"


def limit_mlflow_waits() -> None:
    """MLflow's client tries a server for many minutes by default; here another try is made later, with what is new."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")


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
