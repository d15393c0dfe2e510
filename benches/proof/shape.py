"""The paper's fluctuating load (INFaaS, Romero et al., Figure 6c): 4 queries/s, and 80 from 60 to 90 s and from 150 to 180 s. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Points = Sequence[tuple[float, float]]

# (second, queries/s), straight lines between them; a rise and a fall take a second.
FLUCTUATING: Points = (
    (0, 4),
    (60, 4),
    (61, 80),
    (90, 80),
    (91, 4),
    (150, 4),
    (151, 80),
    (180, 80),
    (181, 4),
    (240, 4),
)


def compressed(points: Points, factor: float) -> Points:
    """The same rates in a factor less time."""
    return tuple((second / factor, rate) for second, rate in points)


def rate_at(points: Points, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Queries/s at these times."""
    at, rates = zip(*points, strict=True)
    return np.interp(seconds, at, rates)


def arrivals(points: Points, seed: int) -> NDArray[np.float64]:
    """Seconds at which queries set out: Poisson with the rate of the moment (by thinning); the same for a seed."""
    rng = np.random.default_rng(seed)
    end, most = points[-1][0], max(rate for _, rate in points)
    count = rng.poisson(most * end)
    times = np.sort(rng.random(count)) * end
    return times[rng.random(count) * most < rate_at(points, times)]
