"""A run before it is queued: what it needs, what it moves, and whether that fits. Pure but for what it is handed.

Owns the verdict and the numbers behind it. Invariant: every refusal names the number that does not fit, and what it was
compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milesbatch.plan.memory import ESTIMATED, trainer_device, trainer_host, worker_device, worker_host
from milesbatch.plan.model_size import ModelSize
from milesbatch.plan.traffic import Measured, Speeds, Transport, bytes_per_step, choose_transport, delta_range
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.site import Site

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Role:
    """One role's processes and what each needs."""

    nodes: int
    processes: int
    gpus_per_process: int
    device: dict[str, int]
    host: dict[str, int]
    gpu_bytes: int | None
    """Memory of a GPU; None: unknown, or none is used."""
    node_bytes: int | None
    """Host memory of a node; None: unknown."""

    @property
    def per_node(self) -> int:
        return self.processes // self.nodes

    @property
    def node_needs(self) -> int:
        """Host memory that its processes on one node need: all of it where they compute on the CPU."""
        on_host = sum(self.host.values()) + (0 if self.gpus_per_process else sum(self.device.values()))
        return self.per_node * on_host


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer."""

    size: ModelSize
    trainer: Role
    rollout: Role
    layout: dict[str, Any]
    bytes_per_step: dict[str, int]
    step_s: float | None
    lag: float
    transport: Transport
    measured: Measured | None
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "nodes": {"trainer": self.trainer.nodes, "rollout": self.rollout.nodes},
            "ranks": {"trainer": self.trainer.processes, "rollout": self.rollout.processes},
            "layout": self.layout,
            "parameters": self.size.parameters,
            "parameters_from": self.size.counted_from,
            "memory_bytes_per_gpu": {"trainer": self.trainer.device, "rollout": self.rollout.device},
            "memory_bytes_of_host": {"trainer": self.trainer.host, "rollout": self.rollout.host},
            "bytes_per_step": self.bytes_per_step,
            "step_s": self.step_s,
            "lag": self.lag,
            "transport": {
                "recommended": self.transport.recommended,
                "reason": self.transport.reason,
                "delta_bytes": list(self.transport.delta_bytes),
                "broadcast_bytes": self.transport.broadcast_bytes,
                "delta_s": None if self.transport.delta_s is None else list(self.transport.delta_s),
                "broadcast_s": self.transport.broadcast_s,
                "pays_above": self.transport.pays_above,
            },
            "measured_in": None if self.measured is None else self.measured.source,
            "estimated": [*ESTIMATED, "bytes_per_step", *(["delta_bytes"] if self.measured is None else [])],
            "problems": list(self.problems),
        }


def make_plan(
    recipe: Recipe,
    size: ModelSize,
    site: Site | None,
    measured: Measured | None = None,
    speeds: Speeds = Speeds(None, None),
    gpu_gib: float | None = None,
) -> Plan:
    """Plan a run of ``recipe``. ``gpu_gib``: memory of one GPU; without, GPUs are not judged."""
    gpu_bytes = None if gpu_gib is None else int(gpu_gib * GIB)
    slurm = recipe.slurm
    site_trainer, site_rollout = (None, None) if site is None else (site.trainer.memory_gib, site.rollout.memory_gib)
    trainer = Role(
        slurm.trainer.nodes, recipe.trainer.ranks, slurm.trainer.gpus_per_task,
        trainer_device(recipe, size), trainer_host(recipe, size),
        gpu_bytes if slurm.trainer.gpus_per_task else None, _bytes(slurm.trainer.memory_gib or site_trainer),
    )  # fmt: skip
    rollout = Role(
        slurm.rollout.nodes, recipe.rollout.workers, slurm.rollout.gpus_per_task,
        worker_device(recipe, size), worker_host(recipe, size),
        gpu_bytes if slurm.rollout.gpus_per_task else None, _bytes(slurm.rollout.memory_gib or site_rollout),
    )  # fmt: skip
    step_s = None if measured is None else measured.step_s
    delta = delta_range(recipe, size, measured)
    return Plan(
        size=size,
        trainer=trainer,
        rollout=rollout,
        layout={"trainer": f"fsdp2 over {recipe.trainer.ranks}", "rollout": f"{recipe.rollout.workers} whole copies"},
        bytes_per_step=bytes_per_step(recipe, size, delta),
        step_s=step_s,
        lag=float(recipe.rollout.staleness),
        transport=choose_transport(recipe, size, measured, speeds, step_s),
        measured=measured,
        problems=tuple(_problems(recipe, size, site, trainer, rollout)),
    )


def _problems(recipe: Recipe, size: ModelSize, site: Site | None, trainer: Role, rollout: Role) -> list[str]:
    found = []
    for name, role, field in (("trainer", trainer, "trainer.ranks"), ("rollout", rollout, "rollout.workers")):
        needed = sum(role.device.values())
        if role.gpu_bytes is not None and needed > role.gpu_bytes * max(1, role.gpus_per_process):
            part = max(role.device, key=lambda part: role.device[part])
            found.append(
                f"{name}: {_gib(needed)} on each GPU, it has {_gib(role.gpu_bytes)}; the largest part is {part} with"
                f" {_gib(role.device[part])}"
            )
        if role.node_bytes is not None and role.node_needs > role.node_bytes:
            found.append(
                f"{name}: {role.per_node} processes ({field}) need {_gib(role.node_needs)} of each node's memory, it has"
                f" {_gib(role.node_bytes)}"
            )
    longest = recipe.rollout.sampling.max_new_tokens
    if longest >= size.context:
        found.append(
            f"rollout.sampling.max_new_tokens is {longest}, the model's longest sequence has {size.context} tokens,"
            " prompt included"
        )
    limit = None if site is None else site.max_time_minutes
    if limit is not None and recipe.slurm.time_limit_minutes > limit:
        found.append(f"slurm.time_limit_minutes is {recipe.slurm.time_limit_minutes}, the site allows {limit}")
    if site is not None and recipe.slurm.shape not in site.shapes:
        found.append(f"slurm.shape is {recipe.slurm.shape}, the site runs {', '.join(site.shapes)}")
    return found


def _bytes(gib: int | None) -> int | None:
    return None if gib is None else gib * GIB


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
