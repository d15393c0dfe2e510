"""What a forecaster offers, and what the rules that forecasters are made of offer."""

from collections.abc import Sequence
from math import isfinite
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HORIZONS = (1, 2, 4, 8, 16, 32, 64, 128)  # periods ahead at which errors are kept; between them is interpolated
LONGEST = HORIZONS[-1]
AHEAD: Floats = np.array(HORIZONS, dtype=np.float64)
MOST = 1e12  # items/s; larger rates count as so many
DAY = 86_400.0  # s
FARTHEST = 1e11  # Unix seconds: some 3,000 years from now


class Forecaster(Protocol):
    """Forecasts one rate (items/s) from what it was. Times are Unix seconds.

    No input does harm: what is not finite or is negative is ignored, and a clock that jumps costs the errors that were pending. All
    answers are finite and at least 0. quantile and peak never fall when `share` grows, and peak never falls when `ahead_s` grows.
    """

    name: str

    def observe(self, at: float, rate: float) -> None:
        """`rate` is the mean over the period that ended at `at`."""
        ...

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        """Earlier rates as (end of a minute, mean rate in it), in any order. Rates from `now` on are ignored."""
        ...

    def point(self, ahead_s: float) -> float:
        """The rate that is expected `ahead_s` after the last observation."""
        ...

    def quantile(self, ahead_s: float, share: float) -> float:
        """The rate that the demand does not exceed at that moment, with the probability `share`."""
        ...

    def peak(self, ahead_s: float, share: float) -> float:
        """The rate that the demand exceeds in no period from now until then, with the probability `share`."""
        ...


class Rule(Protocol):
    """How rates ahead follow from rates so far. A rule sees one finite rate a period, at times that only grow."""

    def learn(self, at: float, rate: float) -> None: ...

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None: ...

    def path(self) -> Floats:
        """Expected rates at HORIZONS. NaN where the rule has nothing to say."""
        ...


def sane(at: float, rate: float) -> bool:
    """Whether these can be a time and a rate."""
    return -FARTHEST <= at <= FARTHEST and isfinite(rate) and rate >= 0.0
