"""``milesbatch doctor``: is this machine, directory and cluster fit for runs?

Owns the words on the screen and which probes are made; the probes are in :mod:`milesbatch.doctor`. Invariant: with
``--json`` standard output is one JSON document and nothing else. Imports without torch. The page behind it is
``docs/operations.md``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from milesbatch.cli.submit import find_site
from milesbatch.cluster.context import runs_directory, site_name
from milesbatch.doctor.filesystem import filesystem_checks, unchecked_elsewhere
from milesbatch.doctor.machine import machine_checks
from milesbatch.doctor.packages import package_checks
from milesbatch.doctor.pair import Patience, no_pair, pair_checks
from milesbatch.doctor.scheduler import no_scheduler, scheduler_checks
from milesbatch.doctor.trial import Ask, trial_checks
from milesbatch.doctor.verdict import Check, Diagnosis, Level
from milesbatch.doctor.workplace import nearest
from milesbatch.errors import EXIT_NOT_WELL
from milesbatch.recipe.site import Site

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.BAD: "bold red", Level.UNCHECKED: "cyan"}


def doctor(
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Where runs are to live; default: the site's, or $MILESBATCH_RUNS.")
    ] = None,
    site: Annotated[
        str | None, typer.Option("--site", help="Site name or file; default: $MILESBATCH_SITE.", show_default=False)
    ] = None,
    job: Annotated[bool, typer.Option("--job/--no-job", help="Run a short job on two nodes.")] = True,
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="GPUs that the job asks for on each node.")] = 0,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds that the job may wait in the queue.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Check Python, this machine, a directory's filesystem and, with a site, Slurm and two of its nodes.

    Writes only in a directory of its own below the one that is checked, and removes it. The job takes at most three
    minutes. Exit code 1 when something is bad.
    """
    where = find_site(site) if site is not None or site_name() is not None else None
    directory = run_dir if run_dir is not None else _directory(where)
    checks = [*package_checks(), *machine_checks()]
    on_disk = filesystem_checks(directory)
    checks += on_disk
    if where is None:
        checks += [unchecked_elsewhere("only this host was asked"), *no_scheduler("no site was given")]
    else:
        checks += _on_site(where, directory, on_disk, gpus, Patience(wait_s) if job else None)
    diagnosis = Diagnosis(tuple(checks))
    if as_json:
        print(json.dumps(diagnosis.to_json(), indent=1))
    else:
        _print(diagnosis)
    if not diagnosis.is_fit:
        raise typer.Exit(EXIT_NOT_WELL)


def _directory(site: Site | None) -> Path:
    if site is not None and site.runs_directory:
        return Path(site.runs_directory).expanduser()
    return runs_directory()


def _on_site(site: Site, directory: Path, on_disk: list[Check], gpus: int, patience: Patience | None) -> list[Check]:
    """Slurm, and two nodes. What cannot work is not tried."""
    ask = Ask(site, gpus, minutes=site.max_time_minutes or 60)
    checks = scheduler_checks(site)
    if any(check.name == "answers" and check.level is Level.BAD for check in checks):
        return [*checks, no_pair("Slurm does not answer")]
    tried = trial_checks(ask, nearest(directory))
    checks += tried
    if patience is None:
        return [*checks, no_pair("left out with --no-job")]
    if any(check.level is Level.BAD for check in tried):
        return [*checks, no_pair("sbatch refuses jobs of this site", "correct that first")]
    if any(check.level is Level.BAD for check in on_disk):
        return [*checks, no_pair("the filesystem is bad already as seen from this host", "correct that first")]
    return [*checks, *pair_checks(ask, directory, patience, _say)]


def _print(diagnosis: Diagnosis) -> None:
    console = Console()
    area = ""
    for check in diagnosis.checks:
        if check.area != area:
            area = check.area
            console.print(Text(area, style="bold"))
        for line in lines_of(check):
            console.print(line, soft_wrap=True)
    console.print(Text(summary(diagnosis), style="bold"), soft_wrap=True)


def lines_of(check: Check) -> list[Text]:
    """A verdict, and where it is not good, what it means and what to do."""
    head = (
        Text("  ")
        .append(f"{check.level.value:<12}", style=_STYLES[check.level])
        .append(f"{check.name}: {_one_line(check.found)}")
    )
    more = [("means", check.meaning), ("what to do", check.mend)]
    return [head, *(Text(f"{'':14}{label}: {_one_line(text)}") for label, text in more if text)]


def _one_line(text: str) -> str:
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())


def summary(diagnosis: Diagnosis) -> str:
    """The last line."""
    counts = [f"{len(diagnosis.of(level))} {level.value}" for level in Level if diagnosis.of(level)]
    return f"{'fit' if diagnosis.is_fit else 'not fit'}: {', '.join(counts)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
