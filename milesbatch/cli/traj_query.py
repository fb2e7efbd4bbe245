"""``milesbatch traj sql`` and ``find``: questions to a run in SQL, answered on the terminal or in a file.

Owns the words on the screen. Invariants: what a query found is never taken for more than it is: rows that are not
shown are said to be there; damaged files are reported. The page behind it is ``docs/trajectories.md``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from milesbatch.analysis.listing import read_samples
from milesbatch.analysis.output import Format, check_free, format_of, write_batches, write_text
from milesbatch.analysis.plain import plain_rows
from milesbatch.analysis.sql import MEMORY, Tables, open_tables, where_query
from milesbatch.cli.conversation import Colour, legend, print_sample, token_text, visible
from milesbatch.cli.outputs import check_outputs
from milesbatch.cli.traj_run import EvaluationOption, JsonOption, RunArgument, VerifyOption, end, print_json, scan_of
from milesbatch.errors import UsageError

SQL_EXAMPLE = (
    'Example: milesbatch traj sql runs/tiny "select step, avg(reward) from trajectories group by step order by step"'
)
FIND_EXAMPLE = "Example: milesbatch traj find runs/tiny \"reward = 0 and finish_reason = 'length'\" --limit 5"
_ROWS = 40
_WIDEST = 60
_FOUND = "step, group_id, sample_index, reward, response_tokens, finish_reason, fate, error, messages[-1].content as response"
_FOUND_NAMES = _FOUND.replace("messages[-1].content as ", "").split(", ")
MemoryOption = Annotated[
    str, typer.Option("--memory", help="Most memory of DuckDB; more is spilled to a temporary place.")
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the result here: .parquet, .jsonl, .json or .csv.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="Format of the file, when its suffix does not say.")
]


def sql(
    run: RunArgument,
    query: Annotated[str, typer.Argument(metavar="SQL", help="One query; `-` reads it from standard input.")],
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV on standard output.")] = False,
    output: OutputOption = None,
    form: FormatOption = None,
    force: ForceOption = False,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Most rows on the terminal.")] = _ROWS,
    memory: MemoryOption = MEMORY,
    evaluation: EvaluationOption = None,
    verify: VerifyOption = False,
) -> None:
    """Ask in SQL (DuckDB): tables trajectories, groups, batches, files, evaluations; only what counts, each trajectory once."""
    if as_json + as_csv + (output is not None) > 1:
        raise UsageError("one of --json, --csv and -o FILE", mend="leave the others out")
    if output is not None:
        check_outputs(output)
        form = format_of(output, form)
        check_free(output, form, force=force)
    text = sys.stdin.read() if query == "-" else query
    scan = scan_of(run, verify, evaluation)
    with open_tables(scan, memory=memory) as tables:
        schema, batches = tables.batches(text)
        if output is not None and form is not None:
            number = write_batches(output, form, schema, batches, force=force)
            print(f"{number:,} rows in {output}", file=sys.stderr)
        elif as_json or as_csv:
            sys.stdout.flush()
            write_text(Format.JSON if as_json else Format.CSV, sys.stdout.buffer, schema, batches)
            sys.stdout.buffer.flush()
        else:
            _print_table(schema.names, plain_rows(batches), rows)
    end(scan.errors)


def find(
    run: RunArgument,
    where: Annotated[str, typer.Argument(metavar="WHERE", help="A condition in SQL on the columns of trajectories.")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most trajectories to print.")] = 20,
    by: Annotated[str, typer.Option("--by", help="Order, as after `order by`.")] = "group_id, sample_index",
    whole: Annotated[bool, typer.Option("--show", help="Print each as a conversation.")] = False,
    colour: Annotated[Colour, typer.Option("--colour", "--color", help="What token colours say.")] = Colour.LOGPROB,
    as_json: JsonOption = False,
    memory: MemoryOption = MEMORY,
    evaluation: EvaluationOption = None,
    verify: VerifyOption = False,
) -> None:
    """Find trajectories by a condition: one line each, or with --show as conversations."""
    scan = scan_of(run, verify, evaluation)
    with open_tables(scan, memory=memory) as tables:
        number = _all(tables, *where_query("count(*) as number", where))[0]["number"]
        found = _all(tables, *where_query(_FOUND, where, f"order by {by} limit {limit}"))
    if as_json:
        print_json({"found": number, "trajectories": found})
    elif whole:
        console, spell = Console(), token_text(scan.counted.layout.model)
        console.print(legend(colour))
        for one, fate in read_samples(scan.counted, [(row["group_id"], row["sample_index"]) for row in found]):
            print_sample(console, one, spell, colour, fate=fate)
        console.print(f"{len(found)} of {number:,}")
    else:
        more = f", the first {limit} of them" if number > limit else ""
        _print_table(_FOUND_NAMES, iter(found), limit, f"{number:,} trajectories{more}")
    end(scan.errors)


def _all(tables: Tables, query: str, line_offset: int) -> list[dict[str, Any]]:
    return list(plain_rows(tables.batches(query, line_offset=line_offset)[1]))


def _print_table(names: list[str], rows: Iterator[dict[str, Any]], most: int, title: str = "") -> None:
    """At most ``most`` of the rows; below them how many there are, as far as that is known."""
    shown = [[_cell(value) for value in row.values()] for row in islice(rows, most)]
    note = f"{len(shown)} rows"
    if next(rows, None) is not None:
        note = f"the first {most} rows; more with --rows N, --json, --csv or -o FILE"
    table = Table()
    for index, name in enumerate(names):
        texts = [cells[index].plain for cells in shown]
        is_number = bool(texts) and all(not text or text.lstrip("-")[:1].isdigit() for text in texts)
        table.add_column(Text(visible(name)), overflow="fold", justify="right" if is_number else "left")
    for cells in shown:
        table.add_row(*cells)
    Console().print(table, Text(title or note), sep="\n")


def _cell(value: Any) -> Text:
    if value is None:
        return Text("", style="dim")
    if isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, list | dict):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    shown = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return Text(shown if len(shown) <= _WIDEST else f"{shown[: _WIDEST - 3]}...")
