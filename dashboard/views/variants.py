"""Variants: the state of every instance now and over time, and why it changed."""

import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import ask, history
from dashboard.widgets import follow, nothing

MOST = 24  # instances in the time line
CHANGES = 2000  # that changes.sql gives at most

widgets.title("Variants", "Which variants are loaded where, in which state, and why that changed.")
chosen = widgets.choose_window()


def now() -> None:
    running = ask("running")
    if running.empty:
        nothing(
            "No model is loaded.",
            "The first query of an app loads a variant that meets its needs: `infaas query --app APP ...`",
        )
        return
    shown = running.assign(
        state=[[state] for state in running["state"]],
        on=[
            formats.simulated(f"{worker} {device}", bool(simulated))
            for worker, device, simulated in zip(
                running["worker"], running["device"], running["simulated"], strict=True
            )
        ],
        utilisation=100 * running["utilisation"],
    )
    widgets.table(
        shown,
        {
            "state": widgets.state(charts.STATES),
            "app": "app",
            "variant": "variant",
            "on": "on",
            "since": widgets.when("since"),
            "load": widgets.figure("items/s", "%.1f"),
            "queue": widgets.figure("queue", "%d"),
            "mean_batch": widgets.figure("batch", "%.1f"),
            "latency_ms": widgets.figure("latency ms"),
            "profiled_ms": widgets.figure("profiled ms", help="Latency of one item when it was measured alone"),
            "utilisation": widgets.figure("busy %", "%.1f"),
            "memory_mb": widgets.figure("MB", "%.0f"),
            "accuracy": widgets.figure("accuracy", "%.4f"),
        },
        "now",
    )


def timeline() -> None:
    window = widgets.again(chosen)
    changes, running = history("changes", window), ask("running")
    bands = series.spans(changes, running.drop_duplicates("instance"), window, after=history("changes_after", window))
    st.subheader("States over time", anchor=False)
    if bands.empty:
        nothing("No instance was there in this range.", "A longer range may show some.")
    else:
        shown = series.newest(bands, "instance", MOST)
        told = [f"the {MOST} of {bands['instance'].nunique()} instances that were there last"] * (
            len(shown) < len(bands)
        )
        told += [f"the latest {CHANGES:,} changes"] * (len(changes) >= CHANGES)
        if told:
            st.caption(f"Shown: {', '.join(told)}. A shorter range shows more of it.")
        charts.draw(shown, charts.spans("instance", charts.STATES, shown), "states", window)
    st.subheader("Why", anchor=False)
    if changes.empty:
        nothing("No state changed in this range.", "A longer range shows earlier changes.")
        return
    widgets.table(
        changes.head(100).assign(change=changes["from_state"] + " → " + changes["to_state"]),
        {
            "time": widgets.when(window=window),
            "change": "change",
            "reason": "why",
            "variant": "variant",
            "worker": "worker",
            "device": "device",
            "app": "app",
        },
        "changes",
        height=460 if len(changes) > 12 else "content",
    )


follow(chosen, now)
follow(chosen, timeline)
