"""The leader's view of demand: rates of classes over all dispatchers, burstiness, what was reached, and the headroom that follows."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.scaling import ClassDemand, DemandHistory, DemandReport
from services.autoscaler.demand import (
    AIM,
    FORGET_S,
    LEAST,
    MOST,
    REACHED_S,
    SILENT_S,
    DemandForecast,
    ForecastLoad,
    margin_factor,
)

NOW = 1_000_000.0
PERIOD = 0.5


def report(
    items: int, now: float, name: str = "d0", app: str = "app", served: tuple[int, int] | None = None, **more: object
) -> DemandReport:
    rows = [ClassDemand(app, "*", items, latency_ms=200.0, **more)] if items else []  # type: ignore[arg-type]
    return DemandReport(
        dispatcher=name, at=now, seconds=PERIOD, rows=rows, served={} if served is None else {app: served}
    )


def fed(
    counts: Iterator[int] | list[int], forecast: DemandForecast | None = None, start: float = NOW
) -> DemandForecast:
    forecast, now = forecast or DemandForecast("combined"), start
    for count in counts:
        now += PERIOD
        forecast.take(report(count, now), now)
        forecast.tick(now)
    return forecast


def only(forecast: DemandForecast) -> ForecastLoad:
    [load] = forecast.loads()
    return load


def arrivals(gap: Callable[[], float], seconds: float) -> list[int]:
    """Items of each report."""
    counts, at = [0] * round(seconds / PERIOD), gap()
    while at < seconds:
        counts[int(at / PERIOD)] += 1
        at += gap()
    return counts


# -- burstiness


@pytest.mark.parametrize("rate", [4.0, 40.0, 400.0])
def test_poisson_arrivals_have_a_peakedness_of_about_one(rate: float) -> None:
    luck = random.Random(3)
    found = [only(fed(arrivals(lambda: luck.expovariate(rate), 120.0))).peakedness for _ in range(5)]
    assert 0.75 <= sum(found) / len(found) <= 1.4
    assert max(found) < 2.0


def test_bursts_have_a_far_larger_one() -> None:
    """Gamma with a coefficient of variation of 4: 16 in the long run, less within a report."""
    luck = random.Random(4)
    shape, rate = 1 / 16, 40.0
    found = [
        only(fed(arrivals(lambda: luck.gammavariate(shape, 1 / (shape * rate)), 120.0))).peakedness for _ in range(5)
    ]
    assert min(found) > 4.0
    assert max(found) < 40.0


def test_steps_slopes_and_even_arrivals_are_no_bursts() -> None:
    assert only(fed([5] * 60 + [100] * 4)).peakedness <= 3.0
    assert only(fed([n // 4 for n in range(400)])).peakedness <= 1.0
    assert only(fed([20] * 200)).peakedness < 0.5


# -- rates


def test_the_rate_is_of_all_dispatchers_and_of_what_nobody_took() -> None:
    forecast, now = DemandForecast("combined"), NOW
    for _ in range(30):
        now += PERIOD
        forecast.take(report(10, now, "d0"), now)
        forecast.take(report(5, now, "d1", refused=5), now)
        forecast.tick(now)
    assert only(forecast).rate == pytest.approx(40.0)
    assert only(forecast).needs.app == "app"


def test_a_dispatcher_that_falls_silent_does_not_count_any_more() -> None:
    forecast, now = DemandForecast("combined"), NOW
    for n in range(60):
        now += PERIOD
        forecast.take(report(10, now, "d0"), now)
        if n < 30:
            forecast.take(report(10, now, "d1"), now)
        forecast.tick(now)
        if n == 29:
            assert only(forecast).rate == pytest.approx(40.0)
    assert SILENT_S < 15.0
    assert only(forecast).rate == pytest.approx(20.0)


def test_classes_are_told_apart_and_forgotten_when_they_are_long_silent() -> None:
    forecast, now = fed([10] * 20), NOW + 10.0
    forecast.take(report(3, now, app="other", served=(3, 0)), now)
    assert sorted(load.needs.app for load in forecast.loads()) == ["app", "other"]
    assert forecast.unknown(now) == ["app", "other"]
    forecast.remember(DemandHistory(app="other", start=NOW - 60.0, items=[5.0]))
    while now < NOW + 10.0 + FORGET_S + 2.0:
        now += 1.0
        forecast.take(report(0, now), now)
        forecast.tick(now)
    assert (forecast.loads(), forecast.reached, forecast._histories, forecast._asked) == ([], {}, {}, {})
    forecast.take(report(3, now, app="other"), now)
    assert forecast.unknown(now) == ["other"], "it has a newer history by now"


def test_a_step_is_a_surge_before_the_mean_shows_it_and_chance_is_none() -> None:
    forecast = fed([10] * 40)
    [(_, calm)] = forecast.surges()
    assert calm < 20.0
    forecast.take(report(100, NOW + 20.5), NOW + 20.5)
    [(_, surge)] = forecast.surges()
    assert 100.0 < surge <= 200.0
    assert only(forecast).rate == pytest.approx(20.0)  # no tick yet


def test_as_much_again_is_expected_of_a_load_that_rises_and_chance_is_no_rise() -> None:
    luck = random.Random(5)
    forecast = fed(arrivals(lambda: luck.expovariate(50.0), 120.0))
    calm = only(forecast)
    assert calm.rise == 0.0
    fed([35, 45, 55, 65, 75, 85], forecast, NOW + 120.0)
    load = only(forecast)
    assert load.point(8.0) >= load.rate > 1.5 * calm.rate
    assert load.peak(8.0, 0.9) > 1.4 * load.rate
    fed([85] * 20, forecast, NOW + 123.0)
    assert only(forecast).rise == 0.0


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_report_of_no_time_counts_for_what_was_served_alone(seconds: float) -> None:
    forecast = DemandForecast("combined")
    row = ClassDemand("app", "*", 5)
    forecast.take(DemandReport(dispatcher="d0", at=NOW, seconds=seconds, rows=[row], served={"app": (4, 1)}), NOW)
    assert forecast.loads() == []
    assert forecast.reached["app"].share == 0.75


# -- what is reached


def test_the_share_that_was_in_time_is_of_the_last_minutes() -> None:
    forecast = DemandForecast("combined")
    assert forecast.reached == {}
    forecast.take(report(0, NOW, served=(0, 0)), NOW)
    assert forecast.reached["app"].share is None
    for name, served in (("d0", (60, 3)), ("d1", (40, 1))):
        forecast.take(report(0, NOW, name, served=served), NOW)
    assert forecast.reached["app"].share == pytest.approx(0.96)
    later = NOW + REACHED_S + 1.0
    forecast.take(report(0, later, served=(10, 0)), later)
    assert forecast.reached["app"].share == 1.0
    assert (forecast.reached["app"].ended, forecast.reached["app"].missed) == (10, 0)


def test_demand_is_remembered_for_minutes_and_bounds_the_margin() -> None:
    forecast = fed([50] * 60)
    assert max(only(forecast).past) == pytest.approx(100.0)
    fed([5] * 120, forecast, NOW + 30)
    assert (only(forecast).past[-1], max(only(forecast).past)) == (pytest.approx(10.0), pytest.approx(100.0))
    fed([5] * 500, forecast, NOW + 90)
    assert max(only(forecast).past) == pytest.approx(10.0)
    never, always = ([margin_factor(0.99, n, share * n) for n in (0, 10, 1000, 100_000)] for share in (0, 1))
    assert all(a > b for a, b in pairwise(never))
    assert all(a <= b for a, b in pairwise(always))
    assert (never[-1], always[-1]) == (LEAST, MOST)


# -- headroom

TARGETS = st.floats(0.5, 0.9999)
COUNTS = st.integers(0, 10**6)


@given(TARGETS, COUNTS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_the_factor_has_bounds_and_grows_with_what_is_missed(target: float, ended: int, a: float, b: float) -> None:
    fewer, more = sorted((round(a * ended), round(b * ended)))
    assert LEAST <= margin_factor(target, ended, fewer) <= margin_factor(target, ended, more) <= MOST


@given(COUNTS, st.floats(0.0, 0.2), TARGETS, TARGETS)
def test_a_stricter_target_never_wants_less(ended: int, part: float, a: float, b: float) -> None:
    loose, strict = sorted((a, b))
    missed = round(part * ended)
    assert margin_factor(strict, ended, missed) >= margin_factor(loose, ended, missed) - 1e-9


@given(TARGETS)
def test_it_is_one_while_nothing_is_known_and_while_as_many_miss_as_are_aimed_at(target: float) -> None:
    assert margin_factor(target, 0, 0) == pytest.approx(1.0)
    assert margin_factor(target, 10**8, round(10**8 * AIM * (1 - target))) == pytest.approx(1.0, rel=0.01)
