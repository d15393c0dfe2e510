"""Data for the charts: rows of the database as series over a window, with every bucket and with rates."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from dashboard import formats
from dashboard.store import history, query
from dashboard.window import Window


def filled(frame: pd.DataFrame, window: Window, by: str, values: Sequence[str]) -> pd.DataFrame:
    """One row for each bucket and each value of `by`, with zeros for missing ones. `lasting`: the seconds of the bucket."""
    if frame.empty:
        return pd.DataFrame(columns=["time", by, *values, "lasting"])
    summed = frame.groupby(["time", by], as_index=False, dropna=False)[list(values)].sum()
    buckets = pd.DatetimeIndex(window.buckets, tz="UTC")
    grid = pd.MultiIndex.from_product([buckets, sorted(summed[by].unique())], names=["time", by])
    full = summed.set_index(["time", by]).reindex(grid, fill_value=0).reset_index()
    lasting = pd.Series({bucket: window.lasting(bucket) for bucket in buckets})
    full["lasting"] = full["time"].map(lasting)
    return full


def largest(frame: pd.DataFrame, by: str, value: str, most: int, rest: str) -> pd.DataFrame:
    """The same rows with at most `most` values of `by`: the smaller ones are renamed to `rest`, so that a chart stays readable."""
    totals = frame.groupby(by)[value].sum().sort_values(ascending=False)
    if len(totals) <= most:
        return frame
    kept = set(totals.index[: most - 1])
    return frame.assign(**{by: frame[by].where(frame[by].isin(kept), rest)})


def state_spans(
    events: pd.DataFrame,
    now: pd.DataFrame,
    window: Window,
    row: str = "instance",
    dead: Sequence[str] = ("Inactive",),
    after: pd.DataFrame | None = None,
    heard: pd.Series | None = None,
) -> pd.DataFrame:
    """The state of each `row` within the window: `time`, `until`, `state`, and the `reason` of the change.

    events: `time`, `row`, `from_state`, `to_state`, `reason` of the changes in the window. now: `row`, `state` and `since` of what exists
    now; it covers rows without a change. after: `row` and `from_state` of the first changes after the window; it covers rows that have
    changed since. heard: the last words of each row; one that is not there now, as it was killed, ends with them. Time in the states `dead` is
    left out.
    """
    start, end = pd.Timestamp(window.start), pd.Timestamp(window.end)
    found: list[tuple[object, ...]] = []
    for name, changes in events.sort_values("time").groupby(row, sort=True):
        since, state, reason = start, str(changes["from_state"].iloc[0]), "as it was before"
        for time, to_state, why in zip(changes["time"], changes["to_state"], changes["reason"], strict=True):
            found.append((name, since, time, state, reason))
            since, state, reason = time, to_state, why
        last = end if heard is None or name in set(now[row]) else max(since, min(end, heard.get(name, since)))
        found.append((name, since, last, state, reason))
    covered = set(events[row])
    still = "no change in this time"
    later = {} if after is None else dict(zip(after[row][::-1], after["from_state"][::-1], strict=True))
    found += [(name, start, end, state, still) for name, state in later.items() if name not in covered]
    covered |= later.keys()
    found += [
        (name, start if pd.isna(since) else max(start, since), end, state, still)
        for name, state, since in zip(now[row], now["state"], now["since"], strict=True)
        if name not in covered
    ]
    frame = pd.DataFrame(found, columns=[row, "time", "until", "state", "reason"])
    frame = frame[(frame["until"] > frame["time"]) & ~frame["state"].isin(dead) & (frame["state"] != "None")]
    return frame.sort_values([row, "time"], ignore_index=True)


def newest(bands: pd.DataFrame, row: str, most: int) -> pd.DataFrame:
    """The same spans for at most `most` values of `row`: those that existed last."""
    last = bands.groupby(row)["until"].max().sort_values(ascending=False, kind="stable")
    return bands[bands[row].isin(last.index[:most])]


def with_gaps(frame: pd.DataFrame, by: str, value: str, longest: float) -> pd.DataFrame:
    """The same rows, and one without a value wherever two values of a line are more than `longest` seconds apart, so that the line is broken.

    `alone`: whether it is one of at most two values between gaps, which a line hardly shows.
    """
    rows = frame.dropna(subset=[by]).sort_values([by, "time"], ignore_index=True)
    if rows.empty:
        return rows.assign(alone=False)
    names, times, known = rows[by].to_numpy(), rows["time"].to_numpy(), rows[value].notna().to_numpy()
    same = names[1:] == names[:-1]
    apart = same & ((times[1:] - times[:-1]) / np.timedelta64(1, "s") > longest)
    piece = np.concatenate([[0], np.cumsum(apart | ~same | (known[1:] != known[:-1]))])
    rows["alone"] = known & (np.bincount(piece)[piece] <= 2)
    gaps = rows[np.append(apart, False)]
    if gaps.empty:
        return rows
    gaps = gaps.assign(time=gaps["time"] + pd.Timedelta(seconds=longest / 2), **{value: math.nan, "alone": False})
    return pd.concat([rows, gaps]).sort_values([by, "time"], ignore_index=True)


ENDINGS = ["queries", "in_time", "late", "refused", "errors"]
SAMPLED_S, OBJECTIVES_S = 2.0, 10.0  # how often workers report, and how often the autoscaler notes what it expects
_COST_STEP_S = 20.0  # machines are charged every 10 s, so in shorter buckets the cost would jump up and down
_HOURLY_FROM_S = 2 * 86400.0  # for longer windows, the hourly costs are read
_MAX_SERIES = 8  # in one chart


def traffic(window: Window) -> pd.DataFrame:
    """By bucket and app: online queries by outcome, `rate` in queries/s, and `attainment` (NaN without queries)."""
    rows = history("traffic_long" if window.long else "traffic", window)
    full = filled(largest(rows, "app", "queries", _MAX_SERIES, "other apps"), window, "app", ENDINGS)
    if full.empty:
        return full
    return full.assign(
        rate=full["queries"] / full["lasting"],
        attainment=(full["in_time"] / full["queries"]).where(full["queries"] > 0),
    )


def percentiles(rows: pd.DataFrame) -> pd.DataFrame:
    """Latencies of an app as lines, for `charts.percentiles`: `time`, `what` and `ms`."""
    what = {"p50_ms": "p50", "p95_ms": "p95", "p99_ms": "p99", "slo_ms": "objective"}
    return rows.rename(columns=what).melt(["time"], list(what.values()), "what", "ms").dropna()


def objectives(window: Window) -> pd.DataFrame:
    """By app: `slo_target`, `accuracy_mean`, `worth`, the share `reached` in the window (NaN without queries), its `queries`, and what was last expected of it."""
    rows = history("traffic_long" if window.long else "traffic", window)
    ended = rows.groupby("app", as_index=False)[["queries", "in_time"]].sum()
    known = query("apps")[["app", "slo_target", "accuracy_mean", "worth"]]
    every = known.merge(ended, on="app", how="left").merge(history("objectives", window), on="app", how="left")
    return every.assign(reached=every["in_time"] / every["queries"])


def budgets(window: Window) -> tuple[pd.DataFrame, pd.DataFrame]:
    """How much of what apps may miss by their targets is left, as (by app, by bucket and app).

    By app: `allowed` misses in the window, `missed`, the share `left` (below 0: too many), and `burn`: misses of the last twelfth of the window
    over those allowed there; 1 uses the budget up exactly. By bucket: `left` so far.
    """
    rows = history("traffic_long" if window.long else "traffic", window)
    targets = query("apps").set_index("app")["slo_target"].astype(float)
    rows = rows[rows["app"].isin(targets.index)].astype({"queries": float, "in_time": float})  # also if there are none
    rows = rows.assign(
        missed=rows["queries"] - rows["in_time"], allowed=rows["queries"] * (1 - rows["app"].map(targets))
    )
    total = rows.groupby("app")[["missed", "allowed"]].sum()
    total = total[total["allowed"] > 0]
    recent = rows[rows["time"] >= pd.Timestamp(window.end) - pd.Timedelta(seconds=max(60.0, window.seconds / 12))]
    late = recent.groupby("app")[["missed", "allowed"]].sum()
    burn = late["missed"] / late["allowed"].where(late["allowed"] > 0)
    by_app = total.assign(left=1 - total["missed"] / total["allowed"], burn=burn).reset_index()
    so_far = rows.groupby("app")["missed"].cumsum() / rows["app"].map(total["allowed"])
    start = pd.DataFrame({"time": pd.Timestamp(window.start), "app": total.index, "left": 1.0})
    return by_app, pd.concat([start, rows.assign(left=1 - so_far)[["time", "app", "left"]].dropna()], ignore_index=True)


_MOST_MARKS = 80  # on one chart
_MOST_TOLD = 3  # actions in one mark


def marks(window: Window, app: str | None = None) -> pd.DataFrame:
    """What was deployed and scaled in the window: `time`, `kind`, and `mark`, which tells what and why. Near ones are one mark.

    app: its own marks, and those of the whole system; None: all.
    """
    rows = history("marks", window)
    if app is not None:
        rows = rows[(rows["app"] == app) | rows["app"].isna()]
    width = max(1.0, window.seconds / _MOST_MARKS)
    near: dict[tuple[str, int], tuple[pd.Timestamp, dict[str, None]]] = {}
    for time, kind, what in zip(rows["time"][::-1], rows["kind"][::-1], rows["what"][::-1], strict=True):
        near.setdefault((kind, int(time.timestamp() // width)), (time, {}))[1][what] = None
    found = []
    for (kind, _), (time, told) in near.items():
        more = [f"and {len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else []
        found.append((time, kind, "; ".join([*list(told)[:_MOST_TOLD], *more])))
    frame = pd.DataFrame(found, columns=["time", "kind", "mark"])
    return frame.assign(time=pd.to_datetime(frame["time"], utc=True))


def spent(window: Window) -> tuple[Window, pd.DataFrame]:
    """The cost by bucket, app, model, variant and hardware, and the window with the coarser buckets of the cost."""
    coarse = window.at_least(3600.0 if window.seconds > _HOURLY_FROM_S else _COST_STEP_S).whole(5.0)
    rows = history("cost_long" if coarse.step >= 3600.0 else "cost", coarse)
    rows["simulated"] = rows["simulated"].astype(bool)
    return coarse, rows


def spending(window: Window, by: str, rows: pd.DataFrame) -> pd.DataFrame:
    """These rows by bucket and the column `by`, with `rate` in US$/h and the running `sum`. Idle machines get the name IDLE."""
    named = rows.assign(**{by: rows[by].fillna(formats.IDLE)})
    full = filled(largest(named, by, "cost", _MAX_SERIES, "others"), window, by, ["cost"])
    if full.empty:
        return full
    return full.assign(rate=3600 * full["cost"] / full["lasting"], sum=full.groupby(by)["cost"].cumsum())


def utilisation(window: Window) -> pd.DataFrame:
    """Utilisation of the devices by bucket. `on`: worker and device, marked if it is simulated."""
    rows, devices = history("utilisation", window), query("devices")
    simulated = {(row.worker, row.device) for row in devices.itertuples() if row.simulated}
    names = [
        formats.mark_simulated(" ".join(each), each in simulated)
        for each in zip(rows["worker"], rows["device"], strict=True)
    ]
    return largest(rows.assign(on=names), "on", "utilisation", 10, "others")


Point = Sequence[float]


def front(points: Sequence[Point]) -> list[bool]:
    """For each point, whether it is on the Pareto front: no other point is as small in all coordinates. Of equal points, the first is."""
    order = sorted(range(len(points)), key=lambda i: tuple(points[i]))
    kept: list[int] = []
    for i in order:
        if not any(all(a <= b for a, b in zip(points[j], points[i], strict=True)) for j in kept):
            kept.append(i)
    chosen = set(kept)
    return [i in chosen for i in range(len(points))]
