"""The metrics that a process offers to Prometheus, as values: families of samples, and histograms with fixed bounds.

Names follow Prometheus' conventions: `infaas_` first, base units (seconds, bytes, US dollars), `_total` for what only grows.
A service's metrics.py reads its actor's state when Prometheus asks. Nothing is counted for it while a query is served.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, Self

from msgspec import Struct

MetricKind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
MICROSECONDS = (1e-5, 2e-5, 3e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)  # in seconds
ITEMS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Histogram:
    """Counts of values up to each bound, and their sum. bounds: rising."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # of each bucket alone; the last one is for values above all bounds
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: list[float]) -> None:
        """Observe many values at once. Sorts `values`."""
        values.sort()
        below = 0
        for i, bound in enumerate(self.bounds):
            upto = bisect_right(values, bound, below)
            self.counts[i] += upto - below
            below = upto
        self.counts[-1] += len(values) - below
        self.total += sum(values)

    def scaled(self, bounds: tuple[float, ...], factor: float) -> "Histogram":
        """The same histogram in another unit. bounds: this one's bounds in that unit."""
        other = Histogram(bounds)
        other.counts, other.total = list(self.counts), self.total * factor
        return other

    @property
    def count(self) -> int:
        return sum(self.counts)


class MetricFamily(Struct, eq=False):
    """One metric: all its samples, each with its labels. Its name carries the unit, as Prometheus wants."""

    name: str
    kind: MetricKind
    help: str
    samples: list[tuple[dict[str, str], float | Histogram]] = []

    def add(self, value: float | Histogram, **labels: str) -> Self:
        self.samples.append((labels, value))
        return self

    def add_all(self, values: Mapping[Any, float | Histogram], *labels: str) -> Self:
        """A sample for each key: the value of its label, or a tuple with that of each."""
        for key, value in values.items():
            self.add(value, **dict(zip(labels, key if isinstance(key, tuple) else (key,), strict=True)))
        return self


def counter(name: str, help: str) -> MetricFamily:
    """What only grows."""
    return MetricFamily(name, "counter", help)


def gauge(name: str, help: str) -> MetricFamily:
    """What rises and falls."""
    return MetricFamily(name, "gauge", help)


def histogram(name: str, help: str) -> MetricFamily:
    """How values are distributed."""
    return MetricFamily(name, "histogram", help)


class Insight(Protocol):
    """What a service offers of its actor: a module or object with these two functions.

    Where it has a third, `under_way(actor)`, an actor with a successor is stopped when that says no.
    """

    def families(self, actor: Any, /) -> Iterable[MetricFamily]:
        """Its numbers now."""
        ...

    def missing(self, actor: Any, now: float, /) -> str:
        """What it lacks to do its work, in words. Empty when it is ready."""
        ...


def named(families: Iterable[MetricFamily]) -> list[MetricFamily]:
    """One family for each name, since several actors of a process may offer the same one."""
    found: dict[str, MetricFamily] = {}
    for family in families:
        known = found.setdefault(family.name, family)
        if known is not family:
            known.samples.extend(family.samples)
    return list(found.values())
