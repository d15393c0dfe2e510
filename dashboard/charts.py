"""Charts as Vega-Lite specifications. A specification depends on what is asked, never on the data: new data only move the marks."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

Spec = dict[str, Any]

# Told apart by people with any colour vision (Okabe and Ito, 2008), darkened a little for thin lines on white.
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a68c8", "#8c6d31", "#4d4d4d", "#b8b000")
STATES: Mapping[str, str] = {
    "Active": "#009e73",
    "Overloaded": "#d0342c",
    "Interfered": "#e69f00",
    "Loading": "#56b4e9",
    "Unloading": "#9fc5e8",
    "Warm": "#7a68c8",
    "Inactive": "#b3b8bf",
}
WORKER_STATES: Mapping[str, str] = {
    "Ready": "#009e73",
    "Booting": "#56b4e9",
    "Draining": "#e69f00",
    "Stopped": "#b3b8bf",
    "Lost": "#d0342c",
}
IDLE = "#c4c9d0"
HEIGHT = 220
_TIME: Spec = {
    "field": "time",
    "type": "temporal",
    "title": None,
    "axis": {
        "grid": False,
        "tickCount": 6,
        "labelOverlap": True,
        # By the visitor's clock, 24 hours; midnight is a day, the first of a month a month.
        "labelExpr": "timeFormat(datum.value, hours(datum.value) + minutes(datum.value) + seconds(datum.value) ?"
        " (seconds(datum.value) ? '%H:%M:%S' : '%H:%M') : '%-d %b')",
    },
}
_LEGEND: Spec = {
    "orient": "top",
    "title": None,
    "symbolType": "square",
    "labelLimit": 220,
    "columns": {"expr": "max(2, floor(width / 150))"},
    "offset": 4,
}
_SHAPE: Spec = {"padding": {"left": 0, "right": 8, "top": 4, "bottom": 0}}


def draw(frame: pd.DataFrame, spec: Spec, key: str) -> None:
    """Show a chart as wide as its place. key: unique on the page."""
    st.vega_lite_chart(frame, {**_SHAPE, **spec}, width="stretch", key=key)


def lines(
    y: str,
    series: str | None = None,
    *,
    unit: str,
    form: str = ",.3~g",
    domain: Sequence[float] | None = None,
    dashed: str | None = None,
    height: int = HEIGHT,
) -> Spec:
    """Lines over `time`, one a value of `series`; the values of a moment are told at the pointer. dashed: the column of a limit."""
    value = _value(y, unit, form, domain)
    colour = _colour(series) if series else {"value": SERIES[0]}
    tips: list[Spec] = [_tip("time", "temporal", "time", "%H:%M:%S"), *([_tip(series)] if series else [])]
    tips.append(_tip(y, "quantitative", unit, form))
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "interpolate": "monotone", "strokeWidth": 2},
            "encoding": {"y": value, "color": colour},
        },
        {
            "mark": {"type": "point", "opacity": 0, "size": 90, "filled": True},
            "encoding": {"y": value, "color": colour, "tooltip": tips},
        },
    ]
    if dashed:
        limit = {"field": dashed, "type": "quantitative"}
        layers.append(
            {
                "mark": {"type": "line", "strokeDash": [5, 4], "strokeWidth": 1.5},
                "encoding": {"y": limit, "color": colour},
            }
        )
    return {"height": height, "encoding": {"x": _TIME}, "layer": layers}


def stacked(y: str, series: str, *, unit: str, form: str = ",.3~g", height: int = HEIGHT, bars: bool = False) -> Spec:
    """Areas (or bars) over `time` that add up, one a value of `series`."""
    mark: Spec = (
        {"type": "bar"} if bars else {"type": "area", "interpolate": "step-after", "opacity": 0.85, "line": False}
    )
    tips = [_tip("time", "temporal", "time", "%d %b %H:%M:%S"), _tip(series), _tip(y, "quantitative", unit, form)]
    return {
        "height": height,
        "mark": mark,
        "encoding": {
            "x": _TIME,
            "y": {**_value(y, unit, form, None), "stack": "zero"},
            "color": _colour(series),
            "tooltip": tips,
        },
    }


def floor_of(percents: pd.Series) -> float:
    """Where an axis up to 100 % begins, so that what is missing can be seen; one of few, so that the axis rarely moves."""
    least = percents.min()
    return next((float(floor) for floor in (99, 95, 90, 75, 50) if least >= floor), 0.0)


def spans(row: str, colours: Mapping[str, str], tips: Sequence[str], rows: int) -> Spec:
    """A band a value of `row`, coloured by `state` from `time` to `until`: who was in which state when."""
    return {
        "height": max(2, rows) * 26 + 80,
        "mark": {"type": "bar", "height": {"band": 0.62}, "cornerRadius": 2},
        "encoding": {
            "x": _TIME,
            "x2": {"field": "until"},
            "y": {
                "field": row,
                "type": "nominal",
                "title": None,
                "sort": None,
                "axis": {"labelLimit": 260, "ticks": False, "domain": False},
            },
            "color": {
                "field": "state",
                "type": "nominal",
                "title": None,
                "scale": {"domain": list(colours), "range": list(colours.values())},
                "legend": _LEGEND,
            },
            "tooltip": [_tip(row), *(_tip(tip) for tip in tips), _tip("time", "temporal", "from", "%d %b %H:%M:%S")],
        },
    }


def bars(y: str, name: str, series: str | None, *, unit: str, form: str = ",.3~g", rows: int = 4) -> Spec:
    """Horizontal bars, one a value of `name`, in parts by `series`."""
    tips = [_tip(name), *([_tip(series)] if series else []), _tip(y, "quantitative", unit, form)]
    return {
        "height": max(2, rows) * 30 + 70,
        "mark": {"type": "bar", "cornerRadiusEnd": 2},
        "encoding": {
            "x": {**_value(y, unit, form, None), "title": unit},
            "y": {"field": name, "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 240}},
            "color": _colour(series) if series else {"value": SERIES[0]},
            "tooltip": tips,
        },
    }


def _colour(series: str) -> Spec:
    # The part that nobody used is grey wherever it is shown.
    return {
        "field": series,
        "type": "nominal",
        "title": None,
        "scale": {"range": list(SERIES)},
        "legend": _LEGEND,
    }


def _value(y: str, unit: str, form: str, domain: Sequence[float] | None) -> Spec:
    scale: Spec = {"domain": list(domain), "nice": False, "clamp": True} if domain else {"zero": True, "nice": True}
    axis = {"format": form, "tickCount": 4, "labelOverlap": True}
    return {"field": y, "type": "quantitative", "title": unit, "scale": scale, "axis": axis}


def _tip(field: str, kind: str = "nominal", title: str | None = None, form: str | None = None) -> Spec:
    return {
        "field": field,
        "type": kind,
        "title": title or field.replace("_", " "),
        **({"format": form} if form else {}),
    }
