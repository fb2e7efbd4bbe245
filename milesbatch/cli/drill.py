"""``milesbatch drill``: break a small form of a recipe by plan, and show whether anything was lost.

Owns the words on the screen; the drill is in :mod:`milesbatch.drill`. Invariant: with ``--json`` standard output is one JSON
document and nothing else. The page behind it is ``docs/drill.md``.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from milesbatch.cli.outputs import check_outputs
from milesbatch.cluster.context import runs_directory
from milesbatch.drill.conduct import conduct
from milesbatch.drill.page import HEADINGS, cells, page
from milesbatch.drill.plan import STANDARD, load_drill_plan
from milesbatch.drill.verdict import DrillVerdict
from milesbatch.errors import EXIT_NOT_WELL, InputError

_COLUMNS = (
    ("fault", "fault"),
    ("seen", "detected s"),
    ("resumed", "resumed s"),
    ("replay", "steps replayed"),
    ("lost", "lost"),
    ("twice", "repeated"),
    ("digest", "digest"),
    ("verdict", "verdict"),
)
"""What fits into 80 columns: heading, and the column of the page."""
_WIDTH = 120


def drill(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML).")],
    faults: Annotated[
        Path,
        typer.Option(
            "--faults",
            metavar="PLAN",
            help="Fault plan or drill plan (YAML); default: the standard plan.",
            show_default=False,
        ),
    ] = STANDARD,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Set a recipe field; may be repeated.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Keep all runs of the drill in this new or empty directory."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option("--site", help="Drill on this site, by Slurm; default: on this machine.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="Also write an HTML page.")
    ] = None,
) -> None:
    """Run a recipe in small form, break it by plan, and compare with an unbroken run. Exit code 1 if a promise broke.

    Every fault must have fired, every run must have finished with no group lost or repeated, the weights of every version must
    be the unbroken run's (with determinism: bitwise), and the audit must be sound.
    """
    # So that `finally` ends the runs as well when the drill is ended by a scheduler or `kill`.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    plan = load_drill_plan(faults)
    check_outputs(report)
    if report is not None and not report.parent.is_dir():
        raise InputError(f"--report {report}: the directory {report.parent} does not exist", mend="make it first")
    directory = _directory(keep, site is not None)
    is_kept = True
    try:
        verdict = conduct(recipe, plan, tuple(changes or ()), directory, _say, site)
        is_kept = keep is not None or not verdict.ok
    except InputError:
        is_kept = keep is not None
        raise
    finally:
        if is_kept:
            _say(f"the runs are in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if report is not None:
        report.write_text(page(verdict), encoding="utf-8")
    if as_json:
        json.dump(verdict.to_json(), sys.stdout, indent=1, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        _print(verdict)
    if not verdict.ok:
        raise typer.Exit(EXIT_NOT_WELL)


def _directory(keep: Path | None, on_site: bool) -> Path:
    """On a site it must lie where the compute nodes see it: beside the runs."""
    if keep is None:
        base = runs_directory().resolve() if on_site else None
        if base is not None:
            base.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="milesbatch-drill-", dir=base))
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InputError(f"--keep {keep}: exists and is not an empty directory", mend="give a new directory")
    keep.mkdir(parents=True, exist_ok=True)
    return keep


def _print(verdict: DrillVerdict) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    table = Table(title=f"drill of {verdict.recipe}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for number, (heading, _) in enumerate(_COLUMNS):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for fault in verdict.faults:
        texts = dict(zip(HEADINGS, cells(fault), strict=True))
        table.add_row(
            *(
                Text(texts[name], style="" if heading != "verdict" else "green" if fault.ok else "bold red")
                for heading, name in _COLUMNS
            )
        )
    console.print(table)
    for line in _lines(verdict):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _lines(verdict: DrillVerdict) -> list[str]:
    """What a person must read: each broken promise once, with the faults after which it broke."""
    problems: dict[str, list[str]] = {text: ["the unbroken run"] for text in verdict.unbroken_problems}
    for fault in verdict.faults:
        for problem in fault.problems:
            problems.setdefault(problem, []).append(fault.fault)
    lines = [f"NOT WELL ({', '.join(names)}): {problem}" for problem, names in problems.items()]
    bad = sum(not fault.ok for fault in verdict.faults)
    held = "every promise held" if verdict.ok else f"{bad} not well"
    return [*lines, f"{len(verdict.faults)} faults in {verdict.seconds:.0f} s: {held}"]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
