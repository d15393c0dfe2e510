"""Which part of the past is shown, in which buckets."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.window import LAG, RANGES, between, latest

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


def test_who_asks_within_one_refresh_asks_the_same() -> None:
    asked = {latest("15m", NOW + timedelta(milliseconds=100 * i)) for i in range(100)}
    assert len(asked) <= 3


def test_what_is_unknown_is_the_default() -> None:
    assert latest("a year or two", NOW) == latest("15m", NOW)


def test_the_period_before_ends_where_this_begins() -> None:
    window = latest("1d", NOW)
    assert window.previous.end == window.start
    assert window.previous.seconds == window.seconds
