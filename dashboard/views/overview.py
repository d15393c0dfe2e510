"""Overview: what needs attention; load, queries in time, cost and machines, now and recently; what runs, and why; the latest
decisions.
"""

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import ahead, history, not_ready, query, unserved, weaknesses_of_nats
from dashboard.widgets import show_empty, show_live
from dashboard.window import Window

widgets.page_title("Overview", "What runs, how well, at what cost.")
chosen = widgets.choose_window()
ahead(widgets.up_to_now(chosen), "served_long", "traffic_long", "utilisation", "decisions")


def figures() -> None:
    window = widgets.up_to_now(chosen)
    traffic, devices, running, spending = series.traffic(window), query("devices"), query("running"), query("spending")
    with st.container(horizontal=True, gap="small"):
        _load(traffic, window)
        _cost(spending)
        workers = devices.drop_duplicates("worker")
        ready = int((workers["state"] == "Ready").sum())
        others = (
            f"{len(workers) - ready} other"
            if len(workers) > ready
            else formats.count(len(devices), "device", "devices")
        )
        widgets.metric("Workers", f"{ready} ready", others, help="Machines that take work, and their devices")
        bad = running[running["state"].isin(["Overloaded", "Interfered"])]["instance"].nunique()
        alone = len(unserved())
        notes = [f"{bad} in trouble"] * bool(bad) + [f"{formats.count(alone, 'app', 'apps')} without any"] * bool(alone)
        widgets.metric(
            "Instances",
            str(running["instance"].nunique()),
            ", ".join(notes) or "none in trouble",
            bad=bool(notes),
            help="Overloaded or Interfered: in trouble. An app without any, and for which none can be started, nobody can serve.",
        )


def _load(traffic: pd.DataFrame, window: Window) -> None:
    total = traffic.groupby(["time", "lasting"], as_index=False)[[*series.ENDINGS]].sum()
    recent = total.tail(max(1, round(60 / window.step)))
    rate = recent["queries"].sum() / recent["lasting"].sum() if len(recent) else 0.0
    asked = int(total["queries"].sum())
    widgets.metric(
        "Load",
        f"{formats.number(rate)}/s",
        f"{formats.count(asked, 'query', 'queries')}",
        help="Online queries per second in the last minute, and their number in this range",
    )
    missed = int(asked - total["in_time"].sum())
    widgets.metric(
        "In time",
        formats.percent(1 - missed / asked if asked else None),
        f"{missed:,} missed" if missed else "none missed",
        bad=bool(missed),
        help="Share of all queries in this range that were answered within their objective. Refused queries count as missed.",
    )


def _cost(spending: pd.DataFrame) -> None:
    is_simulated = spending["simulated"].astype(bool)
    real = 3600 * spending.loc[~is_simulated, "per_second"].sum()
    idle = 3600 * spending.loc[spending["app"].isna() & ~is_simulated, "per_second"].sum()
    simulated = 3600 * spending.loc[is_simulated, "per_second"].sum()
    widgets.metric(
        "Cost now, US$/h",
        formats.number(real),
        f"{formats.percent(idle / real)} idle" if real else "no machine",
        help="Cost of all running machines, used or not."
        + (f" Simulated devices would add US$ {formats.number(simulated)}/h." if simulated else ""),
    )


PROBLEMS = {  # kind of problem in attention.sql: whether it is urgent, what is wrong, the page that shows more, its parameter for the name
    "missed badly": (True, "**{name}**: only {share} of the queries were in time in the last 5 minutes", "slo", "app"),
    "missed": (False, "**{name}**: {share} of the queries were in time in the last 5 minutes", "slo", "app"),
    "member missing": (False, "**{name}**: {share} of the answers lack this model", "members", ""),
    "device silent": (True, "**{name}** has sent nothing for {duration}", "workers", ""),
    "worker failed": (True, "The worker **{name}** failed {duration} ago", "workers", "search"),
    "in trouble": (
        False,
        "{count} of **{name}** cannot keep up, or other work slows it down, for more than a minute",
        "variants",
        "search",
    ),
    "drifted": (False, "**{name}**: {count} drifted from the validation set", "applications", "app"),
    "rejected events": (
        False,
        '{count} could not be written or found again: `infaas sql "SELECT * FROM rejected_events"` says why',
        "logs",
        "",
    ),
    "failed jobs": (False, "{count} failed in the last day", "jobs", ""),
    "failed registrations": (False, "{count} failed in the last day", "registrations", ""),
}
COUNTED = {
    "in trouble": ("instance", "instances"),
    "drifted": ("column of its queries", "columns of its queries"),
    "rejected events": ("event", "events"),
    "failed jobs": ("offline job", "offline jobs"),
    "failed registrations": ("registration", "registrations"),
}


def attention() -> None:
    begun = query("begun").iloc[0]
    if pd.isna(begun["last_sample"]):
        show_empty(
            "Nothing has been recorded yet.",
            "Workers report every 2 s. If this message stays, `infaas doctor` says what is missing.",
        )
    elif begun["apps"] == 0:
        show_empty(
            "No application is registered yet.",
            "`infaas register MODEL.onnx --app APP --model NAME --validation FILE.npz` registers one; `infaas demo` shows a whole system.",
        )
    found = [_problem(row) for row in query("attention").to_dict("records")]
    found += [(True, f"Nobody can serve **{app}**: {why}", "explain", {"app": app}) for app, why in unserved().items()]
    found += [(True, f"Not ready: {each}", "logs", {}) for each in not_ready()]
    found += [(False, each, "logs", {}) for each in weaknesses_of_nats()]
    if not found:
        st.caption(":material/check_circle: Nothing needs attention.")
        return
    with st.container(border=True, gap="small"):
        st.markdown("**What needs attention**")
        for urgent, text, page, where in sorted(found, key=lambda each: not each[0]):
            icon = ":red[:material/error:]" if urgent else ":orange[:material/warning:]"
            with st.container(horizontal=True, vertical_alignment="center"):
                st.markdown(f"{icon} {text}.", width="content")
                st.page_link(f"views/{page}.py", label="show", query_params=where, width="content")


def _problem(row: dict[str, Any]) -> tuple[bool, str, str, dict[str, str]]:
    """Whether it is urgent; what is wrong; the page that shows more, and its parameters."""
    urgent, text, page, parameter = PROBLEMS[row["what"]]
    amount = float(row["amount"])
    told = text.format(
        name=row["name"],
        share=formats.percent(amount),
        duration=formats.seconds(amount),
        count=formats.count(int(amount), *COUNTED.get(row["what"], ("", ""))),
    )
    return urgent, told, page, {parameter: row["name"]} if parameter else {}


def trend() -> None:
    window = widgets.up_to_now(chosen)
    traffic, busy, marks = series.traffic(window), series.utilisation(window), series.marks(window)
    left, right = st.columns(2)
    with left.container(border=True):
        st.markdown("**Load**, queries/s")
        if traffic.empty:
            show_empty("No query arrived in this range.", "`infaas bench --app APP` puts load on an app.")
        else:
            charts.draw(traffic, charts.stacked("rate", "app", unit="queries/s"), "load", window, marks)
    with right.container(border=True):
        st.markdown("**In time**, % of queries")
        if traffic.empty:
            show_empty("No query, no objective.", "An objective comes with a query (`latency_ms`) or with the app.")
        else:
            shown = traffic.assign(percent=100 * traffic["attainment"])
            bounds = [charts.axis_start(shown["percent"]), 100]
            spec = charts.lines("percent", "app", unit="%", form=".4~g", domain=bounds)
            charts.draw(shown, spec, "in-time", window, marks)
    with left.container(border=True):
        _trend_of_cost(window, marks)
    with right.container(border=True):
        st.markdown("**Utilisation** of devices, %")
        if busy.empty:
            show_empty("No worker reported in this range.", "`infaas workers` lists the running ones.")
        else:
            mean = busy.groupby(["time", "on"], as_index=False)["utilisation"].mean()
            shown = mean.assign(percent=100 * mean["utilisation"])
            spec = charts.lines("percent", "on", unit="%", form=".3~g", domain=[0, 100], every=series.SAMPLED_S)
            charts.draw(shown, spec, "utilisation", window, marks)
    widgets.explain_marks(marks)


def _trend_of_cost(window: Window, marks: pd.DataFrame) -> None:
    coarse, rows = series.spent(window)
    real = series.spending(coarse, "app", rows[~rows["simulated"]])
    st.markdown("**Cost**, US$/h" + (", without simulated devices" if rows["simulated"].any() else ""))
    if real.empty:
        show_empty("Nothing was spent in this range.", "Machines are charged every 10 s, used or not.")
    else:
        spec = charts.stacked("rate", "app", unit="US$/h", idle=formats.IDLE in set(real["app"]))
        charts.draw(real, spec, "cost", coarse, marks)


def runs() -> None:
    window = widgets.up_to_now(chosen)
    running, served, decisions = (
        query("running"),
        history("served_long" if window.long else "served", window),
        history("decisions", window),
    )
    st.subheader("What runs", anchor=False)
    if running.empty:
        show_empty("No model is loaded.", "The first query of an app loads a variant that meets its needs.")
    else:
        keys = ["app", "variant"]
        rows = running.groupby(keys, as_index=False).agg(
            instances=("instance", "nunique"),
            state=("states", lambda found: sorted({state for states in found for state in states})),
            accuracy=("accuracy", "first"),
            simulated=("simulated", "first"),
            hardware=("hardware", "first"),
            load=("load", "sum"),
        )
        rows = rows.merge(served[[*keys, "queries", "p99_ms", "cost_per_1000"]], how="left", on=keys)
        why = query("started")
        why = why.assign(why=why["action"] + ": " + why["reason"])
        rows = rows.merge(why[["variant", "why"]], how="left", on="variant")
        rows["hardware"] = formats.marked(rows["hardware"], rows["simulated"])
        rows["accuracy"], accuracy = widgets.quality(rows)
        widgets.table(
            rows,
            {
                "app": "app",
                "variant": "variant",
                "state": widgets.state_column(charts.INSTANCE_STATES),
                "hardware": "on",
                "instances": widgets.number_column("instances", "%d"),
                "load": widgets.number_column("items/s", "%.1f"),
                "queries": widgets.number_column("answered", "localized", help="Queries in this range"),
                "p99_ms": widgets.PERCENTILES["p99_ms"],
                "accuracy": accuracy,
                "cost_per_1000": widgets.money_column(
                    formats.CHARGED, rows["cost_per_1000"], help="What 1,000 queries were charged for computing"
                ),
                "why": "why it was started",
            },
            "runs",
        )
    st.subheader("Latest decisions", anchor=False)
    if decisions.empty:
        show_empty(
            "Nothing was loaded, replicated or removed in this range.", "A longer range shows earlier decisions."
        )
    else:
        widgets.table(
            decisions.head(12),
            {
                "time": widgets.time_column(window=window),
                "action": "action",
                "variant": "variant",
                "reason": "why",
                "worker": "worker",
                "app": "app",
                "count": widgets.number_column("n", "%d", help="How many instances or workers"),
                "scaler": st.column_config.TextColumn(
                    "by",
                    help="dispatcher: a query needed it at once. model: the worker's autoscaler. vm: the cluster's autoscaler.",
                ),
            },
            "decisions",
        )


show_live(chosen, attention)
show_live(chosen, figures)
show_live(chosen, trend)
show_live(chosen, runs)
