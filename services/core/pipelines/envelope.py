"""The traffic envelope: how many queries come in windows of several lengths (InferLine, paper 004, section 5). Pure.

The envelope of a sample is the most queries in *any* window of each length, not only in those that begin at multiples of it. Another trace of
the same law exceeds it now and then, since its own largest count lies elsewhere. So what counts as a change is more: a count beyond the
envelope and also beyond Z standard deviations of such counts. Counts are taken as negative binomial, with the mean and the variance of the
sample; the third term of their Cornish-Fisher expansion keeps the limit right for small means, where a normal law would be too low. Counts
that vary less than a Poisson process's have its skewness for their variance.
"""

from collections.abc import Sequence
from math import ceil, log2, sqrt

import numpy as np
from numpy.typing import NDArray

BIN_S = 0.01  # of the arrivals that dispatchers tell
REPORT_S = 0.1  # between two reports of a dispatcher
LONGEST_S = 60.0
Z = 5.5  # standard deviations: an hour has some 10^5 distinct short windows, and a stationary one should exceed none
FEW = 20  # windows of a sample that tell a variance
LOCAL_S = 5.0  # counts so far apart have the same mean; those of longer windows vary as those of such: what they vary more is the rate
PART_S = 30.0  # of a sample, at least, for which a variance is told by itself
CALMER = 2 / 3  # of these parts vary less: in the others the rate may jump
PEAK_Z = 3.0  # standard deviations by which the largest count of a stationary sample may be above its mean

Envelope = list[tuple[float, int]]


def windows_from(shortest_s: float) -> list[float]:
    """Lengths of windows in seconds: whole bins, doubling from the shortest to a minute."""
    first = max(1, ceil(shortest_s / BIN_S - 1e-9))
    longest = round(LONGEST_S / BIN_S)
    count = max(0, int(log2(longest / first))) if first < longest else 0
    bins = [min(first, longest) << i for i in range(count + 1)]
    if bins[-1] < longest:
        bins.append(longest)
    return [n * BIN_S for n in bins]


def traffic_envelope(arrivals: NDArray[np.float64], shortest_s: float) -> tuple[Envelope, list[float]]:
    """(window in seconds, most queries in any such window) of a sample; and of each window, variance over mean of its number of queries.

    The variance is around a local mean: a rate that rises and falls is no burst. Where a sample has too few windows of a length to tell a
    variance, that of the longest that it has enough of counts.
    """
    envelope: Envelope = []
    dispersion: list[float] = []
    for window in windows_from(shortest_s):
        envelope.append((window, most_in(arrivals, window)))
        dispersion.append(_dispersion(arrivals, window, dispersion[-1] if dispersion else 1.0))
    return envelope, dispersion


def most_in(arrivals: NDArray[np.float64], window_s: float) -> int:
    """The most queries in any window [t, t + window_s). arrivals: in order."""
    if not len(arrivals):
        return 0
    after = np.searchsorted(arrivals, arrivals + (window_s - 1e-9), "left")
    return int((after - np.arange(len(arrivals))).max())


def _dispersion(arrivals: NDArray[np.float64], window_s: float, shorter: float) -> float:
    """Of counts that lie LOCAL_S or a window apart: second differences leave out a rate that changes steadily, the quantile of parts one that jumps.

    Never more than around the mean of all, which tells more exactly where the rate does not change.
    """
    span = float(arrivals[-1] - arrivals[0]) if len(arrivals) else 0.0
    count = int(span / window_s)
    if count < FEW or window_s > LOCAL_S:
        return shorter
    # Windows that begin in halves of each other: twice as many counts of the same law.
    halves = np.histogram(arrivals, 2 * count, (float(arrivals[0]), float(arrivals[0]) + count * window_s))[0]
    counts = halves[:-1] + halves[1:]
    lag = max(2, ceil(min(2.0 * LOCAL_S / window_s, count / 5)))
    parts = max(1, int(span / PART_S))
    before, there, after = counts[: -2 * lag], counts[lag:-lag], counts[2 * lag :]
    squares, means = (before - 2 * there + after) ** 2 / 6.0, (before + there + after) / 3.0
    found = [
        square.mean() / mean.mean()
        for square, mean in zip(np.array_split(squares, parts), np.array_split(means, parts), strict=True)
        if mean.any()
    ]
    around_all = float(counts.var() / counts.mean()) if counts.any() else shorter
    return min(float(np.quantile(found, CALMER)), around_all) if found else shorter


def limits(envelope: Envelope, dispersion: Sequence[float], planned: float, rate: float) -> list[float]:
    """Of each window, the count above which traffic is more than `rate` queries/s of the sample's law. planned: the sample's own rate.

    A sample whose rate changes has stretches above it. What is provided for all of the sample is provided for these.
    """
    found, more = [], rate / planned
    top = max(planned, _peak(envelope, dispersion))
    for (window, most), spread in zip(envelope, dispersion, strict=True):
        at_plan = rate >= planned * (1 - 1e-9)
        mean = window * more * (top if at_plan else planned)
        deviation = sqrt(mean * spread)
        high = mean + Z * deviation + (Z * Z - 1.0) * max(spread, 2.0 * spread - 1.0) / 6.0
        found.append(max(high, most * max(1.0, more)) if at_plan else high)
    return found


def _peak(envelope: Envelope, dispersion: Sequence[float]) -> float:
    """The largest rate of the sample, queries/s, in the longest window."""
    (window, most), spread = envelope[-1], dispersion[-1]
    return max(0.0, most - PEAK_Z * sqrt(most * spread)) / window
