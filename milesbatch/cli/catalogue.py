"""``milesbatch runs``: which runs there are, find some of them, compare them.

Owns the words on the screen. Invariant: with ``--json`` standard output is one JSON document and nothing else. Imports
without torch. The page behind it is ``docs/runs.md``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from milesbatch.catalogue.book import Catalogue
from milesbatch.catalogue.compare import compare
from milesbatch.catalogue.entry import Entry, read_entry
from milesbatch.catalogue.search import find
from milesbatch.cli.runs import find_run
from milesbatch.cluster.context import cache_directory, runs_directory
from milesbatch.errors import UsageError
from milesbatch.store.places import true_path

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="All runs: list them, find some by text and field, compare them."
)

IN = typer.Option("--in", metavar="DIR", help="Also look for runs in this directory; may be given again.")
InOption = Annotated[list[Path] | None, IN]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
_EVALUATION = "evaluation"
_COLUMNS = ("state", "step", "reward", _EVALUATION, "lag", "failed", "went on", "begun")
_COLOURS = {"failed": "red", "lost": "yellow", "unreadable": "red", "finished": "green", "gone": "dim"}


@app.command("ls", epilog="Example: milesbatch runs ls --in /scratch/me/runs")
def ls(
    places: InOption = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Forget all, and read every run again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List all runs that are remembered or found, the newest first."""
    _show(_entries(places, rebuild=rebuild), as_json)


@app.command("find", epilog="Example: milesbatch runs find smollm2 'reward_last>0.8' state=finished")
def find_command(
    terms: Annotated[list[str], typer.Argument(metavar="TERM…", help="Words, or FIELD=VALUE (also != < > <= >= ~).")],
    places: InOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find runs: every TERM must hold. A word is looked for in names, causes and recipes."""
    _show(find(_entries(places), terms), as_json)


@app.command("compare", epilog="Example: milesbatch runs compare runs/a runs/b")
def compare_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Run directories, or names.")],
    as_json: JsonOption = False,
) -> None:
    """Show in which recipe keys runs differ, beside how their outcomes differ."""
    if len(runs) < 2:
        raise UsageError("one run cannot be compared", mend="give two runs or more")
    found = compare([read_entry(find_run(run)) for run in runs])
    if as_json:
        print(json.dumps(asdict(found)))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(run, overflow="fold")
    lineage = [("lineage", found.lineage)] if found.lineage else []
    for title, rows in (*lineage, ("recipe", found.recipe), ("outcome", found.outcomes)):
        table.add_row(Text(title, style="bold"))
        for key, values in rows.items():
            table.add_row(f"  {key}", *(Text(_short(value)) for value in values))
        if not rows:
            table.add_row("  (no difference)")
    Console().print(table)


def _entries(places: Sequence[Path] | None, *, rebuild: bool = False) -> list[Entry]:
    for place in places or ():
        if not place.is_dir():
            raise UsageError(f"{place} is not a directory", mend="give a directory that holds runs")
    catalogue = Catalogue(cache_directory() / "catalogue.jsonl")
    return catalogue.refresh([runs_directory(), *(places or ())], rebuild=rebuild)


def _show(entries: Sequence[Entry], as_json: bool) -> None:
    if as_json:
        print(json.dumps([entry.to_json() | {"recovered": entry.recovered} for entry in entries]))
        return
    if not entries:
        print("no run")
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    # A terminal is narrow: the column is there when a run has something to put into it.
    columns = [name for name in _COLUMNS if name != _EVALUATION or any(entry.evaluations for entry in entries)]
    rows = [_row(entry, columns) for entry in entries]
    table.add_column("run", overflow="fold")
    for place, column in enumerate(columns, start=1):  # a narrow terminal folds only the name
        table.add_column(column, no_wrap=True, min_width=max(len(column), *(len(row[place]) for row in rows)))
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for entry in entries:
        if entry.cause:
            console.print(Text(f"{_place(entry)}: {entry.cause}"), soft_wrap=True)
    for entry in entries:
        if entry.parent_run_id is not None:
            words = (
                f"{_place(entry)}: forked from step {entry.parent_step} of {entry.parent_path} ({entry.parent_run_id})"
            )
            console.print(Text(words), soft_wrap=True)
    if any(entry.starts for entry in entries):
        console.print(Text("went on: restarts that came to a new step, of all"))


def _row(entry: Entry, columns: Sequence[str]) -> list[Text]:
    cells = {
        "state": Text(entry.state, style=_COLOURS.get(entry.state, "")),
        "step": Text(f"{entry.step}/{entry.steps}"),
        "reward": Text("" if entry.reward_last is None else f"{entry.reward_first:.3f} → {entry.reward_last:.3f}"),
        _EVALUATION: Text(_evaluation(entry)),
        "lag": Text("" if entry.lag_mean is None else f"{entry.lag_mean:.2f}"),
        "failed": Text("" if entry.failed_share is None else f"{entry.failed_share:.1%}"),
        "went on": Text(f"{entry.recovered}/{len(entry.starts)}" if entry.starts else "0"),
        "begun": Text((entry.created_at or "")[5:16].replace("T", " ")),
    }
    return [Text(_place(entry)), *(cells[name] for name in columns)]


def _evaluation(entry: Entry) -> str:
    """The last one, and the best one where that is another."""
    if entry.eval_last is None:
        return ""
    is_best = entry.eval_best is None or entry.eval_best == entry.eval_last
    return f"{entry.eval_last:.3f}" + ("" if is_best else f" (best {entry.eval_best:.3f})")


def _place(entry: Entry) -> str:
    """Its name where that names it, else its path."""
    path = Path(entry.path)
    return path.name if path.parent == true_path(runs_directory()) else str(path)


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
