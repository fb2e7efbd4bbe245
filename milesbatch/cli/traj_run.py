"""What the commands of ``milesbatch traj`` share: the run, options, and the end of a command."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from milesbatch.analysis.counted import count_groups
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.cli.runs import find_run
from milesbatch.errors import EXIT_NOT_WELL, MilesbatchError

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Digest each file before it is used; without, only those up to 1 MiB.")
]


def scan_of(run: str, verify: bool = False) -> TrajectoryScan:
    """The counted trajectories of a run."""
    return TrajectoryScan(count_groups(find_run(run)), verify=verify)


def print_json(document: object) -> None:
    """One JSON document on standard output; of a list, each entry on a line."""
    if isinstance(document, list):
        lines = (json.dumps(entry, ensure_ascii=False, allow_nan=False) for entry in document)
        sys.stdout.write("[" + ",".join(f"\n{line}" for line in lines) + "\n]\n")
    else:
        sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def end(errors: Sequence[MilesbatchError]) -> None:
    """Report what could not be read, and end as "not well" when there is any."""
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if errors:
        raise typer.Exit(EXIT_NOT_WELL)
