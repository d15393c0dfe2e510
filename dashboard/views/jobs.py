"""Jobs: offline work, how far it is, at what price."""

import pandas as pd
import streamlit as st

from dashboard import charts, frame, measures, series, words
from dashboard.live import follow, nothing
from dashboard.store import history

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

frame.title("Jobs", "Offline work, computed with what online queries leave free.")
chosen = frame.choose_window()


def page() -> None:
    window = frame.again(chosen)
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
        measures.metric("Under way", str(open_ones), words.count(len(jobs), "job in all", "jobs in all"))
        measures.metric(
            "Items done", f"{int(jobs['done'].sum()):,}", f"{int(jobs['failed'].sum()):,} could not be computed"
        )
        measures.metric("Failed jobs", str(failed), "see why below" if failed else "none", bad=bool(failed))
        measures.metric("Cost, US$", words.number(jobs["cost"].sum()), "of these jobs")
    shown = jobs.assign(
        state=[[state] for state in jobs["state"]],
        progress=100 * jobs["done"].astype(float) / pd.to_numeric(jobs["total"]),
        per_1000=1000 * jobs["cost"] / jobs["done"].where(jobs["done"] > 0),
        took=[
            words.seconds(each.total_seconds()) if pd.notna(each) else words.UNKNOWN
            for each in jobs["finished"] - jobs["started"]
        ],
    )
    frame.table(
        shown,
        {
            "created": frame.when("handed in", window),
            "job": "job",
            "app": "app",
            "state": frame.state(STATES),
            "progress": frame.progress("progress"),
            "reason": "why",
            "done": frame.figure("done", "localized"),
            "total": frame.figure("of items", "localized"),
            "failed": frame.figure("failed", "localized"),
            "cost": frame.figure("US$", "%.3g"),
            "per_1000": frame.dollars("US$/1000", shown["per_1000"]),
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
