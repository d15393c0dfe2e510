"""Forecasters by the names that settings and benches use."""

from collections.abc import Callable

from bus.messages.scaling import DemandHistory
from services.core.forecast.base import DAY, Forecaster, Rule
from services.core.forecast.combined import CombinedForecaster
from services.core.forecast.conformal import Conformal
from services.core.forecast.seasonal import SeasonalNaive
from services.core.forecast.simple import DampedTrend, LastValue, MovingMean

FORECASTERS: dict[str, Callable[[float, float], Rule]] = {
    "combined": CombinedForecaster,
    "last": lambda _period_s, _day_s: LastValue(),
    "mean": lambda _period_s, _day_s: MovingMean(),
    "seasonal-naive": SeasonalNaive,
    "trend": lambda _period_s, _day_s: DampedTrend(),
}

OTHERS: dict[
    str, Callable[[], Forecaster]
] = {}  # of users, by "module:Class"; who wires a service adds them (`load_forecaster`)


def make_forecaster(name: str = "combined", period_s: float = 1.0, *, day_s: float = DAY) -> Forecaster:
    """The forecaster with this name. Raises ValueError for other names. A user's class gets no arguments.

    period_s: seconds between two observations, about. day_s: after how long demand repeats itself.
    """
    if name in OTHERS:
        return OTHERS[name]()
    rule = FORECASTERS.get(name)
    if rule is None:
        raise ValueError(f"there is no forecaster {name!r}; there are: {', '.join(FORECASTERS)}")
    if not (period_s > 0.0 and day_s > 0.0):
        raise ValueError(f"period_s and day_s must be above 0 s, not {period_s:g} and {day_s:g}")
    return Conformal(name, rule(period_s, day_s), period_s)


def rates(history: DemandHistory, part: float = 1.0) -> list[tuple[float, float]]:
    """What `Forecaster.seed` takes. part: of the app's demand that the forecaster is about."""
    return [(history.start + 60.0 * (n + 1), part * items / 60.0) for n, items in enumerate(history.items)]
