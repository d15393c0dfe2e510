"""What the pages about queries share: the controls for a query's needs, the decision in words, what codes of refusals mean."""

from typing import Any

import streamlit as st

from bus.messages.catalog import ACCURACIES, in_metric, is_error
from dashboard import formats
from dashboard.store import query
from infaas.answers import why_chosen
from infaas.errors import Refused

MEANING = {
    "late": "answered, but after the objective",
    "deadline": "no answer would have been in time",
    "overloaded": "all suitable instances were full",
    "unsatisfiable": "no variant has what was asked for: ask for less, or register a better model",
    "unknown_app": "no app of this name is registered: infaas apps lists those that are",
    "unknown_model": "the app has no model or variant of this name: the page Applications lists its variants",
    "bad_request": "a field was wrong: what the client was told names it and says what is right",
    "model_error": "the model failed on these inputs",
    "too_large": "the inputs were too large for one message",
    "forbidden": "the caller may not do this",
    "internal": "a fault of the system: see its logs",
}


def choose_needs(app: str) -> dict[str, Any]:
    """Show the controls for the needs of a query of this app, which are kept in the URL. Returns those that are set. Raises NoData."""
    rows = query("variants")
    mine = rows[rows["app"] == app]
    number: dict[str, Any] = {"value": None, "format": "%g", "bind": "query-params", "width": 170}
    metric = next((one for one in mine["metric"] if one not in (None, *ACCURACIES)), "accuracy")
    bounds: dict[str, Any] = {"min_value": 0.0, "max_value": 1.0, "step": 0.01} if metric == "accuracy" else {}
    named = f"{formats.heading(metric)} at {'most' if is_error(metric) else 'least'}"
    choice: dict[str, Any] = {"index": None, "bind": "query-params", "width": 170, "placeholder": "any"}
    with st.container(horizontal=True):
        asked: dict[str, Any] = {
            "latency_ms": st.number_input("Within, ms", 0.0001, key="latency_ms", placeholder="any time", **number),
            metric: st.number_input(named, key="accuracy", placeholder="any", **bounds, **number),
            "cost": st.number_input(
                "US$/1,000 at most",
                0.0,
                key="cost_per_1000",
                step=0.001,
                placeholder="any price",
                help="US$ per 1,000 queries",
                **number,
            ),
            "model": st.selectbox("Only model", sorted(mine["model"].unique()), key="model", **choice),
            "variant": st.selectbox("Only variant", sorted(mine["variant"]), key="variant", **choice),
        }
    return {name: value for name, value in asked.items() if value is not None}


def show_verdict(answer: dict[str, Any]) -> None:
    """Show which variant an explanation has chosen and why, or why a query would be refused."""
    chosen = answer.get("chosen")
    if chosen:
        name = chosen.get("variant") if isinstance(chosen, dict) else chosen
        known = [each for each in answer.get("candidates") or [] if each["variant"] == name]
        worker = known[0].get("worker") if known else None
        functions = known[0].get("functions") if known else ""
        within = f" Functions of its owner run within it: {functions}." * bool(functions)
        st.success(
            f"**{name}** would answer{f', on {worker}' if worker else ''}: {why_chosen(answer)}.{within}",
            icon=":material/check_circle:",
        )
        return
    refusal = answer.get("refusal")
    if refusal:
        refused = Refused.from_map({"error": refusal})
        st.warning(
            f"It would be refused as **{refused.code}**: {refused.message}.{alternative(refused)}",
            icon=":material/block:",
        )
    else:
        st.warning("No variant would answer it now.", icon=":material/block:")


def alternative(refused: Refused) -> str:
    """The closest variant, and when another try may succeed."""
    closest, later = refused.closest or {}, refused.retry_after_ms
    metric, unit = closest.get("metric", "top1"), closest.get("unit", "")
    figures = [in_metric(closest["accuracy"], metric, unit)] * (closest.get("accuracy") is not None)
    figures += [f"latency {formats.number(closest['latency_ms'])} ms"] * (closest.get("latency_ms") is not None)
    text = f" Closest: **{closest['variant']}** ({', '.join(figures)})." if closest.get("variant") else ""
    return text + (f" Try again in {formats.number(later)} ms." if later is not None else "")
