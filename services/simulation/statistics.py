"""Quantiles of any number of durations in bounded memory, the same on every machine."""

from array import array
from collections import defaultdict
from collections.abc import Mapping
from math import ceil
from typing import Any

import numpy as np
from msgspec import Struct

STEPS = 64  # buckets of each power of two
RELATIVE_ERROR = 0.5 / STEPS  # of a quantile, at most: half a bucket's width over its lower end

# A bucket's key is exponent x 2 STEPS + the mantissa's first bits: frexp and the products are exact, where a logarithm's last digit
# differs between machines. Mantissas lie in [0.5, 1), so their part of the key is at least STEPS, and 0 is a key of its own.


class Quantiles:
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

    def merge(self, other: "Quantiles") -> None:
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


# -- counts of queries

WINDOW_S = 10.0  # of the accuracy drop
UNITS = 10**12  # of accuracy: whole numbers add up without rounding, in any order


class AccuracyUnits(dict[float, int]):
    """An accuracy in units, kept once it was asked for."""

    def __missing__(self, accuracy: float) -> int:
        self[accuracy] = found = round(accuracy * UNITS)
        return found


class AppCounts:
    """Counts of one app's queries. rated, accuracy: how many answers in time have an accuracy, and the sum of these, in units."""

    __slots__ = ("accuracy", "answered", "drop", "late", "latency", "offered", "rated", "refusals")

    def __init__(self) -> None:
        self.offered = 0
        self.answered = 0
        self.late = 0
        self.rated = 0
        self.accuracy = 0
        self.refusals: dict[str, int] = {}
        self.latency = Quantiles()
        self.drop = AccuracyDrop()

    @property
    def refused(self) -> int:
        """With any code."""
        return sum(self.refusals.values())


class AccuracyDrop:
    """The greatest fall of accuracy: of a window's mean (10 s, answers in time) below the best mean of a window before it.

    Windows without such answers do not count.
    """

    __slots__ = ("_accuracy", "_best", "_rated", "most")

    def __init__(self) -> None:
        self.most: float | None = None
        self._best = 0.0
        self._rated = 0
        self._accuracy = 0

    def close(self, rated: int, accuracy: int) -> None:
        """A window has ended, with these sums since the start; accuracy in units."""
        if rated == self._rated:
            return
        mean = (accuracy - self._accuracy) / (UNITS * (rated - self._rated))
        self._rated, self._accuracy = rated, accuracy
        if self.most is None:
            self._best, self.most = mean, 0.0
            return
        self.most = max(self.most, self._best - mean)
        self._best = max(self._best, mean)


# -- the time series


class Sample(Struct, frozen=True, kw_only=True, gc=False):
    """The world at a moment, scenario's seconds. instances: loaded ones by variant. workers: that run, by kind of machine.

    cost_rate: US$/s now. utilisation: 0..1, busy share of all devices since the sample before.
    """

    time: float
    instances: dict[str, int]
    workers: dict[str, int]
    cost_rate: float
    utilisation: float


class Totals(Struct, frozen=True, gc=False):
    """Sums at a moment, since the start. violations: late and refused. rated: answers in time whose variant has an accuracy.

    accuracy: sum of these, in tally.UNITS.
    """

    offered: int = 0
    answered: int = 0
    violations: int = 0
    rated: int = 0
    accuracy: int = 0


class Series:
    """Rows of equal length. A point's rates are means over the interval that begins at its time; a query counts where it ended
    (offered: where it was sent). Instances, workers, cost rate and utilisation are the last known at the interval's begin; after the
    duration nothing costs anything.
    """

    def __init__(self, every_s: float, duration_s: float) -> None:
        self._every, self._duration = every_s, duration_s
        self._flows: list[Totals] = []  # of each interval, a difference
        self._before = Totals()
        self._samples: dict[int, Sample] = {}

    @property
    def length(self) -> int:
        """How many intervals are complete."""
        return len(self._flows)

    def close(self, sums: Totals) -> None:
        """An interval has ended, with these sums since the start."""
        before, self._before = self._before, sums
        self._flows.append(
            Totals(
                sums.offered - before.offered,
                sums.answered - before.answered,
                sums.violations - before.violations,
                sums.rated - before.rated,
                sums.accuracy - before.accuracy,
            )
        )

    def sample(self, sample: Sample) -> None:
        """Note the world; of several in one interval the last one counts, of several at one time the first."""
        place = ceil(sample.time / self._every - 1e-6)
        known = self._samples.get(place)
        if known is None or known.time != sample.time:
            self._samples[place] = sample

    def unlike(self, sums: Totals) -> bool:
        """Whether anything happened since the last interval was closed."""
        return sums != self._before

    def variants(self) -> set[str]:
        """Those that had instances."""
        return {name for sample in self._samples.values() for name in sample.instances}

    def mean_utilisation(self) -> float | None:
        """Over all samples but the one at time 0, before which there was nothing."""
        used = [sample.utilisation for sample in self._samples.values() if sample.time > 0]
        return sum(used) / len(used) if used else None

    def document(self) -> dict[str, Any]:
        """All rows, as docs/simulation.md has them."""
        flows, count = self._flows, len(self._flows)
        seen, spans = self._known(count), [self._span(i) for i in range(count)]
        return {
            "time": [round(i * self._every, 9) for i in range(count)],
            "offered_qps": [flow.offered / span for flow, span in zip(flows, spans, strict=True)],
            "answered_qps": [flow.answered / span for flow, span in zip(flows, spans, strict=True)],
            "violations": [flow.violations for flow in flows],
            "effective_accuracy": [flow.accuracy / (UNITS * flow.rated) if flow.rated else None for flow in flows],
            "cost_rate": [
                sample.cost_rate if sample and i * self._every < self._duration else 0.0
                for i, sample in enumerate(seen)
            ],
            "utilisation": [sample.utilisation if sample else 0.0 for sample in seen],
            "instances": _columns([sample.instances if sample else {} for sample in seen]),
            "workers": _columns([sample.workers if sample else {} for sample in seen]),
        }

    def _span(self, i: int) -> float:
        """Seconds of an interval: the duration may end within one."""
        left = self._duration - i * self._every
        return left if 0 < left < self._every else self._every

    def _known(self, count: int) -> list[Sample | None]:
        """For each interval the last sample until its begin; before the first sample that one."""
        last = self._samples[min(self._samples)] if self._samples else None
        found = []
        for i in range(count):
            last = self._samples.get(i, last)
            found.append(last)
        return found


def _columns(rows: list[Mapping[str, int]]) -> dict[str, list[int]]:
    """Rows of name to count as name to counts, zero where a row does not have the name."""
    names = sorted({name for row in rows for name, count in row.items() if count})
    return {name: [row.get(name, 0) for row in rows] for name in names}
