"""The planning problem of a worker: which load it carries, by which variants, and with which resources. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import WorkerHeartbeat
from services.autoscaler.models.demand import LINGER, ClassLoad, share_of
from services.autoscaler.models.supply import LEAST_RATE, FleetSupply, OtherWorkers, ProfileCache
from services.core.catalog import Catalog
from services.core.cost import Goal, UnknownPrice, price_per_hour
from services.core.lifecycle import COUNTED
from services.core.planning.problem import CandidateVariant, Objective, PlanningProblem, RequirementClass

WITHOUT_APP = "_."  # queries that name a model and no app are counted under this prefix


class ClassDemandShare(Struct, frozen=True):
    """One demand to be: an app, the variants that may answer, whose load it is (None: what must stay), items/s, instances."""

    app: str
    scope: tuple[VariantRecord, ...]
    load: ClassLoad | None
    rate: float
    least: int


def variants_for(
    app: str, needs_model: str | None, version: str | None, variant: str | None, catalog: Catalog
) -> tuple[VariantRecord, ...]:
    """The variants that queries of an app with these names may get, as selection allows them."""
    if needs_model is None and version is None and variant is None and not app.startswith(WITHOUT_APP):
        return catalog.variants_of(app)
    if app.startswith(WITHOUT_APP):
        needs_model = app.removeprefix(WITHOUT_APP)
        record = catalog.model(needs_model)
        links = {} if record is None else {record.model: record.version}
    else:
        known = catalog.app(app)
        links = {} if known is None else known.links
    if variant is not None:
        found = catalog.variant(variant)
        return (found,) if found is not None and found.model in links else ()
    return tuple(
        record
        for model, current in sorted(links.items())
        if needs_model in (None, model)
        for record in catalog.variants_at(model, version or current)
    )


def wanted_by(
    mine: WorkerHeartbeat,
    others: OtherWorkers,
    catalog: Catalog,
    loads: list[ClassLoad],
    now: float,
    only: Mapping[str, str],
) -> list[ClassDemandShare]:
    worker = mine.worker
    by_app: dict[str, list[ClassLoad]] = {}
    for load in loads:
        by_app.setdefault(load.needs.app, []).append(load)
    held = {one.variant for one in mine.instances if one.state in COUNTED}
    wanted: list[ClassDemandShare] = []
    for app in sorted({*by_app, *(record.app for record in catalog.apps)}):
        of_app = by_app.get(app, [])
        everything = _allowed(app, variants_for(app, None, None, None, catalog), only)
        holds = any(record.variant in held for record in everything)
        if not of_app and not holds:
            continue
        latest = max(of_app, key=lambda load: load.last, default=None)
        holder = others.holder(everything)
        first = holds and (holder is None or worker < holder)
        candidates = [worker] if first else [holder] if holder is not None else _able(everything, mine, others)
        for load in of_app:
            needs = load.needs
            scope = _allowed(app, variants_for(app, needs.model, needs.version, needs.variant, catalog), only)
            rate = share_of(worker, load, of_app, candidates)
            if rate <= 0 and first and now - load.last < LINGER:
                rate = 1.0 / LINGER
            if rate > 0 and scope:
                wanted.append(ClassDemandShare(app, scope, load, rate, 0))
        record = catalog.app(app)
        least = record.min_instances if record is not None else 0
        if first and least and everything:
            # While nothing comes, what stays is of use to those who came last.
            busy = any(one.app == app for one in wanted)
            # What others have counts, but for one that is kept here: theirs go without asking anybody.
            least = max(1, least - others.instances(everything, mine))
            wanted.append(ClassDemandShare(app, everything, None if busy else latest, 0.0, least))
    return wanted


def _allowed(app: str, records: tuple[VariantRecord, ...], only: Mapping[str, str]) -> tuple[VariantRecord, ...]:
    name = only.get(app)
    return records if name is None else tuple(record for record in records if record.variant == name)


def _able(records: tuple[VariantRecord, ...], mine: WorkerHeartbeat, others: OtherWorkers) -> list[str]:
    """The first worker that could load one of them, if any."""
    kinds = {(record.hardware, record.simulated) for record in records}
    names = [mine.worker] if any(d.alive and (d.kind, d.simulated) in kinds for d in mine.devices) else []
    other = others.able(kinds)
    if other is not None:
        names.append(other)
    return [min(names)] if names else []


def strictest(wanted: list[ClassDemandShare], facts: ProfileCache) -> dict[str, float]:
    """For each variant the shortest latency, in s, of those that would be answered by it."""
    found: dict[str, float] = {}
    for one in wanted:
        if one.load is None or one.load.needs.latency_ms is None:
            continue
        limit = one.load.needs.latency_ms / 1000.0
        for record in one.scope:
            if facts.table(record).seconds(1) <= limit:
                found[record.variant] = min(limit, found.get(record.variant, inf))
    return found


# -- What would serve a class of needs on devices that nobody has: a machine with one might be added for it. Pure.


def absent(
    one: ClassDemandShare,
    demand: RequirementClass,
    there: Collection[str],
    facts: ProfileCache,
    prices: Mapping[str, float],
) -> tuple[str, ...]:
    """Names of its variants that meet latency and accuracy and are not `there` to plan with, cheapest first.

    By what an item costs at saturation where one instance has a device for itself, since nobody knows how large theirs would be.
    """
    found = []
    for record in one.scope:
        if record.variant in there:
            continue
        accuracy = record.accuracy is None or record.accuracy >= demand.accuracy
        if accuracy and facts.table(record).seconds(1) * 1000.0 <= demand.latency_ms:
            rate = facts.rate(record, demand.latency_ms / 1000.0)
            found.append((_price(record, prices) / rate if rate > 0 else inf, record.variant))
    return tuple(name for _, name in sorted(found))


def _price(record: VariantRecord, prices: Mapping[str, float]) -> float:
    """US$ per second."""
    if record.price_per_s is not None:
        return record.price_per_s
    try:
        return price_per_hour(record.hardware, prices, max(1, record.threads)) / 3600.0
    except UnknownPrice:
        return inf


# -- From what is known to a planning problem: which variants could run where, what runs, which load this worker
# carries. Pure.

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

    problem: PlanningProblem
    records: dict[str, VariantRecord]
    serving: dict[str, int]
    here: frozenset[str]
    classes: tuple[ClassLoad | None, ...]
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
    others: OtherWorkers,
    catalog: Catalog,
    loads: Iterable[ClassLoad],
    prices: Mapping[str, float],
    knobs: Knobs,
    facts: ProfileCache,
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
    supply = FleetSupply(mine, others, records, prices, knobs.memory_share, facts, now)
    limits = strictest(wanted, facts)
    scopes = {i: f"{one.app}/{i}" for i, one in enumerate(wanted)}
    serves: dict[str, list[str]] = {}
    for i, one in enumerate(wanted):
        for record in one.scope:
            serves.setdefault(record.variant, []).append(scopes[i])
    candidates: list[CandidateVariant] = []
    for name, record in sorted(records.items()):
        candidate = supply.candidate(record, tuple(serves[name]), limits.get(name, inf), barred=name in barred)
        if candidate is not None:
            candidates.append(candidate)
    demands = tuple(
        RequirementClass(
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
    problem = PlanningProblem(
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


def _pressed(load: ClassLoad) -> bool:
    """Whether so many queries are refused that it is no chance."""
    return load.refused > CROWDED and (load.turned_away >= FEW or load.turned_away >= MUCH * load.counted)


def _crowded(
    worker: str,
    candidates: list[CandidateVariant],
    demands: Sequence[RequirementClass],
    wanted: Sequence[ClassDemandShare],
    supply: FleetSupply,
) -> list[CandidateVariant]:
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
