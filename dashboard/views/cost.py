"""Cost: by app, model, variant or hardware, and what nobody used; as rate and total; compared with an earlier time."""

from datetime import timedelta

import pandas as pd
import streamlit as st

from dashboard import charts, formats, series, widgets
from dashboard.store import history, query
from dashboard.widgets import need, show_live
from dashboard.window import Window

EARLIER = {
    "nothing": None,
    "the time before": None,
    "a day earlier": timedelta(days=1),
    "a week earlier": timedelta(days=7),
}
BY = ("app", "model", "variant", "hardware")

widgets.page_title(
    "Cost", "What machines cost, used or idle, and which apps use them. US$ at the prices of the settings."
)
chosen = widgets.choose_window()
with st.container(horizontal=True, vertical_alignment="bottom"):
    by = st.segmented_control("By", BY, default=BY[0], required=True, key="by", bind="query-params")
    against = st.selectbox("Compare with", list(EARLIER), key="compare", bind="query-params", width=220)
    include_simulated = st.toggle("Include simulated devices", key="simulated", bind="query-params")


def earlier(window: Window) -> Window | None:
    """The window to compare with."""
    if against == "the time before":
        return window.previous
    shift = EARLIER[against]
    return None if shift is None else Window(window.start - shift, window.end - shift, window.step)


def chosen_rows(window: Window) -> tuple[Window, pd.DataFrame, float]:
    """The window, its rows, and the cost of simulated devices that is left out."""
    coarse, rows = series.spent(window)
    simulated = rows["simulated"]
    if include_simulated:
        marked = rows[by].fillna(formats.IDLE).where(~simulated, rows[by].fillna(formats.IDLE) + " (simulated)")
        return coarse, rows.assign(idle=rows["app"].isna(), **{by: marked}), 0.0
    return coarse, rows[~simulated].assign(idle=rows["app"].isna()), float(rows.loc[simulated, "cost"].sum())


def page() -> None:
    window = widgets.up_to_now(chosen)
    coarse, rows, left_out = chosen_rows(window)
    before = earlier(coarse)
    then = chosen_rows(before)[1] if before else None
    need(
        rows,
        "Nothing was spent in this range.",
        "Each machine is charged every 10 s while it runs. `infaas workers` lists the running ones."
        + (" There were simulated devices, which cost nothing." if left_out else ""),
    )
    _figures(rows, then, coarse)
    for day, said in query("oracle").itertuples(index=False):
        st.caption(f"Beside the best possible, {day:%d %B %Y} (UTC): {said}.")
    if left_out:
        st.caption(f"Simulated devices would have cost {formats.money(left_out)} more.")
    spent = series.spending(coarse, by, rows)
    idle, marks = formats.IDLE in set(spent[by]), series.marks(window)
    left, right = st.columns(2)
    with left.container(border=True):
        st.markdown(f"**Rate** by {by}, US$/h")
        charts.draw(spent, charts.stacked("rate", by, unit="US$/h", idle=idle), "rate", coarse, marks)
    with right.container(border=True):
        st.markdown(f"**So far** by {by}, US$")
        charts.draw(spent, charts.stacked("sum", by, unit="US$", idle=idle), "sum", coarse, marks)
    widgets.explain_marks(marks)
    if before is not None and then is not None:
        _compared(coarse, rows, before, then)
    _table(rows, then, window)


def _figures(rows: pd.DataFrame, then: pd.DataFrame | None, window: Window) -> None:
    total, idle = rows["cost"].sum(), rows.loc[rows["idle"], "cost"].sum()
    recent = rows[rows["time"] >= pd.Timestamp(window.buckets[-1])]["cost"].sum()
    rate = 3600 * recent / window.lasting(window.buckets[-1])
    with st.container(horizontal=True, gap="small"):
        widgets.metric(
            "Spent, US$", formats.number(total), _change(total, None if then is None else then["cost"].sum())
        )
        widgets.metric("Rate at the end, US$/h", formats.number(rate), f"US$ {formats.number(24 * rate)} a day")
        widgets.metric("Idle", formats.percent(idle / total if total else None), f"US$ {formats.number(idle)}")


def _change(now: float, before: float | None) -> str:
    if before is None:
        return "in this range"
    return f"{now / before - 1:+.1%} against {formats.money(before)}" if before else "nothing then"


def _compared(window: Window, rows: pd.DataFrame, before: Window, then: pd.DataFrame) -> None:
    total = series.spending(window, "when", rows.assign(when="this range"))
    past = series.spending(before, "when", then.assign(when=against))
    if past.empty:
        st.info(f"Nothing was spent {'in ' * (against == 'the time before')}{against}.", icon=":material/info:")
        return
    total, past = total[total["time"].isin(rows["time"])], past[past["time"].isin(then["time"])]
    moved = past.assign(time=past["time"] + (window.start - before.start))
    with st.container(border=True):
        st.markdown(f"**Rate** compared with {against}, US$/h")
        charts.draw(pd.concat([total, moved]), charts.lines("rate", "when", unit="US$/h"), "compared", window)


def _table(rows: pd.DataFrame, then: pd.DataFrame | None, window: Window) -> None:
    named = rows.assign(**{by: rows[by].fillna(formats.IDLE)})
    table = named.groupby(by, as_index=False).agg(cost=("cost", "sum"))
    table["share"] = 100 * table["cost"] / table["cost"].sum()
    if "seconds" in named:
        used = named[~named["idle"]].groupby(by)[["busy_seconds", "seconds"]].sum()
        table["busy"] = table[by].map(100 * used["busy_seconds"] / used["seconds"])
    if by in ("app", "variant"):
        traffic = history("answered", window).groupby(by)["items" if by == "app" else "computed"].sum()
        table["items"] = table[by].map(traffic)
        table["cost_per_1000"] = 1e3 * table["cost"] / table["items"].where(table["items"] > 0)
    if then is not None:
        past = then.assign(**{by: then[by].fillna(formats.IDLE)}).groupby(by)["cost"].sum()
        table["before"] = table[by].map(past).fillna(0.0)
        table["change"] = 100 * (table["cost"] / table["before"].where(table["before"] > 0) - 1)
    widgets.table(
        table.sort_values("cost", ascending=False),
        {
            by: by,
            "cost": widgets.number_column("charged US$", "%.4g"),
            "share": st.column_config.ProgressColumn("share", format="%.1f %%", min_value=0, max_value=100),
            "before": widgets.number_column(f"US$, {against}", "%.4g"),
            "change": widgets.number_column("change", "%+.1f %%"),
            "busy": widgets.number_column("busy", "%.2f %%", help="Share of the time in which its instances computed"),
            "items": widgets.number_column("items answered", "localized"),
            "cost_per_1000": widgets.money_column(
                "US$/1,000 with idle",
                table["cost_per_1000"] if "cost_per_1000" in table else table["cost"],
                help="What its instances were charged, with the time in which they were idle, per 1,000 items answered",
            ),
        },
        "table",
    )


show_live(chosen, page)
