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
from milesbatch.cli.on_demand import Place, commands_on_demand
from milesbatch.errors import EXIT_TEMPFAIL, MilesbatchError, StoppedToContinue
from milesbatch.store.durable import storage_error

COMMANDS = {
    "run": Place("milesbatch.cli.run", "run", "milesbatch run recipes/tiny.yaml --set steps=20"),
    "submit": Place(
        "milesbatch.cli.submit", "submit", "milesbatch submit recipes/tiny.yaml --site devcluster --dry-run"
    ),
    "plan": Place("milesbatch.cli.plan", "plan", "milesbatch plan recipes/tiny.yaml --run runs/tiny"),
    "cancel": Place("milesbatch.cli.life", "cancel", "milesbatch cancel runs/tiny --now"),
    "resume": Place("milesbatch.cli.life", "resume", "milesbatch resume runs/tiny"),
    "scale": Place("milesbatch.cli.life", "scale", "milesbatch scale runs/tiny --rollout 8"),
    "status": Place("milesbatch.cli.status", "status", "milesbatch status runs/tiny --json"),
    "watch": Place("milesbatch.cli.watch", "watch", "milesbatch watch runs/tiny --every 5"),
    "logs": Place("milesbatch.cli.logs", "logs", "milesbatch logs runs/tiny --role trainer -f"),
    "audit": Place("milesbatch.cli.audit", "audit", "milesbatch audit runs/tiny --json"),
    "evaluate": Place("milesbatch.cli.evaluate", "evaluate", "milesbatch evaluate runs/tiny --every 20"),
    "report": Place("milesbatch.cli.report", "report", "milesbatch report runs/tiny -o tiny.html"),
    "replay": Place("milesbatch.cli.replay", "replay", "milesbatch replay runs/tiny --step 12"),
    "drill": Place("milesbatch.cli.drill", "drill", "milesbatch drill recipes/tiny.yaml --report drill.html"),
    "doctor": Place("milesbatch.cli.doctor", "doctor", "milesbatch doctor --run-dir /scratch/runs --site mycluster"),
    "traj": Place("milesbatch.cli.traj", "app"),
    "weights": Place("milesbatch.cli.weights", "app"),
    "recipes": Place("milesbatch.cli.recipes", "app"),
    "runs": Place("milesbatch.cli.catalogue", "app"),
}

app = typer.Typer(
    name="milesbatch",
    help="Train language models with reinforcement learning as batch jobs.",
    cls=commands_on_demand(COMMANDS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


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
