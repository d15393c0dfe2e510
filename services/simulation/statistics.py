"""What a report counts: quantiles of durations, counts of queries, and time series. Results are the same on every machine."""

from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from operator import sub
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from services.core.outcomes import CANCELLED

STEPS = 64  # buckets of each power of two
RELATIVE_ERROR = 0.5 / STEPS  # of a quantile, at most: half a bucket's width over the bucket's lower end

# A bucket's key is exponent x 2 STEPS + the mantissa's first bits: frexp and the products are exact, where a logarithm's last digit
# differs between machines. Mantissas lie in [0.5, 1), so their part of the key is at least STEPS, and 0 is a key of its own.


@dataclass(slots=True, eq=False)
class Quantiles:
    """Quantiles of any number of values >= 0, in bounded memory: counts in buckets that are 1/64 of a power of two wide.

    Callers append values to `fresh`, which is the fastest way in Python, and call `settle` often enough.
    """

    bins: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    fresh: "array[float]" = field(default_factory=lambda: array("d"))

    def settle(self, least: int = 1) -> None:
        """Count the values in `fresh` and empty it, if there are at least `least`."""
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
        """Number of values."""
        self.settle()
        return sum(self.bins.values())

    def quantiles(self, *wanted: float) -> list[float | None]:
        """The quantiles at `wanted` (0..1, rising), within 0.8 %; None without any value."""
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

WINDOW_S = 10.0  # length of a window of the accuracy drop
UNITS = 10**12  # that an accuracy of 1 has: whole numbers add up without rounding, in any order


class AccuracyUnits(dict[float, int]):
    """Accuracies in units, cached."""

    def __missing__(self, accuracy: float) -> int:
        self[accuracy] = found = round(accuracy * UNITS)
        return found


@dataclass(slots=True, eq=False)
class AccuracyDrop:
    """The largest fall of accuracy: the mean of a window (10 s, answers in time) below the best mean of an earlier window.

    Windows without such answers do not count.
    """

    most: float | None = None
    _best: float = 0.0
    _rated: int = 0
    _accuracy: int = 0

    def close(self, rated: int, accuracy: int) -> None:
        """End a window. rated, accuracy (in units): sums since the start."""
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


@dataclass(slots=True, eq=False)
class AppCounts:
    """Counts of one app's queries. rated: number of answers in time with an accuracy. accuracy: the sum of these, in units."""

    offered: int = 0
    answered: int = 0
    late: int = 0
    rated: int = 0
    accuracy: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    latency: Quantiles = field(default_factory=Quantiles)
    drop: AccuracyDrop = field(default_factory=AccuracyDrop)

    @property
    def refused(self) -> int:
        """Number of refusals with any code, without queries that their clients took back."""
        return sum(self.refusals.values()) - self.cancelled

    @property
    def cancelled(self) -> int:
        """Number of queries that their clients took back: they are in no objective."""
        return self.refusals.get(CANCELLED.code, 0)

    @property
    def totals(self) -> "Totals":
        """What its part of all sums is."""
        return Totals(self.offered, self.answered, self.late + self.refused, self.rated, self.accuracy)

    def add(self, other: "AppCounts") -> None:
        """Count another app's queries as well, but for the drop, which is no sum."""
        self.offered += other.offered
        self.answered += other.answered
        self.late += other.late
        self.rated += other.rated
        self.accuracy += other.accuracy
        self.latency.merge(other.latency)
        for code, count in other.refusals.items():
            self.refusals[code] = self.refusals.get(code, 0) + count


class Sample(Struct, frozen=True, kw_only=True, gc=False):
    """The system's state at a time (scenario's seconds). instances: loaded, by variant. workers: running, by kind of machine.

    cost_rate: US$/s. utilisation: 0..1, busy share of all devices since the previous sample.
    """

    time: float
    instances: dict[str, int]
    workers: dict[str, int]
    cost_rate: float
    utilisation: float


class Totals(NamedTuple):
    """Sums since the start. violations: late and refused. rated: answers in time whose variant has an accuracy.

    accuracy: sum of these, in tally.UNITS.
    """

    offered: int = 0
    answered: int = 0
    violations: int = 0
    rated: int = 0
    accuracy: int = 0


class Series:
    """Rows of equal length, with a point for each interval of metrics_every_s. Rates are means over the interval that begins at the
    point's time. A query counts in the interval in which it ended (offered: in which it was sent). Instances, workers, cost rate and
    utilisation are the last known ones at the interval's beginning. After the duration, the cost rate is 0.
    """

    def __init__(self, every_s: float, duration_s: float) -> None:
        self._every, self._duration = every_s, duration_s
        self._flows: list[Totals] = []  # of each interval, a difference
        self._before = Totals()
        self._samples: dict[int, Sample] = {}

    @property
    def length(self) -> int:
        """Number of complete intervals."""
        return len(self._flows)

    def close(self, sums: Totals) -> None:
        """End an interval. sums: since the start."""
        self._flows.append(Totals(*map(sub, sums, self._before)))
        self._before = sums

    def sample(self, sample: Sample) -> None:
        """Add a sample. Of several in one interval the last counts, of several at one time the first."""
        place = ceil(sample.time / self._every - 1e-6)
        known = self._samples.get(place)
        if known is None or known.time != sample.time:
            self._samples[place] = sample

    def unlike(self, sums: Totals) -> bool:
        """Whether anything happened since the last complete interval."""
        return sums != self._before

    def variants(self) -> set[str]:
        """The variants that had instances."""
        return {name for sample in self._samples.values() for name in sample.instances}

    def mean_utilisation(self) -> float | None:
        """Mean over all samples except that at time 0, which covers no time."""
        used = [sample.utilisation for sample in self._samples.values() if sample.time > 0]
        return ratio(sum(used), len(used))

    def document(self) -> dict[str, Any]:
        """All rows, as docs/simulation.md describes them."""
        flows, count = self._flows, len(self._flows)
        seen, spans = self._known(count), [self._span(i) for i in range(count)]
        return {
            "time": [round(i * self._every, 9) for i in range(count)],
            "offered_qps": [flow.offered / span for flow, span in zip(flows, spans, strict=True)],
            "answered_qps": [flow.answered / span for flow, span in zip(flows, spans, strict=True)],
            "violations": [flow.violations for flow in flows],
            "effective_accuracy": [ratio(flow.accuracy, UNITS * flow.rated) for flow in flows],
            "cost_rate": [
                sample.cost_rate if sample and i * self._every < self._duration else 0.0
                for i, sample in enumerate(seen)
            ],
            "utilisation": [sample.utilisation if sample else 0.0 for sample in seen],
            "instances": _columns([sample.instances if sample else {} for sample in seen]),
            "workers": _columns([sample.workers if sample else {} for sample in seen]),
        }

    def _span(self, i: int) -> float:
        """Seconds of an interval. The duration may end within the last one."""
        left = self._duration - i * self._every
        return left if 0 < left < self._every else self._every

    def _known(self, count: int) -> list[Sample | None]:
        """For each interval the last sample before its beginning, or the first sample."""
        last = self._samples[min(self._samples)] if self._samples else None
        found = []
        for i in range(count):
            last = self._samples.get(i, last)
            found.append(last)
        return found


def ratio(part: float, whole: float) -> float | None:
    """None: of nothing."""
    return part / whole if whole else None


def _columns(rows: list[Mapping[str, int]]) -> dict[str, list[int]]:
    """Rows of name to count as name to counts; 0 if a row does not have the name."""
    names = sorted({name for row in rows for name, count in row.items() if count})
    return {name: [row.get(name, 0) for row in rows] for name in names}
