"""Jobs: offline work, how far it is, at what price."""

import pandas as pd
import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import history
from dashboard.widgets import follow, nothing

STATES = {
    "accepted": "#b3b8bf",
    "reading": "#9fc5e8",
    "running": "#56b4e9",
    "writing": "#9fc5e8",
    "done": "#009e73",
    "failed": "#d0342c",
    "cancelled": "#8b929b",
}
OVER = ("done", "failed", "cancelled")

widgets.title("Jobs", "Offline work, computed with what online queries leave free.")
chosen = widgets.choose_window()


def page() -> None:
    window = widgets.again(chosen)
    jobs, items = history("jobs", window), history("offline", window)
    if jobs.empty:
        nothing(
            "No offline job in this range.",
            "`infaas submit --app APP --input FILE.npy --output FILE.jsonl` hands one in; the files are in the directory `jobs` of the"
            " data directory, or in one that the setting `jobs.roots` names.",
        )
        return
    open_ones = int((~jobs["state"].isin(OVER)).sum())
    failed = int((jobs["state"] == "failed").sum())
    with st.container(horizontal=True, gap="small"):
        widgets.metric("Under way", str(open_ones), formats.count(len(jobs), "job in all", "jobs in all"))
        widgets.metric(
            "Items done", f"{int(jobs['done'].sum()):,}", f"{int(jobs['failed'].sum()):,} could not be computed"
        )
        widgets.metric("Failed jobs", str(failed), "see why below" if failed else "none", bad=bool(failed))
        widgets.metric("Cost, US$", formats.number(jobs["cost"].sum()), "of these jobs")
    shown = jobs.assign(
        state=[[state] for state in jobs["state"]],
        progress=100 * jobs["done"].astype(float) / pd.to_numeric(jobs["total"]),
        per_1000=1000 * jobs["cost"] / jobs["done"].where(jobs["done"] > 0),
        took=[
            formats.seconds(each.total_seconds()) if pd.notna(each) else formats.UNKNOWN
            for each in jobs["finished"] - jobs["started"]
        ],
    )
    widgets.table(
        shown,
        {
            "created": widgets.when("handed in", window),
            "job": "job",
            "app": "app",
            "state": widgets.state(STATES),
            "progress": widgets.progress("progress"),
            "reason": "why",
            "done": widgets.figure("done", "localized"),
            "total": widgets.figure("of items", "localized"),
            "failed": widgets.figure("failed", "localized"),
            "cost": widgets.figure("US$", "%.3g"),
            "per_1000": widgets.dollars("US$/1000", shown["per_1000"]),
            "took": "took",
            "input": "input",
            "output": "output",
        },
        "jobs",
    )
    if len(items):
        done = series.filled(items, window, "app", ["items"])
        with st.container(border=True):
            st.markdown("**Computed**, items/s")
            rate = done.assign(rate=done["items"] / done["lasting"])
            charts.draw(rate, charts.stacked("rate", "app", unit="items/s"), "items", window)


follow(chosen, page)
