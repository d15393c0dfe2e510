"""Charts as Vega-Lite specifications. A specification does not depend on the data, so new data only move the marks."""

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
import streamlit as st

from dashboard.series import with_gaps
from dashboard.window import Window

Spec = dict[str, Any]

# Colours that people with any colour vision can distinguish (Okabe and Ito, 2008), changed a little so that all are seen on white and on black.
SERIES = ("#1f83c0", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a78d8", "#a07d3a", "#8a9099", "#b8b000")
STATES: Mapping[str, str] = {
    "Active": "#009e73",
    "Overloaded": "#d0342c",
    "Interfered": "#e69f00",
    "Loading": "#56b4e9",
    "Unloading": "#9fc5e8",
    "Warm": "#7a68c8",
    "Inactive": "#8a9099",
}
WORKER_STATES: Mapping[str, str] = {
    "Ready": "#009e73",
    "Booting": "#56b4e9",
    "Draining": "#e69f00",
    "Stopped": "#8a9099",
    "Failed": "#d0342c",
}
IDLE_COLOUR = "#a9b0ba"
INSTANCE_STATES: Mapping[str, str] = {**STATES, "reclaimable": "#8a9099"}  # in tables; an instance may have both
HEIGHT = 220
_TIME: Spec = {
    "field": "time",
    "type": "temporal",
    "title": None,
    "axis": {
        "grid": False,
        "tickCount": 6,
        "labelOverlap": True,
        # In the visitor's time zone, 24 hours. Midnight is labelled with the day.
        "labelExpr": "timeFormat(datum.value, hours(datum.value) + minutes(datum.value) + seconds(datum.value) ?"
        " (seconds(datum.value) ? '%H:%M:%S' : '%H:%M') : '%-d %b')",
    },
}
_LEGEND: Spec = {
    "orient": "top",
    "title": None,  # an empty title still takes the height of a line, unless its size and padding are 0
    "titleFontSize": 0,
    "titlePadding": 0,
    "symbolType": "square",
    "symbolSize": 90,
    "labelLimit": 270,
    "padding": 0,
    "rowPadding": 2,
    "columnPadding": 12,
    "offset": 6,
}
_SHAPE: Spec = {"padding": {"left": 0, "right": 8, "top": 0, "bottom": 0}}
_GREY_SYMBOLS: Spec = {"symbolFillColor": "#8a9099", "symbolStrokeColor": "#8a9099"}  # else black, also on black
_STROKES: Spec = {**_LEGEND, "symbolType": "stroke", "symbolSize": 180}


# Straight from one measured value to the next. Where values are missing, the line is broken (`with_gaps`).
_LINE: Spec = {"type": "line", "interpolate": "linear", "strokeWidth": 2, "strokeCap": "round"}
# A value between two gaps has no line, so its point is visible. All others are there for the pointer.
_POINT: Spec = {
    "opacity": {"condition": {"test": "datum.alone", "value": 1}, "value": 0},
    "size": {"condition": {"test": "datum.alone", "value": 28}, "value": 90},
}

# Rows without a value stretch the axis to the whole window. A scale with the window's limits would change the specification.
_WHOLE: Spec = {"mark": {"type": "rule", "opacity": 0}, "encoding": {"x": _TIME}}
_TOP = "top"  # the column by which an axis of nothing but zeros goes up to 1

# What was deployed and scaled: a thin line from top to bottom, with a point on top that the pointer finds.
_MARKED: Spec = {"condition": {"test": "datum.kind == 'deployment'", "value": "#8a78d8"}, "value": "#8a9099"}


def draw(
    frame: pd.DataFrame, spec: Spec, key: str, window: Window | None = None, marks: pd.DataFrame | None = None
) -> None:
    """Show a chart with the full width. key: unique on the page.

    window: range of the time axis; default: the range of the rows. marks: what happened (`series.marks`), as thin lines.
    """
    about = spec["usermeta"]
    columns, rows = _legend_of(frame[about["series"]], strokes=about.get("strokes", True))
    rows += about.get("legends", 1) - 1
    legend = {"padding": 0, "layout": {"top": {"margin": 4, "direction": "vertical"}}, "columns": columns}
    shape = {**_SHAPE, **spec, "config": {"legend": legend}, "height": spec["height"] + 16 * (rows - 1)}
    parts = [frame]
    if "every" in about and window is not None:
        parts = [with_gaps(frame, about["series"], about["value"], max(1.5 * window.step, 2.5 * about["every"]))]
    if about.get("steps") and window is not None:  # steps end where the last of them begins
        last = frame.sort_values("time").drop_duplicates(about["series"], keep="last")
        parts.append(last.assign(time=pd.Timestamp(window.end)))
    if window is not None:
        top = math.nan if pd.to_numeric(frame[about["value"]], errors="coerce").any() else 1.0
        parts.append(pd.DataFrame({"time": pd.to_datetime([window.start, window.end], utc=True), _TOP: top}))
    if marks is not None:
        shape["layer"] = [*shape["layer"], *_marked_layers()]
        parts.append(marks)
    shown = pd.concat(parts, ignore_index=True) if len(parts) > 1 else frame
    st.vega_lite_chart(shown, shape, width="stretch", key=key)


def _marked_layers() -> list[Spec]:
    real = [{"filter": "isValid(datum.mark)"}]
    encoding = {"x": _TIME, "color": _MARKED, "tooltip": [_moment(), _tip("kind"), _tip("mark", title="what")]}
    head = {"type": "point", "shape": "triangle-down", "filled": True, "size": 60}
    rule = {"type": "rule", "strokeWidth": 1, "opacity": 0.6}
    return [_layer(rule, real, **encoding), _layer(head, real, y={"value": 3}, **encoding)]


def _legend_of(series: pd.Series, *, strokes: bool) -> tuple[int, int]:
    """Columns and rows of a legend on a phone. Vega computes them too late for its own layout. strokes: its symbols are strokes."""
    names = [str(name) for name in series.dropna().unique()] or [""]
    columns = max(1, int(340 / (6.4 * max(map(len, names)) + (38 if strokes else 30))))
    return columns, -(-len(names) // columns)


def lines(
    y: str,
    series: str,
    *,
    unit: str,
    form: str = ",.3~r",
    domain: Sequence[float] | None = None,
    height: int = HEIGHT,
    level: str | None = None,
    note: str | None = None,
    every: float = 0.0,
    holds: bool = False,
    band: tuple[str, str] | None = None,
) -> Spec:
    """Lines over `time`, one for each value of `series`, broken where no value was measured. The tooltip shows the values at the pointer.

    level: the column with the value that each line should reach, drawn as a dashed line of the same colour. note: the column that says why the
    value changed; then lines are steps, with a mark at each change that has a note. every: seconds between two measurements, if that is
    more than a bucket. holds: a value holds until the next one, so lines are steps without gaps. band: the columns with the ends of each line's
    interval, drawn behind it.
    """
    value, real = _value(y, unit, form, domain), _known(series)
    encoding = {"y": value, "color": {**_colour(series), "legend": _STROKES}}
    tips = [_moment(), _tip(series), _tip(y, "quantitative", unit, form)]
    holds = holds or note is not None
    mark = {**_LINE, "interpolate": "step-after"} if holds else _LINE
    point, seen, marked = {}, _POINT, real
    if note is not None:
        point, seen = {"opacity": 1, "size": 45}, {}
        marked = [*real, *_known(note)]
        tips.append(_tip(note))
    wanted = {**encoding, "y": {**value, "field": level}}
    dashed = {"type": "line", "strokeWidth": 1, "strokeDash": [4, 4]}
    behind = []
    if band is not None:
        low, high = {**value, "field": band[0]}, {"field": band[1]}
        behind = [_layer({"type": "area", "opacity": 0.2}, real, **encoding | {"y": low, "y2": high})]
    about = {"series": series, "value": y, "steps": holds and note is None, **({} if holds else {"every": every})}
    return _over_time(
        about,
        _topped(value),
        *behind,
        *([_layer(dashed, real, **wanted)] if level is not None else []),
        _layer(mark, real, **encoding),
        _layer({"type": "point", "filled": True, **point}, marked, tooltip=tips, **encoding, **seen),
        height=height,
    )


def stacked(
    y: str,
    series: str,
    *,
    unit: str,
    form: str = ",.3~r",
    height: int = HEIGHT,
    bars: bool = False,
    idle: bool = False,
    colours: Mapping[str, str] | None = None,
) -> Spec:
    """Stacked areas (or bars) over `time`, one for each value of `series`. idle: the first one is idle cost, and grey."""
    area: Spec = {"type": "area", "interpolate": "step-after", "opacity": 0.85, "line": False}
    value, colour = _value(y, unit, form, None), _colour(series, idle=idle, colours=colours)
    tips = [_moment(), _tip(series), _tip(y, "quantitative", unit, form)]
    stack = {**value, "stack": "zero"}
    shapes = _layer({"type": "bar"} if bars else area, _known(series), y=stack, color=colour, tooltip=tips)
    about = {"series": series, "value": y, "strokes": False, "steps": not bars}
    return _over_time(about, _topped(value), shapes, height=height)


def percentiles() -> Spec:
    """Lines of `ms` over `time` on a logarithmic axis, one for each value of `what`: percentiles, and the objective dashed."""
    kinds = ["p50", "p95", "p99", "objective"]
    colours = ["#56b4e9", "#8a78d8", "#e69f00", "#d0342c"]
    what: Spec = {"field": "what", "type": "nominal", "title": None}
    tips = [_moment(), _tip("what"), _tip("ms", "quantitative", "ms", ",.3~r")]
    y = _number("ms", "ms", {"type": "log", "nice": True}, format="~g", tickCount=4, grid=False)
    colour: Spec = {**what, "scale": {"domain": kinds, "range": colours}, "legend": _STROKES}
    dash: Spec = {**what, "legend": None, "scale": {"domain": kinds, "range": [[1, 0], [1, 0], [1, 0], [4, 6]]}}
    line = _layer(_LINE, _known("what"), y=y, color=colour, strokeDash=dash)
    points = _layer({"type": "point", "filled": True}, _known("what"), y=y, color=colour, tooltip=tips, **_POINT)
    return _over_time({"series": "what", "value": "ms", "every": 0.0}, line, points)


def profile(y: str, series: str, *, unit: str) -> Spec:
    """Lines over `batch` on a logarithmic axis, with a point for each measured batch size; one line for each value of `series`."""
    sizes = [2**n for n in range(13)]
    x = _number(
        "batch", "items in a batch", {"type": "log", "base": 2, "nice": False}, values=sizes, format=",d", grid=False
    )
    mark = {"type": "line", "strokeWidth": 2, "point": {"size": 45}}
    tips = [_tip(series), _tip("batch"), _tip(y, "quantitative", unit, ",.3~r")]
    colour = {**_colour(series), "legend": _STROKES}
    lines = _layer(mark, None, x=x, y=_value(y, unit, ",.3~r", None), color=colour, tooltip=tips)
    return {"usermeta": {"series": series}, "height": HEIGHT, **lines}


def cells() -> Spec:
    """Bars of `percent` for each `cell` in the order of the rows, two beside each other by `of`."""
    x: Spec = {"field": "cell", "type": "ordinal", "title": None, "sort": None, "axis": {"labelAngle": -30}}
    tips = [_tip("of"), _tip("cell"), _tip("percent", "quantitative", "%", ",.3~r")]
    encoding = {"x": x, "xOffset": {"field": "of", "sort": None}, "y": _value("percent", "%", ",.3~r", None)}
    bars = _layer({"type": "bar"}, None, color=_colour("of"), tooltip=tips, **encoding)
    return {"usermeta": {"series": "of", "strokes": False}, "height": HEIGHT, **bars}


def tradeoff(unit: str, quality: str, less_is_better: bool) -> Spec:
    """Accuracy over `x` on a logarithmic axis: one point for each variant, filled on the Pareto front, and a line through the best.

    quality: what the accuracy is called. Its axis has the best values on top.
    """
    x = _number("x", unit, {"type": "log", "nice": True}, format="~g", tickCount=6, grid=False)
    scale = {"zero": False, "nice": True, "reverse": less_is_better}
    y = _number("accuracy", quality, scale, format="~f", tickCount=6)
    tips = [
        _tip("variant"),
        _tip("on"),
        _tip("state"),
        _tip("accuracy", "quantitative", quality, ".4~g"),
        _tip("latency_ms", "quantitative", "compute ms", ",.3~r"),
        _tip("cost_per_1000", "quantitative", "computed US$/1,000", ",.3~r"),
        _tip("front", title="trade-off"),
    ]
    through = {"type": "line", "interpolate": "step-after", "color": "#8b929b", "strokeDash": [3, 3]}
    best = _layer(through, [{"filter": "datum.line"}], x=x, y=y, order={"field": "x"})
    filled = {"condition": {"test": "datum.front == 'no other is better in all'", "value": 0.85}, "value": 0}
    points = _layer(
        {"type": "point", "size": 110, "strokeWidth": 1.8},
        None,
        x=x,
        y=y,
        color=_colour("model"),
        shape={"field": "on", "type": "nominal", "title": None, "legend": {**_LEGEND, **_GREY_SYMBOLS}},
        fillOpacity=filled,
        fill={"field": "model", "type": "nominal", "legend": None, "scale": {"range": list(SERIES)}},
        tooltip=tips,
    )
    return {"usermeta": {"series": "model", "legends": 2}, "height": 360, "layer": [best, points]}


FLOW = "#7d838c"  # of lines and words beside nodes, on white and on black
_OK, _SHORT, _GONE = ("#dcebf5", "#0072b2"), ("#fdf0d5", "#e69f00"), ("#fbdedc", "#d0342c")  # fill and border


class DrawnVertex(NamedTuple):
    """A vertex of a drawn pipeline. lines: what stands below its name. state: "ok", "short" of replicas, or "gone"."""

    name: str
    lines: Sequence[str]
    state: str = "ok"


def flow(nodes: Sequence[DrawnVertex], edges: Sequence[tuple[str, str, Sequence[str]]], last: Sequence[str]) -> str:
    """A pipeline as a graph in DOT, from the query on top to the answer.

    edges: source, target, lines that say when it is followed; none: always. last: whose outputs are answered.
    """
    quoted = {node.name: _quoted(node.name) for node in nodes}
    entered = {target for _, target, _ in edges}
    colours = {"ok": _OK, "short": _SHORT, "gone": _GONE}
    text = [
        'digraph { bgcolor="transparent" rankdir=TB ranksep=0.35 nodesep=0.25 margin=0.02',
        'node [fontname="sans-serif" fontsize=12 shape=box style="rounded,filled" fontcolor="#1f2933" margin="0.12,0.07"]',
        f'edge [fontname="sans-serif" fontsize=11 color="{FLOW}" fontcolor="{FLOW}" arrowsize=0.7]',
        f'":query" [label="query" shape=plain style="" fontcolor="{FLOW}"]',
        f'":answer" [label="answer" shape=plain style="" fontcolor="{FLOW}"]',
    ]
    for node in nodes:
        fill, border = colours[node.state]
        lines = [f"<b>{line}</b>" for line in _broken(node.name)] + [
            line for one in node.lines for line in _broken(one)
        ]
        label = "<br/>".join(lines)
        text.append(f'{quoted[node.name]} [label=<{label}> fillcolor="{fill}" color="{border}"]')
    text += [f'":query" -> {quoted[node.name]}' for node in nodes if node.name not in entered]
    for source, target, when in edges:
        told = "\\n".join(f" {_escaped(line)} " for line in when)
        label = f' [label="{told}" style=dashed]' if when else ""
        text.append(f"{quoted[source]} -> {quoted[target]}{label}")
    text += [f'{quoted[name]} -> ":answer"' for name in dict.fromkeys(last)]
    return "\n".join([*text, "}"])


def _broken(text: str, most: int = 20) -> list[str]:
    """As HTML, in lines of about so many characters, at hyphens and blanks, so that the graph is narrow enough for a phone."""
    lines = [""]
    for word in re.findall(r"[^- ]+[- ]?|[- ]", text):
        if lines[-1] and len(lines[-1]) + len(word.strip()) > most:
            lines.append("")
        lines[-1] += word
    return [html.escape(line.strip()) for line in lines]


def _quoted(name: str) -> str:
    return f'"{_escaped(name)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def axis_start(percents: pd.Series) -> float:
    """The start of an axis that ends at 100 %. It is one of a few values, so that the axis rarely changes."""
    least = percents.min()
    return next((float(start) for start in (99, 95, 90, 75, 50) if least >= start), 0.0)


def state_timeline(row: str, colours: Mapping[str, str], bands: pd.DataFrame) -> Spec:
    """One band for each value of `row`, coloured by `state` from `time` to `until`; the tooltip shows the `reason`."""
    present = {state: colour for state, colour in colours.items() if state in set(bands["state"])}
    tips = [_tip(row), _tip("state"), _tip("reason"), _tip("time", "temporal", "from", "%d %b %H:%M:%S")]
    y: Spec = {"field": row, "type": "nominal", "title": None, "sort": None, "axis": None}
    # Names stand above their bands. Beside them, they would take too much width on a phone.
    words = {"type": "text", "align": "left", "baseline": "bottom", "dy": -4, "fontSize": 12}
    alone = [*_known(row), {"aggregate": [], "groupby": [row]}]
    names = _layer(words, alone, x={"value": 0}, y=y, text={"field": row}, color={"value": "#7d838c"})
    shape = {"type": "bar", "height": 12, "yOffset": 6, "cornerRadius": 2}
    band = _layer(shape, _known(row), x2={"field": "until"}, y=y, color=_colour("state", colours=present), tooltip=tips)
    about = {"series": "state", "value": "state", "strokes": False}
    return _over_time(about, band, names, height=38 * max(1, bands[row].nunique()) + 56)


def _over_time(about: Spec, *layers: Spec, height: int = HEIGHT) -> Spec:
    """A chart whose axis is the time. about: it, for `draw`."""
    return {"usermeta": about, "height": height, "encoding": {"x": _TIME}, "layer": [_WHOLE, *layers]}


def _layer(mark: Spec, transform: list[Spec] | None, **encoding: Any) -> Spec:
    return {**({} if transform is None else {"transform": transform}), "mark": mark, "encoding": encoding}


def _known(field: str) -> list[Spec]:
    """Only rows that have this field."""
    return [{"filter": f"datum['{field}'] != null"}]


def _topped(value: Spec) -> Spec:
    """An invisible layer for the axis."""
    real = [{"filter": f"isValid(datum.{_TOP})"}]
    return _layer({"type": "point", "opacity": 0}, real, y={**value, "field": _TOP})


def _colour(series: str, *, idle: bool = False, colours: Mapping[str, str] | None = None) -> Spec:
    scale: Spec = {"range": [IDLE_COLOUR, *SERIES] if idle else list(SERIES)}
    if colours:
        scale = {"domain": list(colours), "range": list(colours.values())}
    return {"field": series, "type": "nominal", "title": None, "scale": scale, "legend": _LEGEND}


def _value(y: str, unit: str, form: str, domain: Sequence[float] | None) -> Spec:
    scale: Spec = {"domain": list(domain), "nice": False, "clamp": True} if domain else {"zero": True, "nice": True}
    # Without a precision of its own, the format takes the decimals of the step. `~r` takes a digit too few up to 0.12, by an error of rounding.
    axis: Spec = {"format": ",~f", "tickCount": 4}
    if form.endswith("0f"):
        axis |= {"format": ",d", "tickMinStep": 1}
    return _number(y, unit, scale, **axis)


def _number(field: str, title: str, scale: Spec, **axis: Any) -> Spec:
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale,
        "axis": {"labelOverlap": True, **axis},
    }


def _moment() -> Spec:
    return _tip("time", "temporal", "time", "%d %b %H:%M:%S")


def _tip(field: str, kind: str = "nominal", title: str | None = None, form: str | None = None) -> Spec:
    return {
        "field": field,
        "type": kind,
        "title": title or field.replace("_", " "),
        **({"format": form} if form else {}),
    }
