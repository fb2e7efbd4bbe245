"""The charts as Vega specifications. Pure: no data, no colours, no names of the run in them.

Owns: how a chart looks. Invariant: a specification holds only this module's own text, for Vega evaluates expressions in it;
what the run says comes as data. Colours are written ``@name`` and are replaced by those of the page's style. Page:
https://vega.github.io/vega/docs/specification/.
"""

from __future__ import annotations

from typing import Any

Spec = dict[str, Any]

SERIES_COLOURS = ("@c1", "@c2", "@c3", "@c4", "@c5", "@c6")
_TIME_FORMAT = "t1 - t0 < 6e5 ? '%H:%M:%S' : t1 - t0 < 1.7e8 ? '%H:%M' : '%d %b %H:%M'"
_WIDTH = "max(containerSize()[0], 120)"
LANE_HEIGHT = 26
_BAR = LANE_HEIGHT - 13
_INSET = 6
"""Pixels left and right of the data, so that nothing lies on the axis."""


def _frame(height: Any) -> Spec:
    return {
        "$schema": "https://vega.github.io/schema/vega/v6.json",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 12, "top": 6, "bottom": 2},
        "height": height,
        "config": {
            "font": "@font",
            "axis": {
                "labelColor": "@muted", "titleColor": "@muted", "labelFontSize": 11, "titleFontSize": 11,
                "titleFontWeight": "normal", "gridColor": "@line", "domainColor": "@line", "tickColor": "@line",
                "labelFont": "@font", "titleFont": "@font", "tickSize": 4, "labelPadding": 4,
            },
        },
    }  # fmt: skip


def _signals(*more: Spec) -> list[Spec]:
    width = {"name": "width", "init": _WIDTH, "on": [{"update": _WIDTH, "events": "window:resize"}]}
    return [width, *more]


def curve(*, height: int, has_dots: bool, has_zero: bool, x_title: str, has_jumps: bool = False) -> Spec:
    """Lines over steps or versions. Data: ``points`` (x, value, series, width, colour), ``breaks`` (x), ``deaths`` (x),
    ``jumps`` (x, value, label). Signals: ``at``, the x that is pointed at, else null; ``x0`` to ``y1``, what the axes show."""
    marks: list[Spec] = [_breaks(), _lines(has_dots), _deaths()]
    if has_jumps:
        marks += _jumps()
    return {
        **_frame(height),
        "signals": _signals({"name": "at", "value": None}, *({"name": n, "value": 0} for n in ("x0", "x1", "y0", "y1"))),
        "data": [
            {"name": "points"}, {"name": "breaks"}, {"name": "deaths"}, {"name": "jumps"},
            {"name": "here", "source": "points", "transform": [
                {"type": "filter", "expr": "datum.x === at && isValid(datum.value)"}]},
        ],
        "scales": [
            _x_scale(),
            {"name": "y", "type": "linear", "range": "height", "nice": 4, "zero": has_zero,
             "domain": [{"signal": "y0"}, {"signal": "y1"}]},
        ],
        "axes": [_y_axis(), _x_axis(x_title)],
        "marks": [*marks, *_pointer()],
    }  # fmt: skip


def _breaks() -> Spec:
    return {
        "type": "rule", "from": {"data": "breaks"}, "interactive": False,
        "encode": {"update": {
            "x": {"scale": "x", "field": "x"}, "y": {"value": 0}, "y2": {"signal": "height"},
            "stroke": {"value": "@warn"}, "strokeDash": {"value": [2, 3]}, "strokeWidth": {"value": 1},
        }},
    }  # fmt: skip


def _deaths() -> Spec:
    """Small triangles on the axis, where a process died."""
    return {
        "type": "symbol", "from": {"data": "deaths"}, "interactive": False,
        "encode": {"update": {
            "x": {"scale": "x", "field": "x"}, "y": {"signal": "height - 4"}, "shape": {"value": "triangle-up"},
            "size": {"value": 52}, "fill": {"value": "@bad"}, "stroke": {"value": "@panel"}, "strokeWidth": {"value": 1},
        }},
    }  # fmt: skip


def _lines(has_dots: bool) -> Spec:
    line = {
        "type": "line", "from": {"data": "series"}, "interactive": False,
        "encode": {"update": {
            "x": {"scale": "x", "field": "x"}, "y": {"scale": "y", "field": "value"},
            "stroke": {"field": "colour"}, "strokeWidth": {"field": "width"},
            "strokeOpacity": {"signal": "datum.width < 1 ? 0.45 : 1"}, "strokeJoin": {"value": "round"},
            "defined": {"signal": "isValid(datum.value)"},
        }},
    }  # fmt: skip
    dots = {
        "type": "symbol", "from": {"data": "series"}, "interactive": False,
        "encode": {"update": {
            "x": {"scale": "x", "field": "x"}, "y": {"scale": "y", "field": "value"}, "size": {"value": 18},
            "fill": {"field": "colour"}, "opacity": {"signal": "isValid(datum.value) ? 1 : 0"},
        }},
    }  # fmt: skip
    return {
        "type": "group",
        "from": {"facet": {"name": "series", "data": "points", "groupby": "series"}},
        "marks": [line, dots] if has_dots else [line],
    }


def _jumps() -> list[Spec]:
    place = {"x": {"scale": "x", "field": "x"}, "y": {"scale": "y", "field": "value"}}
    return [
        {"type": "symbol", "from": {"data": "jumps"}, "interactive": False,
         "encode": {"update": {**place, "size": {"value": 190}, "fill": {"value": "@panel"},
                               "stroke": {"value": "@ink"}, "strokeWidth": {"value": 1.2}}}},
        {"type": "text", "from": {"data": "jumps"}, "interactive": False,
         "encode": {"update": {**place, "text": {"field": "label"}, "align": {"value": "center"},
                               "baseline": {"value": "middle"}, "fontSize": {"value": 10}, "fill": {"value": "@ink"},
                               "font": {"value": "@font"}, "fontWeight": {"value": 600}}}},
    ]  # fmt: skip


def _pointer() -> list[Spec]:
    return [
        {"type": "rule", "interactive": False, "encode": {"update": {
            "x": {"signal": "scale('x', at)"}, "y": {"value": 0}, "y2": {"signal": "height"},
            "stroke": {"value": "@muted"}, "opacity": {"signal": "at === null ? 0 : 0.8"}}}},
        {"type": "symbol", "from": {"data": "here"}, "interactive": False, "encode": {"update": {
            "x": {"scale": "x", "field": "x"}, "y": {"scale": "y", "field": "value"}, "size": {"value": 44},
            "fill": {"field": "colour"}, "stroke": {"value": "@panel"}}}},
    ]  # fmt: skip


def timeline(num_lanes: int) -> Spec:
    """Lanes over time. Data: ``lanes`` (name), ``activities``, ``bars``, ``lives``, ``marks``. Signals ``t0``, ``t1``: what is
    looked at, in milliseconds since 1970."""
    bar = {
        "x": {"scale": "x", "field": "start"},
        "x2": {"signal": "max(scale('x', datum.end), scale('x', datum.start) + 1)"},
    }
    lane = "scale('lane', datum.lane)"
    return {
        **_frame(num_lanes * LANE_HEIGHT),
        "signals": _signals({"name": "t0", "value": 0}, {"name": "t1", "value": 1}),
        "data": [{"name": "lanes"}, {"name": "activities"}, {"name": "bars"}, {"name": "lives"}, {"name": "marks"}],
        "scales": [
            {"name": "x", "type": "utc", "domain": [{"signal": "t0"}, {"signal": "t1"}], "range": "width"},
            {"name": "lane", "type": "band", "domain": {"data": "lanes", "field": "name"}, "range": "height"},
            {"name": "colour", "type": "ordinal", "domain": {"data": "activities", "field": "name"},
             "range": {"data": "activities", "field": "colour"}},
        ],
        "axes": [
            {"scale": "x", "orient": "bottom", "grid": True, "tickCount": {"signal": "ceil(width / 110)"},
             "formatType": "utc", "format": {"signal": _TIME_FORMAT}, "labelOverlap": True,
             "labelFlush": True, "labelSeparation": 16, "title": "time (UTC)"},
            {"scale": "lane", "orient": "left", "domain": False, "ticks": False, "labelLimit": 110,
             "encode": {"labels": {"update": {"fill": {"value": "@ink"}}}}},
        ],
        "marks": [
            {"type": "rect", "from": {"data": "lives"}, "clip": True, "encode": {"update": {
                **bar, "y": {"signal": f"{lane} + 3"}, "height": {"value": LANE_HEIGHT - 6},
                "fill": {"value": "@life"}, "cornerRadius": {"value": 2}}}},
            {"type": "text", "from": {"data": "lives"}, "clip": True, "interactive": False, "encode": {"update": {
                "x": {"signal": "max(scale('x', datum.start), 0) + 5"}, "y": {"signal": f"{lane} + {LANE_HEIGHT / 2}"},
                "text": {"signal": "datum.lane === 'run' ? datum.text : ''"}, "baseline": {"value": "middle"},
                "limit": {"signal": "max(min(scale('x', datum.end), width) - max(scale('x', datum.start), 0) - 8, 1)"},
                "fontSize": {"value": 11}, "font": {"value": "@font"}, "fill": {"value": "@ink"},
                "opacity": {"signal": "min(scale('x', datum.end), width) - max(scale('x', datum.start), 0) > 30 ? 1 : 0"}}}},
            {"type": "rect", "from": {"data": "bars"}, "clip": True, "encode": {"update": {
                **bar, "y": {"signal": f"{lane} + (datum.thin ? {LANE_HEIGHT - 8} : 4 + datum.top * {_BAR})"},
                "height": {"signal": f"datum.thin ? 4 : datum.part * {_BAR}"},
                "fill": {"scale": "colour", "field": "activity"}}}},
            {"type": "rule", "from": {"data": "marks"}, "clip": True, "interactive": False, "encode": {"update": {
                "x": {"scale": "x", "field": "at"}, "y": {"value": 0}, "y2": {"signal": "height"},
                "stroke": {"signal": "datum.bad ? '@bad' : '@warn'"}, "strokeOpacity": {"value": 0.45},
                "strokeDash": {"value": [2, 3]}}}},
            {"type": "symbol", "from": {"data": "marks"}, "clip": True, "encode": {"update": {
                "x": {"scale": "x", "field": "at"}, "y": {"signal": f"{lane} + {LANE_HEIGHT / 2}"},
                "shape": {"value": "diamond"}, "size": {"value": 110}, "stroke": {"value": "@panel"},
                "strokeWidth": {"value": 1.5}, "fill": {"signal": "datum.bad ? '@bad' : '@warn'"}}}},
        ],
    }  # fmt: skip


def shares(*, height: int, x_title: str) -> Spec:
    """Stacked shares over steps. Data: ``parts`` (start, end, low, high, part 0 to 4, text)."""
    colours = ["@lag0", "@lag1", "@lag2", "@lag3", "@lag4"]
    scale = {"name": "y", "type": "linear", "domain": [0, 1], "range": "height"}
    return _rectangles(height, x_title, scale, ".0%", colours)


def bars(*, height: int, x_title: str) -> Spec:
    """Amounts from 0 on. Data: ``parts`` (start, end, low, high, part 0 or 1, text)."""
    domain = {"data": "parts", "field": "high"}
    scale = {"name": "y", "type": "linear", "domain": domain, "range": "height", "nice": 4, "zero": True}
    return _rectangles(height, x_title, scale, "~s", ["@c1", "@c2"])


def heatmap(*, num_rows: int, x_title: str) -> Spec:
    """Rows over versions. Data: ``parts`` (start, end, row, level from 0 to 1, text), in the order of ``start``; rows lie from
    top to bottom as they first come."""
    each = max(4, min(14, 400 // max(num_rows, 1)))
    begin, end = "scale('x', datum.start)", "scale('x', datum.end)"
    return {
        **_frame(each * num_rows),
        "signals": _signals({"name": "x0", "value": 0}, {"name": "x1", "value": 1}),
        "data": [{"name": "parts"}],
        "scales": [
            _x_scale(),
            {"name": "row", "type": "band", "domain": {"data": "parts", "field": "row"}, "range": "height"},
        ],
        "axes": [
            _x_axis(x_title),
            {"scale": "row", "orient": "left", "domain": False, "ticks": False, "labelOverlap": True, "minExtent": 36},
        ],
        "marks": [
            {"type": "rect", "from": {"data": "parts"}, "encode": {"update": {
                "x": {"scale": "x", "field": "start"}, "x2": {"signal": f"max({end}, {begin} + 0.5)"},
                "y": {"scale": "row", "field": "row"}, "height": {"scale": "row", "band": 1},
                "fill": {"value": "@c1"}, "fillOpacity": {"signal": "0.06 + 0.94 * datum.level"}}}},
        ],
    }  # fmt: skip


def _rectangles(height: int, x_title: str, scale: Spec, label: str, colours: list[str]) -> Spec:
    begin, end = "scale('x', datum.start)", "scale('x', datum.end)"
    return {
        **_frame(height),
        "signals": _signals({"name": "x0", "value": 0}, {"name": "x1", "value": 1}),
        "data": [{"name": "parts"}],
        "scales": [
            _x_scale(),
            scale,
            {"name": "colour", "type": "ordinal", "domain": list(range(len(colours))), "range": colours},
        ],
        "axes": [_y_axis(label), _x_axis(x_title)],
        "marks": [
            {"type": "rect", "from": {"data": "parts"}, "encode": {"update": {
                "x": {"scale": "x", "field": "start"},
                "x2": {"signal": f"max({end} - ({end} - {begin} > 14 ? 1 : -0.5), {begin} + 0.5)"},
                "y": {"scale": "y", "field": "high"}, "y2": {"scale": "y", "field": "low"},
                "fill": {"scale": "colour", "field": "part"}}}},
        ],
    }  # fmt: skip


def _x_scale() -> Spec:
    domain = [{"signal": "x0"}, {"signal": "x1"}]
    reach = [_INSET, {"signal": f"width - {_INSET}"}]
    return {"name": "x", "type": "linear", "domain": domain, "range": reach, "nice": False, "zero": False}


def _x_axis(title: str) -> Spec:
    return {
        "scale": "x", "orient": "bottom", "title": title, "tickMinStep": 1, "format": "~d",
        "tickCount": {"signal": "min(ceil(width / 70), max(floor(x1 - x0), 1))"}, "labelOverlap": True,
    }  # fmt: skip


def _y_axis(label: str | None = None) -> Spec:
    """``label`` formats each number by itself; without it all have the digits that tell them apart."""
    text = {"encode": {"labels": {"update": {"text": {"signal": f"format(datum.value, '{label}')"}}}}} if label else {}
    return {
        **text,
        "scale": "y", "orient": "left", "grid": True, "tickCount": 4, "domain": False, "ticks": False,
        "labelLimit": 64, "minExtent": 36, "labelPadding": 8,
    }  # fmt: skip
