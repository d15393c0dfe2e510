"""The moving average: the rate returns to its mean over the last minute."""

from collections import deque
from collections.abc import Sequence
from math import fsum

import numpy as np

from services.core.forecast.base import HORIZONS, Floats

WINDOW = 60  # periods


class MovingMean:
    """Expects the mean of the last WINDOW rates at all horizons."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=WINDOW)

    def learn(self, at: float, rate: float) -> None:
        del at
        self._rates.append(rate)

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        del history, now

    def path(self) -> Floats:
        return np.full(len(HORIZONS), fsum(self._rates) / max(1, len(self._rates)))
