"""What becomes of each query while a tuner changes the replicas: the estimator's model with replicas that come and go. Pure.

Tuners decide by arrivals alone. So all decisions are made first, from reports of 0.1 s as dispatchers send them; then each vertex is
followed through its sample, a batch at a time, in the order of deadlines. A replica that is ordered serves after ACTIVATION_S. One that
is given back ends its batch first. Both are paid for from the order on, until they are given back.
"""

from bisect import bisect_right
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import NamedTuple

import numpy as np
from inferline_pipelines import configuration

from bus.messages.catalog import PipelinePlan
from services.core.pipelines.branching import visits
from services.core.pipelines.envelope import BIN_S
from services.core.pipelines.graph import PipelineGraph
from services.core.pipelines.problem import PipelineProblem
from services.core.pipelines.queueing import Floats, StageConfiguration
from services.core.pipelines.tuner import ReplicaTuner, TunerDecision

ACTIVATION_S = 5.0
EVERY_S = 0.1  # a dispatcher reports
Change = tuple[float, int]  # when, replicas from then on


class Replayed(NamedTuple):
    """latencies: of each query, s. spent: (time, US$ per hour from then on). decisions: (time, decision)."""

    latencies: Floats
    spent: list[tuple[float, float]]
    decisions: list[tuple[float, TunerDecision]]
    seconds: float
    late: float  # share

    @property
    def cost(self) -> float:
        """US$ per hour, mean."""
        times = [at for at, _ in self.spent] + [self.seconds]
        return sum(price * (b - a) for (_, price), a, b in zip(self.spent, times, times[1:], strict=False)) / (
            self.seconds
        )


def replay(
    problem: PipelineProblem,
    plan: PipelinePlan,
    arrivals: Floats,
    seconds: float,
    tuner: ReplicaTuner | None = None,
    activation_s: float = ACTIVATION_S,
) -> Replayed:
    """A plan that is deployed, without a tuner or with one. seconds: that the sample lasts."""
    decided = [] if tuner is None else list(decisions(tuner, arrivals, seconds))
    graph, first = PipelineGraph(problem.pipeline), len(problem.arrivals)
    visited = visits(graph, np.arange(first, first + len(arrivals), dtype=np.uint64))
    stages = configuration(problem, plan)
    known: dict[str, Floats] = {}
    for name in graph.order:
        before = np.max([known[edge.source] for edge in graph.into[name]] or [arrivals], axis=0)
        rows = np.flatnonzero(visited[name])
        known[name] = before.copy()
        changes = _changes(stages[name].replicas, [(at, one.replicas[name]) for at, one in decided], activation_s)
        known[name][rows] = served(before[rows], stages[name], changes)
    found = np.max([known[name] for name in graph.sinks], axis=0) - arrivals
    return Replayed(
        latencies=found,
        spent=[(0.0, _price(problem, plan, {name: one.replicas for name, one in plan.vertices.items()}))]
        + [(at, _price(problem, plan, one.replicas)) for at, one in decided],
        decisions=decided,
        seconds=seconds,
        late=float(np.mean(1000.0 * found > problem.latency_ms)),
    )


def decisions(tuner: ReplicaTuner, arrivals: Floats, seconds: float) -> Iterable[tuple[float, TunerDecision]]:
    """What a tuner decides that begins at 0."""
    bins, steps = round(EVERY_S / BIN_S), round(seconds / EVERY_S)
    counts = np.bincount((arrivals / BIN_S).astype(np.int64), minlength=(steps + 1) * bins)
    for i in range(steps):
        now = (i + 1) * EVERY_S
        decided = tuner.told(i * EVERY_S, counts[i * bins : (i + 1) * bins].tolist(), now)
        if decided is not None:
            yield now, decided


def _price(problem: PipelineProblem, plan: PipelinePlan, replicas: dict[str, int]) -> float:
    prices = {(one.vertex, one.hardware, one.variant): one.price_per_hour for one in problem.options}
    return sum(prices[name, one.hardware, one.variant] * replicas[name] for name, one in plan.vertices.items())


def _changes(planned: int, wanted: list[Change], activation_s: float) -> list[Change]:
    """(when, replicas more or fewer): more only after their activation."""
    found, before = [], planned
    for at, replicas in wanted:
        if replicas != before:
            found.append((at + (activation_s if replicas > before else 0.0), replicas - before))
            before = replicas
    return sorted(found)


def served(ready: Floats, stage: StageConfiguration, changes: list[Change]) -> Floats:
    """When each query's batch ends. ready: when each arrives, in the order of deadlines. changes: (when, replicas more or fewer)."""
    order = np.argsort(ready, kind="stable")
    times: list[float] = ready[order].tolist()
    ranks: list[int] = order.tolist()
    free = [0.0] * stage.replicas
    heapify(free)
    ahead = [*changes, (inf, 0)]
    ends = np.empty(len(times))
    waiting: list[int] = []
    i = number = 0
    n, clock = len(times), 0.0
    while i < n or waiting:
        ready_at = clock if waiting else times[i]
        at = max(free[0], ready_at)
        while ahead[number][0] <= at:
            when, more = ahead[number]
            number += 1
            for _ in range(more):
                heappush(free, when)
            for _ in range(min(-more, len(free) - 1)):
                heappop(free)
            at = max(free[0], ready_at)
        clock = at
        there = bisect_right(times, at, i)
        for query in ranks[i:there]:
            heappush(waiting, query)
        i = there
        count = min(stage.batch, len(waiting))
        end = at + stage.seconds[count]
        heapreplace(free, end)
        for _ in range(count):
            ends[heappop(waiting)] = end
    return ends
