"""SLO: which queries missed their objective, why, and latencies beside the objective."""

import pandas as pd
import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import history
from dashboard.widgets import follow, nothing

ALL = "all apps"
MEANING = {
    "late": "answered, but after its objective",
    "deadline": "it could not have been answered in time, so it was refused at once",
    "overloaded": "everything that would do was full",
    "unsatisfiable": "no variant can ever meet its needs: ask for less, or register a better model",
    "unknown_app": "no app of this name is registered",
    "unknown_model": "no model of this name is registered",
    "bad_request": "a field was wrong; the refusal names it",
    "model_error": "the model failed on these inputs",
    "too_large": "its inputs were too large for one message",
    "forbidden": "the caller may not do this",
    "internal": "a fault of the system: see its logs",
}

widgets.title("SLO", "Which queries were not answered in time, and why; latencies beside what was asked for.")
chosen = widgets.choose_window()
app = widgets.choose_app(ALL)


def mine(rows: pd.DataFrame) -> pd.DataFrame:
    return rows if app is None else rows[rows["app"] == app]


def endings() -> None:
    window = widgets.again(chosen)
    rows = mine(series.traffic(window))
    if rows.empty:
        nothing(
            "No query arrived in this range.",
            "`infaas bench --app APP --latency-ms 50` puts load on an app, with an objective.",
        )
        return
    total = rows[series.ENDINGS].sum()
    with st.container(horizontal=True, gap="small"):
        widgets.metric(
            "In time", formats.percent(total["in_time"] / total["queries"]), f"of {int(total['queries']):,} queries"
        )
        for name, told in (("late", "answered too late"), ("refused", "got a reason instead"), ("errors", "failed")):
            count = int(total[name])
            widgets.metric(name.capitalize(), f"{count:,}", told if count else "none", bad=bool(count))
    missed = rows.melt(["time"], ["late", "refused", "errors"], "kind", "missed")
    missed = missed.groupby(["time", "kind"], as_index=False).agg(missed=("missed", "sum"))
    left, right = st.columns(2)
    with left.container(border=True):
        st.markdown("**Missed**, queries a bucket")
        colours = {"late": "#e69f00", "refused": "#0072b2", "errors": "#d0342c"}
        charts.draw(
            missed, charts.stacked("missed", "kind", unit="queries", form=",.0f", colours=colours, bars=True), "missed"
        )
    with right.container(border=True):
        st.markdown("**In time**, % of queries")
        shown = rows.assign(percent=100 * rows["attainment"])
        bounds = [charts.floor_of(shown["percent"]), 100]
        charts.draw(shown, charts.lines("percent", "app", unit="%", form=".4~g", domain=bounds), "attainment")


def reasons() -> None:
    window = widgets.again(chosen)
    if mine(series.traffic(window)).empty:
        return
    st.subheader("Why queries were missed", anchor=False)
    rows = mine(history("violations", window))
    if rows.empty:
        st.success("Every query in this range was answered in time.", icon=":material/check_circle:")
        return
    shown = rows.assign(meaning=rows["reason"].map(MEANING).fillna(""))
    widgets.table(
        shown,
        {
            "app": "app",
            "reason": "reason",
            "queries": widgets.figure("queries", "localized"),
            "meaning": "meaning",
            "first": widgets.when("first", window),
            "last": widgets.when("last", window),
        },
        "reasons",
    )


def latencies() -> None:
    window = widgets.again(chosen)
    if mine(series.traffic(window)).empty:
        return
    st.subheader("Latency", anchor=False)
    rows = mine(history("latency_long" if window.long else "latency", window))
    if rows.empty:
        nothing("No query was answered in this range.", "The table above says why queries were refused.")
        return
    apps = list(rows.groupby("app")["queries"].sum().sort_values(ascending=False).index[:6])
    if window.long:
        st.caption(
            "Over long ranges: means of each minute's percentiles, beside the objectives that apps have of their own."
        )
    for place, name in zip([*st.columns(2)] * 3 if len(apps) > 1 else [st.container()], apps, strict=False):
        one = rows[rows["app"] == name]
        asked = one["slo_ms"].dropna()
        none = "the app has no objective of its own" if window.long else "no objective was asked for"
        told = f"strictest objective {formats.number(asked.min())} ms" if len(asked) else none
        lines = one.melt(["time"], ["p50_ms", "p95_ms", "p99_ms", "slo_ms"], "what", "ms").dropna()
        lines["what"] = lines["what"].map({"p50_ms": "p50", "p95_ms": "p95", "p99_ms": "p99", "slo_ms": "objective"})
        with place.container(border=True):
            st.markdown(f"**{name}**, ms; {told}")
            charts.draw(lines, charts.percentiles(), f"latency-{name}", window)


def served() -> None:
    window = widgets.again(chosen)
    rows = mine(history("served_long" if window.long else "served", window))
    if rows.empty:
        return
    st.subheader("Who answered", anchor=False)
    shown = rows.assign(
        hardware=[formats.simulated(*each) for each in zip(rows["hardware"], rows["simulated"], strict=True)],
        late=100 * (1 - rows["in_time"] / rows["queries"]),
    )
    widgets.table(
        shown,
        {
            "app": "app",
            "variant": "variant",
            "hardware": "on",
            "queries": widgets.figure("answered", "localized"),
            "late": widgets.figure("late", "%.2f %%"),
            "p50_ms": widgets.figure("p50 ms"),
            "p99_ms": widgets.figure("p99 ms"),
            "accuracy": widgets.figure("accuracy", "%.4f"),
            "mean_batch": widgets.figure("batch", "%.1f"),
            "cost_per_1000": widgets.dollars(
                "US$/1000", rows["cost_per_1000"], help="Charged for compute, per 1,000 items"
            ),
        },
        "served",
    )


follow(chosen, endings)
follow(chosen, reasons)
follow(chosen, latencies)
follow(chosen, served)
