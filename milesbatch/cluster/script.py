"""A batch script's text from a job plan. Pure: no Slurm, no clock, no file but a site's own template.

Owns: the words for sbatch and the shell. Never: submission. Invariant: the text is a function of its arguments alone, so that a
golden file can hold it, and holds no secret. The last line replaces the shell by the Python process (``exec``): a shell that
waits for a child would get the warning signals in its place, and was seen to lose them. Source: sbatch(1), "FILENAME PATTERN"
and "HETEROGENEOUS JOBS"; how sbatch reads a directive was tried with 22.05.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from milesbatch.cluster.job_plan import GroupPlan, JobPlan
from milesbatch.errors import SiteError, UsageError
from milesbatch.recipe.site import Site

_RESET = ("exclude", "reservation")
"""Slurm hands these on to later components of a heterogeneous job, unless they say something themselves."""
_EARLY = "trap '' USR1"
"""A warning that comes while modules are loaded must not end the job: what is ignored here stays so until the process that
replaces the shell handles it. It asks Slurm for the time that is left."""
_PLACEHOLDER = re.compile(r"\{(directives|setup|command)\}")


@dataclass(frozen=True, slots=True)
class Script:
    """A batch script, and what its job is for."""

    role: str
    """``run``: the job that holds the controller; ``rollout``: workers that join a run."""
    text: str


@dataclass(frozen=True, slots=True)
class JobBody:
    """What a job's batch process is, wherever it runs."""

    run_directory: Path
    working_directory: Path
    command: tuple[str, ...]
    mark: str
    """The job's comment: whose job it is."""


def run_script(plan: JobPlan, site: Site, body: JobBody, requeue: bool) -> Script:
    """The job that holds the controller, and in the shapes ``het`` and ``single`` the rollout nodes too.

    Raises:
        SiteError: the site's template does not fit.
        UsageError: a directory has a name that Slurm or the container cannot be told.
    """
    _check_paths(plan, body)
    directives = _common(plan, site, body, "run", requeue)
    if plan.shape == "het":
        trainer, rollout = dict(plan.trainer.places), dict(plan.rollout.places)
        reset = [f"--{name}=" for name in _RESET if name in trainer and name not in rollout]
        directives += [*_group(plan.trainer, site), "hetjob", *_group(plan.rollout, site, reset)]
    else:
        directives += _group(plan.whole or plan.trainer, site)
    return Script("run", _text(directives, site, body.command))


def rollout_script(plan: JobPlan, site: Site, body: JobBody) -> Script:
    """A job of rollout workers that join the run. Slurm may preempt it, requeue it, or lose it at any moment.

    Raises:
        SiteError, UsageError: see :func:`run_script`.
    """
    _check_paths(plan, body)
    directives = [*_common(plan, site, body, "rollout", True), *_group(plan.rollout, site)]
    return Script("rollout", _text(directives, site, body.command))


def _common(plan: JobPlan, site: Site, body: JobBody, role: str, requeue: bool) -> list[str]:
    suffix = "" if role == "run" else f"-{role}"
    # In a file name of sbatch a percent sign begins a replacement; two of them are one.
    logs = str(body.run_directory / "logs").replace("%", "%%")
    return [
        f"--job-name=milesbatch-{plan.name}{suffix}",
        f"--time={plan.time_limit_minutes}",
        _option("chdir", str(body.working_directory)),
        _option("output", f"{logs}/slurm-{role}-%j.log"),
        "--open-mode=append",
        "--requeue" if requeue else "--no-requeue",
        f"--signal=B:USR1@{site.warning_s}",
        f"--comment={body.mark}",
    ]


def _group(group: GroupPlan, site: Site, more: list[str] | None = None) -> list[str]:
    lines = [
        f"--nodes={group.nodes}",
        f"--ntasks-per-node={group.tasks_per_node}",
        f"--cpus-per-task={group.cpus_per_task}",
    ]
    if group.gpus_per_node:
        lines.append(site.gpu_option.replace("{count}", str(group.gpus_per_node)))
    elif site.cpu_only_option:
        lines.append(site.cpu_only_option)
    if group.memory_gib:
        lines.append(f"--mem={group.memory_gib}G")
    if group.exclusive:
        lines.append("--exclusive")
    lines += [_option(name, value) for name, value in group.places]
    return [*lines, *(more or ()), *group.directives]


def _check_paths(plan: JobPlan, body: JobBody) -> None:
    in_container = any(group.container for group in (plan.trainer, plan.rollout))
    for path, refused in ((body.run_directory, "\\" + (":," if in_container else "")), (body.working_directory, "")):
        text = str(path)
        found = [c for c in text if c in refused or not c.isprintable()]
        if found:
            raise UsageError(
                f"{text!r} cannot be told to Slurm{' and the container' if in_container else ''}: it has {found[0]!r} in it",
                mend="use a directory with a plainer name",
            )


def _text(directives: list[str], site: Site, command: tuple[str, ...]) -> str:
    lines = "\n".join(f"#SBATCH {line}" for line in directives)
    variables = [f"export {name}={shlex.quote(value)}" for name, value in sorted(site.environment.items())]
    setup = "\n".join([*site.setup, *variables])
    start = f"exec {shlex.join(command)}"
    if site.template is not None:
        parts = {"directives": lines, "setup": setup, "command": f"{_EARLY}\n{start}"}
        return _filled(Path(site.template), parts)
    return "\n\n".join(["#!/bin/bash\n" + lines, "\n".join(filter(None, [_EARLY, setup])), start]) + "\n"


def _option(name: str, value: str) -> str:
    """sbatch ends a directive at a blank and at ``#``, outside of quotes; a backslash keeps the next character in them."""
    if not re.search(r"[\s\"'\\#]", value):
        return f"--{name}={value}"
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'--{name}="{escaped}"'


def _filled(path: Path, parts: dict[str, str]) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SiteError(
            f"the template {path} cannot be read: {error}", mend="correct `template` in the site file"
        ) from error
    problem = _problem(text, parts)
    if problem:
        raise SiteError(f"the template {path} {problem}", mend="docs/sites.md shows a template")
    return _PLACEHOLDER.sub(lambda found: parts[found[1]], text)


def _problem(text: str, parts: dict[str, str]) -> str:
    """What is wrong with a template; empty when nothing is."""
    if not text.startswith("#!"):
        return "does not begin with `#!` and an interpreter: sbatch would refuse it"
    for name in [name for name, part in parts.items() if part]:
        if text.count("{" + name + "}") != 1:
            return "must have {" + name + "} exactly once"
    before = text[: text.index("{directives}")]
    if any(line.strip() and not line.startswith("#") for line in before.splitlines()):
        return "has a command before {directives}: sbatch looks for directives only before the first one"
    return ""
