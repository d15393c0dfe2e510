"""Quantiles of any rule's forecasts, from the errors that it made lately at each horizon.

Rolling conformal prediction: the error that a new forecast does not exceed with a probability is that quantile of recent errors. Errors are in units of a scale
that grows with the rate: the noise of counting (k · sqrt(rate)) and a share of the rate. As in adaptive conformal inference (Gibbs and
Candes, "Adaptive conformal inference under distribution shift", NeurIPS 2021), misses widen the quantiles at once.
"""

from collections.abc import Sequence
from math import isfinite, log, log2, sqrt

import numpy as np

from services.core.forecast.base import HORIZONS, LONGEST, MOST, Floats, Rule, sane

KEPT = 512  # errors of each horizon
PRIOR = 64  # of them that stand in for errors until there are real ones
SHARE_OF_RATE = 0.1  # of the scale of errors
GAP = 8  # periods without a rate, after which the forecasts under way are not judged
TAIL = 8  # of the largest errors: beyond them, the tail is taken as exponential
_BACK = np.array(HORIZONS)
_PLACES = np.arange(len(HORIZONS))
_POINT, _PEAK = 0, 1


def scale(rate: Floats, period_s: float) -> Floats:
    """The size of an error at these rates: the deviation of a count, and a share of the rate. Never 0."""
    return np.sqrt((rate + 1.0 / period_s) / period_s + (SHARE_OF_RATE * rate) ** 2)


def prior() -> Floats:
    """Errors to begin with, in units of the scale: (2 kinds, horizons, PRIOR). Cautious: a peak in 8 periods is 2 scales off in the mean."""
    shares = (np.arange(PRIOR) + 0.5) / PRIOR
    logistic = np.log(shares / (1.0 - shares))
    width = 0.5 + 0.25 * np.sqrt(_BACK)
    errors = width[:, None] * logistic[None, :]
    return np.stack([errors, np.abs(errors) + width[:, None]])


class Conformal:
    """A `Forecaster` whose points are a rule's and whose quantiles follow from the rule's errors.

    Before the first rate all points are 0. Until PRIOR errors of a horizon are known, wide ones stand in for those that miss.
    """

    def __init__(self, name: str, rule: Rule, period_s: float) -> None:
        """period_s: seconds between two rates, about."""
        self.name = name
        self._rule, self._period = rule, period_s
        self._at: float | None = None
        self._step = 0
        self._rate = 0.0
        self._paths = np.full((2, len(HORIZONS)), 0.0)  # of points, and of their maxima so far
        self._made = np.full((LONGEST + 1, 2, len(HORIZONS)), np.nan)
        self._recent = np.full(2 * LONGEST, -np.inf)  # rates, the newest at _place and again LONGEST later
        self._errors = np.zeros((2, len(HORIZONS), KEPT))
        self._errors[:, :, :PRIOR] = prior()
        self._counted = np.zeros(len(HORIZONS), dtype=np.int64)
        self._known: dict[tuple[int, int, float], float] = {}

    def observe(self, at: float, rate: float) -> None:
        """See `Forecaster`. A second rate within half a period replaces nothing and is ignored."""
        if not sane(at, rate):
            return
        rate = min(rate, MOST)
        steps = 1 if self._at is None else round((at - self._at) / self._period)
        if steps == 0:
            return
        if steps != 1:
            self._jumped(steps)
        self._at = at
        self._step += 1
        self._judge(rate)
        self._rate = rate
        self._rule.learn(at, rate)
        self._paths[_POINT] = np.minimum(self._rule.path(), MOST)
        np.maximum.accumulate(self._paths[_POINT], out=self._paths[_PEAK])
        self._made[self._step % (LONGEST + 1)] = self._paths
        self._known.clear()

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        """See `Forecaster`."""
        if sane(now, 0.0):
            self._rule.seed([(at, min(rate, MOST)) for at, rate in history if sane(at, rate) and at <= now], now)

    def point(self, ahead_s: float) -> float:
        """See `Forecaster`."""
        below, above, part = self._place(ahead_s)
        return self._between(_POINT, below, above, part)

    def quantile(self, ahead_s: float, share: float) -> float:
        """See `Forecaster`."""
        return self._with_error(_POINT, ahead_s, share)

    def peak(self, ahead_s: float, share: float) -> float:
        """See `Forecaster`."""
        return self._with_error(_PEAK, ahead_s, share)

    def _jumped(self, steps: int) -> None:
        """A gap, or a clock that was set back: the forecasts under way are of other moments."""
        if 0 < steps <= GAP:
            return
        self._made.fill(np.nan)
        self._recent.fill(-np.inf)

    def _judge(self, rate: float) -> None:
        place = -self._step % LONGEST
        recent = self._recent
        recent[place] = recent[place + LONGEST] = rate
        made = self._made[(self._step - _BACK) % (LONGEST + 1), :, _PLACES]  # (horizons, 2)
        judged = ~np.isnan(made[:, 0])
        if not judged.any():
            return
        highest = np.maximum.accumulate(recent[place : place + LONGEST])[_BACK - 1]
        errors = np.empty_like(made)
        errors[:, 0] = rate
        errors[:, 1] = highest
        errors -= made
        errors /= scale(made, self._period)
        where = self._counted[judged]
        self._errors[:, judged, where % KEPT] = errors[judged].T
        self._counted[judged] = where + 1

    def _place(self, ahead_s: float) -> tuple[int, int, float]:
        """Between which horizons this is, and how far from the one below."""
        periods = ahead_s / self._period if isfinite(ahead_s) else LONGEST
        if periods <= 1.0:
            return 0, 0, 0.0
        position = min(log2(periods), len(HORIZONS) - 1.0)
        below = min(int(position), len(HORIZONS) - 2)
        start = HORIZONS[below]
        return below, below + 1, min(1.0, periods / start - 1.0)

    def _between(self, kind: int, below: int, above: int, part: float) -> float:
        path = self._paths[kind]
        return float(path[below] + part * (path[above] - path[below]))

    def _with_error(self, kind: int, ahead_s: float, share: float) -> float:
        below, above, part = self._place(ahead_s)
        first = self._upper(kind, below, share)
        if part == 0.0:
            return first
        second = self._upper(kind, above, share)
        return first + part * (second - first)

    def _upper(self, kind: int, horizon: int, share: float) -> float:
        """The rate that is not exceeded at one of HORIZONS."""
        known = self._known.get((kind, horizon, share))
        if known is None:
            point = float(self._paths[kind, horizon])
            size = sqrt((point + 1.0 / self._period) / self._period + (SHARE_OF_RATE * point) ** 2)
            known = max(0.0, point + self._error(kind, horizon, share) * size)
            if kind == _PEAK and horizon:
                known = max(known, self._upper(kind, horizon - 1, share))
            self._known[kind, horizon, share] = known
        return known

    def _error(self, kind: int, horizon: int, share: float) -> float:
        """This quantile of recent errors; beyond the TAIL largest, of an exponential tail through them."""
        count = min(KEPT, max(PRIOR, int(self._counted[horizon])))
        errors = self._errors[kind, horizon, :count]
        position = share * (count + 1) - 1.0 if isfinite(share) else count
        if position <= count - TAIL:
            place = max(0, min(count - 1, int(position)))
            after = min(count - 1, place + 1)
            found = np.partition(errors, (place, after))
            lower = float(found[place])
            return lower + max(0.0, position - place) * (float(found[after]) - lower)
        largest = np.partition(errors, count - TAIL)[count - TAIL :]
        start = float(largest.min())
        mean = float(largest.mean()) - start
        return start + mean * log(TAIL / max(1e-6 * count, (1.0 - share) * (count + 1)))
