"""From what is known to a planning problem: which variants could run where, what runs, which load this worker carries. Pure.

Resources are pooled by device kind: cores and memory that instances may take. Cores are shared, since an instance without work
takes none: what running instances leave idle counts as free, so that a plan never adds more than the cores can compute.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import WorkerHeartbeat
from services.autoscaler.models.absent import absent
from services.autoscaler.models.loads import Load
from services.autoscaler.models.others import Others
from services.autoscaler.models.supply import LEAST_RATE, Facts, Supply
from services.autoscaler.models.wanted import Wanted, strictest, wanted_by
from services.core.catalog import Catalog
from services.core.goal import Goal
from services.core.planning.problem import Candidate, Demand, Objective, Problem

CROWDED = 0.02  # of a class's items: when more are refused, its instances are full whatever their profiles say ...
FEW = 5  # ... unless that were fewer items in the last seconds, which is a burst by chance,
MUCH = 0.25  # and less than this part of a class that is seldom asked for


class Knobs(Struct, frozen=True, kw_only=True):
    """The settings that planning reads; meanings in services/core/settings, AutoscalerSettings."""

    slack: float = 1.05
    loading_weight: float = 0.1
    objective: Objective = "multiplicative"
    hold_s: float = 5.0
    budget_per_s: float = inf
    memory_share: float = 0.8
    goal: Goal = "cost"


class Situation(Struct, frozen=True, kw_only=True):
    """records: of the problem's candidates. serving: of each, instances that can answer now. here: those that this worker can have.

    classes: behind each demand, the load that it is made of; None for what an app must keep at least. alone: there is no other worker.
    offline: variants that compute nothing here but offline work. absent: behind each demand, the variants that would do on devices
    that nobody has, cheapest first.
    """

    problem: Problem
    records: dict[str, VariantRecord]
    serving: dict[str, int]
    here: frozenset[str]
    classes: tuple[Load | None, ...]
    apps: tuple[str, ...]
    alone: bool = True
    offline: frozenset[str] = frozenset()
    absent: tuple[tuple[str, ...], ...] = ()

    def app_of(self, variant: str) -> str:
        """One app that this variant serves, for the record."""
        for one in self.problem.candidates:
            if one.name == variant:
                return next((self.apps[k] for k, d in enumerate(self.problem.demands) if d.accepts(one)), self.apps[0])
        return ""


def situation(
    mine: WorkerHeartbeat,
    others: Others,
    catalog: Catalog,
    loads: Iterable[Load],
    prices: Mapping[str, float],
    knobs: Knobs,
    facts: Facts,
    now: float,
    *,
    barred: frozenset[str] = frozenset(),
    only: Mapping[str, str] | None = None,
    glance: bool = False,
) -> Situation | None:
    """What this worker has to plan; None while nothing concerns it. mine: its last heartbeat.

    facts: kept from one call to the next. barred: variants of which no more may be loaded for the moment. only: app to the one
    variant that may serve it. glance: with the variants that run alone, which suffices to tell whether the load is carried.
    """
    worker = mine.worker
    wanted = wanted_by(mine, others, catalog, list(loads), now, only or {})
    if not wanted:
        return None
    if glance:
        present = {one.variant for one in mine.instances} | {row.variant for row in others.variants}
        wanted = [replace(one, scope=tuple(r for r in one.scope if r.variant in present)) for one in wanted]
    records = {r.variant: r for one in wanted for r in one.scope}
    supply = Supply(mine, others, records, prices, knobs.memory_share, facts, now)
    limits = strictest(wanted, facts)
    scopes = {i: f"{one.app}/{i}" for i, one in enumerate(wanted)}
    serves: dict[str, list[str]] = {}
    for i, one in enumerate(wanted):
        for record in one.scope:
            serves.setdefault(record.variant, []).append(scopes[i])
    candidates: list[Candidate] = []
    for name, record in sorted(records.items()):
        candidate = supply.candidate(record, tuple(serves[name]), limits.get(name, inf), barred=name in barred)
        if candidate is not None:
            candidates.append(candidate)
    demands = tuple(
        Demand(
            app=scopes[i],
            load=one.rate,
            latency_ms=inf if one.load is None or one.load.needs.latency_ms is None else one.load.needs.latency_ms,
            accuracy=0.0 if one.load is None else one.load.needs.accuracy,
            cost=inf if one.load is None or one.load.needs.cost is None else one.load.needs.cost,
            least=one.least,
        )
        for i, one in enumerate(wanted)
    )
    candidates = _crowded(worker, candidates, demands, wanted, supply)
    resources, shared = supply.totals(candidates, demands, knobs.slack), {}
    if knobs.goal == "accuracy":
        shared = supply.time_shared(candidates)
        resources |= shared
        candidates = supply.in_time(candidates, demands, knobs.slack)
    problem = Problem(
        candidates=tuple(candidates),
        demands=demands,
        resources=resources,
        slack=knobs.slack,
        loading_weight=knobs.loading_weight,
        objective=knobs.objective,
        budget_per_s=knobs.budget_per_s,
        make_before_break=True,
        time_shared=frozenset(shared),
        goal=knobs.goal,
    )
    return Situation(
        problem=problem,
        records=records,
        serving={one.name: supply.serving.get(one.name, 0) for one in candidates},
        here=frozenset(one.name for one in candidates if supply.is_here(records[one.name])),
        classes=tuple(one.load for one in wanted),
        apps=tuple(one.app for one in wanted),
        alone=others.alone,
        offline=_offline(mine),
        absent=tuple(
            absent(one, demand, {c.name for c in candidates}, facts, prices)
            for one, demand in zip(wanted, demands, strict=True)
        ),
    )


def _offline(beat: WorkerHeartbeat) -> frozenset[str]:
    """Variants whose instances here have computed lately (mean_batch), and no queries (load)."""
    online = {one.variant for one in beat.instances if one.load > 0}
    return frozenset(one.variant for one in beat.instances if one.mean_batch > 0) - online


def _pressed(load: Load) -> bool:
    """Whether so many queries are refused that it is no chance."""
    return load.refused > CROWDED and (load.turned_away >= FEW or load.turned_away >= MUCH * load.counted)


def _crowded(
    worker: str, candidates: list[Candidate], demands: Sequence[Demand], wanted: Sequence[Wanted], supply: Supply
) -> list[Candidate]:
    """While queries of a class are refused its instances are full, whatever their profiles say: what they take is all they can."""
    factor: dict[str, float] = {}
    for demand, one in zip(demands, wanted, strict=True):
        if one.load is None or not _pressed(one.load):
            continue
        running = [c for c in candidates if c.running and demand.accepts(c)]
        capacity = sum(c.running * c.saturation_qps for c in running)
        taken = one.load.by_worker.get(worker, 0.0)
        if supply.settled(running) and 0 < taken < capacity:
            for c in running:
                factor[c.name] = min(factor.get(c.name, 1.0), max(LEAST_RATE, taken / capacity))
    return [replace(c, saturation_qps=c.saturation_qps * factor[c.name]) if c.name in factor else c for c in candidates]
