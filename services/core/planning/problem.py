"""A planning problem (INFaaS, Romero et al., section 4.2.1) as data: of a planning file, of a worker between two plans, of a
policy's `scale`.

Candidates carry demands. A demand is one class of an app's queries (latency, accuracy, cost band), so that one app may
have several; a candidate may serve several apps and classes at once, and its throughput is shared among them.
"""

from math import inf, isfinite
from typing import Literal

from msgspec import Struct

from services.core.cost import Goal

BUDGET = "budget, US$/s"  # among the resources: what all instances together may cost
ROUNDING = 1e-9  # relative tolerance: 1.05 × 100 must not need more than 105
Objective = Literal["multiplicative", "additive"]


class CandidateVariant(Struct, frozen=True, kw_only=True, gc=False):
    """A variant that may run.

    latency_ms: of one batch. saturation_qps: the most items/s that one instance serves. cost_per_s: US$ per second of one instance.
    load_s: seconds until a new instance can answer. accuracy: 0..1, or None where it was not measured, which no minimum excludes (as in
    selection). uses: amount of each resource that one instance takes. running: instances now, Loading ones included. most: bound
    on the instances after the plan. cost_per_1000: US$ for 1,000 items at the expected
    batch, which cost limits are compared with; None: at saturation.
    """

    name: str
    apps: tuple[str, ...]
    model: str
    hardware: str
    latency_ms: float
    saturation_qps: float
    cost_per_s: float
    load_s: float = 0.0
    accuracy: float | None = None
    uses: dict[str, float] = {}
    running: int = 0
    most: int | None = None
    cost_per_1000: float | None = None

    def takes(self, resource: str) -> float:
        """What one instance takes of a resource; of BUDGET, its price."""
        return self.cost_per_s if resource == BUDGET else self.uses.get(resource, 0.0)

    @property
    def item_cost(self) -> float:
        """US$ per 1,000 items, which cost limits are compared with."""
        if self.cost_per_1000 is not None:
            return self.cost_per_1000
        return 1000.0 * self.cost_per_s / self.saturation_qps


class RequirementClass(Struct, frozen=True, kw_only=True, gc=False):
    """One class of an app's queries with equal needs, and its load.

    load: items/s. latency_ms: the objective. accuracy: the minimum. cost: the most, in US$ per 1,000 items. model, variant: those that its
    queries name, if any.
    """

    app: str
    load: float
    latency_ms: float = inf
    accuracy: float = 0.0
    cost: float = inf
    model: str | None = None
    variant: str | None = None

    def accepts(self, candidate: CandidateVariant) -> bool:
        """Whether this candidate may answer these queries: constraint (2), and their other needs."""
        return (
            self.app in candidate.apps
            and candidate.latency_ms <= self.latency_ms
            and (candidate.accuracy is None or candidate.accuracy >= self.accuracy)
            and candidate.item_cost <= self.cost
            and self.model in (None, candidate.model)
            and self.variant in (None, candidate.name)
        )


class PlanningProblem(Struct, frozen=True, kw_only=True):
    """What to plan for.

    resources: totals by name. A resource without a total is unlimited.
    slack: wanted throughput over load, a ratio.
    loading_weight: the paper's lambda, in 1/s (multiplicative) or US$/s² (additive).
    objective: the cost of adding d instances, `C d (1 + lambda T)` or `C d + lambda T d`. The paper's text allows both readings. They agree
    at lambda 0.
    budget_per_s: US$ per second that all instances together may cost.
    goal: of the system.
    """

    candidates: tuple[CandidateVariant, ...]
    demands: tuple[RequirementClass, ...]
    resources: dict[str, float] = {}
    slack: float = 1.05
    loading_weight: float = 0.1
    objective: Objective = "multiplicative"
    budget_per_s: float = inf
    goal: Goal = "cost"

    def limits(self) -> dict[str, float]:
        """Totals of what is limited, with the budget if there is one."""
        return self.resources | ({BUDGET: self.budget_per_s} if isfinite(self.budget_per_s) else {})

    def fresh_price(self, one: CandidateVariant) -> float:
        """What adding an instance of this candidate counts."""
        if self.objective == "additive":
            return one.cost_per_s + self.loading_weight * one.load_s
        return one.cost_per_s * (1 + self.loading_weight * one.load_s)

    def accepted(self) -> list[list[CandidateVariant]]:
        """By demand, the candidates that may answer it."""
        by_app: dict[str, list[CandidateVariant]] = {}
        for one in self.candidates:
            for app in one.apps:
                by_app.setdefault(app, []).append(one)
        return [[one for one in by_app.get(demand.app, ()) if demand.accepts(one)] for demand in self.demands]


MOST = 1_000_000  # instances of one candidate; more than any cluster has, few enough for exact integers in a solver
LARGEST = 1e15  # of any other number: what adds up to more is no longer exact
