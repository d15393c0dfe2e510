"""What several pages show: answers of the database as series."""

import pandas as pd
import streamlit as st

from dashboard import series, words
from dashboard.store import ask, history
from dashboard.window import Window

ENDINGS = ["queries", "in_time", "late", "refused", "errors"]
_METERED = 20.0  # s; machines account every 10 s, so shorter buckets of money would be full and empty in turn
_HOURS = 2 * 86400.0  # s of range from which money is read by the hour
_MOST = 8  # lines or colours in one chart


def traffic(window: Window) -> pd.DataFrame:
    """By bucket and app: how many online queries ended how, `rate` in queries/s, and `attainment`, absent without queries."""
    rows = history("traffic_long" if window.long else "traffic", window)
    full = series.filled(series.first(rows, "app", "queries", _MOST, "other apps"), window, "app", ENDINGS)
    if full.empty:
        return full
    return full.assign(
        rate=full["queries"] / full["lasting"],
        attainment=(full["in_time"] / full["queries"]).where(full["queries"] > 0),
    )


def spent(window: Window) -> tuple[Window, pd.DataFrame]:
    """What was spent, by bucket, app, model, variant and hardware, and in which buckets: money comes in coarser ones."""
    coarse = window.at_least(3600.0 if window.seconds > _HOURS else _METERED).whole(5.0)
    rows = history("cost_long" if coarse.step >= 3600.0 else "cost", coarse)
    rows["simulated"] = rows["simulated"].astype(bool)
    return coarse, rows


def spending(window: Window, by: str, rows: pd.DataFrame) -> pd.DataFrame:
    """These rows by bucket and one of their columns, with `rate` in US$/h and `sum` so far; idle parts have a name of their own."""
    named = rows.assign(**{by: rows[by].fillna(words.NOBODY)})
    full = series.filled(series.first(named, by, "cost", _MOST, "others"), window, by, ["cost"])
    if full.empty:
        return full
    return full.assign(rate=3600 * full["cost"] / full["lasting"], sum=full.groupby(by)["cost"].cumsum())


def utilisation(window: Window) -> pd.DataFrame:
    """How busy devices were by bucket; `on`: worker and device, and that it is simulated where it is."""
    rows, devices = history("utilisation", window), ask("devices")
    simulated = {(row.worker, row.device) for row in devices.itertuples() if row.simulated}
    names = [
        words.simulated(" ".join(each), each in simulated) for each in zip(rows["worker"], rows["device"], strict=True)
    ]
    return series.first(rows.assign(on=names), "on", "utilisation", 10, "others")


def metric(label: str, value: str, told: str, *, help: str | None = None, bad: bool = False) -> None:
    """One figure in a row of them. told: a few words below it; bad: in red."""
    st.metric(
        label,
        value,
        told,
        delta_color="inverse" if bad else "off",
        delta_arrow="off",
        border=True,
        help=help,
        height="stretch",
    )
