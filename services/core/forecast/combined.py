"""Several rules weighted by how well each did lately, at each horizon.

The weights are those of the exponentially weighted average forecaster (Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games",
2006, section 2.1) with losses that are forgotten. A loss is a squared error in units of the error's scale.
"""

from collections.abc import Sequence

import numpy as np

from services.core.forecast.base import DAY, HORIZONS, LONGEST, Floats
from services.core.forecast.conformal import scale
from services.core.forecast.seasonal import Seasonal

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
