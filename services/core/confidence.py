"""How sure a mean is that is looked at again and again: a confidence sequence, which holds at every moment at once.

The observations are in [0, 1]: right or wrong, agreement, an error as a share of the largest one. A beta mixture of Bernoulli likelihood
ratios is a non-negative supermartingale for the true mean (for values between 0 and 1 since the ratio is convex in them), so by Ville's
inequality it ever passes 1 / level with probability `level` at most (Robbins, 1970; Howard et al., Annals of Statistics 49, 2021).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import lgamma, log
from typing import Self

_PRIOR = 0.5  # both parameters of the mixture's beta distribution (Jeffreys)
_STEPS = 40  # bisections: 1e-12
_COARSE = 24  # of differences: 1e-7
_EDGE = 1e-12


@dataclass(frozen=True, slots=True)
class Sampled:
    """Observations in [0, 1]: their sum, and how many there are."""

    total: float = 0.0
    count: float = 0.0

    def __add__(self, other: Self) -> "Sampled":
        return Sampled(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """0 without observations."""
        return self.total / self.count if self.count else 0.0

    def interval(self, level: float = 0.05) -> tuple[float, float]:
        """Holds the true mean at all times together with probability 1 - level. (0, 1) without observations."""
        return _interval(self.total, self.count, level)

    def excludes(self, mean: float, level: float = 0.05) -> bool:
        """Whether the interval has left this mean."""
        return self.count > 0 and _evidence(self.total, self.count, mean) > log(1.0 / level)


def difference(new: Sampled, old: Sampled, level: float = 0.05) -> tuple[float, float]:
    """The interval of new's mean less old's, which holds at all times together with probability 1 - level.

    The product of both ratios is a supermartingale at the true pair of means, however the observations of both come. A difference is in the
    interval if a pair with it is not excluded: narrower than the ends of two intervals.
    """
    if not new.count or not old.count:
        return -1.0, 1.0
    bound, middle = log(1.0 / level), new.mean - old.mean
    evidence = partial(_least, new, old)
    return _end(evidence, middle, -1.0, bound, _COARSE), _end(evidence, middle, 1.0, bound, _COARSE)


def apart(new: Sampled, old: Sampled, by: float, level: float = 0.05) -> bool:
    """Whether that interval has left this difference."""
    return bool(new.count and old.count) and _least(new, old, by) > log(1.0 / level)


def _least(new: Sampled, old: Sampled, apart: float) -> float:
    """The least evidence against a pair of means that are so far apart. It is convex in the mean: the slope says on which side it is."""
    low, high = max(_EDGE, _EDGE - apart), min(1.0 - _EDGE, 1.0 - _EDGE - apart)
    new_rest, old_rest = new.count - new.total, old.count - old.total
    for _ in range(_STEPS):
        at = min(max((low + high) / 2, _EDGE), 1.0 - _EDGE)
        then = min(max(at + apart, _EDGE), 1.0 - _EDGE)
        if new_rest / (1.0 - then) - new.total / then + old_rest / (1.0 - at) - old.total / at > 0.0:
            high = at
        else:
            low = at
    return _evidence(new.total, new.count, low + apart) + _evidence(old.total, old.count, low)


def _evidence(total: float, count: float, mean: float) -> float:
    """The logarithm of the mixture's ratio to this mean."""
    mean = min(max(mean, _EDGE), 1.0 - _EDGE)
    rest = count - total
    mixture = lgamma(_PRIOR + total) + lgamma(_PRIOR + rest) - lgamma(2 * _PRIOR + count)
    prior = 2 * lgamma(_PRIOR) - lgamma(2 * _PRIOR)
    return mixture - prior - total * log(mean) - rest * log(1.0 - mean)


@lru_cache(4096)
def _interval(total: float, count: float, level: float) -> tuple[float, float]:
    if not count:
        return 0.0, 1.0
    bound, middle = log(1.0 / level), total / count
    evidence = partial(_evidence, total, count)
    return _end(evidence, middle, 0.0, bound, _STEPS), _end(evidence, middle, 1.0, bound, _STEPS)


def _end(evidence: Callable[[float], float], inside: float, outside: float, bound: float, steps: int) -> float:
    """Where the evidence passes the bound between a mean, or a difference, inside of the interval and one outside."""
    if evidence(outside) <= bound:
        return outside
    for _ in range(steps):
        middle = (inside + outside) / 2
        if evidence(middle) > bound:
            outside = middle
        else:
            inside = middle
    return outside
