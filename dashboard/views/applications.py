"""Applications: their models and variants, with accuracy, latency and cost of each, one against the other; which variants no
other beats; what has drifted; releases with share and figures.
"""

import itertools
import json

import pandas as pd
import streamlit as st

from bus.messages.catalog import is_error
from dashboard import charts, formats, series, widgets
from dashboard.store import known_pipelines, query, releases
from dashboard.widgets import need, show_empty, show_live

REGISTER = "`infaas register MODEL.onnx --app APP --model NAME --validation FILE.npz` registers a model for an app."

widgets.page_title(
    "Applications", "The variants that may answer each application, with their accuracy, latency and cost."
)
app = widgets.choose_app(None)
with st.container(horizontal=True, vertical_alignment="bottom"):
    across = st.segmented_control(
        "Across", ["latency", "cost"], default="latency", required=True, key="across", bind="query-params"
    )
    rows_of = widgets.Filter(None, widgets.choose_text("names of variants and hardware"))
    include_simulated = st.toggle("Include simulated devices", value=True, key="simulated", bind="query-params")


def figures(rows: pd.DataFrame) -> None:
    (best,), quality = widgets.quality(rows.sort_values("accuracy", ascending=False).head(1))
    with st.container(horizontal=True, gap="small"):
        shown = (
            ("Models", str(rows["model"].nunique()), formats.count(len(rows), "variant", "variants")),
            (f"Best {quality['label']}", formats.number(best), "measured"),
            ("Fastest, ms", formats.number(rows["latency_ms"].min()), "one item, alone"),
            ("Cheapest, US$/1,000", formats.number(rows["cost_per_1000"].min()), "computed from prices"),
            ("Loaded now", str(int((rows["instances"] > 0).sum())), "of its variants"),
        )
        for label, value, note in shown:
            widgets.metric(label, value, note)


def page() -> None:
    every = query("variants")
    rows = every[every["app"] == app]
    if app is not None and _part_in_pipelines():
        return
    if app is None or rows.empty:
        show_empty(
            "No application is registered yet." if every.empty else "This application has no variants.", REGISTER
        )
        return
    rows = rows_of.of(rows)
    need(rows, "No variant meets this search.", "Clear the search.")
    if not include_simulated:
        rows = rows[~rows["simulated"].astype(bool)]
    figures(rows)
    _scatter(rows)
    _table(rows)
    _drift(query("drifts"))
    _releases(query("releases"))


def _part_in_pipelines() -> bool:
    """Show which pipelines it is a stage of, and its own stages if it is one. Returns whether it is one."""
    apps = query("apps")
    is_one = bool(apps.loc[apps["app"] == app, "pipeline"].any())
    known = [(one["app"], each) for one in known_pipelines() for each in one["vertices"]]
    parts = [f"{name} ({each['vertex']})" for name, each in known if each["app"] == app]
    if parts:
        st.markdown(
            f"A stage of **{', '.join(parts)}**: these visits are parts of the pipelines' queries, and count as queries of"
            " the pipelines alone."
        )
    if not is_one:
        return False
    st.markdown("A **pipeline**: other applications answer for its stages, so it has no models of its own.")
    stages = [each for name, each in known if name == app]
    if stages:
        widgets.table(
            pd.DataFrame(stages).assign(share=[100 * (each["share"] or 0) for each in stages]),
            {
                "vertex": "stage",
                "app": "app",
                "accuracy_required": widgets.number_column("needs accuracy", "%.4g"),
                "variant": "planned variant",
                "replicas": widgets.number_column("planned replicas", "%d"),
                "instances": widgets.number_column("loaded", "%d"),
                "share": widgets.number_column("of objective", "%.0f %%"),
            },
            "stages",
        )
    st.page_link(
        "views/pipelines.py", label=f"How {app} is served", icon=":material/schema:", query_params={"app": app or ""}
    )
    return True


def _scatter(rows: pd.DataFrame) -> None:
    column, unit = (
        ("latency_ms", "compute time of one item, ms")
        if across == "latency"
        else ("cost_per_1000", "computed US$ per 1,000 queries")
    )
    known = rows.dropna(subset=["accuracy", "latency_ms", "cost_per_1000"])
    if known.empty:
        show_empty(
            "No accuracy is known yet.", "It is measured with the validation data that comes with a registration."
        )
        return
    qualities, quality = widgets.quality(known)
    points = list(zip(-known["accuracy"], known["latency_ms"], known["cost_per_1000"], strict=True))
    line = list(zip(-known["accuracy"], known[column], strict=True))
    shown = known.assign(
        accuracy=qualities,
        x=known[column],
        front=["no other is better in all" if each else "another is better in all" for each in series.front(points)],
        line=series.front(line),
        on=formats.marked(known["hardware"], known["simulated"]),
    )
    with st.container(border=True):
        st.markdown(
            f"**{formats.heading(quality['label'])}** against {unit}; filled: no other variant is better in it, latency and cost; line: best in these two"
        )
        charts.draw(shown, charts.tradeoff(unit, quality["label"], is_error(known["metric"].iloc[0] or "")), "tradeoff")


def _table(rows: pd.DataFrame) -> None:
    rows = rows.sort_values(["accuracy", "cost_per_1000"], ascending=[False, True])
    qualities, accuracy = widgets.quality(rows)
    shown = rows.assign(
        state=[[state] for state in rows["state"]],
        hardware=formats.marked(rows["hardware"], rows["simulated"]),
        saturation_qps=rows["saturation_qps"].round(),
        accuracy=qualities,
        interval=widgets.intervals(rows),
        note=[
            "; ".join(
                [
                    *[f"other answers: {', '.join(differing or ())}"] * bool(differing),
                    *[f"functions of its owner {functions}"] * bool(functions),
                    *["worse than another"] * bool(each),
                    *[f"one item at a time: {why}"] * bool(why),
                ]
            )
            or None
            for differing, functions, each, why in zip(
                *(rows[name] for name in ("differing", "functions", "dominated", "alone")), strict=True
            )
        ],
    )
    widgets.table(
        shown,
        {
            "variant": "variant",
            "hardware": st.column_config.TextColumn("on", width=120),
            "state": widgets.state_column(charts.STATES),
            "accuracy": accuracy,
            "interval": st.column_config.TextColumn("95 %", help="The confidence interval of the accuracy"),
            "latency_ms": widgets.number_column("compute ms", help="One item, alone, without the way there"),
            "saturation_qps": widgets.number_column("most items/s", "localized"),
            "cost_per_1000": widgets.money_column(
                formats.COMPUTED,
                shown["cost_per_1000"],
                help="What 1,000 queries cost while an instance is busy, from the prices and the measured speed",
            ),
            "load_ms": widgets.number_column("load ms", "%.0f"),
            "transfer_ms": widgets.number_column("transfer ms", "%.0f", help="The load of a Warm instance"),
            "memory_mb": widgets.number_column("MB", "%.0f"),
            "price_per_hour": widgets.number_column("US$/h", "%.3g", help="Cost of an instance per hour"),
            "note": "note",
        },
        "variants",
    )


def _drift(drifts: pd.DataFrame) -> None:
    """Columns of the queries that differ from the validation set, or did in the last week, and a picture of the farthest one."""
    drifts = drifts[drifts["app"] == app]
    if drifts.empty:
        return
    farthest = drifts.iloc[0]
    both = json.loads(farthest["cells"])
    with st.container(border=True):
        st.markdown(f"**{farthest['column_name']}** in the validation set and in queries, % of the items in each range")
        charts.draw(
            pd.DataFrame(
                {"of": of, "cell": cell, "percent": 100 * count / max(1, sum(both[side]))}
                for of, side in (("validation set", "expected"), ("queries", "found"))
                for cell, count in zip(_ranges(both["edges"]), both[side], strict=True)
            ),
            charts.cells(),
            "drift",
        )
    widgets.table(
        drifts.drop(columns=["app", "cells"]),
        {
            "column_name": "column",
            "model": "model",
            "distance": widgets.number_column(
                "distance", "%.2g", help="Share of the items that would have to lie elsewhere"
            ),
            "since": widgets.time_column("since"),
            "ended": widgets.time_column("ended"),
        },
        "drifts",
    )


def _releases(events: pd.DataFrame) -> None:
    """Its releases of the last 90 days, the last one's share over time, and how both versions do in that."""
    events = events[events["app"] == app]
    if events.empty:
        return
    last = events[events["release"] == events["release"].iloc[-1]]
    named = f"{last['model'].iloc[-1]} version {last['version'].iloc[-1]}"
    with st.container(border=True):
        st.markdown(f"**{named}**: share of the queries that it answers")
        running = last["state"].iloc[-1] in ("mirror", "step", "paused")
        until = last.tail(1).assign(time=pd.Timestamp.now("UTC"), reason=None)
        shown = pd.concat([last, until], ignore_index=True) if running else last
        shown = shown.assign(percent=100 * shown["share"], release=named, why=shown["state"] + ": " + shown["reason"])
        spec = charts.lines("percent", "release", unit="%", form=".4~g", domain=[0, 100], note="why")
        charts.draw(shown, spec, "release")
        counted = [each for one in releases() if one["app"] == app for each in one["figures"]]
        figures = pd.DataFrame([each for each in counted if each["new_n"] and each["old_n"]])
        if not figures.empty:
            figures["measure"] += [f" ({of})" if of else "" for of in figures["of"]]
            widgets.table(
                figures,
                {
                    "step": widgets.number_column("step", "%d", help="0: the mirror"),
                    "measure": "measure",
                    "new": widgets.number_column("new", "%.4f"),
                    "new_n": widgets.number_column("of", "localized"),
                    "old": widgets.number_column("old", "%.4f"),
                    "old_n": widgets.number_column("of ", "localized"),
                    "low": widgets.number_column(
                        "from", "%+.4f", help="The interval of the difference: below 0, the new one is worse"
                    ),
                    "high": widgets.number_column("to", "%+.4f"),
                    "margin": widgets.number_column("margin", "%.3g"),
                },
                "figures",
            )
    widgets.table(
        events.drop_duplicates("release", keep="last").sort_values("time", ascending=False),
        {
            "time": widgets.time_column("since"),
            "model": "model",
            "old_version": "from version",
            "version": "to version",
            "state": "state",
            "share": widgets.number_column("share", "%.3g"),
            "reason": "reason",
        },
        "releases",
    )


def _ranges(edges: list[float]) -> list[str]:
    """The cells between these edges, and that of NaN."""
    inner = [f"{low:.4g} to {high:.4g}" for low, high in itertools.pairwise(edges)]
    return [f"up to {edges[0]:.4g}", *inner, f"above {edges[-1]:.4g}", "NaN"] if edges else ["any", "NaN"]


show_live(None, page)
if app is not None:
    with st.container(horizontal=True):
        for file, label, icon in (
            ("try_query", f"Try a query of {app}", "play_circle"),
            ("explain", f"Explain a query of {app}", "quiz"),
            ("queries", f"Recent queries of {app}", "list_alt"),
            ("registrations", f"Registrations of {app}", "upload_file"),
        ):
            st.page_link(
                f"views/{file}.py", label=label, icon=f":material/{icon}:", query_params={"app": app}, width="content"
            )
