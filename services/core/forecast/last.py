"""The last value: the rate stays what it is."""

from collections.abc import Sequence

import numpy as np

from services.core.forecast.base import HORIZONS, Floats


class LastValue:
    """Expects the last rate at all horizons."""

    def __init__(self) -> None:
        self._rate = 0.0

    def learn(self, at: float, rate: float) -> None:
        del at
        self._rate = rate

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        del history, now

    def path(self) -> Floats:
        return np.full(len(HORIZONS), self._rate)
