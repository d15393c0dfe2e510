"""Forecasters of a few lines: the last value, the moving mean, and exponential smoothing with a damped trend (Gardner and McKenzie, "Forecasting
trends in time series", Management Science 31, 1985). Their history teaches them nothing.
"""

from collections import deque
from collections.abc import Sequence
from math import fsum

import numpy as np

from services.core.forecast.base import AHEAD, HORIZONS, Floats

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
