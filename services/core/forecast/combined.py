"""Several rules weighted by how well each did lately, at each horizon.

The weights are those of the exponentially weighted average forecaster (Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games",
2006, section 2.1) with losses that are forgotten. A loss is an absolute error (the pinball loss at 0.5) in units of the error's scale.
"""

from collections.abc import Sequence

import numpy as np

from services.core.forecast.base import DAY, HORIZONS, LONGEST, Floats
from services.core.forecast.seasonal import Seasonal
from services.core.forecast.trend import Smoothings

# level, slope, damping: from the last value to a mean over a minute, then trends from quick to slow
SMOOTHINGS = (
    (1.0, 0.0, 0.0),
    (0.5, 0.0, 0.0),
    (0.2, 0.0, 0.0),
    (0.05, 0.0, 0.0),
    (0.5, 0.2, 0.9),
    (0.3, 0.1, 0.95),
    (0.2, 0.05, 0.98),
)
RATIO = 2  # the row of SMOOTHINGS that the seasonal rule scales earlier days with
FORGET = 0.99  # of the losses, a period
SHARPNESS = 12.0  # of the weights
_PLACES = np.arange(len(HORIZONS))
_BACK = np.array(HORIZONS)


class Combined:
    """Smoothings of several speeds, and earlier days scaled to the present level, weighted by their recent losses."""

    def __init__(self, period_s: float, day_s: float = DAY) -> None:
        self._smoothings = Smoothings(*zip(*SMOOTHINGS, strict=True))
        self._seasonal = Seasonal(period_s, day_s)
        rules = len(SMOOTHINGS) + 1
        self._made = np.full((LONGEST + 1, rules, len(HORIZONS)), np.nan)
        self._step = 0
        self._loss = np.zeros((rules, len(HORIZONS)))
        self._paths = np.zeros((rules, len(HORIZONS)))
        self._path = np.zeros(len(HORIZONS))

    def learn(self, at: float, rate: float) -> None:
        self._step += 1
        made = self._made[(self._step - _BACK) % (LONGEST + 1), :, _PLACES].T
        error = np.abs(made - rate)
        error /= error[0] + 0.1 * rate + 1.0
        np.copyto(error, 1.0, where=np.isnan(error))
        self._loss += (1.0 - FORGET) * (error - self._loss)
        self._smoothings.learn(rate)
        self._seasonal.learn(at, rate)
        paths = self._paths
        paths[:-1] = self._smoothings.paths()
        paths[-1] = self._of_earlier_days(paths[RATIO, 0])
        self._made[self._step % (LONGEST + 1)] = paths
        self._path = self._weighted()

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        self._seasonal.seed(history, now)

    def path(self) -> Floats:
        return self._path

    def _of_earlier_days(self, level: float) -> Floats:
        path = self._seasonal.path()
        now = self._seasonal.now()
        ratio = min(4.0, max(0.25, (level + 1.0) / (now + 1.0)))
        return path * ratio

    def _weighted(self) -> Floats:
        known = ~np.isnan(self._paths)
        weights = np.exp(-SHARPNESS * (self._loss - self._loss.min(axis=0))) * known
        found: Floats = (weights * np.where(known, self._paths, 0.0)).sum(axis=0) / weights.sum(axis=0)
        return found
