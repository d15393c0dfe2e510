"""Exponential smoothing with a damped trend (Gardner and McKenzie, "Forecasting trends in time series", Management Science 31, 1985).

One object runs several smoothings side by side, as rows of arrays; a row without a trend is simple exponential smoothing.
"""

from collections.abc import Sequence

import numpy as np

from services.core.forecast.base import AHEAD, Floats

LEVEL, SLOPE, DAMPING = 0.4, 0.1, 0.97  # of the forecaster "trend"


class Smoothings:
    """Levels and slopes of several smoothings of one rate.

    level, slope, damping: one number a row. level and slope: weights of the newest value. damping: what remains of a slope after a period.
    """

    def __init__(self, level: Sequence[float], slope: Sequence[float], damping: Sequence[float]) -> None:
        self._alpha, self._beta, self._phi = np.array(level), np.array(slope), np.array(damping)
        phi = self._phi[:, None]
        # phi + phi² + ... + phi^h: how many periods' slopes lie ahead
        self._sum = np.where(phi < 1.0, phi * (1.0 - phi**AHEAD) / np.maximum(1.0 - phi, 1e-12), AHEAD)
        self._level = np.zeros(len(self._alpha))
        self._slope = np.zeros(len(self._alpha))
        self._begun = False

    def learn(self, rate: float) -> None:
        if not self._begun:
            self._begun = True
            self._level[:] = rate
            return
        carried = self._phi * self._slope
        before = self._level
        expected = before + carried
        self._level = expected + self._alpha * (rate - expected)
        self._slope = carried + self._beta * (self._level - before - carried)

    def paths(self) -> Floats:
        """Expected rates, one row a smoothing, at HORIZONS."""
        paths: Floats = self._sum * self._slope[:, None]
        paths += self._level[:, None]
        return np.maximum(paths, 0.0, out=paths)


class DampedTrend:
    """Expects level and damped slope to go on."""

    def __init__(self) -> None:
        self._smoothing = Smoothings((LEVEL,), (SLOPE,), (DAMPING,))

    def learn(self, at: float, rate: float) -> None:
        del at
        self._smoothing.learn(rate)

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        del history, now

    def path(self) -> Floats:
        row: Floats = self._smoothing.paths()[0]
        return row
