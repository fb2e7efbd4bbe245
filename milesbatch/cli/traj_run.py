"""What the commands of ``milesbatch traj`` share: the run, options, and the end of a command."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from milesbatch.analysis.counted import count_groups
from milesbatch.analysis.evaluated import count_evaluation
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.cli.runs import find_run
from milesbatch.errors import EXIT_NOT_WELL, MilesbatchError

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Digest each file before it is used; without, only those up to 1 MiB.")
]
EvaluationOption = Annotated[
    int | None,
    typer.Option("--evaluation", metavar="VERSION", min=0, help="Look at this policy version's evaluation instead."),
]


def scan_of(run: str, verify: bool = False, evaluation: int | None = None) -> TrajectoryScan:
    """The counted trajectories of a run, or those of the evaluation of one of its policy versions."""
    layout = find_run(run)
    counted = count_groups(layout) if evaluation is None else count_evaluation(layout, evaluation)
    return TrajectoryScan(counted, verify=verify)


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
