"""Forecasters by the names that settings and benches use, and the rules of most of them.

combined: several rules weighted by how well each did lately, at each horizon. The weights are those of the exponentially weighted average
forecaster (Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games", 2006, section 2.1) with losses that are forgotten. A loss is a
squared error in units of the error's scale. seasonal-naive: the same time of earlier days, where there is history. last, mean, trend: the last value, the moving mean, and exponential smoothing with a damped
trend (Gardner and McKenzie, "Forecasting trends in time series", Management Science 31, 1985). Their history teaches them nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import floor, fsum

import numpy as np

from bus.messages.scaling import DemandHistory
from services.core.forecast.conformal import AHEAD, DAY, HORIZONS, LONGEST, Conformal, Floats, Forecaster, Rule, scale

BINS = 1440  # of a day: minutes, where a day has 86,400 s
DAYS = 8  # that are remembered, today among them
NEWER = 0.5  # the weight of a day as a multiple of that of the next
RATIOS = (0.25, 4.0)  # within which earlier days are scaled to the present level
SOME = 1.0  # items/s added to both sides of a ratio, so that small counts make no large one
_NEVER = -(2**62)


class Seasonal:
    """Mean rates of earlier days by the time of the day, from what was observed and from seeds. Newer days weigh more."""

    def __init__(self, period_s: float, day_s: float = DAY) -> None:
        """period_s: seconds between two rates, about. day_s: length of a day."""
        self._bin_s = day_s / BINS
        self._ahead = np.concatenate([[0.0], AHEAD * period_s / self._bin_s])
        self._rates = np.full((DAYS, BINS), np.nan, dtype=np.float32)  # by day modulo DAYS
        self._days = [_NEVER] * DAYS  # which day a row holds
        self._sum, self._count, self._bin = 0.0, 0, _NEVER  # of the bin under way
        self._position = 0.0  # bins since the epoch
        self._day: int | None = None
        self._profile: Floats | None = None  # the mean of the days before _day, with its begin again at its end

    def learn(self, at: float, rate: float) -> None:
        self._position = position = at / self._bin_s
        of = floor(position - 1e-6)
        if of != self._bin:
            if self._count:
                self._put(self._bin, self._sum / self._count)
            self._sum, self._count, self._bin = 0.0, 0, of
        self._sum += rate
        self._count += 1

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        """See `Rule`. Of several rates of a bin, the last counts."""
        first = now - (DAYS - 1) * BINS * self._bin_s
        for at, rate in sorted(history):
            if at >= first:
                self._put(floor(at / self._bin_s - 1e-6), rate)
        self._day = None

    def rates(self) -> Floats | None:
        """What earlier days had now and at HORIZONS, linear between the middles of bins. None, or NaN within, where they had nothing."""
        day = floor(self._position / BINS)
        if day != self._day:
            self._day, self._profile = day, self._before(day)
        profile = self._profile
        if profile is None:
            return None
        where = (self._position - 0.5 + self._ahead) % BINS
        below = np.minimum(where.astype(np.int64), BINS - 1)
        lower = profile[below]
        found: Floats = lower + (where - below) * (profile[below + 1] - lower)
        return found

    def scaled(self, level: float) -> Floats | None:
        """What earlier days had at HORIZONS, times how many times the present level is what they had now. `level` where they had nothing."""
        rates = self.rates()
        if rates is None:
            return None
        ratio = (level + SOME) / (float(rates[0]) + SOME)
        found: Floats = rates[1:] * min(RATIOS[1], max(RATIOS[0], ratio))
        found[np.isnan(found)] = level
        return found

    def _put(self, of: int, rate: float) -> None:
        day, place = divmod(of, BINS)
        row = day % DAYS
        if self._days[row] != day:
            self._days[row] = day
            self._rates[row] = np.nan
        self._rates[row, place] = rate

    def _before(self, day: int) -> Floats | None:
        total, weights = np.zeros(BINS), np.zeros(BINS)
        for row, of in enumerate(self._days):
            if 0 < day - of < DAYS:
                rates = self._rates[row]
                there = ~np.isnan(rates)
                weight = NEWER ** (day - of - 1)
                total[there] += weight * rates[there]
                weights[there] += weight
        if not weights.any():
            return None
        mean = np.divide(total, weights, out=np.full(BINS, np.nan), where=weights > 0.0)
        return np.append(mean, mean[:1])


class SeasonalNaive:
    """Expects what earlier days had at that time; the last rate where there is no history."""

    def __init__(self, period_s: float, day_s: float = DAY) -> None:
        self._seasonal = Seasonal(period_s, day_s)
        self._last = 0.0

    def learn(self, at: float, rate: float) -> None:
        self._seasonal.learn(at, rate)
        self._last = rate

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        self._seasonal.seed(history, now)

    def path(self) -> Floats:
        rates = self._seasonal.rates()
        if rates is None:
            return np.full(len(HORIZONS), self._last)
        return np.where(np.isnan(rates[1:]), self._last, rates[1:])


# weight of the newest rate: the last value … a mean over a minute
LEVELS: Floats = np.array((1.0, 0.5, 0.2, 0.05, 0.02))
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

# of users, by "module:Class"; who wires a service adds them (`load_forecaster`)
OTHERS: dict[str, Callable[[], Forecaster]] = {}


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
