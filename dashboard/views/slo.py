"""SLO: the share of queries in time beside its target, what is left of the error budget, load, forecast and capacity, why
queries were missed, clients' mistakes, who answered, and latencies compared with the objective.
"""

import pandas as pd
import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import ahead, history, query
from dashboard.widgets import need, show_live
from dashboard.window import Window

ALL = "all apps"
CARRIED = "can be carried"
EXPECTED = {"load": "now", "forecast": "expected", "capacity": CARRIED}

widgets.page_title(
    "SLO",
    "Service level objectives: the share of queries answered in time, beside its target; which ones were missed, and why; latencies.",
)
chosen = widgets.choose_window()
app = widgets.choose_app(ALL)
ahead(widgets.up_to_now(chosen), "traffic_long", "violations", "served_long")


def of_app(rows: pd.DataFrame) -> pd.DataFrame:
    return rows if app is None else rows[rows["app"] == app]


def endings() -> None:
    window = widgets.up_to_now(chosen)
    rows = of_app(series.traffic(window))
    need(
        rows,
        "No query arrived in this range.",
        "`infaas bench --app APP --latency-ms 50` puts load on an app, with an objective. What pipelines ask of an app counts as queries of"
        " the pipelines.",
    )
    total = rows[series.ENDINGS].sum()
    shown = rows.assign(percent=100 * rows["attainment"], target=100 * rows["app"].map(targets()))
    with st.container(horizontal=True, gap="small"):
        widgets.metric(
            "In time", formats.percent(total["in_time"] / total["queries"]), f"of {int(total['queries']):,} queries"
        )
        for name, note in (("late", "answered too late"), ("refused", "refused with a reason"), ("errors", "failed")):
            count = int(total[name])
            widgets.metric(name.capitalize(), f"{count:,}", note if count else "none", bad=bool(count))
    missed = rows.melt(["time"], ["late", "refused", "errors"], "kind", "missed")
    missed = missed.groupby(["time", "kind"], as_index=False).agg(missed=("missed", "sum"))
    marks = series.marks(window, app)
    left, right = st.columns(2)
    with left.container(border=True):
        st.markdown(f"**Missed** queries, counted every {formats.seconds(window.step)}")
        colours = {"late": "#e69f00", "refused": "#0072b2", "errors": "#d0342c"}
        charts.draw(
            missed,
            charts.stacked("missed", "kind", unit="queries", form=",.0f", colours=colours, bars=True),
            "missed",
            window,
            marks,
        )
    with right.container(border=True):
        st.markdown("**In time**, % of queries; dashed: the target")
        bounds = [charts.axis_start(pd.concat([shown["percent"], shown["target"]])), 100]
        spec = charts.lines("percent", "app", unit="%", form=".4~g", domain=bounds, level="target")
        charts.draw(shown, spec, "in-time", window, marks)
    widgets.explain_marks(marks)


def targets() -> dict[str, float]:
    apps = query("apps")
    return dict(zip(apps["app"], apps["slo_target"], strict=True))


def objectives() -> None:
    window = widgets.up_to_now(chosen)
    rows = of_app(series.objectives(window))
    if rows.empty:
        return
    st.subheader("Objectives", anchor=False)
    short = rows["reached"] < rows["slo_target"]
    budgets, left = (of_app(each) for each in series.budgets(window))
    rows = rows.merge(budgets, on="app", how="left")
    shown = rows.assign(
        target=100 * rows["slo_target"],
        reached=100 * rows["reached"],
        left=100 * rows["left"],
        allowed=rows["allowed"].astype(float).round(1),
        spare=[formats.spare(each) for each in rows["headroom"].astype(float)],
        verdict=["missed" if each else None for each in short],
    )
    widgets.table(
        shown,
        {
            "app": "app",
            "target": widgets.number_column("target", "%.5g %%", help="Share of queries to be answered in time"),
            "reached": widgets.number_column("reached", "%.5g %%", help="Share that was, in this range"),
            "verdict": "",
            "accuracy_mean": widgets.number_column(
                "accuracy in the mean", "%.4g", help="That answers are to have in the mean"
            ),
            "worth": widgets.number_column(
                "a point is worth", "%.4g $", help="US$ per 1,000 answers for a point of accuracy more"
            ),
            "queries": widgets.number_column("queries", "localized"),
            "allowed": widgets.number_column(
                "may miss",
                "localized",
                help="So many of these queries may miss without missing the target (the error budget)",
            ),
            "missed": widgets.number_column("missed", "localized"),
            "left": widgets.number_column(
                "budget left",
                "%.0f %%",
                help="What is left of the misses that the target allows in this range; below 0: too many",
            ),
            "burn": widgets.number_column(
                "used up at",
                "%.1f ×",
                help="How fast the budget is used up now: at 1 the target is just reached, at 2 twice as many queries miss as may",
            ),
        },
        "objectives",
    )
    if len(left):
        with st.container(border=True):
            st.markdown("**Budget left**, % of the misses that the target allows in this range")
            lines = left.assign(percent=100 * left["left"])
            charts.draw(lines, charts.lines("percent", "app", unit="%", holds=True, height=170), "budget", window)
    st.subheader("Expected load", anchor=False)
    known = shown.dropna(subset=["load"])
    need(
        known,
        "Nothing was expected of any app in the last ten minutes of this range.",
        "The cluster's autoscaler notes what it expects of each app that gets queries.",
    )
    widgets.table(
        known.assign(capacity=known["capacity"].round(1)),
        {
            "app": "app",
            "load": widgets.number_column("items/s now"),
            "forecast": widgets.number_column("expected/s", help="Items/s when what is ordered now would be ready"),
            "capacity": widgets.number_column(
                "can carry/s", "localized", help="Items/s that the loaded instances answer in time"
            ),
            "spare": st.column_config.TextColumn(
                "spare", help="How much more than expected they can carry; below 0: too little"
            ),
        },
        "expected",
    )
    if window.long:
        return
    expected = of_app(history("expected", window))
    apps = list(expected.groupby("app")["load"].sum().sort_values(ascending=False).index[:6])
    for place, name in zip([*st.columns(2)] * 3 if len(apps) > 1 else [st.container()], apps, strict=False):
        one = expected[expected["app"] == name].rename(columns=EXPECTED)
        lines, note = list(EXPECTED.values()), ""
        if one[CARRIED].min() > 10 * one[lines].drop(columns=CARRIED).max().max():  # the others would all look like 0
            lines.remove(CARRIED)
            note = f"; {formats.number(one[CARRIED].min())} or more can be carried"
        one = one.melt(["time"], lines, "what", "rate")
        with place.container(border=True):
            st.markdown(f"**{name}**, items/s{note}")
            spec = charts.lines("rate", "what", unit="items/s", every=series.OBJECTIVES_S)
            charts.draw(one, spec, f"expected-{name}", window, series.marks(window, name))


def accuracy() -> None:
    window = widgets.up_to_now(chosen)
    rows = of_app(history("accuracy", window))
    if rows.empty:
        return
    st.subheader("Right answers", anchor=False)
    names = {name: 100 * rows[name] for name in ("promised", "found", "low", "high")}
    shown = rows.assign(**names)
    count = int(rows["labels"].sum())
    with st.container(border=True):
        st.markdown(
            f"**Right**, % by the labels that came ({count:,}), with its 95 % interval; dashed: what was promised"
        )
        bounds = [charts.axis_start(pd.concat([shown["low"], shown["promised"]])), 100]
        band = ("low", "high")
        spec = charts.lines("found", "app", unit="%", domain=bounds, level="promised", every=3600.0, band=band)
        charts.draw(shown, spec, "accuracy", window)
    widgets.table(
        rows.groupby("app", as_index=False).last().assign(labels=rows.groupby("app")["labels"].sum().to_numpy()),
        {
            "app": "app",
            "promised": widgets.number_column("promised", "%.4g", help="What its labelled queries stated, on average"),
            "found": widgets.number_column("found, last hour", "%.4g"),
            "low": widgets.number_column("at least", "%.4g"),
            "high": widgets.number_column("at most", "%.4g"),
            "labels": widgets.number_column("labels", "localized"),
            "burn": widgets.number_column(
                "used up at", "%.1f ×", help="Wrong answers of the last hour over those that the promise allows"
            ),
        },
        "accuracy",
    )


def reasons() -> None:
    window = widgets.up_to_now(chosen)
    if of_app(series.traffic(window)).empty:
        return
    st.subheader("Why queries were missed", anchor=False)
    rows = of_app(history("violations", window))
    if rows.empty:
        st.success("Every query in this range was answered in time.", icon=":material/check_circle:")
        return
    _codes(rows, {"app": "app", "reason": "reason", "queries": "queries"}, window, "reasons")


def _codes(rows: pd.DataFrame, titles: dict[str, str], window: Window, key: str) -> None:
    """How often queries of an app ended with a code, what it means, and when. titles: of app, code and number."""
    widgets.table(
        rows.assign(meaning=rows["reason"].map(widgets.MEANING).fillna("")),
        {
            **titles,
            "queries": widgets.number_column(titles["queries"], "localized"),
            "meaning": "meaning",
            "first": widgets.time_column("first", window),
            "last": widgets.time_column("last", window),
        },
        key,
    )


def mistakes() -> None:
    window = widgets.up_to_now(chosen)
    rows = of_app(history("mistakes", window))
    if rows.empty:
        return
    st.subheader("Clients' mistakes", anchor=False)
    st.caption("Queries that nobody could answer as they were asked. They count neither as queries nor as missed.")
    _codes(rows, {"app": "app asked for", "reason": "mistake", "queries": "times"}, window, "mistakes")


def latencies() -> None:
    window = widgets.up_to_now(chosen)
    if of_app(series.traffic(window)).empty:
        return
    st.subheader("Latency", anchor=False)
    rows = of_app(history("traffic_long" if window.long else "latency", window))
    need(rows, "No query was answered in this range.", "The table above says why queries were refused.")
    apps = list(rows.groupby("app")["queries"].sum().sort_values(ascending=False).index[:6])
    if window.long:
        st.caption("For long ranges: means of the percentiles of each minute, and the objectives of the apps.")
    for place, name in zip([*st.columns(2)] * 3 if len(apps) > 1 else [st.container()], apps, strict=False):
        one = rows[rows["app"] == name]
        asked = one["slo_ms"].dropna()
        none = "the app has no objective" if window.long else "no query had an objective"
        note = f"strictest objective {formats.number(asked.min())} ms" if len(asked) else none
        with place.container(border=True):
            st.markdown(f"**{name}**, ms; {note}")
            charts.draw(
                series.percentiles(one), charts.percentiles(), f"latency-{name}", window, series.marks(window, name)
            )


def served() -> None:
    window = widgets.up_to_now(chosen)
    rows = of_app(history("served_long" if window.long else "served", window))
    if rows.empty:
        return
    st.subheader("Who answered", anchor=False)
    qualities, accuracy = widgets.quality(rows)
    shown = rows.assign(
        accuracy=qualities,
        hardware=formats.marked(rows["hardware"], rows["simulated"]),
        late=100 * (1 - rows["in_time"] / rows["queries"]),
    )
    widgets.table(
        shown,
        {
            "app": "app",
            "variant": "variant",
            "hardware": "on",
            "queries": widgets.number_column("answered", "localized"),
            "late": widgets.number_column("late", "%.2f %%"),
            **widgets.PERCENTILES,
            "accuracy": accuracy,
            "mean_batch": widgets.number_column("batch", "%.1f"),
            "cost_per_1000": widgets.money_column(
                formats.CHARGED, shown["cost_per_1000"], help="What 1,000 queries were charged for computing"
            ),
        },
        "served",
    )


show_live(chosen, endings)
show_live(chosen, objectives)
show_live(chosen, accuracy)
show_live(chosen, reasons)
show_live(chosen, mistakes)
show_live(chosen, latencies)
show_live(chosen, served)
