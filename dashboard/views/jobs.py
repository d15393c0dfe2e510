"""Jobs: offline jobs with their progress, items, cost and reasons."""

import pandas as pd
import streamlit as st

from bus.messages.jobs import OVER
from dashboard import charts, formats, series, widgets
from dashboard.store import history
from dashboard.widgets import need, show_live

STATES = {
    "accepted": "#b3b8bf",
    "reading": "#9fc5e8",
    "running": "#56b4e9",
    "writing": "#9fc5e8",
    "done": "#009e73",
    "failed": "#d0342c",
    "cancelled": "#8b929b",
}

widgets.page_title("Jobs", "Offline jobs, computed on capacity that online queries leave.")
chosen = widgets.choose_window()
rows_of = widgets.choose_rows()


def page() -> None:
    window = widgets.up_to_now(chosen)
    jobs, items = history("jobs", window), history("offline", window)
    need(jobs, "No offline job in this range.", "`infaas submit APP --input FILE.npy --output FILE.jsonl` submits one.")
    jobs, items = rows_of.of(jobs), rows_of.of(items)
    need(jobs, "No job meets these filters.", "Clear the search, or choose another application.")
    unfinished = int((~jobs["state"].isin(OVER)).sum())
    failed = int((jobs["state"] == "failed").sum())
    with st.container(horizontal=True, gap="small"):
        widgets.metric("Unfinished", str(unfinished), formats.count(len(jobs), "job in all", "jobs in all"))
        widgets.metric(
            "Items done", f"{int(jobs['done'].sum()):,}", f"{int(jobs['failed'].sum()):,} could not be computed"
        )
        widgets.metric("Failed jobs", str(failed), "see why below" if failed else "none", bad=bool(failed))
        widgets.metric("Charged, US$", formats.number(jobs["cost"].sum()), "of these jobs")
    shown = jobs.assign(
        state=[[state] for state in jobs["state"]],
        progress=100 * jobs["done"].astype(float) / pd.to_numeric(jobs["total"]),
        cost_per_1000=1e3 * jobs["cost"] / jobs["done"].where(jobs["done"] > 0),
        took=[
            formats.seconds(each.total_seconds()) if pd.notna(each) else formats.UNKNOWN
            for each in jobs["finished"] - jobs["started"]
        ],
    )
    widgets.table(
        shown,
        {
            "created": widgets.time_column("submitted", window),
            "job": "job",
            "app": "app",
            "state": widgets.state_column(STATES),
            "progress": widgets.progress_column("progress"),
            "reason": "why",
            "done": widgets.number_column("done", "localized"),
            "total": widgets.number_column("of items", "localized"),
            "failed": widgets.number_column("failed", "localized"),
            "cost": widgets.number_column("charged US$", "%.3g"),
            "cost_per_1000": widgets.money_column(
                formats.CHARGED, shown["cost_per_1000"], help="What 1,000 items were charged for computing"
            ),
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


show_live(chosen, page)
