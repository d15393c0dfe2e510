"""Workers: machines and their devices, their utilisation, memory, load, queue and price, and their life cycle."""

import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import history, query
from dashboard.widgets import need, show_live

widgets.page_title(
    "Workers", "Machines and their devices: utilisation, memory and price; when they boot, drain and stop."
)
chosen = widgets.choose_window()
rows_of = widgets.choose_rows(apps=False)


def now() -> None:
    devices = query("devices")
    need(
        devices,
        "No worker has reported in the last 15 s.",
        "`infaas up` starts one; `infaas doctor` says what is missing.",
    )
    devices = rows_of.of(devices)
    need(devices, "No device meets this search.", "Clear the search.")
    shown = devices.assign(
        state=[[state] if state else [] for state in devices["state"]],
        device=formats.marked(devices["device"], devices["simulated"]),
        utilisation=100 * devices["utilisation"],
        foreign=100 * devices["foreign_use"],
        memory_mb=devices["memory_mb"].round(),
        memory=100 * devices["memory_used_mb"] / devices["memory_mb"],
    )
    widgets.table(
        shown,
        {
            "worker": "worker",
            "device": "device",
            "state": widgets.state_column(charts.WORKER_STATES),
            "utilisation": widgets.progress_column("utilisation"),
            "foreign": widgets.number_column("others %", "%.0f", help="Used by processes that are not this worker's"),
            "memory": widgets.progress_column("memory"),
            "memory_mb": widgets.number_column("total MB", "localized"),
            "host_used_mb": widgets.number_column(
                "kept MB", "%.0f", help="Host memory of models that are ready to be moved to the device (Warm)"
            ),
            "load": widgets.number_column("items/s", "%.1f"),
            "queue": widgets.number_column("queue", "%d"),
            "per_hour": widgets.number_column("US$/h", "%.3g", help="Price of all devices of this kind of the worker"),
            "since": widgets.time_column("since"),
            "reason": "why",
        },
        "devices",
    )


def trend() -> None:
    window = widgets.up_to_now(chosen)
    rows = rows_of.of(series.utilisation(window))
    if rows.empty:
        return
    shown = rows.groupby(["time", "on"], as_index=False).agg(
        utilisation=("utilisation", "mean"), memory=("memory", "mean"), load=("load", "sum"), queue=("queue", "max")
    )
    shown = shown.assign(utilisation=100 * shown["utilisation"], memory=100 * shown["memory"])
    marks = series.marks(window)
    left, right = st.columns(2)
    for place, column, name, unit, domain in (
        (left, "utilisation", "Utilisation", "%", [0, 100]),
        (right, "memory", "Memory", "%", [0, 100]),
        (left, "load", "Load", "items/s", None),
        (right, "queue", "Queue", "items", None),
    ):
        with place.container(border=True):
            st.markdown(f"**{name}**, {unit}")
            spec = charts.lines(
                column,
                "on",
                unit=unit,
                form=",.0f" if column == "queue" else ",.3~r",
                domain=domain,
                height=170,
                every=series.SAMPLED_S,
            )
            charts.draw(shown, spec, column, window, marks)
    widgets.explain_marks(marks)


def life() -> None:
    window = widgets.up_to_now(chosen)
    changes, devices = rows_of.of(history("worker_changes", window)), rows_of.of(query("devices"))
    st.subheader("Starts and stops", anchor=False)
    heard = history("utilisation", window).groupby("worker")["time"].max()
    known = devices.drop_duplicates("worker")
    bands = series.state_spans(changes, known, window, "worker", dead=("Stopped", "None"), heard=heard)
    need(bands, "There was no worker in this range.", "A longer range may show some.")
    charts.draw(bands, charts.state_timeline("worker", charts.WORKER_STATES, bands), "life", window)
    ordered = rows_of.of(history("decisions", window))
    ordered = ordered[ordered["action"].isin(["add_worker", "remove_worker"])]
    ordered = ordered.assign(change=ordered["action"].str.replace("_", " "))
    own = changes.assign(change=changes["from_state"].replace("None", "new") + " → " + changes["to_state"])
    rows = [*own.to_dict("records"), *ordered.to_dict("records")]
    if rows:
        both = type(own)(sorted(rows, key=lambda row: row["time"], reverse=True)[:60])
        widgets.table(
            both,
            {"time": widgets.time_column(window=window), "worker": "worker", "change": "change", "reason": "why"},
            "changes",
        )


def prices() -> None:
    rows = query("prices")
    if not rows.empty:
        text = ", ".join(
            f"{row.hardware} US$ {formats.number(row.price_per_hour)} a {row.unit}" for row in rows.itertuples()
        )
        st.caption(f"Prices per hour: {text}.")


show_live(chosen, now)
show_live(chosen, trend)
show_live(chosen, life)
show_live(chosen, prices)
