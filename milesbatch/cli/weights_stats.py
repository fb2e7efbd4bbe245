"""``milesbatch weights stats``: how much of the weights changed from version to version, by kind of tensor and by layer.

Owns the words on the screen. Invariant: with ``--json`` standard output is one JSON document and nothing else; payload is never
read. Imports without torch. The page behind it is ``docs/format-weights.md``.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from milesbatch.cli.runs import find_run
from milesbatch.errors import InputError
from milesbatch.report.page.words import many, size
from milesbatch.weights.changes import Changes, Group, mark_in_words, read_changes, totals

_SPARKS = "▁▂▃▄▅▆▇█"
_WIDTH = 20
_MOST_MARKS = 20


def stats(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Show the share of elements that changed from version to version, by kind of tensor and by layer.

    From manifests alone. Versions that changed nothing, or more than five times more or less than the median of the 20 before
    them, are named with their tensors.
    """
    layout = find_run(run)
    changes = read_changes(layout)
    if as_json:
        json.dump(document(changes), sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
        sys.stdout.write("\n")
        return
    if not changes.versions and not changes.gaps:
        raise InputError(f"{layout.root} has no policy versions yet", mend="see `milesbatch status`")
    console = Console()
    console.print(_sizes(changes), markup=False, soft_wrap=True)
    for heading, groups in (("kind", [changes.whole, *changes.kinds]), ("layer", changes.layers)):
        if groups and changes.whole.moments(changes.versions) is not None:
            console.print(_table(heading, groups, changes.versions))
    for mark in changes.marks[-_MOST_MARKS:]:
        console.print(Text(mark_in_words(mark), style="yellow"), soft_wrap=True)
    if (left_out := len(changes.marks) - _MOST_MARKS) > 0:
        console.print(f"({many(left_out, 'earlier version')} that stand out: --json)", markup=False)
    for gap in changes.gaps:
        print(f"warning: {gap}", file=sys.stderr)


def document(changes: Changes) -> dict[str, Any]:
    """All of it, with one density for each version in every group."""
    return {
        "versions": [
            {
                "version": version,
                "density": changes.whole.density[place],
                "delta_bytes": changes.delta_bytes[place],
                "keyframe_bytes": changes.keyframe_bytes[place],
                "tensors_by_encoding": changes.encodings[place],
            }
            for place, version in enumerate(changes.versions)
        ],
        "all": _group(changes.whole, changes.versions),
        "kinds": [_group(group, changes.versions) for group in changes.kinds],
        "layers": [_group(group, changes.versions) for group in changes.layers],
        "marked": [{**dataclasses.asdict(mark), "text": mark_in_words(mark)} for mark in changes.marks],
        "unreadable": changes.gaps,
    }


def _group(group: Group, versions: Sequence[int]) -> dict[str, Any]:
    moments = group.moments(versions)
    return {
        "name": group.name,
        "tensors": group.tensors,
        "elements": group.elements,
        "moments": None if moments is None else dataclasses.asdict(moments),
        "density": group.density,
    }


def _sizes(changes: Changes) -> str:
    """Bytes of deltas and keyframes, and in which encodings tensors were held."""
    lines = [f"{many(len(changes.versions), 'policy version')}, as they were published"]
    for word, column in (("delta", changes.delta_bytes), ("keyframe", changes.keyframe_bytes)):
        known = [value for value in column if value is not None]
        if known:
            lines.append(
                f"  {many(len(known), word)}: {size(sum(known))}, mean {size(statistics.fmean(known))},"
                f" smallest {size(min(known))}, largest {size(max(known))}"
            )
    if held := totals(changes.encodings):
        every = sum(held.values())
        shares = ", ".join(f"{name} {count / every:.1%}" for name, count in held.items())
        lines.append(f"  tensors of deltas by encoding: {shares}")
    return "\n".join(lines)


def _table(heading: str, groups: Sequence[Group], versions: Sequence[int]) -> Table:
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)  # fits 80 columns
    for name in (heading, "elements", "first", "last", "mean", "max", "at", "over versions"):
        table.add_column(name, justify="left" if name in ("kind", "over versions") else "right", no_wrap=True)
    for group in groups:
        moments = group.moments(versions)
        if moments is not None:
            shares = (f"{100 * value:.3g}%" for value in (moments.first, moments.last, moments.mean, moments.max))
            table.add_row(group.name, _count(group.elements), *shares, str(moments.max_version), sparks(group.density))
    return table


def _count(number: int) -> str:
    """Three digits and a prefix."""
    return size(number).removesuffix("B").strip().replace("k", "K").replace(" ", "")


def sparks(values: Sequence[float | None], width: int = _WIDTH) -> str:
    """Means of ``width`` parts as bars from 0 to the largest; a space where nothing is known."""
    length = min(width, len(values))
    means: list[float | None] = []
    for place in range(length):
        part = values[place * len(values) // length : (place + 1) * len(values) // length]
        known = [value for value in part if value is not None]
        means.append(statistics.fmean(known) if known else None)
    top = max((value for value in means if value is not None), default=0.0)
    scale = (len(_SPARKS) - 1) / top if top else 0.0
    return "".join(" " if value is None else _SPARKS[round(value * scale)] for value in means)
