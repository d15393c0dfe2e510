"""Variants: the state of each instance now and over time, and the reasons of its changes; which are reclaimable; latency and
throughput by batch.
"""

import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import NoData, history, query
from dashboard.widgets import need, show_empty, show_live

MAX_INSTANCES = 24  # in the timeline
MAX_CHANGES = 2000  # rows that changes.sql returns

widgets.page_title("Variants", "Which variants are loaded where, in which state, and why that changed.")
chosen = widgets.choose_window()
rows_of = widgets.choose_rows()


def now() -> None:
    running = query("running")
    need(
        running,
        "No model is loaded.",
        "The first query of an app loads a variant that meets its needs: `infaas query --app APP ...`",
    )
    running = rows_of.of(running)
    need(running, "No instance meets these filters.", "Clear the search, or choose another application.")
    qualities, accuracy = widgets.quality(running)
    shown = running.assign(
        state=running["states"],
        accuracy=qualities,
        on=formats.marked(running["worker"] + " " + running["device"], running["simulated"]),
        interval=widgets.intervals(running),
        utilisation=100 * running["utilisation"],
        mean_batch=running["mean_batch"].where(running["load"] > 0),  # without a query, nothing was measured
        latency_ms=running["latency_ms"].where(running["load"] > 0),
    )
    widgets.table(
        shown,
        {
            "state": widgets.state_column(charts.INSTANCE_STATES),
            "app": "app",
            "variant": "variant",
            "on": "on",
            "since": widgets.time_column("since"),
            "load": widgets.number_column("items/s", "%.1f"),
            "queue": widgets.number_column("queue", "%d"),
            "mean_batch": widgets.number_column("batch", "%.1f"),
            "latency_ms": widgets.number_column("compute ms"),
            "profiled_ms": widgets.number_column(
                "alone ms", help="Latency of one item alone, as measured at registration"
            ),
            "utilisation": widgets.number_column("busy %", "%.1f"),
            "memory_mb": widgets.number_column("MB", "%.0f"),
            "accuracy": accuracy,
            "interval": st.column_config.TextColumn("95 %", help="The confidence interval of the accuracy"),
        },
        "now",
    )


def timeline() -> None:
    window = widgets.up_to_now(chosen)
    changes, running = rows_of.of(history("changes", window)), rows_of.of(query("running"))
    bands = series.state_spans(
        changes, running.drop_duplicates("instance"), window, after=rows_of.of(history("changes_after", window))
    )
    st.subheader("States over time", anchor=False)
    if bands.empty:
        show_empty("There was no instance in this range.", "A longer range may show some.")
    else:
        shown = series.newest(bands, "instance", MAX_INSTANCES)
        limits = [f"the {MAX_INSTANCES} of {bands['instance'].nunique()} instances that existed last"] * (
            len(shown) < len(bands)
        )
        limits += [f"the latest {MAX_CHANGES:,} changes"] * (len(changes) >= MAX_CHANGES)
        if limits:
            st.caption(f"Shown: {', '.join(limits)}. A shorter range shows more of it.")
        charts.draw(shown, charts.state_timeline("instance", charts.STATES, shown), "states", window)
    st.subheader("Why", anchor=False)
    need(changes, "No state changed in this range.", "A longer range shows earlier changes.")
    widgets.table(
        changes.head(100).assign(change=changes["from_state"] + " → " + changes["to_state"]),
        {
            "time": widgets.time_column(window=window),
            "change": "change",
            "reason": "why",
            "variant": "variant",
            "worker": "worker",
            "device": "device",
            "app": "app",
        },
        "changes",
    )


@st.fragment
def profiles() -> None:
    """What was measured of one variant at its registration, by batch size."""
    st.subheader("Profile", anchor=False)
    try:
        every = query("variants")
        names = sorted(every["variant"].unique())
        if not names:
            show_empty("No variant is registered yet.", "`infaas register` measures each variant of a model.")
            return
        loaded = every.sort_values("instances", ascending=False)["variant"].iloc[0]
        name = st.selectbox("Variant", names, names.index(loaded), key="variant", bind="query-params", width=380)
        rows = query("profile", variant=name)
    except NoData:
        return  # the parts above show the reason
    if rows.empty:
        show_empty("This variant was not measured.", "`infaas variants` says what is known of it.")
        return
    lengths = rows["length"].dropna().unique()
    suffix = [f", length {length:,.0f}" if len(lengths) > 1 else "" for length in rows["length"].fillna(0)]
    kinds = {"p50_ms": "p50", "p99_ms": "p99"}
    latencies = (
        rows.assign(suffix=suffix).rename(columns=kinds).melt(["batch", "suffix"], list(kinds.values()), "what", "ms")
    )
    latencies["what"] += latencies["suffix"]
    rates = rows.assign(rate=1000 * rows["batch"] / rows["p50_ms"], what=[f"one instance{each}" for each in suffix])
    left, right = st.columns(2)
    with left.container(border=True):
        st.markdown("**Latency** of a batch, ms")
        charts.draw(latencies, charts.profile("ms", "what", unit="ms"), "profile-latency")
    with right.container(border=True):
        st.markdown("**Throughput** with full batches, items/s")
        charts.draw(rates, charts.profile("rate", "what", unit="items/s"), "profile-rate")
    told = (
        "Measured at registration"
        if set(rows["provenance"]) == {"measured"}
        else "Derived from what was measured on other devices"
    )
    st.caption(f"{told}; without other load. Half of the batches are faster than p50, 99 of 100 are faster than p99.")


show_live(chosen, now)
show_live(chosen, timeline)
profiles()
