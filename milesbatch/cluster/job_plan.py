"""What a run asks of Slurm, resolved from recipe and site: groups of nodes, and which processes go where. Pure.

Owns: the meeting of recipe and site (the recipe wins), and the spread of processes over nodes. Never: text for sbatch
(``script.py``), or a look at the cluster. Invariant: what the launcher places later is what was asked for here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from milesbatch.errors import SiteError
from milesbatch.recipe.models import FileData, PretrainedModel, Recipe
from milesbatch.recipe.site import Site, SitePlacement
from milesbatch.recipe.slurm import Container, NodeGroup, Placement, Slurm

Role = Literal["trainer", "rollout"]
Shape = Literal["het", "single", "separate"]

_PLACES = ("partition", "account", "qos", "constraint", "reservation", "exclude")
_HANDED_ON = ("account", "qos")
"""What rollout takes over from the trainer; Slurm itself does so in heterogeneous jobs, and all shapes ask for the same."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The nodes of one role."""

    role: Role
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    memory_gib: int | None
    exclusive: bool
    places: tuple[tuple[str, str], ...]
    """Option and value (``partition``, ``gpu``), those that are said."""
    directives: tuple[str, ...]
    container: Container | None

    @property
    def gpus_per_task(self) -> int:
        return self.gpus_per_node // self.tasks_per_node

    def without(self, nodes: tuple[str, ...]) -> GroupPlan:
        """The same, with ``nodes`` excluded besides those that are anyway."""
        if not nodes:
            return self
        places = dict(self.places)
        places["exclude"] = ",".join(filter(None, (places.get("exclude"), *nodes)))
        return replace(self, places=tuple(sorted(places.items())))


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A run's jobs."""

    name: str
    shape: Shape
    time_limit_minutes: int
    trainer: GroupPlan
    rollout: GroupPlan
    whole: GroupPlan | None
    """All nodes of the run's own job, where that is one allocation (shape ``single``)."""

    def without(self, nodes: tuple[str, ...]) -> JobPlan:
        """The same, with ``nodes`` excluded from every group."""
        return replace(
            self,
            trainer=self.trainer.without(nodes),
            rollout=self.rollout.without(nodes),
            whole=self.whole and self.whole.without(nodes),
        )


def plan_jobs(recipe: Recipe, site: Site) -> JobPlan:
    """What ``recipe`` asks of ``site``.

    Raises:
        SiteError: the site cannot run that; names field, value and what is possible.
    """
    slurm = recipe.slurm
    _check_shape_and_time(slurm, site)
    if site.offline_nodes:
        _check_offline(recipe, site)
    trainer = _group("trainer", recipe.trainer.ranks, recipe.trainer.threads, slurm.trainer, site.trainer, site)
    rollout = _group("rollout", recipe.rollout.workers, recipe.rollout.threads, slurm.rollout, site.rollout, site)
    handed_on = {name: value for name, value in trainer.places if name in _HANDED_ON}
    rollout = replace(rollout, places=tuple(sorted({**handed_on, **dict(rollout.places)}.items())))
    whole = _one_allocation(trainer, rollout, slurm.rollout) if slurm.shape == "single" else None
    plan = JobPlan(recipe.name, slurm.shape, slurm.time_limit_minutes, trainer, rollout, whole)
    _check_memory(plan)
    return plan


def _one_allocation(trainer: GroupPlan, rollout: GroupPlan, asked: NodeGroup) -> GroupPlan:
    """The nodes of both, where the trainer's come from; each is as large as the larger of the two."""
    at = dict(trainer.places)
    for name in (place for place in _PLACES if place != "exclude"):
        wanted = getattr(asked, name)
        if wanted and wanted != at.get(name):
            raise SiteError(
                f"slurm.rollout.{name} is {wanted}, and slurm.shape is single: all nodes come from where the trainer's do"
                f" ({name}: {at.get(name, 'not set')})",
                mend=f"take slurm.rollout.{name} out of the recipe, or take another slurm.shape",
            )
    excluded = dict.fromkeys(filter(None, (at.get("exclude"), asked.exclude)))
    places = {**at, **({"exclude": ",".join(excluded)} if excluded else {})}
    memory = [gib for gib in (trainer.memory_gib, asked.memory_gib) if gib]
    return GroupPlan(
        role="trainer",
        nodes=trainer.nodes + rollout.nodes,
        tasks_per_node=1,
        cpus_per_task=max(group.tasks_per_node * group.cpus_per_task for group in (trainer, rollout)),
        gpus_per_node=max(trainer.gpus_per_node, rollout.gpus_per_node),
        memory_gib=max(memory, default=None),
        exclusive=trainer.exclusive or rollout.exclusive,
        places=tuple(sorted(places.items())),
        directives=tuple(dict.fromkeys((*trainer.directives, *asked.directives))),
        container=None,
    )


def _check_shape_and_time(slurm: Slurm, site: Site) -> None:
    if slurm.shape not in site.shapes:
        raise SiteError(
            f"slurm.shape is {slurm.shape}, which site {site.name} cannot run; it can: {', '.join(site.shapes)}",
            mend=f"--set slurm.shape={site.shapes[0]}",
        )
    minutes = slurm.time_limit_minutes
    if site.warning_s >= minutes * 60:
        raise SiteError(
            f"slurm.time_limit_minutes is {minutes}, and warning_s of site {site.name} is {site.warning_s}: the warning of the"
            " end would come before the job begins",
            mend=f"--set slurm.time_limit_minutes={site.warning_s // 60 + 10}, or a smaller warning_s in the site file",
        )
    if site.max_time_minutes is not None and minutes > site.max_time_minutes:
        raise SiteError(
            f"slurm.time_limit_minutes is {minutes}; site {site.name} allows {site.max_time_minutes}",
            mend=f"--set slurm.time_limit_minutes={site.max_time_minutes}; a run goes on over as many jobs as it needs",
        )


def _check_offline(recipe: Recipe, site: Site) -> None:
    asked = None if recipe.evaluation is None else recipe.evaluation.prompts
    paths = {
        "model.path": recipe.model.path if isinstance(recipe.model, PretrainedModel) else "",
        "data.path": recipe.data.path if isinstance(recipe.data, FileData) else "",
        "evaluation.prompts.path": asked.path if isinstance(asked, FileData) else "",
    }
    for field, path in paths.items():
        if "://" in path and not path.startswith("file://"):
            raise SiteError(
                f"{field} is {path}, and compute nodes of site {site.name} reach no other network (offline_nodes)",
                mend="copy it to a shared filesystem and give that path",
            )


def _check_memory(plan: JobPlan) -> None:
    if plan.shape == "het" and plan.trainer.memory_gib and not plan.rollout.memory_gib:
        raise SiteError(
            f"the trainer's nodes get {plan.trainer.memory_gib} GiB (memory_gib), and nothing is said for rollout: in a"
            " heterogeneous job Slurm would hand the trainer's memory on to it",
            mend="--set slurm.rollout.memory_gib=N",
        )


def _group(
    role: Role, processes: int, threads: int, asked: NodeGroup, placement: SitePlacement, site: Site
) -> GroupPlan:
    tasks_per_node = processes // asked.nodes
    return GroupPlan(
        role=role,
        nodes=asked.nodes,
        tasks_per_node=tasks_per_node,
        cpus_per_task=asked.cpus_per_task or threads,
        gpus_per_node=asked.gpus_per_task * tasks_per_node,
        memory_gib=asked.memory_gib or placement.memory_gib,
        exclusive=asked.exclusive,
        places=_places(placement, asked),
        directives=(*placement.directives, *asked.directives),
        container=asked.container or placement.container or site.container,
    )


def _places(site: Placement, asked: Placement) -> tuple[tuple[str, str], ...]:
    said = {name: getattr(asked, name) or getattr(site, name) for name in _PLACES}
    return tuple(sorted((name, value) for name, value in said.items() if value))
