"""Members: the models of an app that answer together: their weights and errors over time, by context, how far they agree, and
which are missing.
"""

import pandas as pd
import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import NoData, history
from dashboard.widgets import show_empty, show_live
from dashboard.window import Window

WHOLE = "all of the app"
MOST = 8  # members in one chart

widgets.page_title(
    "Members",
    "The models of an app that answer together: what feedback taught, how far they agree, and which are missing.",
)
chosen = widgets.choose_window()
app = widgets.choose_app(None)


def choose_context() -> str | None:
    """Show the control for the context where there are several, which is kept in the URL (?context=). None: all of them."""
    try:
        found = history("contexts", widgets.up_to_now(chosen), app=app)
    except NoData:
        return None  # the page itself shows the reason
    names = [name for name in found["context"] if name is not None]
    if not names:
        return None
    picked = st.selectbox("Context", [WHOLE, *names], key="context", bind="query-params", width=280)
    return None if picked == WHOLE else picked


context = choose_context() if app is not None else None


def page() -> None:
    if app is None:
        widgets.show_no_app()
        return
    window = widgets.up_to_now(chosen)
    about = {"app": app, "context": context, "whole": context is None}
    agreed, taught = history("agreement", window, app=app), history("taught", window, **about)
    if agreed.empty and taught.empty:
        show_empty(
            "No query of this range was answered by several models together.",
            f"`infaas admin set-selection {app} --policy exp4` lets all models of the app answer together (docs/ensembles.md).",
        )
        return
    parts, missing = history("parts", window, app=app), history("missing", window, app=app)
    _figures(agreed, taught)
    if taught.empty:
        show_empty(
            "No feedback came in this range, so nothing was learnt.",
            "Clients send true labels to `infaas.feedback.<app>`: `await client.feedback(app, label, query=answer.query)`.",
        )
    else:
        _lines(history("weights", window, **about), taught, window)
    with st.container():
        left, right = st.columns(2)
        with left.container(border=True):
            st.markdown("**Confidence**, % of the asked members that agree with the answer")
            shown = agreed.assign(percent=100 * agreed["confidence"], app=app).dropna(subset=["percent"])
            if shown.empty:
                show_empty("No answer of this range had an output.", "The table below says which models were missing.")
            else:
                charts.draw(shown, charts.lines("percent", "app", unit="%", domain=[0, 100]), "confidence", window)
        with right.container(border=True):
            st.markdown(f"**Missing** members, answers counted every {formats.seconds(window.step)}")
            rows = series.filled(
                series.largest(missing, "member", "missing", MOST, "others"), window, "member", ["missing"]
            )
            charts.draw(
                rows, charts.stacked("missing", "member", unit="answers", form=",.0f", bars=True), "missing", window
            )
    _table(taught, parts, missing)


def _figures(agreed: pd.DataFrame, taught: pd.DataFrame) -> None:
    queries, incomplete = int(agreed["queries"].sum()), int(agreed["incomplete"].sum())
    defaults = int(agreed["defaults"].sum())
    known = agreed.dropna(subset=["confidence"])
    mean = (known["confidence"] * known["queries"]).sum() / known["queries"].sum() if len(known) else None
    with st.container(horizontal=True, gap="small"):
        widgets.metric("Queries", f"{queries:,}", "answered together")
        widgets.metric("Confidence", formats.percent(mean), "on average")
        share = formats.percent(incomplete / queries) if queries else formats.UNKNOWN
        widgets.metric("Incomplete", share, "answers without a member" if incomplete else "none", bad=bool(incomplete))
        widgets.metric("Default outputs", f"{defaults:,}", "given instead" if defaults else "none", bad=bool(defaults))
        if not taught.empty:
            first = taught.iloc[0]
            widgets.metric("Believed most", str(first["member"]), f"{formats.percent(first['weight'])} of the weights")


def _lines(rows: pd.DataFrame, taught: pd.DataFrame, window: Window) -> None:
    rows = rows[rows["member"].isin(taught["member"].head(MOST))]
    shown = rows.assign(weight=100 * rows["weight"], error=100 * rows["error"])
    left, right = st.columns(2)
    with left.container(border=True):
        st.markdown("**Weights**, % of all")
        charts.draw(shown, charts.lines("weight", "member", unit="%", form=".3~g", holds=True), "weights", window)
    with right.container(border=True):
        st.markdown("**Error** by feedback, %")
        charts.draw(shown, charts.lines("error", "member", unit="%", form=".3~g"), "errors", window)


def _table(taught: pd.DataFrame, parts: pd.DataFrame, missing: pd.DataFrame) -> None:
    table = taught.merge(parts, on="member", how="outer")
    lost = missing.groupby("member")["missing"].sum()
    table["missing"] = 100 * table["member"].map(lost).fillna(0) / table["asked"]
    for column in ("weight", "probability", "error"):
        table[column] = 100 * table[column].astype(float)
    widgets.table(
        table.sort_values(["weight", "member"], ascending=[False, True], na_position="last"),
        {
            "member": "model",
            "weight": widgets.number_column(
                "weight", "%.3g %%", help="Its share of all weights after the last feedback"
            ),
            "probability": widgets.number_column("asked with", "%.3g %%", help="Probability, at the last feedback"),
            "error": widgets.number_column("error", "%.3g %%", help="Share of feedback by which it was wrong"),
            "feedbacks": widgets.number_column("feedbacks", "localized"),
            "reevaluated": widgets.number_column("late ones", "localized", help="For which it was asked again"),
            "asked": widgets.number_column("asked", "localized"),
            "missing": widgets.number_column(
                "missing", "%.3g %%", help="Share of these without its output in the answer"
            ),
            **widgets.PERCENTILES,
            "cost_per_1000": widgets.money_column(
                formats.CHARGED, table["cost_per_1000"], help="What 1,000 answers were charged for computing"
            ),
        },
        "members",
    )


show_live(chosen, page)
