"""Quantiles of any number of durations in bounded memory, the same on every machine."""

from array import array
from collections import defaultdict
from math import ceil

import numpy as np

STEPS = 64  # buckets of each power of two
RELATIVE_ERROR = 0.5 / STEPS  # of a quantile, at most: half a bucket's width over its lower end

# A bucket's key is exponent x 2 STEPS + the mantissa's first bits: frexp and the products are exact, where a logarithm's last digit
# differs between machines. Mantissas lie in [0.5, 1), so their part of the key is at least STEPS, and 0 is a key of its own.


class Histogram:
    """Counts of values >= 0 by size, in buckets that are 1/64 of a power of two wide.

    Values are put into `fresh` (the fastest that Python offers) and `settle` counts them; whoever fills it settles often enough.
    """

    __slots__ = ("bins", "fresh")

    def __init__(self) -> None:
        self.bins: defaultdict[int, int] = defaultdict(int)
        self.fresh = array("d")

    def settle(self, least: int = 1) -> None:
        """Count what is fresh and forget it, if there are at least so many."""
        if len(self.fresh) < least:
            return
        mantissas, exponents = np.frexp(np.array(self.fresh))
        keys = exponents.astype(np.int64) * (2 * STEPS) + (mantissas * (2 * STEPS)).astype(np.int64)
        for key, count in zip(*np.unique(keys, return_counts=True), strict=True):
            self.bins[int(key)] += int(count)
        del self.fresh[:]

    def merge(self, other: "Histogram") -> None:
        """Count all that the other has counted."""
        other.settle()
        for key, count in other.bins.items():
            self.bins[key] += count

    @property
    def count(self) -> int:
        """How many values there were."""
        self.settle()
        return sum(self.bins.values())

    def quantiles(self, *wanted: float) -> list[float | None]:
        """For each of `wanted` (0..1, rising) the value that so many do not exceed, within 0.8 %; None without any value."""
        total = self.count  # settles
        found: list[float | None] = []
        seen, keys = 0, iter(sorted(self.bins))
        value: float | None = None
        for share in wanted:
            while total and seen < max(1, ceil(share * total)):
                key = next(keys)
                seen += self.bins[key]
                value = _middle(key)
            found.append(value)
        return found


def _middle(key: int) -> float:
    """The middle of a bucket."""
    if key == 0:
        return 0.0
    exponent, part = divmod(key, 2 * STEPS)
    return (part + 0.5) / (2 * STEPS) * 2.0**exponent
