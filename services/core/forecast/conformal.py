"""What forecasters and their rules offer, and quantiles of any rule's forecasts, from the errors that it made lately at each horizon.

Rolling conformal prediction: a new forecast's error is not greater than the quantile of the known errors, with its probability (Vovk, Gammerman and
Shafer, "Algorithmic Learning in a Random World", 2005; under change: Gibbs and Candes, "Adaptive conformal inference under distribution shift", NeurIPS 2021).
Errors are in units of a scale that grows with the rate: the deviation of a count, k · sqrt(rate), and a share of the rate.
"""

from collections.abc import Sequence
from math import isfinite, log2
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


KEPT = 480  # errors of each horizon
EVERY = (1, 1, 1, 1, 2, 4, 4, 4)  # each how manieth error is kept: long horizons' errors resemble the ones before
PRIOR = 64  # errors that are there from the beginning
FADE = 32  # periods after which one of them is forgotten
TAIL = 8  # of the largest errors: beyond them, the tail is taken as exponential
SHARE_OF_RATE = 0.03  # in the scale of errors
LEAST_COUNT = 0.25  # in the scale of errors, so that it is never 0
GROWTH = 1.1  # by which a large error grows with the scale at most: a step is not expected again by the same factor
NOISE = 3.0  # scales: smaller errors are chance, which grows with the scale
GAP = 8  # periods without a rate, after which the forecasts under way are not judged
RARE = 1e-6  # probabilities nearer to 0 or 1 count as so near
_POINT, _PEAK = 0, 1
_COUNT = len(HORIZONS)
_BACK = np.array(HORIZONS)
_ALL = np.arange(_COUNT)
_TAIL = np.arange(TAIL)
_CYCLE = max(EVERY)
_LEAVES = np.argsort(np.arange(PRIOR) * 0.6180339887498949 % 1.0)  # large and small ones leave in turn
# the horizons whose errors are kept, by step
_KEEP = [np.flatnonzero(step % np.array(EVERY) == 0) for step in range(_CYCLE)]


def scale(rate: Floats, period_s: float) -> Floats:
    """The size of an error at these rates; never 0."""
    part = SHARE_OF_RATE * rate
    found: Floats = np.sqrt((rate + LEAST_COUNT / period_s) / period_s + part * part)
    return found


def prior() -> Floats:
    """Errors to begin with, in units of the scale: (kinds, horizons, PRIOR).

    Cautious: the mean excess of a peak is 0.4 + 0.3 · sqrt(periods). A flash crowd that has not been seen yet has its place in the tail.
    """
    shares = (np.arange(PRIOR) + 0.5) / PRIOR
    root = np.sqrt(_BACK)[:, None]
    logistic = np.log(shares / (1.0 - shares))
    points = np.where(logistic > 0.0, 0.5 + 0.12 * root, 0.5 + 0.05 * root) * logistic
    width = 0.4 + 0.3 * root
    return np.stack([points, 0.3 * np.log2(_BACK)[:, None] + width * (np.log(1.0 / (1.0 - shares)) - 0.3)])


class Conformal:
    """A `Forecaster` whose points are a rule's and whose quantiles follow from the rule's errors.

    Before the first rate all points are 0. Quantiles begin with the errors of `prior`, which lose weight as real ones come.
    """

    def __init__(self, name: str, rule: Rule, period_s: float) -> None:
        """period_s: seconds between two rates, about."""
        self.name = name
        self._rule, self._period = rule, period_s
        self._at: float | None = None
        self._step = 0
        self._fresh = 0  # the last step before forecasts that may be judged
        self._paths = np.zeros((2, _COUNT))  # points, and the highest points until then
        self._made = np.ones((LONGEST + 1, 4, _COUNT))  # by step: paths, then the scales of their errors
        # rates, the newest first from the place of its step on; twice, so that this never wraps
        self._recent = np.zeros(2 * LONGEST)
        self._errors = np.full((2, _COUNT, PRIOR + KEPT), np.inf, dtype=np.float32)
        self._errors[:, :, :PRIOR] = prior()
        # the scales that the errors were measured in
        self._sizes = np.full((2, _COUNT, PRIOR + KEPT), np.inf, dtype=np.float32)
        self._prior = PRIOR  # of the errors to begin with are left
        self._counts = np.zeros(_COUNT, dtype=np.int64)
        self._sorted: list[NDArray[np.float32] | None] = [None, None]
        self._upper: dict[tuple[int, float], Floats] = {}

    def observe(self, at: float, rate: float) -> None:
        """See `Forecaster`. A rate within half a period of the one before is ignored."""
        if not sane(at, rate):
            return
        steps = 1.0 if self._at is None else (at - self._at) / self._period
        if -0.5 < steps < 0.5:
            return
        rate = min(rate, MOST)
        self._at = at
        self._step = step = self._step + 1
        if not 0.0 < steps <= GAP:
            self._fresh = step - 1  # the clock jumped: what was forecast was of other moments
        if step % FADE == 0 and self._prior:
            self._prior -= 1
            self._errors[:, :, _LEAVES[self._prior]] = np.inf
        self._judge(step, rate)
        self._rule.learn(at, rate)
        self._forecast(step)

    def seed(self, history: Sequence[tuple[float, float]], now: float) -> None:
        if sane(now, 0.0):
            self._rule.seed([(at, min(rate, MOST)) for at, rate in history if sane(at, rate) and at <= now], now)

    def point(self, ahead_s: float) -> float:
        return self._between(self._paths[_POINT], ahead_s)

    def quantile(self, ahead_s: float, share: float) -> float:
        return self._between(self._uppers(_POINT, share), ahead_s)

    def peak(self, ahead_s: float, share: float) -> float:
        return self._between(self._uppers(_PEAK, share), ahead_s)

    def _judge(self, step: int, rate: float) -> None:
        """Keep the errors of the forecasts for this moment."""
        place = -step % LONGEST
        recent = self._recent
        recent[place] = recent[place + LONGEST] = rate
        keep = _KEEP[step % _CYCLE]
        if step - self._fresh <= LONGEST:
            keep = keep[_BACK[keep] < step - self._fresh]
        if not len(keep):
            return
        back = _BACK[keep]
        made = (step - back) % (LONGEST + 1)
        errors = np.empty((2, len(keep)))
        errors[_POINT] = rate
        errors[_PEAK] = np.maximum.accumulate(recent[place : place + LONGEST])[back - 1]
        forecast = self._made[made, :, keep].T
        errors -= forecast[:2]
        errors /= forecast[2:]
        counts = self._counts[keep]
        into = PRIOR + counts % KEPT
        self._errors[:, keep, into] = errors
        self._sizes[:, keep, into] = forecast[2:]
        self._counts[keep] = counts + 1

    def _forecast(self, step: int) -> None:
        paths = self._paths
        np.minimum(self._rule.path(), MOST, out=paths[_POINT])
        np.maximum.accumulate(paths[_POINT], out=paths[_PEAK])
        made = self._made[step % (LONGEST + 1)]
        made[:2] = paths
        made[2:] = scale(paths, self._period)
        self._sorted = [None, None]
        self._upper.clear()

    def _between(self, rates: Floats, ahead_s: float) -> float:
        """Linear between the two horizons that this is between."""
        periods = ahead_s / self._period
        if not periods > 1.0:
            return float(rates[0])
        if periods >= LONGEST:
            return float(rates[-1])
        below = int(log2(periods))
        first = float(rates[below])
        return first + (periods / HORIZONS[below] - 1.0) * (float(rates[below + 1]) - first)

    def _uppers(self, kind: int, share: float) -> Floats:
        """The rates that are not exceeded at HORIZONS."""
        known = self._upper.get((kind, share))
        if known is None:
            share_or_all = min(1.0 - RARE, max(RARE, share)) if isfinite(share) else 1.0 - RARE
            path = self._paths[kind]
            known = path + self._quantiles(kind, share_or_all) * self._made[self._step % (LONGEST + 1), 2 + kind]
            np.maximum(known, 0.0, out=known)
            if kind == _PEAK:
                np.maximum.accumulate(known, out=known)
            self._upper[kind, share] = known
        return known

    def _quantiles(self, kind: int, share: float) -> Floats:
        """This quantile of the known errors at each horizon; within the TAIL largest, of an exponential tail through them."""
        known = self._sorted[kind]
        if known is None:
            known = self._sorted[kind] = self._limited(kind)
            known.sort(axis=1)
        counts = self._prior + np.minimum(self._counts, KEPT)
        position = share * (counts + 1.0) - 1.0
        start = counts - TAIL
        rare = position > start
        if rare.all():
            return _tail(known, start, share, counts)
        below = np.clip(position.astype(np.int64), 0, start - 1)
        lower = known[_ALL, below].astype(np.float64)
        found = lower + np.clip(position - below, 0.0, 1.0) * (known[_ALL, below + 1] - lower)
        if rare.any():
            found[rare] = _tail(known, start, share, counts)[rare]
        return found

    def _limited(self, kind: int) -> NDArray[np.float32]:
        """The errors, in units of the present scales, as large as they may be expected again (GROWTH, NOISE)."""
        errors: NDArray[np.float32] = self._errors[kind].copy()
        scales = self._made[self._step % (LONGEST + 1), 2 + kind]
        limits = self._sizes[kind] * (GROWTH / scales).astype(np.float32)[:, None]
        np.minimum(limits, 1.0, out=limits)
        limits *= errors
        np.maximum(limits, NOISE, out=limits)
        np.minimum(errors, limits, out=errors)
        return errors


def _tail(known: NDArray[np.float32], start: NDArray[np.int64], share: float, counts: NDArray[np.int64]) -> Floats:
    """The quantile within the TAIL largest errors of each horizon. known: errors in order. start: the place of the first of them."""
    largest = known[_ALL[:, None], start[:, None] + _TAIL]
    first = largest[:, 0]
    excess = np.add.reduce(largest, axis=1) / TAIL - first
    found: Floats = first + excess * np.log(TAIL / ((1.0 - share) * (counts + 1.0)))
    return found
