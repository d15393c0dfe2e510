"""Rows of the database as series over a window: every bucket there, rates instead of counts. Pure."""

from collections.abc import Sequence

import pandas as pd

from dashboard import formats
from dashboard.store import ask, history
from dashboard.window import Window


def filled(frame: pd.DataFrame, window: Window, by: str, values: Sequence[str]) -> pd.DataFrame:
    """A row for every bucket and every value of `by`, zero where there was none; `lasting`: the seconds of the bucket."""
    if frame.empty:
        return pd.DataFrame(columns=["time", by, *values, "lasting"])
    summed = frame.groupby(["time", by], as_index=False, dropna=False)[list(values)].sum()
    buckets = pd.DatetimeIndex(window.buckets, tz="UTC")
    grid = pd.MultiIndex.from_product([buckets, sorted(summed[by].unique())], names=["time", by])
    full = summed.set_index(["time", by]).reindex(grid, fill_value=0).reset_index()
    lasting = pd.Series({bucket: window.lasting(bucket) for bucket in buckets})
    full["lasting"] = full["time"].map(lasting)
    return full


def first(frame: pd.DataFrame, by: str, value: str, most: int, rest: str) -> pd.DataFrame:
    """The same rows with all but the `most` largest values of `by` under one name, so that a chart can be read."""
    totals = frame.groupby(by)[value].sum().sort_values(ascending=False)
    if len(totals) <= most:
        return frame
    kept = set(totals.index[: most - 1])
    return frame.assign(**{by: frame[by].where(frame[by].isin(kept), rest)})


def spans(
    events: pd.DataFrame,
    now: pd.DataFrame,
    window: Window,
    row: str = "instance",
    dead: Sequence[str] = ("Inactive",),
    after: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Who was in which state from `time` to `until` within the window, and why (`reason`).

    events: `time`, `row`, `from_state`, `to_state`, `reason`; now: `row`, `state` and `since` of what is there now, for what did not
    change in the window; after: `row` and `from_state` of the first changes after the window, which tell of it what `now` cannot.
    Time in the states `dead` is left out.
    """
    start, end = pd.Timestamp(window.start), pd.Timestamp(window.end)
    found: list[tuple[object, ...]] = []
    for name, changes in events.sort_values("time").groupby(row, sort=True):
        since, state, reason = start, str(changes["from_state"].iloc[0]), "as it was before"
        for time, to_state, why in zip(changes["time"], changes["to_state"], changes["reason"], strict=True):
            found.append((name, since, time, state, reason))
            since, state, reason = time, to_state, why
        found.append((name, since, end, state, reason))
    told = set(events[row])
    still = "no change in this time"
    later = {} if after is None else dict(zip(after[row][::-1], after["from_state"][::-1], strict=True))
    found += [(name, start, end, state, still) for name, state in later.items() if name not in told]
    told |= later.keys()
    found += [
        (name, start if pd.isna(since) else max(start, since), end, state, still)
        for name, state, since in zip(now[row], now["state"], now["since"], strict=True)
        if name not in told
    ]
    frame = pd.DataFrame(found, columns=[row, "time", "until", "state", "reason"])
    frame = frame[(frame["until"] > frame["time"]) & ~frame["state"].isin(dead) & (frame["state"] != "None")]
    return frame.sort_values([row, "time"], ignore_index=True)


def newest(bands: pd.DataFrame, row: str, most: int) -> pd.DataFrame:
    """The same bands of at most so many of `row`: those that were there last."""
    last = bands.groupby(row)["until"].max().sort_values(ascending=False, kind="stable")
    return bands[bands[row].isin(last.index[:most])]


# -- What several pages show: answers of the database as series.

ENDINGS = ["queries", "in_time", "late", "refused", "errors"]
_METERED = 20.0  # s; machines account every 10 s, so shorter buckets of money would be full and empty in turn
_HOURS = 2 * 86400.0  # s of range from which money is read by the hour
_MOST = 8  # lines or colours in one chart


def traffic(window: Window) -> pd.DataFrame:
    """By bucket and app: how many online queries ended how, `rate` in queries/s, and `attainment`, absent without queries."""
    rows = history("traffic_long" if window.long else "traffic", window)
    full = filled(first(rows, "app", "queries", _MOST, "other apps"), window, "app", ENDINGS)
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
    named = rows.assign(**{by: rows[by].fillna(formats.NOBODY)})
    full = filled(first(named, by, "cost", _MOST, "others"), window, by, ["cost"])
    if full.empty:
        return full
    return full.assign(rate=3600 * full["cost"] / full["lasting"], sum=full.groupby(by)["cost"].cumsum())


def utilisation(window: Window) -> pd.DataFrame:
    """How busy devices were by bucket; `on`: worker and device, and that it is simulated where it is."""
    rows, devices = history("utilisation", window), ask("devices")
    simulated = {(row.worker, row.device) for row in devices.itertuples() if row.simulated}
    names = [
        formats.simulated(" ".join(each), each in simulated)
        for each in zip(rows["worker"], rows["device"], strict=True)
    ]
    return first(rows.assign(on=names), "on", "utilisation", 10, "others")


# -- Which of several choices nobody would pass over: none of the others is as good in every respect and better in
# one. Pure.

Point = Sequence[float]


def front(points: Sequence[Point]) -> list[bool]:
    """For each point whether it is on the front; smaller is better in every respect. The first of equal points is."""
    order = sorted(range(len(points)), key=lambda i: tuple(points[i]))
    kept: list[int] = []
    for i in order:
        if not any(all(a <= b for a, b in zip(points[j], points[i], strict=True)) for j in kept):
            kept.append(i)
    chosen = set(kept)
    return [i in chosen for i in range(len(points))]
