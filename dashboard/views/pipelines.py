"""Pipelines: the graph of one with variant, replicas and batch of each vertex; visits, queue and latencies by vertex; whether it
keeps its objective, what it costs, how its replicas change, and why.
"""

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import NoData, explain, history, pipelines, query
from dashboard.widgets import need, show_empty, show_live
from dashboard.window import Window
from infaas.errors import Refused

widgets.page_title(
    "Pipelines",
    "Apps that other apps answer, one after the other or side by side: their stages, objectives, costs and replicas.",
)
chosen = widgets.choose_window()
app = widgets.choose_app(None, pipelines=True)


def page() -> None:
    if app is None:
        query("apps")
        show_empty(
            "No pipeline is registered yet.",
            "`infaas pipeline add FILE.toml` adds one; `infaas demo --pipeline` shows one under load.",
        )
        return
    window = widgets.up_to_now(chosen)
    traffic = _traffic(window)
    seen, changes = history("stages", window, app=app), history("replicas", window, app=app)
    item, problem = _now()
    _figures(traffic, item, window)
    if problem is not None:
        st.warning(
            f"How its stages are served now is not known: {problem} {problem.remedy}", icon=":material/cloud_off:"
        )
    _stages(item, seen, changes, int(traffic["queries"].sum()))
    _charts(traffic, item, window)
    _replicas(changes, window)


def _traffic(window: Window) -> pd.DataFrame:
    rows = history("traffic_long" if window.long else "traffic", window)
    full = series.filled(rows[rows["app"] == app], window, "app", series.ENDINGS)
    return full.assign(percent=100 * (full["in_time"] / full["queries"]).where(full["queries"] > 0))


def _now() -> tuple[dict[str, Any] | None, NoData | None]:
    """The pipeline as a dispatcher lists it, and who would answer for vertices without a plan; or why that is not known."""
    assert app is not None
    try:
        item = next((one for one in pipelines() if one["app"] == app), None)
        if item is None:
            return None, None
        told = {row["vertex"]: row for row in explain(app, {}).get("stages") or []}
    except NoData as problem:
        return None, problem
    except Refused as refused:
        return None, NoData(str(refused), "")
    for stage in item["vertices"]:
        about = told.get(stage["vertex"], {})
        stage["answers"] = stage["variant"] or about.get("variant")
        stage["why"], stage["waiting"] = about.get("why", ""), about.get("waiting", 0)
        stage["refused"] = about.get("refused", False)
    return item, None


def _figures(traffic: pd.DataFrame, item: dict[str, Any] | None, window: Window) -> None:
    known = query("apps").set_index("app").loc[app]
    total = traffic[series.ENDINGS].sum() if len(traffic) else pd.Series(0, series.ENDINGS)
    queries = int(total["queries"])
    reached = total["in_time"] / queries if queries else None
    target = known["slo_target"]
    latency = _latency(window)
    with st.container(horizontal=True, gap="small"):
        widgets.metric("Queries", f"{queries:,}", f"{formats.number(queries / window.seconds)} a second")
        short = reached is not None and reached < target
        widgets.metric("In time", formats.percent(reached), f"target {formats.percent(target)}", bad=short)
        widgets.metric(
            "p99, ms",
            formats.number(latency["p99_ms"].dropna().iloc[-1] if latency["p99_ms"].notna().any() else None),
            f"objective {formats.number(known['latency_ms'])} ms",
            help="99 of 100 queries were faster, at the end of the range",
        )
        plan = None if item is None else item["plan"]
        if plan is not None:
            widgets.metric(
                "Planned, US$/h",
                formats.number(3600 * plan["cost_per_s"]),
                f"for {formats.number(plan['rate'])} queries/s",
                help=f"Planned by {plan['policy']}: {plan['status']}; {100 * plan['percentile']:g} % of queries in"
                f" {formats.number(plan['p99_ms'])} ms",
            )


def _latency(window: Window) -> pd.DataFrame:
    rows = history("traffic_long" if window.long else "latency", window)
    return rows[rows["app"] == app]


def _stages(item: dict[str, Any] | None, seen: pd.DataFrame, changes: pd.DataFrame, queries: int) -> None:
    st.subheader("Stages", anchor=False)
    wanted = {row.vertex: int(row.replicas) for row in changes.iloc[::-1].itertuples()}
    if item is not None:
        with st.container(border=True):
            st.graphviz_chart(_graph(item, wanted), width="content")
        now = pd.DataFrame(item["vertices"])
        now["wanted"] = [wanted.get(name, count) for name, count in zip(now["vertex"], now["replicas"], strict=True)]
        now["queued"] += now["waiting"]
        now["share"] *= 100
        rows = now.merge(seen.drop(columns=["app", "accuracy"]), on="vertex", how="left")
    elif seen.empty:
        show_empty(
            "No query of this range visited a stage.",
            f"`infaas query --app {app}` or `infaas bench --app {app}` asks it.",
        )
        return
    else:
        rows = seen
    rows["of_queries"] = 100 * rows["visits"] / queries if queries else None
    widgets.table(
        rows,
        {
            "vertex": "stage",
            "app": "app",
            "answers": "variant",
            "share": widgets.number_column(
                "of objective", "%.0f %%", help="Its share of the latency objective, by service times"
            ),
            "wanted": widgets.number_column(
                "replicas wanted", "%d", help="By the plan, or as they follow the traffic now"
            ),
            "instances": widgets.number_column(
                "there", "%d", help="Loaded instances: of the planned variant, else of the app"
            ),
            "batch": widgets.number_column("largest batch", "%d"),
            "mean_batch": widgets.number_column("mean batch", "%.1f"),
            "queued": widgets.number_column(
                "queued", "%d", help="Items that wait now, at instances and in one dispatcher"
            ),
            "visits": widgets.number_column("visits", "localized"),
            "of_queries": widgets.number_column("of queries", "%.0f %%"),
            "failed": widgets.number_column("failed", "localized"),
            **widgets.PERCENTILES,
            "cost_per_1000": widgets.money_column(
                formats.CHARGED, rows["cost_per_1000"], help="What 1,000 visits were charged for computing"
            ),
            "why": "why this variant",
        },
        "stages",
    )


def _graph(item: dict[str, Any], wanted: dict[str, int]) -> str:
    nodes = []
    for stage in item["vertices"]:
        name, there = stage["vertex"], stage["instances"]
        goal = wanted.get(name, stage["replicas"])
        lines = [stage["app"]] if stage["app"] != name else []
        lines += [stage["answers"] or ("nobody could answer" if stage["refused"] else "several models")]
        if goal is None:
            lines.append(f"{formats.count(there, 'instance', 'instances')} loaded")
        else:
            lines.append(f"{formats.count(goal, 'replica', 'replicas')}, {there} loaded")
            lines.append(f"batches up to {stage['batch']}")
        state = "short" if goal is not None and there < goal else "ok"
        nodes.append(charts.DrawnVertex(name, lines, "gone" if stage["refused"] else state))
    names = {node.name for node in nodes}
    edges = [(edge["from"], edge["to"], _when(edge)) for edge in item["edges"]]
    last = [part.strip().partition(".")[0] for text in item["output"].values() for part in text.split("|")]
    return charts.flow(nodes, edges, [name for name in last if name in names])


def _when(edge: dict[str, Any]) -> list[str]:
    """When the edge is followed; empty: always."""
    when, share = edge["when"], edge["probability"]
    told = []
    if when is not None:
        left = when["output"] if when["reduce"] == "first" else f"{when['reduce']} {when['output']}"
        told.append(f"{left} {when['op']} {when['value']}")
    if share is not None and share < 1:
        told.append(f"{100 * share:g} %")
    if items := edge.get("items"):
        seen = edge.get("items_seen")
        told.append(f"each of {items}" + (f", {seen['mean']:.3g} a query" if seen else ""))
    return told


def _charts(traffic: pd.DataFrame, item: dict[str, Any] | None, window: Window) -> None:
    if traffic.empty:
        show_empty("No query arrived in this range.", f"`infaas bench --app {app}` puts load on it.")
        return
    target = 100 * query("apps").set_index("app")["slo_target"][app]
    latency, marks = _latency(window), series.marks(window, app)
    first, second = st.columns(2), st.columns(2)
    with first[0].container(border=True):
        st.markdown("**In time**, % of queries; dashed: the target")
        shown = traffic.assign(target=target)
        bounds = [charts.axis_start(pd.concat([shown["percent"], shown["target"]])), 100]
        spec = charts.lines("percent", "app", unit="%", form=".4~g", domain=bounds, level="target")
        charts.draw(shown, spec, "in-time", window, marks)
    with first[1].container(border=True):
        st.markdown("**Latency**, ms")
        if (lines := series.percentiles(latency)).empty:
            show_empty("No query of this range was answered.", "The table above says why a stage would be refused.")
        else:
            charts.draw(lines, charts.percentiles(), "latency", window, marks)
    with second[0].container(border=True):
        st.markdown("**Visits** a second, by stage")
        seen = series.filled(history("visits", window, app=app), window, "vertex", ["visits"])
        shown = seen.assign(rate=seen["visits"] / seen["lasting"])
        charts.draw(shown, charts.lines("rate", "vertex", unit="visits/s"), "visits", window, marks)
    with second[1].container(border=True):
        _cost(item, window, marks)
    widgets.explain_marks(marks)


def _cost(item: dict[str, Any] | None, window: Window, marks: pd.DataFrame) -> None:
    coarse = window.at_least(3600.0 if window.long else 20.0).whole(5.0)
    rows = history("pipeline_cost_long" if window.long else "pipeline_cost", coarse, app=app)
    every = rows.melt(["time"], ["kept", "charged"], "what", "cost")
    every["what"] = every["what"].map({"kept": "its instances", "charged": "charged to queries"})
    full = series.filled(every[every["cost"].astype(float) > 0], coarse, "what", ["cost"])
    plan = None if item is None or item["plan"] is None else 3600 * item["plan"]["cost_per_s"]
    st.markdown("**Cost**, US$/h" + ("; dashed: as planned" if plan is not None else ""))
    if full.empty:
        show_empty("Nothing was spent on it in this range.", "A deployed plan keeps instances for it.")
        return
    shown = full.assign(rate=3600 * full["cost"] / full["lasting"], plan=plan)
    spec = charts.lines("rate", "what", unit="US$/h", level="plan" if plan is not None else None)
    charts.draw(shown, spec, "cost", coarse, marks)


def _replicas(changes: pd.DataFrame, window: Window) -> None:
    st.subheader("Replicas", anchor=False)
    need(
        changes,
        "No plan was deployed in this range, so its stages are served like any other app.",
        "`infaas pipeline plan FILE.toml --json > plan.json` makes one, and `infaas pipeline deploy plan.json` deploys it.",
    )
    end = pd.Timestamp(window.end)
    still = changes.drop_duplicates("vertex").assign(time=end, reason=None)
    shown = pd.concat([still, changes.assign(reason=changes["reason"].where(changes["changed"], None))])
    with st.container(border=True):
        st.markdown("**Replicas** that are wanted, by stage; dots: changes")
        spec = charts.lines("replicas", "vertex", unit="replicas", form=",.0f", note="reason")
        charts.draw(shown, spec, "replicas", window)
    rows = changes[changes["changed"]]
    if rows.empty:
        return
    widgets.table(
        rows,
        {
            "time": widgets.time_column(window=window),
            "vertex": "stage",
            "action": "action",
            "from_replicas": widgets.number_column("from", "%d"),
            "replicas": widgets.number_column("to", "%d"),
            "lambda_max": widgets.number_column("for queries/s"),
            "window_s": widgets.number_column("seen in s"),
            "reason": "why",
        },
        "changes",
    )


show_live(chosen, page)
if app is not None:
    st.page_link(
        "views/explain.py", label=f"Explain a query of {app}", icon=":material/quiz:", query_params={"app": app}
    )
