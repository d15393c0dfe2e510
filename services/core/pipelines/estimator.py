"""How long each query of a sample takes in a pipeline that is configured in a certain way (InferLine, paper 004, section 3.4). Pure.

Each vertex has one queue by deadline for all replicas. An idle replica takes the head of the queue at once, and with it as many as wait, up
to the largest batch. All queries of a pipeline have the same objective, so the earliest deadline is the earliest arrival. Vertices are
simulated one after the other, in the order of the graph.

When batches begin, and how many queries are in each, does not depend on which queries they are. So both are found first for arrivals in
order, with one iteration for each batch, and without any where queries find an idle replica; then places in batches are given out by
deadline, where queries have overtaken each other. Where batches are single, begins follow from begins: the n-th query begins at
max(its arrival, end of query n - k) with k replicas, which is a running maximum.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from functools import reduce
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil, inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from services.core.pipelines.branching import Bools, visits
from services.core.pipelines.graph import PipelineGraph

Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]

KEPT = 10_000_000  # numbers that an estimator keeps for later estimates
WORTH = 64  # queries that must find an idle replica in a row, for them to be left out of the iteration


class StageConfiguration(Struct, frozen=True, gc=False):
    """How a vertex is served. seconds: of a batch of 0, 1, ... `batch` items or more; not decreasing."""

    seconds: tuple[float, ...]
    batch: int
    replicas: int


class LatencyEstimator:
    """arrivals: seconds, of each query of the sample, in order. visited: of each vertex, which queries visit it; None: drawn by
    probability for uids 0, 1, ... hop_s: seconds that a message between client and stage or between two stages takes.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        arrivals: Floats,
        *,
        visited: Mapping[str, Bools] | None = None,
        hop_s: float = 0.0,
    ) -> None:
        self.graph = graph
        self.arrivals = arrivals
        self.hop_s = hop_s
        if visited is None:
            visited = visits(graph, np.arange(len(arrivals), dtype=np.uint64))
        self._visited = visited
        self._rows = {name: None if rows.all() else np.flatnonzero(rows) for name, rows in visited.items()}
        self._upstream = {name: [one for one in graph.order if one in graph.ancestors(name)] for name in graph.order}
        self._kept: OrderedDict[tuple[object, ...], Floats] = OrderedDict()

    def scale(self, name: str) -> float:
        """Visits of a vertex for each query."""
        return float(self._visited[name].mean()) if len(self.arrivals) else 0.0

    def latencies(self, stages: Mapping[str, StageConfiguration]) -> Floats:
        """Seconds from arrival to answer, of each query."""
        found = self.latencies_within(stages, inf, len(self.arrivals))
        assert found is not None, "any number of queries may be late"
        return found

    def latencies_within(self, stages: Mapping[str, StageConfiguration], limit_s: float, late: int) -> Floats | None:
        """The same; None as soon as more than `late` queries are known to take longer than `limit_s`.

        What is computed of a vertex is kept for configurations that differ in others only.
        """
        known: dict[str, Floats] = {}  # of each vertex, when it is known whether it was visited, and its answer is there
        for name in self.graph.order:
            key = (name, stages[name], *(stages[one] for one in self._upstream[name]))
            there = self._kept.get(key)
            if there is None:
                there = self._kept[key] = self._stage(name, self._before(name, known), stages[name])
                if len(self._kept) > max(1, KEPT // max(1, len(self.arrivals))):
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(key)
            known[name] = there
            if limit_s < inf and np.count_nonzero(there - self.arrivals > limit_s - self.hop_s) > late:
                return None
        return self._latest([known[name] for name in self.graph.sinks]) + (self.hop_s - self.arrivals)

    def _stage(self, name: str, before: Floats, stage: StageConfiguration) -> Floats:
        rows = self._rows[name]
        if rows is None:
            return _served(before + self.hop_s, stage)
        found = before.copy()
        found[rows] = _served(before[rows] + self.hop_s, stage)
        return found

    def unqueued(self, seconds: Mapping[str, float]) -> Floats:
        """The same where no query waits. seconds: of one item, by vertex."""
        known: dict[str, Floats] = {}
        for name in self.graph.order:
            known[name] = self._before(name, known) + np.where(self._visited[name], seconds[name] + self.hop_s, 0.0)
        return self._latest([known[name] for name in self.graph.sinks]) + (self.hop_s - self.arrivals)

    def _before(self, name: str, known: Mapping[str, Floats]) -> Floats:
        """When it is known of each query whether it visits this vertex."""
        return self._latest([known[edge.source] for edge in self.graph.into[name]] or [self.arrivals])

    def _latest(self, times: list[Floats]) -> Floats:
        return reduce(np.maximum, times)


def at_percentile(latencies: Floats, percentile: float) -> float:
    """The least latency that at least this share of queries does not exceed; 0 of no queries."""
    if not len(latencies):
        return 0.0
    place = place_of(percentile, len(latencies))
    return float(np.partition(latencies, place)[place])


def place_of(percentile: float, count: int) -> int:
    """Of this many sorted numbers, the place of the percentile."""
    return min(count - 1, max(0, ceil(percentile * count - 1e-9) - 1))


def _served(ready: Floats, stage: StageConfiguration) -> Floats:
    """When each query's batch ends. ready: when each arrives, in the order of deadlines."""
    if not len(ready):
        return ready
    order: Ranks | None = None
    arrivals = ready
    if np.any(ready[1:] < ready[:-1]):
        order = np.argsort(ready, kind="stable")
        arrivals = ready[order]
    begins, ends = _singles(arrivals, stage) if stage.batch == 1 else _batches(arrivals, stage)
    if order is None:
        return ends
    found = np.empty_like(ends)
    found[_by_deadline(order, arrivals, begins, ends)] = ends
    return found


def _singles(arrivals: Floats, stage: StageConfiguration) -> tuple[Floats, Floats]:
    """Begin and end of batches of one, of arrivals in order."""
    each, k = stage.seconds[1], stage.replicas
    if k >= len(arrivals) or bool((arrivals[k:] >= arrivals[:-k] + each).all()):
        return arrivals, arrivals + each  # none waits
    begins = np.empty_like(arrivals)
    for first in range(min(k, len(arrivals))):
        mine = arrivals[first::k]
        before = each * np.arange(len(mine))
        begins[first::k] = np.maximum.accumulate(mine - before) + before
    begins = np.maximum(begins, arrivals)  # what rounding took
    return begins, begins + each


def _batches(arrivals: Floats, stage: StageConfiguration) -> tuple[Floats, Floats]:
    """Begin and end of each query's batch, of arrivals in order."""
    seconds, most, k, n = stage.seconds, stage.batch, stage.replicas, len(arrivals)
    one, lengths = seconds[1], np.array(seconds)
    begins, ends = arrivals.copy(), arrivals + one  # of those that find an idle replica
    tight = np.zeros(n, np.bool_)  # those that would not, if all before them did, and those that come at once with another
    tight[k:] = arrivals[k:] < ends[:-k] if k < n else False
    tight[:-1] |= arrivals[1:] == arrivals[:-1]
    places: list[int] = np.flatnonzero(tight).tolist()
    times: list[float] = arrivals.tolist()
    place, i = 0, 0
    while place < len(places):
        i = first = places[place]
        free = [-inf] * max(0, k - first) + ends[max(0, first - k) : first].tolist()
        heapify(free)
        until: list[float] = []
        starts: list[float] = []
        sizes: list[int] = []
        idle = 0  # queries in a row that found an idle replica
        while i < n:
            at, head = free[0], times[i]
            last = i + 1
            if at <= head:
                at = head
                idle += 1
            else:
                idle = 0
            if last < n and times[last] <= at:
                last = bisect_right(times, at, last, min(i + most, n))
                idle = 0
            heapreplace(free, at + seconds[last - i])
            starts.append(at)
            sizes.append(last - i)
            i = last
            if idle >= k and idle % 16 == 0:
                place = bisect_left(places, i, place)
                if place == len(places) or places[place] - i >= WORTH:
                    break
        began, counts = np.array(starts), np.array(sizes)
        begins[first:i] = np.repeat(began, counts)
        ends[first:i] = np.repeat(began + lengths[counts], counts)
        place = bisect_left(places, i, place)
    return begins, ends


def _by_deadline(order: Ranks, arrivals: Floats, begins: Floats, ends: Floats) -> Ranks:
    """Who takes which place. order: queries as they arrive; begins, ends: of places, in order. A place goes to the earliest deadline that waits.

    Only a query that has been overtaken, and those that it passes again while it waits, change places.
    """
    late = np.flatnonzero(order[1:] < np.maximum.accumulate(order)[:-1]) + 1
    if not len(late):
        return order
    lows = np.minimum(np.searchsorted(begins, arrivals[late], "left"), late)
    matters = (begins[lows] < begins[late]) | (ends[lows] != ends[late])  # else it is in the same batch
    late, lows = late[matters], lows[matters]
    if not len(late):
        return order
    starts = np.minimum.accumulate(lows[::-1])[::-1]  # ends rise: a block reaches back as far as a later one does
    fresh = np.append(True, starts[1:] > late[:-1])
    blocks = np.flatnonzero(fresh)
    taken = order.copy()
    lasts = late[np.append(blocks[1:], len(late)) - 1]
    for low, high in zip(starts[blocks].tolist(), lasts.tolist(), strict=True):
        taken[low : high + 1] = _shared_out(
            order[low : high + 1].tolist(), arrivals[low : high + 1].tolist(), begins[low : high + 1].tolist()
        )
    return taken


def _shared_out(queries: list[int], arrivals: list[float], begins: list[float]) -> list[int]:
    waiting: list[int] = []
    taken = []
    i, n = 0, len(queries)
    for at in begins:
        while i < n and arrivals[i] <= at:
            heappush(waiting, queries[i])
            i += 1
        taken.append(heappop(waiting))
    return taken
