"""How long each query of a sample takes in a pipeline that is configured in a certain way (InferLine, paper 004, section 3.4). Pure.

Each vertex has one queue by deadline for all replicas (services/core/pipelines/queueing.py). Vertices are simulated one after the other, in the
order of the graph. All queries of a pipeline have the same objective, so the earliest deadline is the earliest arrival.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import reduce
from math import ceil, inf
from typing import NamedTuple, Self

import numpy as np

from services.core.pipelines.branching import draws, visits
from services.core.pipelines.graph import PipelineGraph
from services.core.pipelines.queueing import Floats, StageConfiguration, served

# Shares of batches: hops are known by their quantiles there, and are linear between them. The two longest of 1,000 are left out: a stop of
# the whole machine would count for each stage by itself.
HOP_LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998)
KEPT = 10_000_000  # numbers that an estimator keeps for later estimates


class MeasuredHop(NamedTuple):
    """What batches take beyond their profiles. ms: the mean. quantiles_ms: at HOP_LEVELS; empty: it never varies."""

    ms: float
    quantiles_ms: tuple[float, ...] = ()

    @classmethod
    def of(cls, measured: Collection[float]) -> Self:
        """measured: of some batches, at least one, ms."""
        hops = np.array(measured)
        return cls(float(hops.mean()), tuple(np.quantile(hops, HOP_LEVELS).tolist()))


NO_HOP = MeasuredHop(0.0)


class LatencyEstimator:
    """arrivals: seconds, of each query of the sample, in order. first: uid of the first one, by which it is drawn which vertices each
    visits. hop: between two stages, or client and stage: to a dispatcher and on. Where it varies, each batch draws its own.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        arrivals: Floats,
        *,
        first: int = 0,
        hop: MeasuredHop = NO_HOP,
    ) -> None:
        self.graph = graph
        self.arrivals = arrivals
        self.hop_s = hop.ms / 1000.0
        uids = np.arange(first, first + len(arrivals), dtype=np.uint64)
        visited = self._visited = visits(graph, uids)
        # Whose each visit is, in the order of queries: several of one that hands items on. None: each query visits it once.
        self._rows = {
            name: None if (asked == 1).all() else np.repeat(np.arange(len(asked)), asked)
            for name, asked in visited.items()
        }
        self._hops: dict[str, Floats] = {}  # of each vertex, by the place of a batch's first query there
        answer: float | Floats = self.hop_s
        if hop.quantiles_ms:
            hops_s = np.array(hop.quantiles_ms) / 1000.0
            for name, asked in visited.items():
                drawn = draws(np.arange(first, first + asked.sum(), dtype=np.uint64), f"hop {name}")
                self._hops[name] = np.interp(drawn, HOP_LEVELS, hops_s)
            answer = np.interp(draws(uids, "hop"), HOP_LEVELS, hops_s)
        self._answer = answer - arrivals  # what is added to when the last stage is known
        self._upstream = {name: [one for one in graph.order if one in graph.ancestors(name)] for name in graph.order}
        self._kept: OrderedDict[tuple[object, ...], Floats] = OrderedDict()

    def scale(self, name: str) -> float:
        """Visits of a vertex for each query, one for each item that it is asked for."""
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
        # of each vertex, when it is known whether it was visited, and its answer is there
        known: dict[str, Floats] = {}
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
            if limit_s < inf and np.count_nonzero(there + self._answer > limit_s) > late:
                return None
        return self._latest([known[name] for name in self.graph.sinks]) + self._answer

    def _stage(self, name: str, before: Floats, stage: StageConfiguration) -> Floats:
        """The hop is a part of the service: a replica gets its next batch when its dispatcher has heard that the last one is done."""
        hops = self._hops.get(name)
        if self.hop_s and hops is None:
            seconds = (0.0, *(one + self.hop_s for one in stage.seconds[1:]))
            stage = StageConfiguration(seconds, stage.batch, stage.replicas)
        rows = self._rows[name]
        if rows is None:
            return served(before, stage, hops)
        found = before.copy()
        if len(rows):  # a query goes on with the last of its items
            begins = np.flatnonzero(np.diff(rows, prepend=-1))
            found[rows[begins]] = np.maximum.reduceat(served(before[rows], stage, hops), begins)
        return found

    def unqueued(self, seconds: Mapping[str, float]) -> Floats:
        """The same where no query waits, and each hop takes `hop_s`. seconds: of one item, by vertex."""
        known: dict[str, Floats] = {}
        for name in self.graph.order:
            known[name] = self._before(name, known) + np.where(self._visited[name] > 0, seconds[name] + self.hop_s, 0.0)
        return self._latest([known[name] for name in self.graph.sinks]) + (self.hop_s - self.arrivals)

    def _before(self, name: str, known: Mapping[str, Floats]) -> Floats:
        """When it is known of each query whether it visits this vertex."""
        return self._latest([known[edge.source] for edge in self.graph.into[name]] or [self.arrivals])

    def _latest(self, times: list[Floats]) -> Floats:
        return reduce(np.maximum, times)


def resampled(arrivals: Floats, number: int) -> Floats:
    """Another sample of the same law, as far as this one tells it: short stretches of its gaps, drawn with replacement (a block bootstrap).

    number: of the sample, from 0; each has its own draws. What changes slowly in the sample changes less in it.
    """
    gaps = np.diff(arrivals)
    count = len(gaps)
    if count < 2:
        return arrivals
    length = max(1, round(count ** (1 / 3)))
    blocks = -(-count // length)
    starts = (draws(np.arange(blocks, dtype=np.uint64), f"sample {number}") * (count - length + 1)).astype(np.int64)
    drawn = gaps[(starts[:, None] + np.arange(length)).ravel()[:count]]
    found: Floats = arrivals[0] + np.append(0.0, np.cumsum(drawn))
    return found


def at_percentile(latencies: Floats, percentile: float) -> float:
    """The least latency that at least this share of queries does not exceed; 0 of no queries."""
    if not len(latencies):
        return 0.0
    place = place_of(percentile, len(latencies))
    return float(np.partition(latencies, place)[place])


def place_of(percentile: float, count: int) -> int:
    """Of this many sorted numbers, the place of the percentile."""
    return min(count - 1, max(0, ceil(percentile * count - 1e-9) - 1))
