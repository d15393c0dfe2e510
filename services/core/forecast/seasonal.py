"""The same time of earlier days (seasonal naive), where there is history."""

from collections.abc import Sequence
from math import floor

import numpy as np

from services.core.forecast.base import AHEAD, DAY, HORIZONS, Floats

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
