"""The ``slurm`` section of a recipe: what a run asks of a cluster, and its limits on restarts.

Owns: fields and their limits. Never: how they become a batch script (``cluster/script.py``). What belongs to a cluster rather
than to a recipe (partitions, accounts, containers) may be given here too; it then wins over the site file
(``recipe/site.py``). The page behind it is ``docs/recipe.md``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from milesbatch.recipe.inputs import Section

Directive = Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=[^\n\r\x00]*)?$")]
"""A raw option of sbatch, such as ``--switches=1``."""
Word = Annotated[str, Field(pattern=r"""^[^\s'"\\#]+$""")]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\n\r\x00]*$")]

OWN_OPTIONS = {
    "array": "`milesbatch scale` adds workers",
    "chdir": "jobs run where `milesbatch submit` was called",
    "comment": "the comment says whose job it is",
    "error": "logs are in the run directory",
    "job-name": "the recipe's `name`",
    "nodes": "`nodes`",
    "no-requeue": "`slurm.requeue`",
    "ntasks": "the processes of a role and its `nodes`",
    "ntasks-per-node": "the processes of a role and its `nodes`",
    "open-mode": "logs are in the run directory",
    "output": "logs are in the run directory",
    "requeue": "`slurm.requeue`",
    "signal": "`warning_s` of the site",
    "time": "`slurm.time_limit_minutes`",
    "wrap": "the script is milesbatch's own",
}
"""Options of sbatch that a directive must not set, and what says it instead."""


class Container(Section):
    """In what the processes of a role run on the compute nodes."""

    runtime: Literal["apptainer", "singularity", "pyxis"] = Field(
        description="`apptainer exec`, `singularity exec`, or the options that the Pyxis plugin gives srun."
    )
    image: Text = Field(description="Image: a file or a URL that the runtime understands.")
    mounts: tuple[Text, ...] = Field((), description="Mounts, `from:to`. The run directory is always mounted.")
    options: tuple[Text, ...] = Field(
        (), description="More options for the runtime, as they are (`--nv` shows GPUs to Apptainer)."
    )
    python: Text = Field("python3", description="The interpreter in the image that has milesbatch and torch.")


class Placement(Section):
    """Where a group of nodes comes from; nothing said means: as the site, or else the cluster's default, says."""

    partition: Word | None = Field(None, description="Partition (or several, with commas).")
    account: Word | None = Field(None, description="Account that is charged; rollout: not set is the trainer's.")
    qos: Word | None = Field(None, description="Quality of service; rollout: not set is the trainer's.")
    constraint: Word | None = Field(None, description="Features that the nodes must have, in Slurm's syntax.")
    reservation: Word | None = Field(None, description="Reservation to run in.")
    exclude: Word | None = Field(None, description="Nodes never to be used, in Slurm's syntax (`n[1-3],n7`).")
    container: Container | None = Field(
        None, description="Container for this role's processes; not set: what the site says, or none."
    )
    directives: tuple[Directive, ...] = Field(
        (),
        description="More options for sbatch, written as after `#SBATCH` in a script (`--switches=1`); those of the site"
        " come first. They come last in the script and so win; what milesbatch itself needs (`--time`, `--output`, ...)"
        " is refused.",
    )

    @field_validator("directives")
    @classmethod
    def _leave_our_own(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for directive in value:
            name = directive.removeprefix("--").partition("=")[0]
            if name in OWN_OPTIONS:
                raise ValueError(f"--{name} is set by milesbatch: {OWN_OPTIONS[name]}")
        return value


class NodeGroup(Placement):
    """The nodes of one role."""

    nodes: int = Field(
        1, ge=1, description="Nodes; the role's processes are spread over them evenly, so their number must divide."
    )
    cpus_per_task: int | None = Field(
        None, ge=1, description="CPUs of each process; not set: as many as the role has threads. Fewer make it slow."
    )
    gpus_per_task: int = Field(0, ge=0, description="GPUs of each process; 0 computes on the CPU.")
    memory_gib: int | None = Field(
        None,
        ge=1,
        description="Memory of each node in GiB; not set: what the site gives. Too little is ended by Slurm.",
    )
    exclusive: bool = Field(False, description="Whole nodes for this run, whatever they have.")


class Slurm(Section):
    """What a run asks of Slurm, and limits on restarts; the latter hold for the local launcher too."""

    shape: Literal["het", "single", "separate"] = Field(
        "het",
        description="How the two groups become jobs: `het` is one heterogeneous job, `single` one allocation split by node"
        " (for sites without heterogeneous jobs), `separate` two jobs: the trainer's, and one for rollout that may be"
        " preempted and come back while the trainer goes on.",
    )
    time_limit_minutes: int = Field(
        60,
        ge=1,
        le=525_600,
        description="Time limit of each job. A run goes on over as many jobs as it needs; short limits cost restarts.",
    )
    trainer: NodeGroup = Field(NodeGroup(), description="The trainer's nodes.")
    rollout: NodeGroup = Field(NodeGroup(), description="The rollout workers' nodes.")
    requeue: bool = Field(
        True,
        description="Whether the run goes on by itself after a time limit, a preemption or a lost node. Without, it stops and"
        " waits for `milesbatch resume`.",
    )
    max_excluded_nodes: int = Field(
        4,
        ge=0,
        description="Nodes that the run may exclude because its processes were lost there; the oldest come back first.",
    )
    max_restarts_without_progress: int = Field(
        3,
        ge=0,
        description="Restarts of a role, or of the whole run, without a new train step in between, after which the run stops"
        " and says why. 0 stops at the first death; large values retry a hopeless start for long.",
    )
    heartbeat_s: float = Field(
        2.0,
        gt=0,
        le=5,
        description="Seconds between the heartbeats of a process; silent for seven and a half of them it counts as lost. Too"
        " short takes a busy process for a lost one.",
    )
    hang_s: float = Field(
        120.0,
        gt=0,
        description="Seconds after which a process that makes no progress is treated as dead. Shorter than loading the model"
        " or one step takes, healthy processes are ended.",
    )
    disk_full_wait_s: float = Field(
        600.0,
        ge=0,
        description="Seconds for which a writer waits for space on a full disk before the run stops. Nothing is lost either"
        " way; 0 stops at once.",
    )
    visible_wait_s: float = Field(
        90.0,
        ge=0,
        description="Seconds for which a process looks for a file that it was told of and does not see yet, or sees in part,"
        " before that counts as lost: shared filesystems show new files late to other nodes. Shorter than the filesystem's"
        " caches live (NFS: 60), sound files are taken for lost; long, real losses are noticed late. Nothing is waited for on"
        " a filesystem that only one host mounts.",
    )
