"""All forecasters: bounds that hold for any input, and what the names in the settings stand for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.forecast.conformal import FADE, MOST, PRIOR, Forecaster
from services.core.forecast.forecasters import FORECASTERS, make_forecaster
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


def test_settings_name_every_forecaster() -> None:
    assert sorted(NAMES) == sorted(FORECASTERS)
    for name in NAMES:
        assert make_forecaster(name).name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
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
