"""``milesbatch status``: one screen about a run, from its files; works while it runs and long after."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from milesbatch.cli.runs import find_run
from milesbatch.errors import EXIT_NOT_WELL
from milesbatch.report.status import run_status


def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Show state, steps, versions, checkpoint and restarts of a run. Exit code 1 when it failed."""
    body = run_status(find_run(run))
    if as_json:
        print(json.dumps(body, indent=1))
    else:
        Console().print(_screen(body))
    if body["state"] == "failed":
        raise typer.Exit(EXIT_NOT_WELL)


def _screen(body: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("run", str(body["run_id"]))
    table.add_row("state", body["state"])
    if body["cause"]:
        table.add_row("cause", body["cause"])
    table.add_row("step", f"{body['step']} of {body['steps']}")
    table.add_row("policy version", f"{body['policy_version']}  {body['weights_digest'] or ''}")
    table.add_row("last checkpoint", f"step {body['last_checkpoint_step']}")
    table.add_row("if it died now", f"nothing is lost; {body['would_be_replayed']} steps would be replayed")
    if body["reward_mean"] is not None:
        table.add_row("reward", f"{body['reward_mean']:.3f}")
        table.add_row("lag", f"mean {body['lag']['mean']:.2f}, max {body['lag']['max']:.0f} versions")
    table.add_row("incarnation", f"{body['incarnation']} (jobs: {', '.join(body['job_ids']) or 'none'})")
    for restart in body["restarts"]:
        table.add_row("  restart", f"incarnation {restart['incarnation']}: {restart['cause']}, {restart['at']}")
    if body["waiting_for"]:
        table.add_row("waits for", body["waiting_for"])
    for worker in body["workers"]:
        text = f"{worker['state']}, version {worker['policy_version']}, {worker['samples_in_flight']} in flight"
        table.add_row(f"  {worker['name']}", text)
    return table
