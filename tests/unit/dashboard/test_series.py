"""Rows as series: nothing is missing, nothing is made up."""

from datetime import UTC, datetime, timedelta

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import accuracy_of
from dashboard import formats
from dashboard.series import filled, front, largest, newest, state_spans, with_gaps
from dashboard.window import LAG, RANGES, Window, between, latest

START = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW = Window(START, datetime(2026, 1, 1, 0, 1, 15, tzinfo=UTC), 30.0)


def at(second: float) -> pd.Timestamp:
    return pd.Timestamp(START) + pd.Timedelta(seconds=second)


def test_buckets_without_rows_are_zero_for_everybody() -> None:
    rows = pd.DataFrame({"time": [at(30), at(60)], "app": ["a", "b"], "queries": [3, 4]})
    full = filled(rows, WINDOW, "app", ["queries"])
    found = {
        (app, (time - at(0)).total_seconds()): n for time, app, n in zip(full.time, full.app, full.queries, strict=True)
    }
    assert found == {("a", 0): 0, ("a", 30): 3, ("a", 60): 0, ("b", 0): 0, ("b", 30): 0, ("b", 60): 4}
    assert full.drop_duplicates("time")["lasting"].tolist() == [30, 30, 15]


def test_few_series_are_the_newest_the_largest_and_none_of_none() -> None:
    assert filled(pd.DataFrame(columns=["time", "app", "queries"]), WINDOW, "app", ["queries"]).empty
    rows = pd.DataFrame({"app": list("abcd"), "queries": [1, 9, 8, 2]})
    assert largest(rows, "app", "queries", 3, "others")["app"].tolist() == ["others", "b", "c", "others"]
    assert largest(rows, "app", "queries", 4, "others") is rows
    names, ends = ["a", "b", "a", "c", "d"], [1, 9, 5, 2, 9]
    bands = pd.DataFrame({"instance": names, "until": pd.to_datetime(ends, unit="s", utc=True)})
    assert newest(bands, "instance", 3)["instance"].tolist() == ["a", "b", "a", "d"]
    assert newest(bands, "instance", 9).equals(bands)
    assert front([(1, 5), (2, 2), (3, 3), (5, 1), (2, 2)]) == [True, True, False, True, False]
    assert front([]) == []


def test_lines_are_broken_where_nothing_was_measured_and_lonely_values_are_marked() -> None:
    nan = float("nan")
    rows = pd.DataFrame(
        [
            (at(0), "a", 1.0),
            (at(5), "a", 2.0),
            (at(60), "a", 3.0),
            (at(65), "a", nan),
            (at(70), "a", 4.0),
            (at(5), "b", 5.0),
        ],
        columns=["time", "what", "ms"],
    )
    shown = with_gaps(rows, "what", "ms", 8.0)
    assert shown.loc[shown["what"] == "a", "ms"].isna().tolist() == [False, False, True, False, True, False]
    assert at(5) < shown["time"][2] < at(60)
    assert shown.loc[shown["alone"], "ms"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert with_gaps(rows[:3], "what", "ms", 80.0)["alone"].tolist() == [False] * 3


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from("ab")), unique=True, max_size=30), st.integers(1, 60))
def test_no_value_is_lost_or_made_up_and_no_line_crosses_a_gap(points: list[tuple[int, str]], longest: int) -> None:
    rows = pd.DataFrame(
        {"time": pd.to_datetime([at(t) for t, _ in points], utc=True), "what": [w for _, w in points], "ms": 1.0}
    )
    shown = with_gaps(rows, "what", "ms", longest)
    assert len(shown.dropna(subset=["ms"])) == len(points)
    for _, line in shown.groupby("what"):
        both = line["ms"].notna() & line["ms"].shift().notna()
        assert (line["time"].diff()[both].dt.total_seconds() <= longest).all()


def test_states_last_until_the_next_and_begin_before_the_window() -> None:
    events = pd.DataFrame(
        [
            (at(20), "i", "Active", "Overloaded", "too much"),
            (at(50), "i", "Overloaded", "Inactive", "evicted"),
            (at(10), "j", "Inactive", "Loading", "wanted"),
        ],
        columns=["time", "instance", "from_state", "to_state", "reason"],
    )
    names = ["j", "k", "new", "later", "changed"]
    since = [at(10), at(-500), at(60), at(76), at(80)]
    now = pd.DataFrame({"instance": names, "state": ["Loading", *["Active"] * 4], "since": since})
    after = pd.DataFrame({"instance": ["changed", "gone", "changed"], "from_state": ["Overloaded", "Active", "Active"]})
    bands = state_spans(events, now, WINDOW, after=after)
    assert list(bands[["instance", "time", "until", "state"]].itertuples(index=False, name=None)) == [
        ("changed", at(0), at(75), "Overloaded"),
        ("gone", at(0), at(75), "Active"),
        ("i", at(0), at(20), "Active"),
        ("i", at(20), at(50), "Overloaded"),
        ("j", at(10), at(75), "Loading"),
        ("k", at(0), at(75), "Active"),
        ("new", at(60), at(75), "Active"),
    ]
    assert bands["reason"].tolist()[3] == "too much"
    killed = state_spans(events, now[1:], WINDOW, after=after, heard=pd.Series({"j": at(30)}))
    assert killed.set_index("instance").loc["j", "until"] == at(30)  # it said nothing any more


# -- What nobody would pass over.

points = st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=30)


@given(points)
def test_it_beats_everything_else_and_nothing_in_it_is_beaten(found: list[tuple[int, ...]]) -> None:
    kept = front(found)
    best = [point for point, on in zip(found, kept, strict=True) if on]
    assert len(set(best)) == len(best)
    for point, on in zip(found, kept, strict=True):
        beaten = any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in best)
        assert beaten is (not on and point not in best)


# -- Accuracies in the words of those who measured.


def test_an_accuracy_is_told_in_its_metric() -> None:
    assert (formats.quality(0.97, "top1"), formats.quality(None, "mae")) == ("0.97", formats.UNKNOWN)
    assert formats.quality(accuracy_of(43.2, "mae"), "mae", "EUR") == "mae 43.2 EUR"
    assert (formats.measure("top1", "EUR")[0], formats.measure("mae", "EUR")[0]) == ("accuracy", "mae, EUR")
    assert formats.interval(accuracy_of(50, "mae"), accuracy_of(40, "mae"), "mae") == "40..50"
    assert formats.interval(0.9, 0.95, "top1") == "0.900..0.950"


# -- Which part of the past is shown, in which buckets.
NOW = datetime(2026, 3, 29, 0, 59, 58, 250_000, UTC)
moments = st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC))


@pytest.mark.parametrize("choice", RANGES)
def test_a_range_is_shown_whole_and_up_to_now(choice: str) -> None:
    window = latest(choice, NOW)
    assert NOW - window.end >= timedelta(seconds=LAG)
    assert NOW - window.end <= timedelta(seconds=LAG + max(60, window.refresh))
    assert window.seconds >= RANGES[choice]


@given(st.sampled_from(list(RANGES)), moments)
def test_there_are_never_more_than_500_buckets_and_they_cover_the_window(choice: str, now: datetime) -> None:
    window = latest(choice, now)
    assert 50 <= len(window.buckets) <= 500
    assert window.buckets[0] == window.start
    assert window.end - timedelta(seconds=window.step) <= window.buckets[-1] < window.end
    assert sum(map(window.lasting, window.buckets)) == pytest.approx(window.seconds)


@given(moments, moments)
def test_any_two_moments_make_a_window(one: datetime, other: datetime) -> None:
    window = between(one, other)
    assert window == between(other, one)
    assert len(window.buckets) <= 500
    assert window.refresh == 0.0


def test_ranges_are_shared_within_a_refresh_and_unknown_ones_the_default() -> None:
    assert len({latest("15m", NOW + timedelta(milliseconds=100 * i)) for i in range(100)}) <= 3
    assert latest("a year or two", NOW) == latest("15m", NOW)
    window = latest("1d", NOW)
    assert window.previous.end == window.start
    assert window.previous.seconds == window.seconds
