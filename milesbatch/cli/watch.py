"""``milesbatch watch``: the status of a run, live, until the run is over.

Owns: when to look, and the screen. Invariant: looking never changes the run, and a Ctrl-C ends the looking alone.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from milesbatch.cli.runs import find_submitted
from milesbatch.cli.screen import job_in_words, screen
from milesbatch.report.condition import Condition
from milesbatch.report.page.words import many
from milesbatch.report.status import StatusReader


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    every_s: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Watch a run until it is over: a screen on a terminal, else a line whenever something has changed.

    Exit code 0 when it is finished (or on Ctrl-C), 1 when it failed, 75 when it was stopped in order to be continued.
    """
    reader = StatusReader(find_submitted(run))
    try:
        last = _on_screen(reader, every_s) if sys.stdout.isatty() else _in_lines(reader, every_s)
    except KeyboardInterrupt:
        return
    if last.exit_code:
        raise typer.Exit(last.exit_code)


def _on_screen(reader: StatusReader, every_s: float) -> Condition:
    console = Console()
    with Live(Text("looking"), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            condition, body = reader.read_both()
            # One line is the terminal's own: on the last one the cursor waits.
            live.update(screen(body, width=console.width, height=console.height - 1), refresh=True)
            if condition.is_over:
                return condition
            time.sleep(every_s)


def _in_lines(reader: StatusReader, every_s: float) -> Condition:
    said = ""
    while True:
        condition, body = reader.read_both()
        line = line_of(body)
        if line != said:
            print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
            said = line
        if condition.is_over:
            return condition
        time.sleep(every_s)


def line_of(body: dict[str, Any]) -> str:
    """What changes, in one line."""
    parts = [body["state"] + (f" ({body['note']})" if body["note"] else "")]
    if body["cause"]:
        parts.append(str(body["cause"]).splitlines()[0])
    parts.append(f"step {body['step']} of {body['steps']}, checkpoint {body['last_checkpoint_step']}")
    if body["reward_mean"] is not None:
        parts.append(f"reward {body['reward_mean']:.3f}")
    parts.append(f"incarnation {body['incarnation']}, {many(len(body['workers']), 'worker')}")
    parts += [f"{one['name']}: {one['servers'].splitlines()[0]}" for one in body["workers"] if one.get("servers")]
    if body["slurm"] not in (None, "answers"):
        parts.append("Slurm does not answer")
    # Without the time that is left, which changes at each look.
    parts += [f"job {job_in_words({**job, 'time_left_s': None, 'starts_at': ''})}" for job in body["jobs"]]
    return "; ".join(parts)
