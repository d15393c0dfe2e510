"""Explain: the decision that a query with these needs would get now, and why every other variant is passed over. No query is
sent.
"""

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import charts, formats, widgets
from dashboard.store import NoData, explain
from dashboard.widgets import need, show_live
from infaas.answers import why_chosen
from infaas.errors import Refused

widgets.page_title(
    "Explain", "Which variant would answer a query with these needs now, and why not the others. No query is sent."
)
app = widgets.choose_app(None)


def decision(needs: dict[str, Any]) -> None:
    assert app is not None
    try:
        answer = explain(app, needs)
    except Refused as refused:
        st.error(f"**{refused.code}:** {refused.message}", icon=":material/block:")
        return
    candidates = pd.DataFrame(answer.get("candidates") or [])
    _members(answer)
    _stages(answer)
    if _is_refused(answer) or not (answer.get("members") or answer.get("stages")):
        widgets.show_verdict(answer)
    if candidates.empty and "stages" in answer:
        return
    need(candidates, "This application has no variants.", "`infaas register` adds a model with its variants.")
    qualities, accuracy = widgets.quality(candidates.assign(app=app))
    shown = candidates.assign(
        accuracy=qualities,
        verdict=["chosen" if not why else "passed over" for why in candidates["why_not"]],
        why=[why or why_chosen(answer) for why in candidates["why_not"]],
        state=[[state] for state in candidates["state"]],
        on=formats.marked(candidates["worker"].fillna(candidates["hardware"]), candidates["simulated"]),
    ).sort_values("verdict", kind="stable")
    several = answer.get("stages") is not None or answer.get("members")
    answering = set(shown.index[shown["verdict"] == "chosen"]) if several else set(shown.index[:1])
    columns = ["variant", "why", "state", "on", "accuracy", "latency_ms", "load_ms", "cost_per_1000"]
    st.dataframe(
        shown[[*(["stage"] if "stage" in shown else []), *columns]].style.apply(
            lambda row: (
                ["background-color: rgba(0, 158, 115, 0.16)" * (row.name in answering and not _is_refused(answer))]
                * len(row)
            ),
            axis=1,
        ),
        hide_index=True,
        width="stretch",
        height=38 + 35 * min(len(shown), 25),
        key="candidates",
        column_config={
            "stage": "stage",
            "variant": "variant",
            "why": st.column_config.TextColumn("why, or why not", width=380),
            "state": widgets.state_column(charts.STATES),
            "on": st.column_config.TextColumn("on", width=60 if shown["on"].str.len().max() < 8 else 118),
            "accuracy": accuracy,
            "latency_ms": widgets.number_column("latency ms"),
            "load_ms": widgets.number_column("load ms", "%.3g"),
            "cost_per_1000": widgets.money_column(
                formats.COMPUTED,
                shown["cost_per_1000"],
                help="What 1,000 queries cost while an instance is busy; for loaded variants, with the present batch sizes",
            ),
        },
    )


def _members(answer: dict[str, Any]) -> None:
    """Where several models answer together: who would be asked."""
    rows = pd.DataFrame(answer.get("members") or [])
    if rows.empty:
        return
    st.markdown(f"**{formats.count(len(rows), 'model answers', 'models answer')} together**; each may be asked:")
    shown = rows.assign(probability=100 * rows["probability"].astype(float), weight=100 * rows["weight"].astype(float))
    widgets.table(
        shown,
        {
            "member": "model",
            "probability": widgets.number_column("asked", "%.3g %%", help="Probability that a query asks it"),
            "weight": widgets.number_column("weight", "%.3g %%", help="Its share of all weights"),
            "variant": "variant",
            "why": "why",
        },
        "members",
    )


def _stages(answer: dict[str, Any]) -> None:
    """Of a pipeline: who would be asked for each vertex."""
    rows = pd.DataFrame(answer.get("stages") or [])
    if rows.empty:
        return
    st.markdown(f"**{formats.count(len(rows), 'stage', 'stages')}**, each asked for its share of the objective:")
    shown = rows.assign(
        when=[" or ".join(each) or "always" for each in rows["when"]],
        planned=["planned" if each else "" for each in rows["planned"]],
    )
    widgets.table(
        shown,
        {
            "vertex": "stage",
            "app": "app",
            "variant": "variant",
            "share_ms": widgets.number_column("share ms", help="What is left of the objective by the other stages"),
            "accuracy": widgets.number_column("needs accuracy", "%.4g", help="The least that a variant must have"),
            "when": "visited if",
            "planned": "plan",
            "waiting": widgets.number_column(
                "waiting", "%d", help="Items in one dispatcher's queue for the planned variant"
            ),
            "why": "why",
        },
        "stages",
    )


def _is_refused(answer: dict[str, Any]) -> bool:
    return answer.get("chosen") is None


def page() -> None:
    if app is None:
        widgets.show_no_app()
        return
    decision(needs)


try:
    needs = widgets.choose_needs(app) if app is not None else {}
except NoData:
    needs = {}
show_live(None, page)
