"""The page as a whole: sections in order, the data of the charts, styles and scripts, and a policy that lets nothing else run.

Owns: order and assembly. Invariant: the page asks for no other file and runs no script but its own two: the content security
policy names their digests, so that markup from a run could not run even if it were not escaped. The page behind it is
``docs/report.md``.
"""

from __future__ import annotations

import base64
import bisect
import hashlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import yaml

from milesbatch import __version__
from milesbatch.analysis.jumps import find_jumps
from milesbatch.recipe.dotted import dotted
from milesbatch.report.page import made, opening, told
from milesbatch.report.page.changes import changes_charts, changes_section
from milesbatch.report.page.charts import timeline
from milesbatch.report.page.evaluations import evaluation_chart, evaluation_section
from milesbatch.report.page.glossary import glossary
from milesbatch.report.page.html import Html, joined, raw, safe_json, tag
from milesbatch.report.page.lanes import Lanes, lay_lanes
from milesbatch.report.page.material import Material
from milesbatch.report.page.panels import Panel, chosen_panels, label_of, panel_chart, reward_chart, steps_table
from milesbatch.report.page.steps import Steps, collect_steps, fewer
from milesbatch.report.page.words import figure
from milesbatch.timeline.slices import ACTIVITIES
from milesbatch.timeline.troubles import Trouble

_MOST_ROWS = 1500
SectionParts = list[tuple[str, str, Html]]


def page(material: Material, library: str | None) -> str:
    """The whole document; ``library`` is Vega's script, None for a page with tables and without charts."""
    every = collect_steps(material.evidence)
    material.gaps += every.odd
    steps = fewer(every)
    jumps = find_jumps(every.step, every.column("reward_mean"))
    lanes = lay_lanes(material.story, material.troubles)
    panels = chosen_panels(steps)
    sections: SectionParts = [
        ("reward", "Reward", joined([_reward_figure(), told.jump_table(jumps, every)])),
        ("faults", "Faults and restarts", _faults(material)),
        ("timeline", "Timeline", told.timeline_section(lanes, material.story)),
        ("evaluation", "Evaluation", evaluation_section(material.evaluations)),
        ("curves", "Curves", _curves(panels, steps)),
        ("lag", "Lag and stale samples", _lag(material)),
        ("episodes", "Failed episodes", made.episode_section(material.experience)),
        ("weights", "Weights", _weights(material)),
        ("time", "Where the time went", told.time_table(material.story)),
        ("samples", "Samples", made.sample_cards(material.samples, material.name)),
        ("recipe", "Recipe and its changes", _recipe(material)),
        ("audit", "Audit", opening.audit_section(material)),
        ("steps", "Every step", told.step_table(fewer(every, _MOST_ROWS))),
        ("words", "Words", glossary()),
    ]  # fmt: skip
    charts: list[dict[str, Any]] = [reward_chart("chart-reward", steps, jumps)]
    charts += [panel_chart(f"chart-p{n}", panel, names, steps) for n, (panel, names) in enumerate(panels)]
    charts.append(made.lag_chart("chart-lag", material.experience.lag_tokens))
    weight_charts, versions = made.weights_charts("chart-bytes", "chart-times", material.versions)
    charts += weight_charts
    evaluation, evaluations = evaluation_chart(material.evaluations)
    charts += [evaluation] if evaluation is not None else []
    change_charts, changed = changes_charts(material.changes)
    charts += change_charts
    data = {
        "charts": charts,
        "tables": {
            "steps": steps_table(steps),
            "versions": versions,
            "evaluations": evaluations,
            "changes": changed,
        },
        "breaks": _breaks(steps),
        "deaths": _deaths(steps, material.troubles),
        "timeline": _timeline_data(lanes),
    }
    head = [opening.headline(material, every), opening.stop_cause(material), opening.missing(material)]
    return _document(material, head, sections, data, library)


def _chart(name: str, label: str) -> Html:
    return tag("div", id=f"chart-{name}", _class="chart", role="img", aria_label=label)


def _faults(material: Material) -> Html:
    return joined([told.cost_of_faults(material.story), told.trouble_table(material.troubles)])


def _lag(material: Material) -> Html:
    return joined([made.lag_words(material.experience), _chart("lag", "lag of trained tokens by step")])


def _recipe(material: Material) -> Html:
    return joined([told.incarnation_table(material, _flat(material.recipe)), made.recipe_details(material.recipe)])


def _reward_figure() -> Html:
    label = "mean reward by step; arrow keys move from step to step, escape lets go"
    place = tag("div", id="chart-reward", _class="chart", tabindex="0", role="group", aria_label=label)
    readout = tag(
        "p", "Point at a curve, or focus it and use the arrow keys, to read its values.", id="readout", role="status"
    )
    return tag("figure", readout, place, _class="card wide")


def _curves(panels: list[tuple[Panel, list[str]]], steps: Steps) -> Html:
    return tag(
        "div", *(_panel(f"chart-p{n}", panel, names, steps) for n, (panel, names) in enumerate(panels)), _class="grid"
    )


def _panel(element: str, panel: Panel, names: list[str], steps: Steps) -> Html:
    values = []
    for place, name in enumerate(names):
        last = next((value for value in reversed(steps.column(name)) if value is not None), None)
        value = tag("b", figure(last), data_series=name, data_chart=element)
        label = label_of(name, names) if len(names) > 1 else ""
        swatch = tag("i", _class=f"swatch s{place + 1}") if len(names) > 1 else None
        values.append(tag("span", swatch, f"{label} " if label else "", value))
    unit = tag("span", panel.unit, _class="quiet") if panel.unit else None
    head = tag("figcaption", tag("strong", panel.title), unit, tag("span", *values, _class="values"))
    chart = tag("div", id=element, _class="chart", role="img", aria_label=f"{panel.title} by step")
    return tag("figure", head, chart, _class="card")


def _weights(material: Material) -> Html:
    grid = [
        tag("figure", tag("figcaption", tag("strong", "Bytes by version"),
                          tag("span", tag("span", tag("i", _class="swatch s2"), "keyframe"),
                              tag("span", tag("i", _class="swatch s1"), "delta"), _class="values")),
            _chart("bytes", "bytes of weights by policy version"), _class="card"),
        tag("figure", tag("figcaption", tag("strong", "Seconds by version"),
                          tag("span", tag("span", tag("i", _class="swatch s1"), "publish"),
                              tag("span", tag("i", _class="swatch s3"), "fetch"),
                              tag("span", tag("i", _class="swatch s2"), "pause"), _class="values")),
            _chart("times", "seconds of publishing and fetching by policy version"), _class="card"),
    ]  # fmt: skip
    charts = tag("div", *grid, _class="grid pair") if material.versions else None
    return joined([made.weights_words(material.versions), charts, changes_section(material.changes)])


def _breaks(steps: Steps) -> list[int]:
    """Steps at which another incarnation went on, or that were replayed after a restart (the first of a row)."""
    found = []
    for place in range(1, len(steps.step)):
        is_other = steps.incarnation[place] != steps.incarnation[place - 1]
        if is_other or (steps.replays[place] and not steps.replays[place - 1]):
            found.append(steps.step[place])
    return found


def _deaths(steps: Steps, troubles: Sequence[Trouble]) -> list[int]:
    """The steps that were under way when a process died or was lost, once each; after the last step, that one."""
    found = set()
    for trouble in troubles:
        if trouble.kind in ("died", "lost") and steps.step:
            place = bisect.bisect_left(steps.at_s, trouble.at_s)
            found.add(steps.step[min(place, len(steps.step) - 1)])
    return sorted(found)


def _timeline_data(lanes: Lanes) -> dict[str, Any]:
    return {
        "spec": timeline(len(lanes.names)), "lanes": list(lanes.names), "activities": list(ACTIVITIES),
        "bars": lanes.bars, "lives": lanes.lives,
        "marks": lanes.marks, "fine": lanes.fine, "from": lanes.start_ms, "to": lanes.end_ms,
    }  # fmt: skip


def _flat(recipe: str) -> dict[str, object]:
    """Dotted path -> value, as far as the text is a mapping."""
    try:
        body = yaml.safe_load(recipe)
    except yaml.YAMLError:
        return {}
    return dotted(body) if isinstance(body, dict) else {}


def _document(
    material: Material, head: list[Html | None], sections: SectionParts, data: dict[str, Any], library: str | None
) -> str:
    style, script = _asset("page.css"), _asset("page.js")
    scripts = [code for code in (library, script) if code is not None]
    links = [tag("a", name.capitalize(), href=f"#{name}") for name, _, _ in sections]
    links.append(tag("span", "⟷ swipe for all sections", _class="hint", aria_hidden="true"))
    body = [
        tag("section", tag("h2", title, id=f"h-{name}"), content, id=name, aria_labelledby=f"h-{name}")
        for name, title, content in sections
    ]
    no_charts = "The charts need JavaScript, which is turned off here; all tables are complete without it."
    parts = [
        tag("a", "Skip to the report", href="#main", _class="skip"),
        tag("header", *head[:1], _class="top"),
        tag("nav", *links, aria_label="sections"),
        tag(
            "main",
            *head[1:],
            tag("noscript", tag("p", no_charts, _class="notice warn")),
            _without(library),
            *body,
            id="main",
        ),
        tag(
            "footer",
            tag("p", f"Made {material.made_at[:19]}Z by milesbatch {__version__} from the files of the run alone."),
        ),
        tag("div", id="tip", role="tooltip", hidden=True),
        tag("script", safe_json(data), type="application/json", id="data"),
        *(tag("script", raw(code)) for code in scripts),
    ]
    head_tags = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{material.name}: milesbatch report"),
        tag("link", rel="icon", href="data:,"),
        tag("style", raw(style)),
    ]
    page_ = tag("html", tag("head", *head_tags), tag("body", *parts), lang="en")
    return f"<!doctype html>\n{page_}\n"


def _without(library: str | None) -> Html | None:
    if library is not None:
        return None
    words = "Made without charts: the package vl-convert-python was not installed (pip install 'milesbatch[analysis]')."
    return tag("p", words, _class="notice warn")


def _policy(scripts: list[str]) -> str:
    """Vega makes functions out of the expressions of its specifications, which are our own: hence unsafe-eval."""
    digests = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed} 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"


def _asset(name: str) -> str:
    return (files("milesbatch.report.page") / name).read_text(encoding="utf-8")


def chart_library(tell: Callable[[str], None]) -> str | None:
    """Vega with its embedder as one script that needs no network; None, after telling so, when the package is not installed."""
    try:
        import vl_convert
    except ImportError:
        tell("vl-convert-python is not installed: the page is made without charts (pip install 'milesbatch[analysis]')")
        return None
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")
