"""Forecasters by the names that settings and benches use, and the rules of most of them.

combined: several rules weighted by how well each did lately, at each horizon. The weights are those of the exponentially weighted average
forecaster (Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games", 2006, section 2.1) with losses that are forgotten. A loss is a
squared error in units of the error's scale. last, mean, trend: the last value, the moving mean, and exponential smoothing with a damped
trend (Gardner and McKenzie, "Forecasting trends in time series", Management Science 31, 1985). Their history teaches them nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import fsum

import numpy as np

from bus.messages.scaling import DemandHistory
from services.core.forecast.base import AHEAD, DAY, HORIZONS, LONGEST, Floats, Forecaster, Rule
from services.core.forecast.conformal import Conformal, scale
from services.core.forecast.seasonal import Seasonal, SeasonalNaive

LEVELS: Floats = np.array(
    (1.0, 0.5, 0.2, 0.05, 0.02)
)  # weight of the newest rate: the last value … a mean over a minute
REFERENCE = 2  # the level that earlier days are scaled to
EVERY = 2  # periods between two weighings
FORGET = 0.01  # of the losses, at a weighing
SHARPNESS = 1.0  # of the weights
_EARLIER = len(LEVELS)  # the column of earlier days
_COUNT = len(HORIZONS)
_BACK = np.array(HORIZONS)
_ALL = np.arange(_COUNT)


class CombinedForecaster:
    """Levels of several speeds, and earlier days scaled to the present level, weighted by their recent losses."""

    def __init__(self, period_s: float, day_s: float = DAY) -> None:
        self._levels = np.zeros(_EARLIER)
        self._seasonal = Seasonal(period_s, day_s)
        self._period = period_s
        self._made = np.zeros((LONGEST + 1, _EARLIER))  # levels by step; a level is what is expected at all horizons
        self._made_earlier = np.zeros((LONGEST + 1, _COUNT))
        self._paths = np.zeros((LONGEST + 1, _COUNT))
        self._losses = np.zeros((_COUNT, _EARLIER + 1))
        self._weights = np.zeros((_COUNT, _EARLIER + 1))
        self._rules = 0  # that are weighed, and have weights
        self._step = 0

    def learn(self, at: float, rate: float) -> None:
        self._step = step = self._step + 1
        row = step % (LONGEST + 1)
        self._levels += (LEVELS if step > 1 else 1.0) * (rate - self._levels)
        self._made[row] = self._levels
        self._seasonal.learn(at, rate)
        reference = float(self._levels[REFERENCE])
        earlier = self._seasonal.scaled(reference)
        self._made_earlier[row] = reference if earlier is None else earlier
        rules = _EARLIER if earlier is None else _EARLIER + 1
        if rules != self._rules or step % EVERY == 0:
            self._weigh(step, rate, rules)
        path = self._weights[:, :_EARLIER] @ self._levels
        if earlier is not None:
            path += self._weights[:, _EARLIER] * earlier
        self._paths[row] = path

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        self._seasonal.seed(history, now)

    def path(self) -> Floats:
        path: Floats = self._paths[self._step % (LONGEST + 1)]
        return path

    def _weigh(self, step: int, rate: float, rules: int) -> None:
        """Judge what was expected of this rate, and weigh the first `rules` rules anew."""
        self._rules = rules
        made = (step - _BACK) % (LONGEST + 1)
        losses = np.empty((_COUNT, _EARLIER + 1))
        losses[:, :_EARLIER] = self._made[made]
        losses[:, _EARLIER] = self._made_earlier[made, _ALL]
        losses -= rate
        losses /= scale(self._paths[made, _ALL], self._period)[:, None]
        losses *= losses
        losses -= self._losses
        if step <= LONGEST:
            losses[step <= _BACK] = 0.0
        losses *= FORGET
        self._losses += losses
        known = self._losses[:, :rules]
        weights = np.exp(SHARPNESS * (known.min(axis=1, keepdims=True) - known))
        self._weights[:, :rules] = weights / weights.sum(axis=1, keepdims=True)


WINDOW = 60  # periods of the moving mean
LEVEL = 0.1  # weight of the newest rate in the level
SLOPE = 0.02  # weight of the newest change of the level in the slope
DAMPING = 0.98  # what remains of a slope after a period
# DAMPING + DAMPING² + ... + DAMPING^h: how many periods' slopes lie ahead
_SLOPES = DAMPING * (1.0 - DAMPING**AHEAD) / (1.0 - DAMPING)


class _Unseeded:
    """Of a rule that begins with what it learns itself."""

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        del history, now


class LastValue(_Unseeded):
    """Expects the last rate at all horizons."""

    def __init__(self) -> None:
        self._rate = 0.0

    def learn(self, at: float, rate: float) -> None:
        del at
        self._rate = rate

    def path(self) -> Floats:
        return np.full(len(HORIZONS), self._rate)


class MovingMean(_Unseeded):
    """Expects the mean of the last WINDOW rates at all horizons."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=WINDOW)

    def learn(self, at: float, rate: float) -> None:
        del at
        self._rates.append(rate)

    def path(self) -> Floats:
        return np.full(len(HORIZONS), fsum(self._rates) / max(1, len(self._rates)))


class DampedTrend(_Unseeded):
    """Expects level and slope to go on, the slope ever less."""

    def __init__(self) -> None:
        self._level: float | None = None
        self._slope = 0.0

    def learn(self, at: float, rate: float) -> None:
        del at
        if self._level is None:
            self._level = rate
            return
        carried = DAMPING * self._slope
        missed = rate - self._level - carried
        self._level += carried + LEVEL * missed
        self._slope = carried + SLOPE * LEVEL * missed

    def path(self) -> Floats:
        return np.maximum((self._level or 0.0) + self._slope * _SLOPES, 0.0)


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
