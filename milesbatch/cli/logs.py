"""``milesbatch logs``: what a run's processes printed, merged in time order, from any host that sees the run directory.

Owns the words on the screen; times and merging are in :mod:`milesbatch.report.logs`. Imports without torch. The page behind
it is
``docs/operations.md``.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

import typer

from milesbatch.cli.following import looks
from milesbatch.cli.runs import find_submitted
from milesbatch.errors import InputError
from milesbatch.report.logs import Line, LogReader, Wanted
from milesbatch.report.sources import list_sources
from milesbatch.report.status import StatusReader
from milesbatch.store.layout import RunLayout

_LOOK_S = 0.5
_WAIT_S = 5.0


def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    role: Annotated[
        str | None,
        typer.Option(
            "--role", help="Only of a role (controller, trainer, rollout, tracking) or of one name (trainer-0)."
        ),
    ] = None,
    incarnation: Annotated[int | None, typer.Option("--incarnation", min=1, help="Only of this incarnation.")] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with what comes, until the run is over.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines; 0 for all.")] = 200,
    events: Annotated[
        bool, typer.Option("--events", help="Events of all processes, not only the controller's.")
    ] = False,
) -> None:
    """Show what the processes of a run printed, merged in time order, with the controller's events between.

    Each line begins with its time (UTC), incarnation and process. A time that ends in ~ is not the line's own: the line has
    none (a fatal signal's traceback, srun, a C library), and is shown where it fits.
    """
    layout = find_submitted(run)
    reader = LogReader(layout, Wanted(role, incarnation, events), goes_on=follow)
    if follow:
        _wait_for_logs(layout)
    if lines == 0:
        for line in reader.everything():
            _show(line)
    else:
        shown, has_more = reader.last(lines)
        if has_more:
            print(f"(the last {lines} lines; --lines 0 shows all)", file=sys.stderr)
        for line in shown:
            _show(line)
    if follow:
        _follow(layout, reader)


def _follow(layout: RunLayout, reader: LogReader) -> None:
    """Until the run is over, or Ctrl-C, which is no error: it ends the looking, not the run."""
    with contextlib.suppress(KeyboardInterrupt):
        for is_last in looks(layout, follow=True, pause_s=_LOOK_S):
            for line in reader.new(rest=is_last):
                _show(line)


def _wait_for_logs(layout: RunLayout) -> None:
    """A run that is queued has none yet."""
    status = StatusReader(layout)
    is_told = False
    while not list_sources(layout):
        condition = status.condition()
        if condition.is_over:
            raise InputError(f"{layout.root} has no logs, and nothing of it is running", mend="see `milesbatch status`")
        if not is_told:
            print(f"(no logs yet: {condition.state}; {condition.note or 'waiting for the first'})", file=sys.stderr)
            is_told = True
        time.sleep(_WAIT_S)


def _show(line: Line) -> None:
    at = line.at[:23] + ("Z" if line.is_timed else "~")
    incarnation = f"i{line.incarnation}" if line.incarnation else "-"
    print(f"{at} {incarnation} {line.name}: {line.text}", flush=True)
