"""Shadow: what policies that run beside the system would do and cost, beside what it does and costs."""

import pandas as pd
import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import history
from dashboard.widgets import need, show_live
from dashboard.window import Window
from infaas.answers import would_have

REAL = "the system"

widgets.page_title("Shadow", "What other policies would do with the same demand. They act on simulated machines only.")
chosen = widgets.choose_window()


def page() -> None:
    window = widgets.up_to_now(chosen)
    found = history("shadows", window)
    need(
        found,
        "No policy ran beside the system in this range.",
        "`infaas shadow POLICY` runs one on the live demand without acting, as `infaas shadow static --seconds 600`.",
    )
    for one in found.replace({float("nan"): None}).to_dict("records"):
        missed = [None if each is None else 1 - each for each in (one["attainment"], one["real_attainment"])]
        st.markdown(f"**{would_have(one['policy'], one['cost_rate'], one['real_cost_rate'], *missed)}**")
    st.subheader("Policies", anchor=False)
    _policies(found, window)
    _costs(window)
    _actions(window)


def _policies(found: pd.DataFrame, window: Window) -> None:
    ours = found.assign(ran=[formats.seconds(each.total_seconds()) for each in found["until"] - found["since"]])
    figures = ["attainment", "cost_rate", "apps_cost_rate", "actions"]
    real = ours.assign(policy=REAL, reached=None, **{name: ours[f"real_{name}"] for name in figures})
    shown = pd.concat([ours, real]).sort_index(kind="stable")
    widgets.table(
        shown.assign(percent=100 * shown["attainment"]),
        {
            "policy": "policy",
            "since": widgets.time_column("since", window),
            "ran": "ran for",
            "percent": widgets.number_column("items in time", "%.2f %%"),
            "cost_rate": widgets.number_column("machines, US$/h", "%.4g"),
            "apps_cost_rate": widgets.number_column("instances, US$/h", "%.4g", help="Those that somebody needs"),
            "actions": widgets.number_column("actions", "%d"),
            "reached": "answered, and what it has now",
        },
        "policies",
    )


def _costs(window: Window) -> None:
    coarse, spent = series.spent(window)
    rates = history("shadow_cost", coarse)
    bills = [("machines", "cost_rate", spent), ("instances", "apps_cost_rate", spent[spent["app"].notna()])]
    for part, (title, column, rows) in zip(st.columns(2), bills, strict=True):
        real = series.spending(coarse, "policy", rows.assign(policy=REAL))
        ours = rates.rename(columns={column: "rate"})[["time", "policy", "rate"]]
        with part.container(border=True):
            st.markdown(f"**Cost** of {title}, US$/h")
            real = real[real["time"].isin(rows["time"])]  # without a bill, there was no system
            both = ours if real.empty else pd.concat([real[["time", "policy", "rate"]], ours])
            charts.draw(both, charts.lines("rate", "policy", unit="US$/h", every=series.OBJECTIVES_S), title, coarse)


def _actions(window: Window) -> None:
    ours = history("shadow_actions", window)
    st.subheader("What they would have done", anchor=False)
    need(
        ours,
        "They would have changed nothing in this range.",
        "A longer range shows earlier actions; `infaas bench` changes the load.",
    )
    widgets.table(
        ours,
        {
            "time": widgets.time_column(window=window),
            "policy": "policy",
            "action": "action",
            "variant": "variant",
            "reason": "why",
            "worker": "worker",
            "app": "app",
            "count": widgets.number_column("n", "%d", help="How many instances or workers"),
            "scaler": "by",
        },
        "actions",
    )


show_live(chosen, page)
