"""Registrations: how far each is, why it failed; those under way can be cancelled."""

import pandas as pd
import streamlit as st

from dashboard import formats, widgets
from dashboard.store import NoData, cancel_registration, query
from dashboard.widgets import need, show_live
from infaas.errors import Refused

REGISTER = "`infaas register MODEL.onnx --app APP --model NAME --validation FILE.npz` registers a model for an app."
OVER = {"done": "#009e73", "failed": "#d0342c", "refused": "#d0342c", "cancelled": "#8b929b"}
TOLD = "cancelled"  # key of the session: what became of the last cancellation or dismissal

widgets.page_title("Registrations", "Models on their way into the system, and those that have arrived or failed.")
rows_of = widgets.choose_rows()


def cancel(registrations: list[str], done: str) -> None:
    """Cancel them, or dismiss those that failed."""
    st.session_state[TOLD] = ("success", done)
    try:
        for each in registrations:
            try:
                cancel_registration(each)
            except Refused as refused:
                st.session_state[TOLD] = ("warning", f"Not done: {refused.message}.")
    except NoData as problem:
        st.session_state[TOLD] = ("error", f"Not done: {problem}. {problem.remedy}")


def page() -> None:
    every = query("registrations")
    rows = rows_of.of(every)
    need(every, "Nothing has been registered yet.", REGISTER)
    need(rows, "No registration meets these filters.", "Clear the search, or choose another application.")
    if told := st.session_state.get(TOLD):
        getattr(st, told[0])(told[1])
    over = rows["state"].isin(OVER)
    for row in rows[~over].to_dict("records"):
        _under_way(row)
    rows = rows[over]
    if failed := list(rows.loc[rows["state"] == "failed", "registration"]):
        st.button(
            f"Dismiss {len(failed)} failed",
            key="dismiss",
            help="Those in the table below leave all lists and Overview, for everybody. SQL keeps them",
            icon=":material/done_all:",
            on_click=cancel,
            args=(
                failed,
                f"{formats.count(len(failed), 'failed registration leaves', 'failed registrations leave')} the list in some seconds.",
            ),
        )
    if rows.empty:
        return
    shown = rows.assign(state=[[state] for state in rows["state"]])
    widgets.table(
        shown,
        {
            "started": widgets.time_column("started"),
            "app": "app",
            "model": "model",
            "version": "version",
            "state": widgets.state_column(OVER),
            "reason": "reason",
            "updated": widgets.time_column("ended"),
            "registration": st.column_config.TextColumn("registration id"),
        },
        "registrations",
    )


def _under_way(row: dict[str, object]) -> None:
    name = str(row["registration"])
    with st.container(border=True, horizontal=True, vertical_alignment="center"):
        share = float(str(row["progress"])) if pd.notna(row["progress"]) else 0.0
        reason = f": {row['reason']}" if pd.notna(row["reason"]) and row["reason"] else ""
        st.progress(min(max(share, 0.0), 1.0), f"**{row['model']}** for {row['app']}, {row['state']}{reason}")
        with st.popover("Cancel", icon=":material/cancel:"):
            st.markdown("Its work stops, and nothing of it is kept.")
            told = f"Registration {name} is being cancelled. Nothing of it is kept."
            st.button(
                f"Cancel {row['model']}", key=f"cancel-{name}", type="primary", on_click=cancel, args=([name], told)
            )


show_live(None, page)
