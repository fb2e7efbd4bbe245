"""``milesbatch``: the command line. Each command lives in a module of its own; this one only ties them together.

Expected errors end as one clear text on stderr and an exit code (0 done, 1 not well, 2 wrong usage or input, 75 stopped in
order to be continued); a traceback appears only with ``--debug``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import typer

from milesbatch import __version__
from milesbatch.cli import catalogue, recipes, traj, weights
from milesbatch.cli.audit import audit
from milesbatch.cli.doctor import doctor
from milesbatch.cli.drill import drill
from milesbatch.cli.evaluate import evaluate
from milesbatch.cli.life import cancel, resume, scale
from milesbatch.cli.logs import logs
from milesbatch.cli.plan import plan
from milesbatch.cli.replay import replay
from milesbatch.cli.report import report
from milesbatch.cli.run import run
from milesbatch.cli.status import status
from milesbatch.cli.submit import submit
from milesbatch.cli.watch import watch
from milesbatch.errors import EXIT_TEMPFAIL, MilesbatchError, StoppedToContinue
from milesbatch.store.durable import storage_error

app = typer.Typer(
    name="milesbatch",
    help="Train language models with reinforcement learning as batch jobs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


app.command("run", epilog="Example: milesbatch run recipes/tiny.yaml --set steps=20")(run)
app.command("submit", epilog="Example: milesbatch submit recipes/tiny.yaml --site devcluster --dry-run")(submit)
app.command("plan", epilog="Example: milesbatch plan recipes/tiny.yaml --run runs/tiny")(plan)
app.command("cancel", epilog="Example: milesbatch cancel runs/tiny --now")(cancel)
app.command("resume", epilog="Example: milesbatch resume runs/tiny")(resume)
app.command("scale", epilog="Example: milesbatch scale runs/tiny --rollout 8")(scale)
app.command("status", epilog="Example: milesbatch status runs/tiny --json")(status)
app.command("watch", epilog="Example: milesbatch watch runs/tiny --every 5")(watch)
app.command("logs", epilog="Example: milesbatch logs runs/tiny --role trainer -f")(logs)
app.command("audit", epilog="Example: milesbatch audit runs/tiny --json")(audit)
app.command("evaluate", epilog="Example: milesbatch evaluate runs/tiny --every 20")(evaluate)
app.command("report", epilog="Example: milesbatch report runs/tiny -o tiny.html")(report)
app.command("replay", epilog="Example: milesbatch replay runs/tiny --step 12")(replay)
app.command("drill", epilog="Example: milesbatch drill recipes/tiny.yaml --report drill.html")(drill)
app.command("doctor", epilog="Example: milesbatch doctor --run-dir /scratch/runs --site mycluster")(doctor)
app.add_typer(traj.app, name="traj")
app.add_typer(weights.app, name="weights")
app.add_typer(recipes.app, name="recipes")
app.add_typer(catalogue.app, name="runs")


def main() -> None:
    """Entry point of the ``milesbatch`` command."""
    _open_closed_streams()
    # As with `python -m`, which the roles are started with: a user's reward may lie in the working directory.
    sys.path.insert(0, "")
    signal.signal(signal.SIGTERM, _stop)
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    is_debug = len(arguments) < len(sys.argv) - 1
    try:
        app(args=arguments)
    except MilesbatchError as error:
        if is_debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("error: interrupted; the same command again goes on from here", file=sys.stderr)
        sys.exit(EXIT_TEMPFAIL)
    except BrokenPipeError:
        # The reader of our output (a pager, `head`) has closed it.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        # A path that cannot even be looked at: no permission, too long, a filesystem that does not answer.
        if is_debug or not isinstance(error.filename, str):
            raise
        mapped = storage_error(Path(error.filename), error)
        print(f"error: {mapped}", file=sys.stderr)
        sys.exit(mapped.exit_code)


def _stop(number: int, frame: object) -> None:
    """SIGTERM outside the controller's loop, which has handlers of its own."""
    raise StoppedToContinue("stopped by SIGTERM", mend="give the same command again; it goes on from here")


def _open_closed_streams() -> None:
    """A closed standard stream would give its number to the next file that is opened, and its text to that file."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - lives as long as the process


if __name__ == "__main__":
    main()
