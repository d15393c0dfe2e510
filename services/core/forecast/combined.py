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
)  # weights of the newest rate: from the last value to a mean over a minute
REFERENCE = 2  # the level that earlier days are scaled to
FORGET = 0.005  # of the losses, a period
SHARPNESS = 1.0  # of the weights
_EARLIER = len(LEVELS)
_BACK = np.array(HORIZONS)
_ALL = np.arange(len(HORIZONS))


class Combined:
    """Levels of several speeds, and earlier days scaled to the present level, weighted by their recent losses."""

    def __init__(self, period_s: float, day_s: float = DAY) -> None:
        self._levels = np.zeros(len(LEVELS))
        self._seasonal = Seasonal(period_s, day_s)
        self._period = period_s
        rules = len(LEVELS) + 1
        self._made = np.zeros((LONGEST + 1, len(HORIZONS), rules))
        self._scales = np.ones((LONGEST + 1, len(HORIZONS), 1))
        self._losses = np.zeros((len(HORIZONS), rules))
        self._step = 0
        self._path = np.zeros(len(HORIZONS))

    def learn(self, at: float, rate: float) -> None:
        self._step = step = self._step + 1
        made = (step - _BACK) % (LONGEST + 1)
        losses = self._made[made, _ALL]
        losses -= rate
        losses /= self._scales[made, _ALL]
        losses *= losses
        if step <= LONGEST:
            losses[step <= _BACK] = 0.0
        losses -= self._losses
        losses *= FORGET
        self._losses += losses
        self._levels += (LEVELS if step > 1 else 1.0) * (rate - self._levels)
        self._seasonal.learn(at, rate)
        row = step % (LONGEST + 1)
        paths = self._made[row]
        paths[:, :_EARLIER] = self._levels
        earlier = self._seasonal.scaled(float(self._levels[REFERENCE]))
        paths[:, _EARLIER] = self._levels[REFERENCE] if earlier is None else earlier
        rules = _EARLIER if earlier is None else _EARLIER + 1
        losses = self._losses[:, :rules]
        weights = np.exp(SHARPNESS * (losses.min(axis=1, keepdims=True) - losses))
        self._path = (weights * paths[:, :rules]).sum(axis=1) / weights.sum(axis=1)
        self._scales[row, :, 0] = scale(self._path, self._period)

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        self._seasonal.seed(history, now)

    def path(self) -> Floats:
        return self._path
