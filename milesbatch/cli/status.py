"""``milesbatch status``: one screen about a run, from its files and from Slurm; works while it runs and long after."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from milesbatch.cli.runs import find_submitted
from milesbatch.cli.screen import rows, screen
from milesbatch.errors import EXIT_NOT_WELL
from milesbatch.report.status import run_status


def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Show state, jobs, steps, versions, checkpoint and restarts of a run. Exit code 1 when it failed.

    Works from files alone where Slurm does not answer, and says so; a run that was never submitted does not ask it.
    """
    body = run_status(find_submitted(run))
    if as_json:
        print(json.dumps(body, indent=1))
    elif sys.stdout.isatty():
        Console().print(screen(body))
    else:  # a line for each, whatever its length, for whoever reads it
        print("\n".join(f"{label:<16} {text}" for label, text in rows(body)))
    if body["state"] == "failed":
        raise typer.Exit(EXIT_NOT_WELL)
