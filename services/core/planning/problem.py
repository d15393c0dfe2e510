"""A planning problem (INFaaS, Romero et al., section 4.2.1) as data: of a planning file, of a worker between two plans, of a
policy's `scale`.

Candidates carry demands. A demand is one class of an app's queries (latency, accuracy, cost band), so that one app may
have several; a candidate may serve several apps and classes at once, and its throughput is shared among them.

And the paper's greedy reaction to load that what runs cannot carry: replicate it, or upgrade to one other variant. Pure.

INFaaS (section 4.2.2): once the load takes more than what the running instances carry less a slack, the
model-autoscaler compares the cost of more instances of what runs with that of each other variant that meets the needs, for what is
missing, and takes the
cheapest that fits. A model-autoscaler reacts so between two plans of the leader, and `infaas plan --policy greedy` plans so.
"""

from collections.abc import Mapping, Sequence
from math import ceil, inf, isfinite
from typing import Literal, NamedTuple

from msgspec import Struct

from services.core.cost import Goal

BUDGET = "budget, US$/s"  # among the resources: what all instances together may cost
ROUNDING = 1e-9  # relative tolerance: 1.05 × 100 must not need more than 105
ELASTIC_SHARE = 1e-3  # weight of instances' shares where machines are billed: enough to prefer fewer
LOAD_WEIGHT = 1e-3  # of the share of an instance, per second that it loads: enough to prefer what runs
CALM = 4.0  # what loading one counts where variants are mixed, times its price while it loads: many mixes are about equally good
LIFE_S = 90.0  # s for which a plan is expected to hold: a swap must gain more accuracy than it loses while it loads
LEAST_LOAD = 0.01  # items/s that the load counts at least: parts of less are beyond the solver's numbers
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
    queries name, if any. accuracy_mean: of all answers of the app; 0: any. worth: US$ per 1,000 items for a point of accuracy more.
    """

    app: str
    load: float
    latency_ms: float = inf
    accuracy: float = 0.0
    cost: float = inf
    model: str | None = None
    variant: str | None = None
    accuracy_mean: float = 0.0
    worth: float = 0.0

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


class Pool(Struct, frozen=True, kw_only=True):
    """Machines that are alike. machines: how many there are. least, most: how many there may be.

    price: US$ per hour of one. resources: of one machine, by name. elastic: machines are billed, so that an instance costs nothing more.
    spares: what runs may stand by for the reserve without being claimed by anybody, as long as nobody needs its place. paid: they are billed
    whatever they carry: of plans for apps to which accuracy is worth something, the most accurate is taken.
    """

    name: str
    machines: int
    least: int
    most: int
    price: float
    resources: Mapping[str, float]
    elastic: bool = True
    spares: bool = False
    paid: bool = False


class PooledVariant(Struct, frozen=True, kw_only=True):
    """A variant on the machines of one pool (index).

    uses: of each resource of the machine, by one instance. computes: (resource, amount) that an instance takes only while it computes.
    most: instances that one machine has room for. running: instances there are. limit: on all instances, if any. price: US$ per hour of
    one instance's share. load_s: seconds to load one. adding: what adding one counts beside its price, in the same unit; None: what
    follows from load_s. serves: items/s that a running one serves now, or will when it is loaded. accuracy: 0..1.
    """

    name: str
    pool: int
    uses: Mapping[str, float]
    computes: tuple[str, float]
    most: int
    running: int
    price: float
    load_s: float
    adding: float | None = None
    serves: float = 0.0
    accuracy: float = 0.0
    limit: int | None = None


class ClassNeed(Struct, frozen=True, kw_only=True):
    """One class of queries. load: items/s. layers: shares of it that go to one layer of instances after the other; the last is the reserve.
    options: variant (index) to the instances that each layer takes. mean: the accuracy that answers of this name have in the mean; 0: any.
    worth: what one whole of accuracy of its load counts, in the unit of prices.
    """

    name: str
    load: float
    options: Mapping[int, tuple[float, ...]]
    layers: tuple[float, ...] = (1.0, 0.0)
    mean: float = 0.0
    worth: float = 0.0


class FleetProblem(Struct, frozen=True, kw_only=True):
    """least: (variants, number): so many instances of these variants together must be there, whatever the load. reserved: the same, and
    they carry nothing of the needs, and those that are there stay. wanted: so many there are, no more and, where there is room, no
    fewer: a policy has said so. strict: nothing may be missing.
    """

    pools: tuple[Pool, ...]
    variants: tuple[PooledVariant, ...]
    needs: tuple[ClassNeed, ...]
    least: tuple[tuple[tuple[int, ...], int], ...] = ()
    reserved: tuple[tuple[tuple[int, ...], int], ...] = ()
    wanted: tuple[tuple[tuple[int, ...], int], ...] = ()
    goal: Goal = "cost"
    budget: float | None = None
    strict: bool = False


class FleetPlan(Struct, frozen=True, kw_only=True):
    """machines: by pool. instances: by variant. spares: by variant, those that run and stand by beside them. busy: by variant, how many
    instances' time the expected load takes. missing: by class, the share of each layer that is not carried. gap: how far from
    optimal it may be at most, relative. accuracy: by class, the mean of what is carried; None: nothing is.
    """

    machines: tuple[int, ...]
    instances: tuple[int, ...]
    missing: tuple[tuple[float, ...], ...]
    spares: tuple[int, ...] = ()
    busy: tuple[float, ...] = ()
    accuracy: tuple[float | None, ...] = ()
    objective: float = 0.0
    gap: float = 0.0


class FleetCounts:
    """What counts in the plans of a problem, in units of the dearest machine. free: variants on machines that are paid anyway, of which the best are taken."""

    def __init__(self, problem: FleetProblem) -> None:
        self._problem = problem
        unit = max((pool.price for pool in problem.pools), default=0.0)
        self.unit = (
            unit if unit > 1e-9 else 1.0
        )  # prices next to nothing count as none: a share divided by them is infinite
        self.total = max(LEAST_LOAD, sum(need.load for need in problem.needs))
        self.accurate = problem.goal == "accuracy"
        wishing = [need for need in problem.needs if need.mean or need.worth]
        self._wishing = bool(wishing)
        self.free = {v for need in wishing for v in need.options if problem.pools[problem.variants[v].pool].paid}

    def price(self, v: int) -> float:
        """Of an instance that is there."""
        one = self._problem.variants[v]
        elastic = self._problem.pools[one.pool].elastic or self.accurate or v in self.free
        return one.price / self.unit * (ELASTIC_SHARE if elastic else 1.0)

    def added(self, v: int) -> float:
        """Of one more."""
        one = self._problem.variants[v]
        share = one.price / self.unit
        change = LOAD_WEIGHT * max(share, 0.01) * (1.0 + one.load_s) if one.adding is None else one.adding / self.unit
        if self._wishing and one.adding is None and v not in self.free:
            change += CALM * share * one.load_s / LIFE_S
        return self.price(v) + change

    def worth(self, need: ClassNeed) -> float:
        """One whole of accuracy of its load."""
        if self.accurate:
            return 0.0
        most = (need.mean or need.worth) and need.options.keys() <= self.free
        return max(need.worth / self.unit, need.load / self.total if most else 0.0)

    def losses(self, need: ClassNeed) -> dict[int, float]:
        """By variant: the accuracy that is lost if it answers the whole load."""
        accuracies = {v: self._problem.variants[v].accuracy for v in need.options}
        if self.accurate and not need.mean:
            return {v: (1.0 - accuracy) * need.load / self.total for v, accuracy in accuracies.items()}
        best, worth = max(accuracies.values(), default=0.0), self.worth(need)
        return {v: (best - accuracy) * worth for v, accuracy in accuracies.items()}


MOST = 1_000_000  # instances of one candidate; more than any cluster has, few enough for exact integers in a solver
LARGEST = 1e15  # of any other number: what adds up to more is no longer exact


class Reaction(NamedTuple):
    """added: new instances by variant. lacking: by demand (index), items/s that are not carried even with them."""

    added: dict[str, int]
    lacking: dict[int, float]


def lacking(problem: PlanningProblem) -> dict[int, float]:
    """By demand (index): items/s that the running instances lack for slack x its load. Demands that are carried are left out."""
    return _Search(problem, may_add=False).run().lacking


def react(problem: PlanningProblem) -> Reaction:
    """The instances to add. What runs stays: only a plan for all knows what can be spared."""
    return _Search(problem, may_add=True).run()


class _Search:
    """Demand after demand, those with the fewest candidates first; each takes from what the ones before it have left."""

    def __init__(self, problem: PlanningProblem, *, may_add: bool) -> None:
        self._problem = problem
        self._may_add = may_add
        self._added: dict[str, int] = {}
        self._spare = {one.name: one.saturation_qps * one.running for one in problem.candidates}
        self._left = problem.limits()
        for one in problem.candidates:
            self._use(one, one.running)

    def run(self) -> Reaction:
        able, missing = self._problem.accepted(), {}
        for k in sorted(range(len(able)), key=lambda k: len(able[k])):
            load = self._problem.slack * self._problem.demands[k].load
            need = self._serve(able[k], load * (1 - ROUNDING))
            while need > 0 and self._may_add and self._add(able[k], need):
                need = self._serve(able[k], need)
            if need > 0:
                missing[k] = need
        return Reaction(self._added, missing)

    def _serve(self, able: Sequence[CandidateVariant], need: float) -> float:
        """What the present instances leave of a need, items/s."""
        for one in able:
            given = min(need, self._spare[one.name])
            self._spare[one.name] -= given
            need -= given
        return need

    def _add(self, able: Sequence[CandidateVariant], need: float) -> bool:
        """Add instances of one variant: the cheapest of which enough fit, else of the one that carries most. False: none fits."""
        best: tuple[tuple[float, ...], str] | None = None
        chosen: tuple[CandidateVariant, int] | None = None
        for one in able:
            wanted = ceil(need / one.saturation_qps - ROUNDING)
            count = min(wanted, self._fitting(one))
            if count <= 0:
                continue
            price = count * self._problem.fresh_price(one)
            short = max(0.0, need - count * one.saturation_qps) if count < wanted else 0.0
            key = ((short, price, -one.running), one.name)
            if best is None or key < best:
                best, chosen = key, (one, count)
        if chosen is None:
            return False
        one, count = chosen
        self._use(one, count)
        self._added[one.name] = self._added.get(one.name, 0) + count
        self._spare[one.name] += count * one.saturation_qps
        return True

    def _fitting(self, one: CandidateVariant) -> int:
        room = inf if one.most is None else one.most - one.running - self._added.get(one.name, 0)
        for name, left in self._left.items():
            if one.takes(name) > 0:
                room = min(room, (left * (1 + ROUNDING) + ROUNDING) // one.takes(name))
        return int(max(0.0, min(room, 1e6)))

    def _use(self, one: CandidateVariant, count: int) -> None:
        for name in self._left:
            self._left[name] -= count * one.takes(name)
