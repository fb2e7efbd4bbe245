"""The doctor's own jobs: would sbatch take what runs at this site ask for? And the script of the pair of nodes.

Owns: a recipe that asks for one node of each role, and the texts made of it by the same code as a run's. Never: submission
of what is only tried. Invariant: nothing here stays in the queue.
"""

from __future__ import annotations

import math
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from milesbatch.cluster.job_plan import JobPlan, Shape, plan_jobs
from milesbatch.cluster.script import JobBody, Script, rollout_script, run_script
from milesbatch.cluster.steps import role_command
from milesbatch.cluster.submission import test_only
from milesbatch.doctor.verdict import Check, bad, ok, unchecked, warn
from milesbatch.errors import InputError, SlurmError
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.site import Site

_AREA = "slurm"
_MARK = "milesbatch:doctor"
_PAIR_MINUTES = 3
_NO_NODE = ("node configuration is not available", "down, drained or reserved")


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of a site."""

    site: Site
    gpus: int = 0
    """For each of the two nodes."""
    minutes: int = 60


def ask_recipe(ask: Ask, shape: Shape) -> Recipe:
    """One node for each role, one process on each."""
    group = {"gpus_per_task": ask.gpus}
    slurm = {"shape": shape, "time_limit_minutes": ask.minutes, "trainer": group, "rollout": group}
    sections = {"model": {"kind": "made"}, "data": {"kind": "arithmetic"}, "slurm": slurm}
    one = {"rollout": {"workers": 1}, "trainer": {"ranks": 1}}
    return Recipe.model_validate({"name": "doctor", "steps": 1, **sections, **one})


def trial_checks(ask: Ask, directory: Path) -> list[Check]:
    """Ask sbatch about each shape that the site names, without queueing anything."""
    return [_trial(ask, shape, directory) for shape in ask.site.shapes]


def _trial(ask: Ask, shape: Shape, directory: Path) -> Check:
    name = f"jobs of shape {shape}"
    try:
        said = [_ask_sbatch(script) for script in _scripts(ask, shape, directory)]
    except InputError as error:
        return bad(_AREA, name, error.what, "the site file contradicts itself", error.mend)
    except SlurmError as error:
        if error.may_be_asked_again:
            return unchecked(_AREA, name, f"Slurm does not answer: {error.what}")
        if any(words in error.what for words in _NO_NODE):
            meaning = "no node that is up has what is asked for: nodes are down or drained, or the site file asks for too much"
            return warn(
                _AREA,
                name,
                error.what,
                meaning,
                "see `sinfo -R`; or correct constraint, memory and GPUs in the site file",
            )
        mend = "correct the site file (account, partition, QoS, constraint), or leave the shape out of `shapes`"
        return bad(_AREA, name, error.what, f"a recipe with slurm.shape: {shape} is refused", mend)
    when = "; ".join(text for text in said if text) or "taken"
    return ok(_AREA, name, f"sbatch would take it ({ask.minutes} minutes): {when}")


def _scripts(ask: Ask, shape: Shape, directory: Path) -> list[Script]:
    plan = plan_jobs(ask_recipe(ask, shape), ask.site)
    body = JobBody(directory, directory, ("true",), _MARK)
    scripts = [run_script(plan, ask.site, body, requeue=True)]
    return scripts if shape != "separate" else [*scripts, rollout_script(plan, ask.site, body)]


def _ask_sbatch(script: Script) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script.text)
        file.flush()
        return " ".join(test_only(Path(file.name)).removeprefix("sbatch:").split())


# -- the pair of nodes ----------------------------------------------------------------------------------------------------


def pair_script(ask: Ask, directory: Path) -> Script:
    """A job of two nodes, the trainer's and a rollout worker's, that examine ``directory`` from both sides.

    Raises:
        InputError: the site file contradicts itself.
    """
    site = ask.site
    shape: Shape = "het" if "het" in site.shapes else "single"
    site = site.model_copy(update={"shapes": (shape,)})
    # Slurm's warning before the end would end the shell: the limit is beyond it, and the nodes end by themselves long before.
    minutes = _PAIR_MINUTES + math.ceil(site.warning_s / 60)
    plan = plan_jobs(ask_recipe(Ask(site, ask.gpus, minutes), shape), site)
    steps = [_step(plan, site, directory, part) for part in (0, 1)]
    both = f"trap '' USR1; {shlex.join(steps[0])} & {shlex.join(steps[1])} & wait"
    return run_script(plan, site, JobBody(directory, directory, ("bash", "-c", both), _MARK), requeue=False)


def _step(plan: JobPlan, site: Site, directory: Path, part: int) -> list[str]:
    group = (plan.trainer, plan.rollout)[part]
    place = [f"--het-group={part}"] if plan.shape == "het" else [f"--relative={part}"]
    arguments = ["-m", "milesbatch.doctor.node", ("examiner", "servant")[part], str(directory)]
    command = role_command(group.container, site.interpreter, directory, arguments)
    return [
        "srun",
        *place,
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--cpu-bind=none",
        "--mem=0",
        *site.srun_options,
        *command,
    ]
