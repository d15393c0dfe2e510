"""The problem of planning a pipeline: what it is, the ways to serve its vertices, a sample of its queries. Pure."""

from collections.abc import Iterable, Mapping
from math import inf, isfinite, prod
from typing import Annotated

import numpy as np
from msgspec import Struct

from bus.fields import SHARE, Number, faults, filled
from bus.messages.catalog import LARGEST_BATCH, PipelinePlan, PipelineRecord, PipelineVertex, PlannedStage
from services.core.cost import Goal
from services.core.pipelines.envelope import REPORT_S, traffic_envelope
from services.core.pipelines.estimator import NO_HOP, LatencyEstimator, MeasuredHop, at_percentile, place_of, resampled
from services.core.pipelines.graph import PipelineGraph
from services.core.pipelines.queueing import Floats, StageConfiguration

LONGEST_MS = 3.6e6
DEAREST = 1e6  # US$ per hour
ALIKE = 0.005  # accuracies that a validation set does not tell apart
ROOM = 0.03  # of the rate: what samples of ten minutes at a CV of 4 may differ by
HOP = MeasuredHop(3.0)  # where it was not measured: about its mean on one machine (benches/pipelines.py --only live)
OTHERS = 4  # samples that a plan is tried on, beside the one that it was made from


class StageOption(Struct, frozen=True, kw_only=True):
    """A way to serve a vertex. price_per_hour: US$ of one replica. batch_latency_ms: of batches, by size; between sizes it is linear.

    variant: which is served so; empty: the only one there is. accuracy: its own, 0..1; None: not known, which no floor excludes.
    """

    vertex: str
    hardware: str
    price_per_hour: Annotated[float, Number(most=DEAREST)]
    batch_latency_ms: dict[Annotated[int, Number(1, LARGEST_BATCH)], Annotated[float, Number(above=0, most=LONGEST_MS)]]
    variant: str = ""
    accuracy: Annotated[float | None, SHARE] = None


class MeasuredStages(Struct, frozen=True, kw_only=True):
    """The accuracy of a pipeline's answers by their labels, where variants answered its stages: "stage=variant, ...". product: of their accuracies."""

    stages: str
    product: float
    accuracy: float
    low: float
    high: float
    labels: int


def factor_of(planned: Mapping[str, PlannedStage], measured: Iterable[MeasuredStages]) -> float:
    """What answers of planned variants reach, as a multiple of the product of the stages' accuracies; 1 where labels do not exclude that."""
    mine = {f"{name}={stage.variant}" for name, stage in planned.items()}
    found = [one for one in measured if mine.issuperset(one.stages.split(", "))]
    if not any(one.labels and not one.low <= one.product <= one.high for one in found):
        return 1.0
    return sum(one.labels * one.accuracy for one in found) / sum(one.labels * one.product for one in found)


class PipelineProblem(Struct, frozen=True, kw_only=True):
    """arrivals: of the sample trace, in seconds and in order. percentile: of the latencies, which must be within `latency_ms`.

    goal: "accuracy": `model-less` plans the most accurate answers that budget_per_hour (US$) pays, "cost" the cheapest ones that its vertices' accuracies
    allow.

    hop: the time that a query takes at each stage, and once more for its client, beyond queues and the batches' own times: the messages,
    and what they wait in processes.

    measured: what labels say of combinations of variants, from a running system.
    """

    name: str
    pipeline: PipelineRecord
    latency_ms: float
    options: tuple[StageOption, ...]
    arrivals: Floats
    percentile: float = 0.99
    hop: MeasuredHop = NO_HOP
    goal: Goal = "cost"
    budget_per_hour: float = inf
    measured: tuple[MeasuredStages, ...] = ()


def problem_errors(problem: PipelineProblem) -> list[str]:
    """All that is wrong with what is planned for; the pipeline itself is checked by `pipeline_errors`."""
    wrong = []
    if not (isfinite(problem.latency_ms) and 0 < problem.latency_ms <= LONGEST_MS):
        wrong.append(f"latency_ms: must be above 0 and at most {LONGEST_MS:.0f}")
    if not 0 < problem.percentile <= 1:
        wrong.append("plan.percentile: must be above 0 and at most 1, such as 0.99")
    arrivals = problem.arrivals
    if not len(arrivals):
        wrong.append("load: the sample trace has no queries; give it a rate above 0 and a longer time")
    elif not np.isfinite(arrivals).all() or np.any(arrivals[1:] < arrivals[:-1]):
        wrong.append("load: the times of the sample trace must be finite and in order")
    elif len(arrivals) > 1 and arrivals[0] == arrivals[-1]:
        wrong.append("load: the sample trace lasts no time; give it a longer time")
    wrong += [
        f"edge[{edge.source} -> {edge.target}].items_mean: is not said, and was not measured; say how many items an answer has in the mean"
        for edge in problem.pipeline.edges
        if edge.items and not edge.items_mean
    ]
    names = [vertex.name for vertex in problem.pipeline.vertices]
    for i, option in enumerate(problem.options):
        wrong += _option(f"option[{i}]", option, names)
    for vertex in problem.pipeline.vertices:
        mine = [option for option in problem.options if option.vertex == vertex.name]
        if not mine:
            wrong.append(
                f"option: vertex {vertex.name} has none; add [[option]] with vertex, hardware, price_per_hour and batch_latency_ms"
            )
        elif not allowed(vertex, mine):
            best = max(option.accuracy or 0.0 for option in mine)
            wrong.append(f"vertex[{vertex.name}].accuracy: no option has {vertex.accuracy:g}; the best has {best:g}")
    return wrong


def _option(at: str, option: StageOption, names: list[str]) -> list[str]:
    wrong = []
    if option.vertex not in names:
        wrong.append(f"{at}.vertex: there is no vertex {option.vertex[:80]!r}; there are: {', '.join(names)}")
    if not option.hardware:
        wrong.append(f"{at}.hardware: must name a device kind, such as cpu or gpu")
    if not option.batch_latency_ms:
        wrong.append(f"{at}.batch_latency_ms: must have at least one batch size, such as {{ 1 = 20.0 }}")
    return wrong + [f"{at}.{fault.key}: {fault.reason}" for fault in faults(option)]


def allowed(vertex: PipelineVertex, options: Iterable[StageOption]) -> list[StageOption]:
    """The options that meet the vertex's accuracy floor."""
    floor = vertex.accuracy or 0.0
    return [option for option in options if option.accuracy is None or option.accuracy >= floor]


def most_accurate(options: list[StageOption]) -> list[StageOption]:
    """The options that a developer would have named: the most accurate, and those that are as accurate on other hardware."""
    best = max(option.accuracy or 0.0 for option in options)
    return [option for option in options if option.accuracy is None or option.accuracy >= best - ALIKE]


def batch_seconds(option: StageOption) -> tuple[float, ...]:
    """Seconds of a batch of 0, 1, ... items up to the largest of the profile. A larger batch never counts as faster."""
    sizes = sorted(option.batch_latency_ms)
    known = np.array([option.batch_latency_ms[size] for size in sizes]) / 1000.0
    found = np.interp(np.arange(1, sizes[-1] + 1), sizes, known)
    return (0.0, *np.maximum.accumulate(found).tolist())


def whole_accuracy(stages: Iterable[tuple[float, float | None]]) -> float | None:
    """Of the whole pipeline's answers, from (visits of a query, accuracy) of each vertex: the product. None: not known of all."""
    known = [(scale, accuracy) for scale, accuracy in stages if accuracy is not None or scale > 0]
    if not known or any(accuracy is None for _, accuracy in known):
        return None
    return prod(1.0 - min(1.0, scale) * (1.0 - (accuracy or 0.0)) for scale, accuracy in known)


class ServingChoice(Struct, frozen=True, gc=False):
    """How a vertex is served. option: place in the workspace's list of the vertex."""

    option: int
    batch: int
    replicas: int


Choices = tuple[ServingChoice, ...]  # of each vertex, in the order of the graph


class PlanningWorkspace:
    """A problem without errors as planners see it: costs, and whether the estimator says that a configuration meets the objective.

    options: by vertex, those that a planner may take, the dearest first. It remembers what was estimated.
    """

    def __init__(self, problem: PipelineProblem, options: Mapping[str, list[StageOption]]) -> None:
        self.problem = problem
        self.graph = PipelineGraph(problem.pipeline)
        self.estimator = LatencyEstimator(self.graph, problem.arrivals, hop=problem.hop)
        self.order = self.graph.order
        self.options = [sorted(options[name], key=lambda one: -one.price_per_hour) for name in self.order]
        self.seconds = [[batch_seconds(option) for option in mine] for mine in self.options]
        self.scales = [self.estimator.scale(name) for name in self.order]
        arrivals = problem.arrivals
        self.rate = (len(arrivals) - 1) / float(arrivals[-1] - arrivals[0]) if len(arrivals) > 1 else 0.0
        self.objective = problem.latency_ms / 1000.0
        self.estimated = 0  # visits that the estimator has followed
        count = len(arrivals)
        self.late = count - 1 - place_of(problem.percentile, count)  # queries of the sample that may be late
        self._allowed = self.late
        self._known: dict[Choices, tuple[float, int]] = {}  # latency, and late queries
        self._others: list[LatencyEstimator] = []

    def price(self, vertex: int, choice: ServingChoice) -> float:
        """US$ per hour of all replicas."""
        return choice.replicas * self.options[vertex][choice.option].price_per_hour

    def cost(self, choices: Choices) -> float:
        """US$ per hour."""
        return sum(self.price(vertex, choice) for vertex, choice in enumerate(choices))

    def batches(self, vertex: int, option: int) -> list[int]:
        """Powers of two up to the largest profiled batch, and that."""
        most = len(self.seconds[vertex][option]) - 1
        return sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})

    def throughput(self, vertex: int, option: int, batch: int) -> float:
        """Items/s of one replica in largest batches, of which one follows the other at once."""
        return batch / (self.seconds[vertex][option][batch] + self.estimator.hop_s)

    def least(self, vertex: int, option: int, batch: int) -> int:
        """The fewest replicas whose queue does not grow for ever, also where the sample's rate is a little lower than that of other samples."""
        load = (1 + ROOM) * self.rate * self.scales[vertex] / self.throughput(vertex, option, batch)
        return max(1, int(load * (1 + 1e-9)) + 1)

    def least_price(self, vertex: int) -> float:
        """US$ per hour: the least that a vertex costs."""
        return min(
            self.least(vertex, o, b) * option.price_per_hour
            for o, option in enumerate(self.options[vertex])
            for b in self.batches(vertex, o)
        )

    def latency(self, choices: Choices) -> float:
        """Seconds, at the problem's percentile; infinite if it does not meet the objective, or some queue grows for ever."""
        latency, late = self._estimated(choices)
        return latency if late <= self._allowed else np.inf

    def meets(self, choices: Choices) -> bool:
        return self._estimated(choices)[1] <= self._allowed

    def _estimated(self, choices: Choices) -> tuple[float, int]:
        found = self._known.get(choices)
        if found is None:
            steady = all(one.replicas >= self.least(v, one.option, one.batch) for v, one in enumerate(choices))
            found = self._known[choices] = self._estimate(choices) if steady else (np.inf, len(self.problem.arrivals))
        return found

    def _estimate(self, choices: Choices) -> tuple[float, int]:
        self.estimated += int(len(self.problem.arrivals) * sum(self.scales))
        found = self.estimator.latencies_within(self.configurations(choices), self.objective, self._allowed)
        if found is None:
            return np.inf, self._allowed + 1
        return at_percentile(found, self.problem.percentile), int(np.count_nonzero(found > self.objective))

    def late_elsewhere(self, choices: Choices) -> int:
        """The most late queries in other samples of the same law."""
        if not self._others:
            arrivals, count = self.problem.arrivals, len(self.problem.arrivals)
            self._others = [
                LatencyEstimator(self.graph, resampled(arrivals, i), first=(i + 1) * count, hop=self.problem.hop)
                for i in range(OTHERS)
            ]
        configurations = self.configurations(choices)
        return max(int(np.count_nonzero(one.latencies(configurations) > self.objective)) for one in self._others)

    def tighten(self, choices: Choices, late: int) -> bool:
        """From now on allow fewer late queries in the sample: these choices had so many in another. False: no fewer are possible."""
        here = self._known[choices][1]
        allowed = min(int(self._allowed * self.late / late), here - 1)
        self._allowed = max(0, allowed)
        return allowed >= 0

    def configurations(self, choices: Choices) -> dict[str, StageConfiguration]:
        return {
            name: StageConfiguration(self.seconds[v][one.option][: one.batch + 1], one.batch, one.replicas)
            for v, (name, one) in enumerate(zip(self.order, choices, strict=True))
        }

    def unqueued(self, options: Iterable[int]) -> float:
        """Seconds at the percentile where each query is served alone and none waits. options: of each vertex."""
        alone = {name: self.seconds[v][o][1] for v, (name, o) in enumerate(zip(self.order, options, strict=True))}
        return at_percentile(self.estimator.unqueued(alone), self.problem.percentile)

    def plan(
        self, choices: Choices, *, policy: str, optimal: bool = False, steps: Iterable[str] = (), reason: str = ""
    ) -> PipelinePlan:
        """The plan with these choices. It is infeasible if there is a reason, or if it does not meet the objective."""
        latency = at_percentile(self.estimator.latencies(self.configurations(choices)), self.problem.percentile)
        if latency > self.objective and not reason:
            reason = self._shortfall(choices, latency)
        problem, cost = self.problem, self.cost(choices)
        if cost > problem.budget_per_hour * (1 + 1e-9) and not reason:
            reason = f"it costs {cost:.4g} US$/h, more than budget_per_hour ({problem.budget_per_hour:g}); allow more, or longer latencies"
        stages = {name: self._stage(v, choices[v]) for v, name in enumerate(self.order)}
        whole = whole_accuracy((one.scale, one.accuracy) for one in stages.values())
        service = {
            name: self.seconds[v][one.option][one.batch]
            for v, (name, one) in enumerate(zip(self.order, choices, strict=True))
        }
        # What comes in less time than that between two reports is known no sooner; its rate is mostly chance.
        shortest = max(REPORT_S, self.graph.longest_path(service)[0])
        envelope, dispersion = traffic_envelope(problem.arrivals, shortest)
        return PipelinePlan(
            pipeline=problem.name,
            policy=policy,
            status="infeasible" if reason else "optimal" if optimal else "feasible",
            cost_per_s=cost / 3600.0,
            p99_ms=1000.0 * latency,
            vertices=stages,
            envelope=envelope,
            dispersion=dispersion,
            steps=list(steps),
            rate=self.rate,
            latency_ms=problem.latency_ms,
            percentile=problem.percentile,
            hop_ms=problem.hop.ms,
            reason=reason,
            accuracy=None if whole is None else min(1.0, whole * factor_of(stages, problem.measured)),
            budget_per_hour=problem.budget_per_hour if problem.budget_per_hour < inf else None,
        )

    def _stage(self, vertex: int, choice: ServingChoice) -> PlannedStage:
        option = self.options[vertex][choice.option]
        capacity = choice.replicas * self.throughput(vertex, choice.option, choice.batch)
        return filled(
            PlannedStage,
            option,
            choice,
            scale=self.scales[vertex],
            service_ms=1000.0 * self.seconds[vertex][choice.option][choice.batch],
            rho=self.rate * self.scales[vertex] / capacity,
        )

    def _shortfall(self, choices: Choices, latency: float) -> str:
        for vertex, one in enumerate(choices):
            capacity = one.replicas * self.throughput(vertex, one.option, one.batch)
            load = self.rate * self.scales[vertex]
            if load >= capacity:
                return f"vertex {self.order[vertex]} gets {load:.4g} queries/s, and its {one.replicas} replicas serve {capacity:.4g}"
        over = 1000.0 * latency - self.problem.latency_ms
        share = f"{100 * self.problem.percentile:g} % of queries"
        return f"{share} take up to {1000 * latency:.4g} ms, {over:.4g} ms more than the objective of {self.problem.latency_ms:g} ms"
