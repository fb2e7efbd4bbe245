"""The section about evaluations: a curve over policy versions, and a table of all of them. Pure but for the reading.

Owns: words, table, chart data. Invariant: only evaluations of the same prompts and settings are one curve; others are tables of
their own. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milesbatch.evaluation.reader import OF_RECIPE, Curve, curves, read_evaluations
from milesbatch.records import EvaluationRecord
from milesbatch.report.page.charts import curve as curve_spec
from milesbatch.report.page.html import Html, joined, table, tag
from milesbatch.report.page.steps import rounded
from milesbatch.report.page.words import figure, many, share, span
from milesbatch.store.layout import RunLayout

_DOTS_BELOW = 60
_MOST_ROWS = 200
_MOST_PARTS = 4
CHART = "chart-evaluation"


def read_curves(layout: RunLayout) -> tuple[list[Curve], list[str]]:
    """All curves of the run, the one it is judged by first; and what could not be read, in words."""
    records, errors = read_evaluations(layout)
    return curves(records), [error.what for error in errors]


def evaluation_section(found: Sequence[Curve]) -> Html:
    """What the run's policy versions answered to held-out prompts."""
    if not found:
        words = "No policy version was evaluated: a recipe's section evaluation, or `milesbatch evaluate`, would do so."
        return tag("p", words, _class="quiet")
    parts: list[Html | None] = [_figure(found[0])]
    for curve in found:
        parts += [tag("h3", _title(curve)) if len(found) > 1 else None, _sentence(curve), _table(curve)]
    return joined(parts)


def evaluation_chart(found: Sequence[Curve]) -> tuple[dict[str, Any] | None, dict[str, list[Any]]]:
    """The first curve's chart (None without one), and the table that it is drawn from."""
    if not found:
        return None, {}
    points = found[0].points
    columns: dict[str, list[Any]] = {
        "version": [point.version for point in points],
        "reward": [rounded(point.figures.reward_mean) for point in points],
    }
    series = [{"column": "reward", "label": "mean reward", "width": 2.0, "colour": "@c1"}]
    if points[-1].settings.samples_per_prompt > 1:
        columns["best"] = [rounded(point.figures.reward_best_mean) for point in points]
        series.append({"column": "best", "label": "best sample of each prompt", "width": 1.5, "colour": "@c3"})
    chart = {
        "element": CHART,
        "kind": "curve",
        "table": "evaluations",
        "x": "version",
        "unit": "",
        "series": series,
        "spec": curve_spec(height=150, has_dots=len(points) <= _DOTS_BELOW, has_zero=False, x_title="policy version"),
    }
    return chart, columns


def _figure(curve: Curve) -> Html:
    head = tag(
        "figcaption",
        tag("strong", "Evaluation"),
        tag("span", "mean reward on held-out prompts", _class="quiet"),
        tag("span", tag("b", figure(curve.last.figures.reward_mean)), _class="values"),
    )
    label = "mean reward on held-out prompts by policy version"
    return tag("figure", head, tag("div", id=CHART, _class="chart", role="img", aria_label=label), _class="card wide")


def _title(curve: Curve) -> str:
    return "Prompts of the recipe" if curve.name == OF_RECIPE else f"Prompts of {curve.name}"


def _sentence(curve: Curve) -> Html:
    settings, best = curve.last.settings, curve.best
    how = "greedy" if settings.temperature == 0 else f"at temperature {settings.temperature:g}"
    asked = f"{many(settings.num_prompts, 'prompt')} that training never asks"
    words = f"{asked}, {many(settings.samples_per_prompt, 'sample')} each, {how}. "
    words += f"Best: version {best.version} with {figure(best.figures.reward_mean)}."
    return tag("p", words, _class="quiet")


def _table(curve: Curve) -> Html:
    shown = curve.points[-_MOST_ROWS:]
    names = list(dict.fromkeys(name for point in shown for name in point.figures.rewards))[:_MOST_PARTS]
    headings = ("version", "reward", "spread", *names, "length", "cut off", "failed", "took")
    rows = [_row(point, names) for point in shown]
    made = table(headings, rows, label=f"evaluations, {_title(curve).lower()}", numbers=range(len(headings)))
    left_out = len(curve.points) - len(shown)
    return joined([made, tag("p", f"{left_out} earlier ones are left out.", _class="quiet") if left_out else None])


def _row(point: EvaluationRecord, names: Sequence[str]) -> tuple[str, ...]:
    figures = point.figures
    return (
        str(point.version),
        figure(figures.reward_mean),
        figure(figures.reward_std),
        *(figure(figures.rewards.get(name)) for name in names),
        figure(figures.length_mean),
        share(figures.finish_reasons.get("length", 0), figures.samples),
        f"{figures.failed:,}",
        span(point.seconds),
    )
