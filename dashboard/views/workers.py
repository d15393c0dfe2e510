"""Workers: machines and their devices, how busy and how full they are, and how they come and go."""

import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import ask, history
from dashboard.widgets import follow, nothing

widgets.title("Workers", "Machines and their devices: how busy, how full, at what price; how they boot, drain and go.")
chosen = widgets.choose_window()


def now() -> None:
    devices = ask("devices")
    if devices.empty:
        nothing(
            "No worker has reported in the last 15 s.", "`infaas up` starts one; `infaas doctor` says what is missing."
        )
        return
    shown = devices.assign(
        state=[[state] if state else [] for state in devices["state"]],
        device=[formats.simulated(*each) for each in zip(devices["device"], devices["simulated"], strict=True)],
        utilisation=100 * devices["utilisation"],
        memory_mb=devices["memory_mb"].round(),
        memory=100 * devices["memory_used_mb"] / devices["memory_mb"],
    )
    widgets.table(
        shown,
        {
            "worker": "worker",
            "device": "device",
            "state": widgets.state(charts.WORKER_STATES),
            "utilisation": widgets.progress("utilisation"),
            "memory": widgets.progress("memory"),
            "memory_mb": widgets.figure("MB in all", "localized"),
            "load": widgets.figure("items/s", "%.1f"),
            "queue": widgets.figure("queue", "%d"),
            "per_hour": widgets.figure("US$/h", "%.3g", help="Of all the worker's devices of this kind"),
            "since": widgets.when("since"),
            "reason": "why",
        },
        "devices",
    )


def trend() -> None:
    window = widgets.again(chosen)
    rows = series.utilisation(window)
    if rows.empty:
        return
    shown = rows.groupby(["time", "on"], as_index=False).agg(
        utilisation=("utilisation", "mean"), memory=("memory", "mean"), load=("load", "sum"), queue=("queue", "max")
    )
    shown = shown.assign(utilisation=100 * shown["utilisation"], memory=100 * shown["memory"])
    left, right = st.columns(2)
    for place, column, name, unit, domain in (
        (left, "utilisation", "Utilisation", "%", [0, 100]),
        (right, "memory", "Memory", "%", [0, 100]),
        (left, "load", "Load", "items/s", None),
        (right, "queue", "Queue", "queries", None),
    ):
        with place.container(border=True):
            st.markdown(f"**{name}**, {unit}")
            charts.draw(shown, charts.lines(column, "on", unit=unit, domain=domain, height=170), column, window)


def life() -> None:
    window = widgets.again(chosen)
    changes, devices = history("worker_changes", window), ask("devices")
    st.subheader("Coming and going", anchor=False)
    bands = series.spans(changes, devices.drop_duplicates("worker"), window, "worker", dead=("Stopped", "None"))
    if bands.empty:
        nothing("No worker was there in this range.", "A longer range may show some.")
        return
    charts.draw(bands, charts.spans("worker", charts.WORKER_STATES, bands), "life", window)
    ordered = history("decisions", window)
    ordered = ordered[ordered["action"].isin(["add_worker", "remove_worker"])]
    ordered = ordered.assign(change=ordered["action"].str.replace("_", " "))
    told = changes.assign(change=changes["from_state"].replace("None", "new") + " → " + changes["to_state"])
    rows = [*told.to_dict("records"), *ordered.to_dict("records")]
    if rows:
        both = type(told)(sorted(rows, key=lambda row: row["time"], reverse=True)[:60])
        widgets.table(
            both,
            {"time": widgets.when(window=window), "worker": "worker", "change": "change", "reason": "why"},
            "changes",
            height=460 if len(rows) > 12 else "content",
        )


def prices() -> None:
    rows = ask("prices")
    if not rows.empty:
        told = ", ".join(
            f"{row.hardware} US$ {formats.number(row.price_per_hour)} a {row.unit}" for row in rows.itertuples()
        )
        st.caption(f"Prices an hour: {told}.")


follow(chosen, now)
follow(chosen, trend)
follow(chosen, life)
follow(chosen, prices)
