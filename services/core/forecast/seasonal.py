"""The same time of earlier days (seasonal naive), where there is history."""

from collections.abc import Sequence
from math import floor

import numpy as np

from services.core.forecast.base import AHEAD, DAY, Floats

BINS = 1440  # of a day: minutes, where a day has 86,400 s
DAYS = 7  # that are remembered
NEVER = -(2**62)


class Seasonal:
    """Mean rates of earlier days by the time of the day, from what was observed and from seeds.

    day_s: length of a day. The newest days count most: each earlier one counts half.
    """

    def __init__(self, period_s: float, day_s: float = DAY) -> None:
        self._bin_s = day_s / BINS
        self._ahead = AHEAD * period_s / self._bin_s
        self._rates = np.full((DAYS, BINS), np.nan, dtype=np.float32)  # by day modulo DAYS
        self._days = np.full(DAYS, NEVER, dtype=np.int64)  # which day a row holds
        self._sum, self._count, self._bin = 0.0, 0, -1  # of the bin under way
        self._at = 0.0
        self._last = 0.0
        self._profile: tuple[int, Floats] | None = (
            None  # day, and the mean of the days before it with its end joined to its begin
        )

    def learn(self, at: float, rate: float) -> None:
        of = floor(at / self._bin_s - 1e-6)
        if of != self._bin:
            self._close()
            self._sum, self._count, self._bin = 0.0, 0, of
        self._sum += rate
        self._count += 1
        self._at, self._last = at, rate

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        """See `Rule`. A bin has the last of its rates."""
        first = now - (DAYS - 1) * BINS * self._bin_s
        for at, rate in sorted(history):
            if at >= first:
                self._put(floor(at / self._bin_s - 1e-6), rate)
        self._profile = None

    def path(self) -> Floats:
        """NaN without an earlier day."""
        return self.at(self._ahead)

    def now(self) -> float:
        """What earlier days had at this time. NaN without one."""
        return float(self.at(np.zeros(1))[0])

    def at(self, bins: Floats) -> Floats:
        """What earlier days had so many bins from now, linear between the middles of bins."""
        position = self._at / self._bin_s
        profile = self._of_day(floor(position / BINS))
        where = (position - 0.5 + bins) % BINS
        lower = np.minimum(where.astype(np.int64), BINS - 1)
        below = profile[lower]
        found: Floats = below + (where - lower) * (profile[lower + 1] - below)
        return found

    def _close(self) -> None:
        if self._count:
            self._put(self._bin, self._sum / self._count)

    def _put(self, of: int, rate: float) -> None:
        day, place = divmod(of, BINS)
        row = day % DAYS
        if self._days[row] != day:
            self._days[row] = day
            self._rates[row] = np.nan
        self._rates[row, place] = rate

    def _of_day(self, day: int) -> Floats:
        if self._profile is None or self._profile[0] != day:
            total, weights = np.zeros(BINS), np.zeros(BINS)
            for row, of in enumerate(self._days):
                past = day - int(of)
                if 0 < past <= DAYS:
                    weight = 0.5 ** (past - 1)
                    there = ~np.isnan(self._rates[row])
                    total[there] += weight * self._rates[row][there]
                    weights[there] += weight
            with np.errstate(invalid="ignore"):
                mean = total / weights
            self._profile = day, np.append(mean, mean[:1])
        return self._profile[1]


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
        path = self._seasonal.path()
        return np.where(np.isnan(path), self._last, path)
