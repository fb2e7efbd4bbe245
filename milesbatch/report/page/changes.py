"""What of the weights changed: a heat map of layers over versions, a curve of kinds, a table, versions that stand out. Pure.

Owns: words, table, chart data. Invariant: at most ``_MOST_CELLS`` cells, whatever the model and the run. The page behind it is
``docs/report.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

from milesbatch.report.page.charts import SERIES_COLOURS, curve, heatmap
from milesbatch.report.page.html import Html, joined, table, tag
from milesbatch.report.page.steps import rounded
from milesbatch.report.page.words import many
from milesbatch.weights.changes import Changes, Group, mark_in_words

MOST_VERSIONS = 240
"""Versions that are looked at for the page."""
_MOST_CELLS = 6000
_MOST_SERIES = len(SERIES_COLOURS)
_MOST_MARKS = 20
_DOTS_BELOW = 60
_DENSE = 0.9
"""A curve that never comes below this share is drawn from its lowest value on: from 0 on it would be a flat line."""
_LAYERS, _KINDS = "chart-layers", "chart-kinds"

Chart = dict[str, Any]


def changes_section(changes: Changes) -> Html | None:
    """Figures, table and what stands out; None when no version has a delta."""
    if changes.whole.moments(changes.versions) is None:
        return None
    parts: list[Html | None] = [tag("h3", "What changed")]
    parts.append(tag("p", _words(changes), _class="quiet"))
    figures = [_figure(_KINDS, "Changed elements by kind", "per cent", _legend(_shown(changes)))]
    if _rows(changes):
        label = "Changed elements by layer" if changes.layers else "Changed elements by kind, each version"
        figures.append(_figure(_LAYERS, label, "darker: more, logarithmic", None))
    parts += figures
    parts.append(_table([changes.whole, *changes.kinds], changes.versions))
    if changes.marks:
        parts.append(tag("h3", "Versions that stand out"))
        parts.append(tag("ul", *(tag("li", mark_in_words(mark)) for mark in changes.marks[-_MOST_MARKS:])))
        left_out = len(changes.marks) - _MOST_MARKS
        parts.append(tag("p", f"{many(left_out, 'earlier one')} left out.", _class="quiet") if left_out > 0 else None)
    return joined(parts)


def changes_charts(changes: Changes) -> tuple[list[Chart], dict[str, list[Any]]]:
    """The charts, and the table that the curve is drawn from; none when no version has a delta."""
    if changes.whole.moments(changes.versions) is None:
        return [], {}
    shown = _shown(changes)
    columns: dict[str, list[Any]] = {"version": list(changes.versions)}
    for place, group in enumerate(shown):
        columns[f"k{place}"] = [rounded(None if value is None else 100 * value) for value in group.density]
    series = [
        {"column": f"k{place}", "label": group.name, "width": 1.5, "colour": SERIES_COLOURS[place]}
        for place, group in enumerate(shown)
    ]
    has_dots = len(changes.versions) <= _DOTS_BELOW
    spec = curve(height=150, has_dots=has_dots, has_zero=not _is_dense(shown), x_title="policy version")
    charts: list[Chart] = [
        {
            "element": _KINDS, "kind": "curve", "table": "changes", "x": "version", "unit": " %", "series": series,
            "spec": spec,
        }
    ]  # fmt: skip
    if rows := _rows(changes):
        charts.append(_heat(rows, changes))
    return charts, columns


def _shown(changes: Changes) -> list[Group]:
    """The kinds that have most of what changed, in their own order."""
    largest = sorted(changes.kinds, key=lambda group: -group.changed)[:_MOST_SERIES]
    return [group for group in changes.kinds if group in largest]


def _rows(changes: Changes) -> list[Group]:
    return changes.layers or changes.kinds


def _heat(rows: Sequence[Group], changes: Changes) -> Chart:
    """Cells by version, then by row. Colour by the logarithm: densities of layers lie decades apart."""
    width = max(1, -(-len(changes.versions) * len(rows) // _MOST_CELLS))
    places = range(0, len(changes.versions), width)
    known = [value for group in rows for value in (group.density[place] for place in places) if value]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    word = "layer " if changes.layers else ""
    columns: dict[str, list[Any]] = {name: [] for name in ("start", "end", "row", "level", "text")}
    for place in places:
        version = changes.versions[place]
        following = changes.versions[place + width] if place + width < len(changes.versions) else version + 1
        for group in rows:
            if (density := group.density[place]) is not None:
                text = f"version {version}, {word}{group.name}: {100 * density:.3g} %"
                cell = (version - 0.5, following - 0.5, group.name, _level(density, low, high), text)
                for column, value in zip(columns.values(), cell, strict=True):
                    column.append(value)
    spec = heatmap(num_rows=len(rows), x_title="policy version")
    return {"element": _LAYERS, "kind": "parts", "parts": columns, "spec": spec}


def _level(density: float, low: float, high: float) -> float:
    """0 for nothing, else 0.15 to 1 by the logarithm."""
    if density <= 0:
        return 0.0
    span = log(high / low) if high > low else 0.0
    return round(0.15 + 0.85 * (log(density / low) / span if span else 1.0), 3)


def _words(changes: Changes) -> str:
    first, last = changes.versions[0], changes.versions[-1]
    looked = f"{many(len(changes.versions), 'version')} between {first} and {last} looked at"
    text = f"Share of elements whose bits differ from the version before; {looked}. milesbatch weights stats has all of them."
    if _is_dense(changes.kinds):
        text += (
            " Nearly every element changes in every version: with weights in float32 even a small step moves each of them by"
            " some bits. The curve begins near its lowest value, not at 0; weights.dtype: bfloat16 would tell kinds apart."
        )
    return text


def _is_dense(groups: Sequence[Group]) -> bool:
    """Do nearly all elements change, always?"""
    known = [value for group in groups for value in group.density if value is not None]
    return bool(known) and min(known) > _DENSE


def _legend(shown: Sequence[Group]) -> Html:
    entries = (tag("span", tag("i", _class=f"swatch s{place}"), group.name) for place, group in enumerate(shown, 1))
    return tag("span", *entries, _class="values")


def _figure(element: str, title: str, unit: str, legend: Html | None) -> Html:
    head = tag("figcaption", tag("strong", title), tag("span", unit, _class="quiet"), legend)
    label = f"{title.lower()} by policy version"
    return tag("figure", head, tag("div", id=element, _class="chart", role="img", aria_label=label), _class="card wide")


def _table(groups: Sequence[Group], versions: Sequence[int]) -> Html:
    rows = []
    for group in groups:
        moments = group.moments(versions)
        if moments is not None:
            shares = (f"{100 * value:.3g} %" for value in (moments.first, moments.last, moments.mean, moments.max))
            rows.append((group.name, f"{group.tensors:,}", f"{group.elements:,}", *shares, str(moments.max_version)))
    headings = ("kind", "tensors", "elements", "first", "last", "mean", "max", "at version")
    return table(headings, rows, label="changed elements by kind of tensor", numbers=range(1, len(headings)))
