"""Rates that change over time, as straight pieces, and when the k-th unit of operational time is reached: exactly, no thinning."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.simulation.traces import Times


class Rates:
    """A rate over [starts[0], ends[-1]): in each piece straight from `first` to `last` (queries/s, at least 0).

    Pieces follow each other without gaps and have a length above 0. before: operational time (queries expected) that has
    passed at the first piece's start; until: at the last one's end.
    """

    def __init__(self, starts: Times, ends: Times, first: Times, last: Times, before: float = 0.0) -> None:
        self.first, self.last = first, last
        self._starts, self._lengths = starts, ends - starts
        self._latest = np.nextafter(ends, 0)
        passed = before + np.concatenate([[0.0], np.cumsum(self._lengths * (first + last) / 2)])
        self._passed = passed[:-1]
        self.expected, self.until = float(passed[-1] - before), float(passed[-1])

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]], duration: float) -> "Rates":
        """Over [0, duration) through (second, queries/s) points, straight between them and constant beyond.

        Points with the same second make a step.
        """
        at, rates = np.array(points, np.float64).T
        at = np.concatenate([[min(0.0, at[0])], at, [max(duration, at[-1])]])
        rates = np.concatenate([rates[:1], rates, rates[-1:]])
        kept = (at[:-1] < at[1:]) & (at[:-1] < duration)
        starts, first, ends, last = at[:-1][kept], rates[:-1][kept], at[1:][kept], rates[1:][kept]
        if ends[-1] > duration:
            last[-1] = first[-1] + (last[-1] - first[-1]) * (duration - starts[-1]) / (ends[-1] - starts[-1])
            ends[-1] = duration
        return cls(starts, ends, first, last)

    @classmethod
    def stairs(cls, rates: Times, width: float, duration: float) -> "Rates":
        """One constant rate after the other, each for `width` seconds; ends with the last of them, at latest at `duration`."""
        rates = np.asarray(rates[: int(np.ceil(duration / width))], np.float64)
        starts = np.arange(len(rates), dtype=np.float64) * width
        kept = starts < duration
        ends = np.minimum((np.arange(len(rates)) + 1) * width, duration)
        return cls(starts[kept], ends[kept], rates[kept], rates[kept])

    def when(self, passed: Times) -> Times:
        """Seconds at which operational times (rising, below `until`) are reached: the inverse of the rate's integral.

        Each lies in its piece, before the piece's end. Rounding may turn neighbours round.
        """
        piece: NDArray[np.intp] | int = 0
        if len(self._starts) > 1:
            piece = np.searchsorted(self._passed, passed, "right") - 1
        length, first = self._lengths[piece], self.first[piece]
        # Within a piece: first x s + (last - first) x s² / 2 = mean so far, s from 0 to 1, solved without cancellation.
        mean = np.maximum(passed - self._passed[piece], 0) / length
        root = np.sqrt(np.maximum(first * first + 2 * (self.last[piece] - first) * mean, 0))
        share = np.divide(2 * mean, first + root, out=np.zeros_like(mean), where=first + root > 0)
        seconds: Times = np.minimum(self._starts[piece] + share * length, self._latest[piece])
        return seconds
