"""Planners by the names that the command line and scenarios use. Pure.

inferline: one variant for each vertex, the most accurate. model-less: any variant that meets the vertex's accuracy floor, where it names one, so
that the plan chooses models as well; with the goal accuracy, the best ones together that the budget pays. cg-mean, cg-peak: the baselines of InferLine's evaluation (paper 004,
section 6.1), which have a tuner of their own: the pipeline as one unit, replicated for a rate. A unit is one replica of each vertex on its
fastest hardware, the dearer one of equals. Its batch is the largest for which one query through it meets the objective: Σ latency on the longest
path. `cg-mean` has units for the mean rate of the sample, `cg-peak` for the largest rate in any window as long as the objective. Whether queries
then wait too long is for the estimator to say, after the fact.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import ceil
from typing import Any

from bus.messages.catalog import PipelinePlan
from services.core.pipelines.envelope import BIN_S, most_in
from services.core.pipelines.inferline import EFFORT, ROUNDS, fastest, infeasible, plan_inferline
from services.core.pipelines.problem import (
    PipelineProblem,
    PlanningWorkspace,
    ServingChoice,
    StageOption,
    allowed,
    most_accurate,
    whole_accuracy,
)
from services.core.pipelines.tuner import LOOK_S, Asked, PipelineTuner, ReplicaTuner, TunerDecision, pays

MOST_RANKED = 4096  # combinations of floors; then only the lowest one
MANY = 32  # combinations of floors that are over the budget, after which more and more are passed over
RATE_S = 10.0  # over which a rate is measured
IDLE_S = 120.0  # without need, before a unit goes: that of AutoScale


def plan_coarse(space: PlanningWorkspace, *, policy: str) -> PipelinePlan:
    """policy: "cg-mean" or "cg-peak"."""
    options = fastest(space)
    if space.unqueued(options) > space.objective:
        return infeasible(space, policy)
    batch = max((n for n in _sizes(space, options) if _path_seconds(space, options, n) <= space.objective), default=1)
    sizes = [min(batch, len(space.seconds[v][o]) - 1) for v, o in enumerate(options)]
    unit = min(
        space.throughput(v, o, n) / space.scales[v]
        for v, (o, n) in enumerate(zip(options, sizes, strict=True))
        if space.scales[v] > 0
    )
    rate = space.rate
    if policy == "cg-peak":
        rate = most_in(space.problem.arrivals, space.objective) / space.objective
    units = max(1, ceil(rate / unit - 1e-9))
    choices = tuple(ServingChoice(o, n, units) for o, n in zip(options, sizes, strict=True))
    steps = [f"a unit in batches of {batch} serves {unit:.4g} queries/s", f"{units} units for {rate:.4g} queries/s"]
    return space.plan(choices, policy=policy, steps=steps)


def _sizes(space: PlanningWorkspace, options: list[int]) -> set[int]:
    return {n for v, o in enumerate(options) for n in space.batches(v, o)}


def _path_seconds(space: PlanningWorkspace, options: list[int], batch: int) -> float:
    """Of one query through an idle unit in full batches, on its longest path."""
    hop = space.problem.hop.ms / 1000.0
    tables = [space.seconds[v][o] for v, o in enumerate(options)]
    weights = {name: table[min(batch, len(table) - 1)] + hop for name, table in zip(space.order, tables, strict=True)}
    return space.graph.longest_path(weights)[0] + hop


class CoarseTuner:
    """The tuner of the baselines, after AutoScale (Gandhi et al., TOCS 2012): the plan is scaled as one unit.

    Units are added once those that there are serve less than what comes, and then also for what waits by then. What was not needed for
    two minutes goes. It is told and asked like `PipelineTuner`.
    """

    def __init__(self, plan: PipelinePlan, now: float, *, replicas: Mapping[str, int] | None = None) -> None:
        """now: Unix seconds. replicas: of each vertex, those that a tuner before this one had; None: the plan's."""
        stages = plan.vertices
        self.lead_s = 0.0
        self._planned = {name: stage.replicas for name, stage in stages.items()}
        self._units = max(self._planned.values())  # of the plan; a coarse one has a replica of each vertex for each
        self.replicas = dict(replicas or self._planned)
        served = [
            1000.0 * one.replicas * one.batch / one.service_ms / one.scale for one in stages.values() if one.scale > 0
        ]
        self._unit = min(served) / self._units
        self._plan = plan
        self._arrived: deque[tuple[float, int]] = deque()  # (when a report begins, its queries) of the last RATE_S
        self._wanted: deque[tuple[float, int]] = deque()  # (when, units) of the last IDLE_S; falling
        self._begun = self._looked = now
        self._fresh = 0  # queries since the last look
        self._waiting = 0.0

    def told(self, start: float, counts: Sequence[int], now: float, asked: Asked | None = None) -> TunerDecision | None:
        """A dispatcher's report: queries in the bins from `start`, Unix seconds. None: the units stay as they are."""
        del asked  # a unit is for queries
        if now - RATE_S <= start <= now - len(counts) * BIN_S + LOOK_S:
            self._arrived.append((start, sum(counts)))
            self._fresh += sum(counts)
        passed = now - self._looked
        if passed < LOOK_S:
            return None
        units = max(round(self.replicas[name] * self._units / k) for name, k in self._planned.items())
        self._waiting = max(0.0, self._waiting + self._fresh - units * self._unit * passed)
        self._looked, self._fresh = now, 0
        while self._arrived and self._arrived[0][0] < now - RATE_S:
            self._arrived.popleft()
        rate = sum(count for _, count in self._arrived) / min(RATE_S, max(LOOK_S, now - self._begun))
        wanted = max(1, ceil((rate + self._waiting / RATE_S) / self._unit - 1e-9))
        while self._wanted and self._wanted[0][0] < now - IDLE_S:
            self._wanted.popleft()
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        most = self._wanted[0][1]
        while most > units and not pays(self._plan, self._replicas(most)):
            most -= 1
        if most != units and (units < wanted or now - self._begun >= IDLE_S):
            return self._changed(units, most, rate)
        return None

    def _replicas(self, units: int) -> dict[str, int]:
        return {name: max(1, ceil(k * units / self._units - 1e-9)) for name, k in self._planned.items()}

    def _changed(self, units: int, wanted: int, rate: float) -> TunerDecision:
        before = self.replicas
        self.replicas = self._replicas(wanted)
        reason = f"{rate:.4g} queries/s and {self._waiting:.0f} that wait; a unit serves {self._unit:.4g}/s"
        return TunerDecision(
            action="up" if wanted > units else "down",
            replicas=dict(self.replicas),
            before=before,
            lambda_max=rate,
            window_s=RATE_S,
            reason=reason,
        )


POLICIES = ("inferline", "model-less", "cg-mean", "cg-peak")
COARSE = POLICIES[2:]


def plan_pipeline(
    problem: PipelineProblem, policy: str = "inferline", *, effort: int = EFFORT, rounds: int = ROUNDS
) -> PipelinePlan:
    """Plan a problem without errors. The same problem always has the same plan. Raises ValueError for other policies.

    effort: visits that the estimator may follow beyond the paper's steps, in each round. rounds: plans that are made until one holds for other
    samples too; 1: the sample is taken as it is.
    """
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}; there are: {', '.join(POLICIES)}")
    if policy == "model-less" and problem.goal == "accuracy":
        return _most_accurate_plan(problem, effort, rounds)
    space = workspace(problem, policy)
    if policy in COARSE:
        return plan_coarse(space, policy=policy)
    return plan_inferline(space, policy=policy, effort=effort, rounds=rounds)


def _most_accurate_plan(problem: PipelineProblem, effort: int, rounds: int) -> PipelinePlan:
    """The most accurate answers of the whole pipeline that the budget pays: floors for all vertices, the best together first.

    Options of unknown accuracy serve only vertices that have no others.
    """
    options = {
        vertex.name: allowed(vertex, (one for one in problem.options if one.vertex == vertex.name))
        for vertex in problem.pipeline.vertices
    }
    whole = PlanningWorkspace(problem, options)
    floors = [sorted({one.accuracy for one in mine if one.accuracy is not None} or {1.0}) for mine in whole.options]
    ranked = list(_best_first(whole, floors))
    i = tried = 0
    while True:
        floor, last = dict(zip(whole.order, ranked[i], strict=True)), i == len(ranked) - 1
        left = {
            name: [one for one in mine if one.accuracy is not None and one.accuracy >= floor[name]] or mine
            for name, mine in options.items()
        }
        space = PlanningWorkspace(problem, left)
        if last or sum(map(space.least_price, range(len(left)))) <= problem.budget_per_hour * (1 + 1e-9):
            plan = plan_inferline(space, policy="model-less", effort=effort // MANY, rounds=1)
            if plan.status != "infeasible":
                plan = plan_inferline(
                    PlanningWorkspace(problem, left), policy="model-less", effort=effort, rounds=rounds
                )
            if last or plan.status != "infeasible":
                return plan
            tried += 1
        i = min(len(ranked) - 1, i + 1 + tried // MANY)


def _best_first(space: PlanningWorkspace, floors: Sequence[Sequence[float]]) -> Iterator[tuple[float, ...]]:
    """Combinations of a floor for each vertex, the most accurate together first, and at last the lowest: they multiply with each vertex."""

    def entry(places: tuple[int, ...]) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
        one = tuple(mine[place] for mine, place in zip(floors, places, strict=True))
        return -(whole_accuracy(zip(space.scales, one, strict=True)) or 0.0), places, one

    best = tuple(len(mine) - 1 for mine in floors)
    queue, seen = [entry(best)], {best}
    for _ in range(MOST_RANKED):
        if not queue:
            return
        _, places, one = heappop(queue)
        yield one
        for v, place in enumerate(places):
            lower = (*places[:v], place - 1, *places[v + 1 :])
            if place and lower not in seen:
                seen.add(lower)
                heappush(queue, entry(lower))
    yield tuple(mine[0] for mine in floors)


def make_tuner(
    plan: PipelinePlan, now: float, replicas: Mapping[str, int] | None = None, **foreseen: Any
) -> ReplicaTuner | None:
    """The tuner that goes with a plan's policy. None: the plan does not say what traffic it is for.

    now: Unix seconds. replicas: of each vertex, those that a tuner before this one had; None: the plan's. foreseen: as `PipelineTuner` has it.
    """
    if not (plan.rate > 0 and plan.envelope):
        return None
    if plan.policy in COARSE:
        return CoarseTuner(plan, now, replicas=replicas)
    return PipelineTuner(plan, now, replicas=replicas, **foreseen)


def workspace(problem: PipelineProblem, policy: str) -> PlanningWorkspace:
    """The problem with the options that the policy may take."""
    options: dict[str, list[StageOption]] = {}
    for vertex in problem.pipeline.vertices:
        mine = allowed(vertex, (option for option in problem.options if option.vertex == vertex.name))
        chooses = policy == "model-less" and vertex.accuracy is not None
        options[vertex.name] = mine if chooses else most_accurate(mine)
    return PlanningWorkspace(problem, options)
