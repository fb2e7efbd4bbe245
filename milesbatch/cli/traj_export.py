"""``milesbatch traj export``: trajectories as a file or directory that other tools load.

Owns which rows and columns go out. Invariant: what is written is complete, or not there. The page behind it is
``docs/trajectories.md``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from milesbatch.analysis.counted import FATES, PENDING, Counted
from milesbatch.analysis.output import Format, check_free, format_of, write_batches
from milesbatch.analysis.scan import COLUMNS, SCHEMA, TrajectoryScan
from milesbatch.cli.outputs import check_outputs
from milesbatch.cli.traj_query import ForceOption
from milesbatch.cli.traj_run import EvaluationOption, RunArgument, VerifyOption, end, scan_of
from milesbatch.errors import UsageError

_RANGE = re.compile(r"(?P<first>\d+)(-(?P<last>\d+))?")


class Fate(StrEnum):
    """Which groups."""

    TRAINED = "trained"
    REJECTED = "rejected"
    PENDING = "pending"


def export(
    run: RunArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where: a .parquet, .jsonl, .json or .csv file, or a directory.")
    ],
    form: Annotated[
        Format | None, typer.Option("--format", help="When the suffix does not say; `datasets` writes a directory.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option("--columns", help="Only these, with commas between; default all.")
    ] = None,
    steps: Annotated[str | None, typer.Option("--steps", help="Only of these train steps: 3,10-20.")] = None,
    fate: Annotated[Fate | None, typer.Option("--fate", help="Only groups of this fate.")] = None,
    force: ForceOption = False,
    evaluation: EvaluationOption = None,
    verify: VerifyOption = False,
) -> None:
    """Write the trajectories that count, with their fates, as Parquet, JSON lines, or a directory for `datasets`."""
    check_outputs(output)
    form = format_of(output, form)
    check_free(output, form, force=force)
    names = _columns(columns)
    scan = scan_of(run, verify, evaluation)
    chosen = _groups(scan.counted, None if steps is None else _ranges(steps), fate)
    schema = pa.schema([SCHEMA.field(name) for name in names])
    title = scan.counted.layout.root.name
    number = write_batches(output, form, schema, _rows(scan, names, chosen), force=force, title=title)
    print(f"{number:,} trajectories in {output} ({form})", file=sys.stderr)
    if scan.errors:
        print(f"{output} lacks the trajectories of the files below", file=sys.stderr)
    end(scan.errors)


def _columns(text: str | None) -> list[str]:
    if text is None:
        return list(COLUMNS)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in COLUMNS]
    if unknown or not names:
        raise UsageError(f"--columns names {', '.join(unknown) or 'none'}", mend=f"there are {', '.join(COLUMNS)}")
    return names


def _ranges(text: str) -> list[tuple[int, int]]:
    found = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"--steps is {text!r}", mend="write train steps and ranges of them, as in --steps 3,10-20")
        found.append((int(match["first"]), int(match["last"] or match["first"])))
    return found


def _groups(counted: Counted, ranges: list[tuple[int, int]] | None, fate: Fate | None) -> Any:
    """Which groups go out, as a mask; None for all."""
    if ranges is None and fate is None:
        return None
    chosen = np.ones(len(counted.group_id), bool)
    if ranges is not None:
        in_ranges = [(counted.step >= first) & (counted.step <= last) for first, last in ranges]
        chosen &= np.logical_or.reduce(in_ranges) & (counted.step != PENDING)
    if fate is not None:
        chosen &= counted.fate_code == FATES.index(fate)
    return chosen


def _rows(scan: TrajectoryScan, names: list[str], chosen: Any) -> Iterator[Any]:
    if chosen is None:
        yield from scan.batches(names)
        return
    counted = scan.counted
    for batch in scan.batches([*names, *({"group_id"} - set(names))], counted.files_of(chosen)):
        mask = chosen[counted.positions(batch["group_id"].to_numpy())]
        if mask.any():
            yield batch.filter(pa.array(mask)).select(names)
