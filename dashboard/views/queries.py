"""Recent queries: the last 200 by app, outcome or text: how each ended, by which variant and why; one of them with its parts."""

from typing import Any
from uuid import UUID

import pandas as pd
import streamlit as st

from dashboard import formats, widgets
from dashboard.store import history, query
from dashboard.widgets import show_empty, show_live

ANY = "any outcome"
OUTCOMES = {
    "ok": "#009e73",
    "late": "#e69f00",
    "refused": "#d0342c",
    "error": "#b3261e",
    "default": "#7a68c8",
    "cancelled": "#b8bdc4",
    "mistake": "#8b929b",
}
SHOWN = 200  # rows that recent.sql returns

widgets.page_title(
    "Recent queries",
    "The latest queries, how each ended and why. A click on a time shows all that is known of it. Clients' mistakes are counted by the second.",
)
chosen = widgets.choose_window()
rows_of = widgets.choose_rows(inside="ids, variants, workers, codes")
outcome = st.segmented_control(
    "Outcome",
    [ANY, *OUTCOMES],
    default=ANY,
    required=True,
    key="outcome",
    bind="query-params",
    label_visibility="collapsed",
)


def recent() -> None:
    window = widgets.up_to_now(chosen)
    rows = history(
        "recent", window, app=rows_of.app, text=rows_of.text or None, outcome=None if outcome == ANY else outcome
    )
    if rows.empty:
        if rows_of.app or rows_of.text or outcome != ANY:
            show_empty("No query of this range meets these filters.", "Clear a filter, or choose a longer range.")
        else:
            show_empty(
                "No query arrived in this range.", "`infaas query --app APP` sends one, and so does Try a query."
            )
        return
    zone = widgets.viewer_zone()
    form = "%H:%M:%S.%f" if window.seconds <= 21_600 else "%d %b %H:%M:%S"
    shown = rows.assign(
        open=[each.tz_convert(zone).strftime(form)[: 12 if "f" in form else None] for each in rows["time"]],
        ended=[[each] for each in rows["outcome"]],
        why=[why(row) for row in rows.to_dict("records")],
        cost_per_1000=1e3 * rows["cost"].where(rows["variant"].notna()),
    )
    key = "open-query"
    widgets.table(
        shown,
        {
            "open": widgets.link_column("time", "the query's details", key),
            "app": "app",
            "ended": widgets.state_column(OUTCOMES, "outcome"),
            "latency_ms": widgets.number_column("latency ms"),
            "slo_ms": widgets.number_column("allowed ms", "%.4g", help="The query's objective"),
            "variant": "variant",
            "why": "why",
            "worker": "worker",
            "items": widgets.number_column("items", "%d"),
            "cost_per_1000": widgets.money_column(
                formats.CHARGED, shown["cost_per_1000"], help="What 1,000 such queries are charged"
            ),
            "id": "its own id",
        },
        "recent",
        fills=True,
    )
    if len(rows) == SHOWN:
        st.caption(f"The latest {SHOWN} are shown. A filter or a shorter range shows others.")
    if (clicked := st.session_state.get(key)) and (uid := rows.iloc[clicked["row"]]["query"]):
        st.query_params["query"] = uid
        st.rerun()


def why(row: dict[str, Any]) -> str:
    """A few words on how a query ended."""
    times: Any = row.get("times")
    often = f"{int(times)} times: " if pd.notna(times) and times > 1 else ""
    code = row["code"] if pd.notna(row["code"]) else ("late" if row["outcome"] == "late" else None)
    if code:
        return often + f"{code}: {widgets.MEANING.get(str(code), '')}".rstrip(": ")
    told = ["from the cache"] if row["cached"] else []
    if pd.notna(row["missing"]):
        several = "several models together" if row["policy"] != "pipeline" else "a pipeline"
        told.append(several + (f", {int(row['missing'])} missing" if row["missing"] else ""))
    return ", ".join(told)


def details() -> None:
    uid = st.query_params.get("query")
    if not uid:
        return
    st.subheader("One query", anchor=False)
    try:
        UUID(uid)
    except ValueError:
        show_empty(f"{uid[:60]} is no query's name.", "Choose one in the table above.")
        return
    rows = query("one_query", uid=uid)
    if rows.empty or rows.iloc[0]["part"]:
        show_empty("This query is not known (any more).", "Outcomes are written a few seconds after the answer.")
        return
    one, parts = rows.iloc[0], rows[rows["part"]]
    asked = pd.DataFrame([one] * 2).assign(accuracy=[one["accuracy"], one["accuracy_required"]])
    (reached, required), quality = widgets.quality(asked)
    with st.container(horizontal=True, gap="small"):
        widgets.metric(
            "Outcome",
            one["outcome"],
            one["code"] or "no refusal",
            bad=one["outcome"] not in ("ok", "default", "cancelled"),
        )
        _need("Latency, ms", one["latency_ms"], one["slo_ms"], "allowed")
        _need(formats.heading(quality["label"]), reached, required, "needed")
        limit = one["cost_limit"]
        _need("Cost, US$/1,000", 1e3 * one["cost"], None if pd.isna(limit) else limit, "allowed")
    if text := why(one.to_dict()):
        st.markdown(f"{text[0].upper()}{text[1:]}.")
    facts = {
        "query": uid,
        "its own id": one["id"],
        "app": one["app"],
        "variant": one["variant"],
        "worker": one["worker"],
        "on": formats.mark_simulated(one["hardware"], bool(one["simulated"])) if one["hardware"] else None,
        "items": one["items"],
        "batch": one["batch"],
        "priority": one["priority"],
        "policy": one["policy"],
        "context": one["context"],
        "models that agree": formats.percent(one["confidence"]) if pd.notna(one["confidence"]) else None,
    }
    known = {name: value for name, value in facts.items() if value is not None and pd.notna(value) and value != ""}
    st.markdown(
        " · ".join(
            f"{name}: `{value:g}`" if isinstance(value, float) else f"{name}: `{value}`"
            for name, value in known.items()
        )
    )
    st.caption(
        f"Its spans, where traces are collected, have the attribute `infaas.query.uid` = `{uid.replace('-', '')}`.",
        help="A query that came with the header `traceparent` makes spans if `telemetry.otlp_endpoint` is set (docs/metrics.md, Traces).",
    )
    if len(parts):
        _parts(one, parts)
    if st.button("Close", icon=":material/close:"):
        del st.query_params["query"]
        st.rerun()


def _need(label: str, value: float | None, limit: float | None, word: str) -> None:
    note = "no limit" if limit is None or pd.isna(limit) else f"{formats.number(limit)} {word}"
    widgets.metric(label, formats.number(value), note)


def _parts(one: pd.Series, parts: pd.DataFrame) -> None:
    """What each model or stage contributed."""
    st.markdown(
        f"**{formats.count(len(parts), 'part', 'parts')}**: the models that were asked together, or the stages of a pipeline"
    )
    shown = parts.assign(
        ended=[[each] for each in parts["outcome"]],
        after=1000 * (parts["time"] - one["time"]).dt.total_seconds(),
        cost_per_1000=1e3 * parts["cost"],
        why=[why(row) for row in parts.to_dict("records")],
    )
    widgets.table(
        shown,
        {
            "stage": "part",
            "ended": widgets.state_column(OUTCOMES, "outcome"),
            "after": widgets.number_column("began after ms", "%.1f"),
            "latency_ms": widgets.number_column("latency ms"),
            "variant": "variant",
            "worker": "worker",
            "batch": widgets.number_column("batch", "%d"),
            "cost_per_1000": widgets.money_column(formats.CHARGED, shown["cost_per_1000"]),
            "why": "why",
        },
        "parts",
    )


show_live(chosen, details)
show_live(chosen, recent)
