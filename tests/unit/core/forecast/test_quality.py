"""What forecasts are worth: quantiles hold their probability, follow a flash crowd, forget it, and earlier days help."""

from collections.abc import Iterable

import numpy as np
import pytest

from bus.messages.scaling import DemandHistory
from services.core.forecast.conformal import DAY, Forecaster
from services.core.forecast.forecasters import make_forecaster, rates
from services.core.settings.scaling import FORECASTERS as NAMES

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


def test_a_step_is_followed_within_seconds() -> None:
    forecaster = make_forecaster()
    at = fed(forecaster, poisson(10.0, 600))
    assert forecaster.peak(5.0, 0.99) < 40.0
    at = fed(forecaster, poisson(200.0, 2), at)
    assert forecaster.peak(5.0, 0.99) > 200.0
    fed(forecaster, poisson(200.0, 20), at)
    assert forecaster.point(5.0) == pytest.approx(200.0, rel=0.1)
    assert forecaster.peak(5.0, 0.9) < 1.5 * 200.0
    assert forecaster.peak(30.0, 0.99) < 3.0 * 200.0  # another such step, not another factor of 20


def test_a_flash_crowd_is_remembered_for_minutes_and_forgotten_within_half_an_hour() -> None:
    forecaster = make_forecaster()
    at = fed(forecaster, poisson(50.0, 3000))
    calm = forecaster.peak(30.0, 0.99)
    at = fed(forecaster, poisson(400.0, 20), at)
    at = fed(forecaster, poisson(50.0, 120, seed=2), at)
    assert forecaster.peak(30.0, 0.99) > 2.0 * calm
    fed(forecaster, poisson(50.0, 2000, seed=3), at)
    assert forecaster.peak(30.0, 0.99) < 1.2 * calm


def test_a_drift_is_followed_by_the_trend() -> None:
    forecaster = make_forecaster("trend")
    fed(forecaster, [20.0 + 0.5 * second for second in range(600)])
    assert 320.0 + 5.0 < forecaster.point(60.0) < 320.0 + 30.0


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


def test_a_day_that_was_observed_is_history_for_the_next() -> None:
    forecaster = make_forecaster("seasonal-naive", day_s=1440.0)
    at = fed(forecaster, [100.0 if 700 <= second < 760 else 20.0 for second in range(1440)], 1440.0 * 1000)
    fed(forecaster, [20.0] * 690, at)
    assert forecaster.point(30.0) == pytest.approx(100.0)
    assert forecaster.point(5.0) == pytest.approx(20.0)


def test_gaps_and_clocks_set_back_cost_only_the_errors_that_were_pending() -> None:
    counts = poisson(50.0, 600)
    even, jumpy = make_forecaster(), make_forecaster()
    fed(even, counts)
    at = fed(jumpy, counts[:300])
    at = fed(jumpy, counts[300:450], at - 10_000.0)
    fed(jumpy, counts[450:], at + 40_000.0)
    assert jumpy.point(10.0) == pytest.approx(even.point(10.0), rel=0.05)
    assert jumpy.peak(10.0, 0.99) == pytest.approx(even.peak(10.0, 0.99), rel=0.2)
