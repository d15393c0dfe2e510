"""Forecasters by the names that settings and benches use."""

from collections.abc import Callable

from services.core.forecast.base import DAY, Forecaster, Rule
from services.core.forecast.combined import Combined
from services.core.forecast.conformal import Conformal
from services.core.forecast.last import LastValue
from services.core.forecast.mean import MovingMean
from services.core.forecast.seasonal import SeasonalNaive
from services.core.forecast.trend import DampedTrend

FORECASTERS: dict[str, Callable[[float, float], Rule]] = {
    "combined": Combined,
    "last": lambda _period_s, _day_s: LastValue(),
    "mean": lambda _period_s, _day_s: MovingMean(),
    "seasonal-naive": SeasonalNaive,
    "trend": lambda _period_s, _day_s: DampedTrend(),
}


def make_forecaster(name: str = "combined", period_s: float = 1.0, *, day_s: float = DAY) -> Forecaster:
    """The forecaster with this name. Raises ValueError for other names.

    period_s: seconds between two observations, about. day_s: after how long demand repeats itself.
    """
    rule = FORECASTERS.get(name)
    if rule is None:
        raise ValueError(f"there is no forecaster {name!r}; there are: {', '.join(FORECASTERS)}")
    if not (period_s > 0.0 and day_s > 0.0):
        raise ValueError(f"period_s and day_s must be above 0 s, not {period_s:g} and {day_s:g}")
    return Conformal(name, rule(period_s, day_s), period_s)
