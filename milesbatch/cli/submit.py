"""``milesbatch submit``: a recipe as Slurm jobs. Runs on a login node, without torch.

load recipe and site -> scripts (milesbatch.jobs.submit) -> sbatch; the job goes on in milesbatch.jobs.control
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from milesbatch.cli.forking import ForkOption, ForkStepOption, begin_fork, place_of
from milesbatch.cli.recipes import find_recipe
from milesbatch.cluster.context import expand_path, runs_directory, site_directories, site_name
from milesbatch.cluster.script import Script
from milesbatch.cluster.submission import test_only
from milesbatch.decisions.going_on import BY_HAND
from milesbatch.errors import JobRefusedError, RunHeldError, SlurmError, UsageError
from milesbatch.jobs.order import Order, place_order
from milesbatch.jobs.submit import check_order, jobs_of, scripts_of
from milesbatch.jobs.submit import submit as queue
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.site import Site, load_site
from milesbatch.report.status import is_finished
from milesbatch.store.layout import RunLayout


def submit(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML), or the name of a shipped one.")],
    site: Annotated[
        str | None, typer.Option("--site", help="Site name or file; default: $MILESBATCH_SITE.", show_default=False)
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Run directory; default: under the site's or $MILESBATCH_RUNS.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Set a recipe field; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch scripts; queue nothing.")] = False,
    fork: ForkOption = None,
    fork_step: ForkStepOption = None,
) -> None:
    """Queue a recipe as Slurm jobs. The same command again continues a run that has stopped.

    With --fork NEW_RUN the state is taken over here and now, and the jobs go on in the new directory.
    """
    wanted = load_recipe(recipe if recipe.exists() else find_recipe(str(recipe)), changes or [])
    where = find_site(site)
    base = expand_path(where.runs_directory) if where.runs_directory else runs_directory()
    place = place_of(run_dir, base, wanted.name)
    layout = RunLayout(begin_fork(place, run_dir is not None, fork, fork_step, wanted, _say, only_look=dry_run))
    order = place_order(layout, wanted, where)
    check_order(order)
    scripts = scripts_of(order, cause=f"{BY_HAND}: `milesbatch submit`")
    if dry_run:
        _show(scripts)
        return
    if is_finished(order.layout, wanted.steps):
        print(f"{order.layout.root} is finished; nothing was queued", file=sys.stderr)
        return
    refuse_queued(order.layout)
    _tell(order, queue(order, scripts))


def find_site(name: str | None) -> Site:
    """The site that was named, or that of the environment.

    Raises:
        UsageError: none was named. SiteError: it cannot be used.
    """
    wanted = name or site_name()
    if wanted is None:
        raise UsageError(
            "no site was given", mend="give --site NAME (or a file), or set MILESBATCH_SITE; see docs/sites.md"
        )
    return load_site(wanted, site_directories())


def refuse_queued(layout: RunLayout) -> None:
    """One job at a time may hold a run.

    Raises:
        RunHeldError: a job of this run is pending or running. SlurmError: Slurm does not answer.
    """
    queued = [job for job in jobs_of(layout) if job.role == "run"]
    if queued:
        job = queued[0]
        reason = f" ({job.reason})" if job.reason not in ("", "None") else ""
        raise RunHeldError(
            f"job {job.job_id} of {layout.root} is {job.state.value}{reason}",
            mend=f"watch it with `milesbatch status {layout.root}`, or end it with `milesbatch cancel {layout.root}`",
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _show(scripts: tuple[Script, ...]) -> None:
    for script in scripts:
        print(script.text, end="" if script is scripts[-1] else "\n")
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
                file.write(script.text)
                file.flush()
                print(test_only(Path(file.name)) or f"sbatch would take the {script.role} job", file=sys.stderr)
        except JobRefusedError:
            raise
        except SlurmError as error:
            print(f"not checked by sbatch: {error.what}", file=sys.stderr)


def _tell(order: Order, queued: dict[str, str]) -> None:
    for role, job_id in queued.items():
        print(f"{role} job {job_id}", file=sys.stderr)
    run = shlex.quote(str(order.layout.root))
    print(
        f"\nwhere to look next:\n  milesbatch status {run}\n  milesbatch logs {run} -f\n  milesbatch cancel {run}",
        file=sys.stderr,
    )
