"""All forecasters: bounds that hold for any input, and what the names in the settings stand for."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.scaling import DemandHistory
from services.core.forecast.conformal import DAY, FADE, MOST, PRIOR, Forecaster
from services.core.forecast.forecasters import FORECASTERS, make_forecaster, rates
from services.core.settings.scaling import FORECASTERS as NAMES

SHARES = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0, math.nan)
AHEAD = (-1.0, 0.0, 0.5, 1.0, 3.7, 30.0, 120.0, 1e9, math.inf, math.nan)
SOME = st.floats(allow_nan=True, allow_infinity=True)
RATES = st.one_of(SOME, st.floats(0, 1e4))


def bounds(forecaster: Forecaster) -> None:
    for ahead in AHEAD:
        found = [forecaster.point(ahead)]
        for kind in (forecaster.quantile, forecaster.peak):
            rates = [kind(ahead, share) for share in SHARES]
            assert rates[:-1] == sorted(rates[:-1])
            found += rates
        assert all(math.isfinite(rate) and rate >= 0.0 for rate in found)
    for share in (0.5, 0.9, 0.999):
        peaks = [forecaster.peak(ahead, share) for ahead in (1.0, 1.5, 2.0, 5.0, 40.0, 128.0)]
        assert peaks == sorted(peaks)


def test_settings_name_every_forecaster_and_no_other() -> None:
    assert sorted(NAMES) == sorted(FORECASTERS)
    for name in NAMES:
        assert make_forecaster(name).name == name
    with pytest.raises(ValueError, match="there is no forecaster 'arima'; there are: combined"):
        make_forecaster("arima")
    with pytest.raises(ValueError, match="above 0 s, not 0 and"):
        make_forecaster("last", 0.0)


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(st.tuples(SOME, RATES), max_size=20), st.lists(st.tuples(SOME, RATES), max_size=5))
def test_no_input_does_harm(name: str, observed: list[tuple[float, float]], history: list[tuple[float, float]]) -> None:
    forecaster = make_forecaster(name)
    forecaster.seed(history, 1e9)
    for at, rate in observed:
        forecaster.observe(at, rate)
    bounds(forecaster)


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(st.tuples(st.floats(-200, 200), st.floats(0, 1e4)), max_size=150))
def test_clocks_that_jump_do_no_harm(name: str, observed: list[tuple[float, float]]) -> None:
    forecaster = make_forecaster(name)
    at = 1.7e9
    for step, rate in observed:
        at += step if abs(step) > 100 else 1.0
        forecaster.observe(at, rate)
    bounds(forecaster)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rate", [0.0, 1.0, 100.0, MOST])
def test_a_constant_rate_is_expected_to_stay_ever_more_surely(name: str, rate: float) -> None:
    forecaster = make_forecaster(name)
    peaks = []
    for second in range(PRIOR * FADE + 1):
        forecaster.observe(1000.0 + second, rate)
        if second in (30, 300, 1000):
            bounds(forecaster)
            assert forecaster.point(100.0) == pytest.approx(rate)
            peaks.append(forecaster.peak(30.0, 0.99))
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] > rate
    assert forecaster.peak(30.0, 0.99) == pytest.approx(rate)
    assert forecaster.quantile(30.0, 0.99) == pytest.approx(rate)


@pytest.mark.parametrize("name", NAMES)
def test_one_observation_gives_cautious_quantiles(name: str) -> None:
    forecaster = make_forecaster(name)
    forecaster.observe(1000.0, 100.0)
    assert forecaster.point(10.0) == pytest.approx(100.0)
    assert 110.0 < forecaster.quantile(10.0, 0.9) < forecaster.peak(10.0, 0.99) < 1000.0


# -- What forecasts are worth: quantiles hold their probability, follow a flash crowd, forget it, and earlier days help.
BEGIN = 1.7e9 // DAY * DAY


def fed(forecaster: Forecaster, rates: Iterable[float], begin: float = BEGIN) -> float:
    """The forecaster after these rates, one a second; returns the time."""
    at = begin
    for rate in rates:
        at += 1.0
        forecaster.observe(at, float(rate))
    return at


def poisson(mean: float, seconds: int, seed: int = 1) -> list[float]:
    return [float(count) for count in np.random.default_rng(seed).poisson(mean, seconds)]


def loss(came: float, asked: float, share: float) -> float:
    return max(share * (came - asked), (share - 1.0) * (came - asked))


@pytest.mark.parametrize(
    "mean", [pytest.param(0.5, marks=pytest.mark.slow), pytest.param(5.0, marks=pytest.mark.slow), 200.0]
)
@pytest.mark.parametrize("name", NAMES)
def test_quantiles_of_a_steady_load_hold_their_probability(name: str, mean: float) -> None:
    forecaster = make_forecaster(name)
    counts = poisson(mean, 6000)
    within = {(kind, share): 0 for kind in ("quantile", "peak") for share in (0.9, 0.99)}
    asked = 0
    for second, count in enumerate(counts[:-5]):
        forecaster.observe(BEGIN + second, count)
        if second >= 3000 and second % 5 == 0:
            asked += 1
            came = {"quantile": counts[second + 5], "peak": max(counts[second + 1 : second + 6])}
            for kind, share in within:
                within[kind, share] += came[kind] <= getattr(forecaster, kind)(5.0, share)
    for (_, share), count in within.items():
        assert count / asked > share - 0.03
        if mean > 100.0:  # small counts have few values: what covers 0.9 may cover 0.97
            assert count / asked < share + 0.03


def test_combined_loses_less_than_the_last_value() -> None:
    counts = poisson(60.0, 1200)
    losses = {}
    for name in ("combined", "last"):
        forecaster = make_forecaster(name)
        losses[name] = 0.0
        for second, count in enumerate(counts[:-10]):
            forecaster.observe(BEGIN + second, count)
            if second > 300:
                losses[name] += loss(max(counts[second + 1 : second + 11]), forecaster.peak(10.0, 0.99), 0.99)
    assert losses["combined"] < 0.85 * losses["last"]


def test_steps_are_followed_within_seconds_and_crowds_forgotten_within_half_an_hour() -> None:
    forecaster = make_forecaster()
    at = fed(forecaster, poisson(10.0, 600))
    assert forecaster.peak(5.0, 0.99) < 40.0
    at = fed(forecaster, poisson(200.0, 2), at)
    assert forecaster.peak(5.0, 0.99) > 200.0
    fed(forecaster, poisson(200.0, 20), at)
    assert forecaster.point(5.0) == pytest.approx(200.0, rel=0.1)
    assert forecaster.peak(5.0, 0.9) < 1.5 * 200.0
    assert forecaster.peak(30.0, 0.99) < 3.0 * 200.0  # another such step, not another factor of 20
    forecaster = make_forecaster()
    at = fed(forecaster, poisson(50.0, 3000))
    calm = forecaster.peak(30.0, 0.99)
    at = fed(forecaster, poisson(400.0, 20), at)
    at = fed(forecaster, poisson(50.0, 120, seed=2), at)
    assert forecaster.peak(30.0, 0.99) > 2.0 * calm
    fed(forecaster, poisson(50.0, 2000, seed=3), at)
    assert forecaster.peak(30.0, 0.99) < 1.2 * calm


def test_drifts_and_earlier_days_are_followed() -> None:
    forecaster = make_forecaster("trend")
    fed(forecaster, [20.0 + 0.5 * second for second in range(600)])
    assert 320.0 + 5.0 < forecaster.point(60.0) < 320.0 + 30.0
    forecaster = make_forecaster("seasonal-naive", day_s=1440.0)
    at = fed(forecaster, [100.0 if 700 <= second < 760 else 20.0 for second in range(1440)], 1440.0 * 1000)
    fed(forecaster, [20.0] * 690, at)
    assert forecaster.point(30.0) == pytest.approx(100.0)
    assert forecaster.point(5.0) == pytest.approx(20.0)


def day(at: float) -> float:
    """A load that is 20/s, and 100/s from noon to one."""
    return 100.0 if 0.5 * DAY <= at % DAY < 0.5 * DAY + 3600.0 else 20.0


@pytest.mark.parametrize(("name", "least"), [("seasonal-naive", 90.0), ("combined", 24.0)])
def test_the_same_time_of_earlier_days_is_expected(name: str, least: float) -> None:
    noon = BEGIN + 0.5 * DAY
    items = [60.0 * day(BEGIN - 3 * DAY + 60.0 * minute) for minute in range(3 * 1440)]
    history = rates(DemandHistory(app="faces", start=BEGIN - 3 * DAY, items=items))
    without, forecaster = make_forecaster(name), make_forecaster(name)
    forecaster.seed(history, noon - 600.0)
    for one in (without, forecaster):
        fed(one, [20.0] * 555, noon - 600.0)
    assert without.point(100.0) == pytest.approx(20.0)
    assert forecaster.point(100.0) > least


def test_a_class_gets_its_part_of_the_apps_history() -> None:
    history = DemandHistory(app="faces", start=600.0, items=[60.0, 0.0, 120.0])
    assert rates(history, 0.5) == [(660.0, 0.5), (720.0, 0.0), (780.0, 1.0)]


def test_gaps_and_clocks_set_back_cost_only_the_errors_that_were_pending() -> None:
    counts = poisson(50.0, 600)
    even, jumpy = make_forecaster(), make_forecaster()
    fed(even, counts)
    at = fed(jumpy, counts[:300])
    at = fed(jumpy, counts[300:450], at - 10_000.0)
    fed(jumpy, counts[450:], at + 40_000.0)
    assert jumpy.point(10.0) == pytest.approx(even.point(10.0), rel=0.05)
    assert jumpy.peak(10.0, 0.99) == pytest.approx(even.peak(10.0, 0.99), rel=0.2)
