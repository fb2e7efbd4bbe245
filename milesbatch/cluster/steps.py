"""The launcher inside a Slurm job: each role process is a job step of one task, started by srun on the node that is its own.

Owns: which node a process belongs to, the srun command, and the end of a step. Never: when to start or restart. Invariant: two
processes of one role have each their own slot (node and place on it), and keep it over restarts, so that a worker that comes
back finds its own GPUs. One step for each process: then one can be replaced while the others run. The steps of a node share it
(``--overlap``): without, a replacement waits silently until its predecessor's whole step is over.

An exit status of 0 is no proof that a task ended well: srun was seen to return 0 when the node failed.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from milesbatch.cluster import slurm
from milesbatch.cluster.context import JobContext, RoleContext, child_environment
from milesbatch.cluster.job_plan import GroupPlan, JobPlan, Role
from milesbatch.cluster.local import ROLE_MODULES, LocalLauncher
from milesbatch.cluster.port import RunningProcess
from milesbatch.errors import SlurmError
from milesbatch.recipe.site import Site
from milesbatch.recipe.slurm import Container
from milesbatch.store.durable import make_directory, storage_error
from milesbatch.store.layout import RunLayout

_KILL_S = 8.0
"""How long the end of a step is waited for; longer, its node is lost, and so is the proof that it ended."""


@dataclass(frozen=True, slots=True)
class Place:
    """A group's nodes in this job."""

    group: GroupPlan
    nodes: tuple[slurm.NodeFacts, ...]
    het_group: int | None

    def slot(self, index: int) -> tuple[slurm.NodeFacts, int]:
        """The node of a process, and its place among the processes there: ranks fill one node after the other."""
        node, local = divmod(index % (self.group.nodes * self.group.tasks_per_node), self.group.tasks_per_node)
        return self.nodes[node], local


@dataclass(frozen=True, slots=True)
class Allocation:
    """What Slurm gave: the places of the roles in this job."""

    job: JobContext
    places: dict[Role, Place]
    address: str
    """Of the node that this process runs on, as other nodes reach it."""


def read_allocation(job: JobContext, plan: JobPlan, roles: Sequence[Role]) -> Allocation:
    """Ask Slurm which nodes are whose. ``roles`` are those that this job holds.

    Raises:
        SlurmError: Slurm does not answer, or gave other nodes than the plan asks for.
    """
    groups = {role: plan.trainer if role == "trainer" else plan.rollout for role in roles}
    components = [slurm.expand(nodes) for nodes in job.node_lists]
    if not job.is_het and len(groups) > 1:  # one allocation, split by node: the trainer has the first ones
        names = components[0]
        components = [names[: plan.trainer.nodes], names[plan.trainer.nodes :]]
    places: dict[Role, Place] = {}
    for index, (role, group) in enumerate(groups.items()):
        if len(components[index]) != group.nodes:
            raise SlurmError(
                f"job {job.job_id} has nodes {', '.join(components[index])} for {role}, but the plan asks for {group.nodes}",
                mend="the recipe's slurm section was changed after the job was queued: `milesbatch cancel` and `resume`",
            )
        nodes = tuple(slurm.node(name) for name in components[index])
        places[role] = Place(group, nodes, index if job.is_het else None)
    own = job.node or components[0][0]
    return Allocation(job, places, _address(slurm.node(own)))


def _address(node: slurm.NodeFacts) -> str:
    return "127.0.0.1" if node.address in ("localhost", "127.0.0.1") else node.address


@dataclass(slots=True)
class StepProcess:
    """A job step, seen through its srun."""

    job_id: str
    step_name: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        code = self.process.poll()
        return 128 - code if code is not None and code > 128 else code

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> bool:
        """End the step; False when Slurm could not confirm in time that it ended: then its process may still run."""
        try:
            slurm.end_step(self.job_id, self.step_name)
            self.process.wait(_KILL_S)
        except (SlurmError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
            return False
        return True


class StepLauncher:
    """Starts roles as steps of this job; the tracking process, which no node needs, as a subprocess beside the controller.

    Evaluation has no place here: all GPUs of the job belong to trainer and rollout.
    """

    def __init__(self, allocation: Allocation, site: Site, run_directory: Path) -> None:
        self._allocation = allocation
        self._site = site
        self._run_directory = run_directory
        self._local = LocalLauncher()

    @property
    def address(self) -> str:
        return self._allocation.address

    def has(self, role: str) -> bool:
        return role == "tracking" or role in self._allocation.places

    def node_of(self, context: RoleContext) -> str:
        """Name of the node that a process belongs to."""
        place = self._allocation.places.get(context.role)  # type: ignore[call-overload]
        return self._allocation.job.node if place is None else str(place.slot(context.index)[0].name)

    def python_step(self) -> list[str]:
        """The command that runs Python as a step on the trainer's first node, where the model can be loaded."""
        place = self._allocation.places["trainer"]
        return self._srun(place, place.nodes[0].name, "preparation", ())

    def is_lost(self, context: RoleContext) -> bool:
        """Asks Slurm; when it does not answer, nothing is known, and the node counts as there."""
        try:
            return slurm.node(self.node_of(context)).is_lost
        except SlurmError:
            return False

    def start(self, context: RoleContext, threads: int) -> RunningProcess:
        """Start one role process; its output is appended to its log of this incarnation.

        Raises:
            StorageError: the log cannot be written.
        """
        if context.role not in self._allocation.places:
            return self._local.start(context, threads)
        place = self._allocation.places[context.role]
        node, local = place.slot(context.index)
        gpus = place.group.gpus_per_task
        context = replace(context, parent_pid=0, address=_address(node), device_slice=f"{local * gpus}:{gpus}")
        step_name = f"{context.name}.{context.attempt}"
        log = RunLayout(context.run_directory).log(context.name, context.incarnation)
        command = self._srun(place, node.name, step_name, ("-m", ROLE_MODULES[context.role]))
        make_directory(log.parent)  # somebody may have cleaned up
        try:
            with open(log, "ab") as stream:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=child_environment(threads, context.to_environment()),
                    start_new_session=True,
                )
        except OSError as error:
            raise storage_error(log, error) from error
        return StepProcess(self._allocation.job.job_id, step_name, process)

    def _srun(self, place: Place, node: str, step_name: str, arguments: Sequence[str]) -> list[str]:
        return [
            "srun",
            *([f"--het-group={place.het_group}"] if place.het_group is not None else []),
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={node}",
            "--overlap",
            "--cpu-bind=none",
            "--mem=0",
            "--kill-on-bad-exit=1",
            "--unbuffered",
            "--export=ALL",
            f"--job-name={step_name}",
            *self._site.srun_options,
            *role_command(place.group.container, self._site.interpreter, self._run_directory, arguments),
        ]


def role_command(
    container: Container | None, interpreter: str, run_directory: Path, arguments: Sequence[str]
) -> list[str]:
    """Options of srun for a container, and the command that runs Python in it; ``interpreter`` is that without one."""
    if container is None:
        return [interpreter, *arguments]
    mounts = [f"{run_directory}:{run_directory}", *container.mounts]
    python = [container.python, *arguments]
    if container.runtime == "pyxis":
        image, all_mounts = f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"
        return [image, all_mounts, *container.options, *python]
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return [container.runtime, "exec", *binds, *container.options, container.image, *python]
