"""Rows of the database as series over a window: every bucket there, rates instead of counts. Pure."""

from collections.abc import Sequence

import pandas as pd

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
