"""The planning problem of a worker: which load it carries, by which variants, and with which resources. Pure.

Resources are pooled by device kind: cores and memory that instances may take. Cores are shared, since an idle instance uses none:
what running instances leave idle counts as free. So a plan never adds more than the cores can compute.
"""

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
from services.core.demand import variants_for, variants_named
from services.core.lifecycle import needed
from services.core.planning.problem import CandidateVariant, PlanningProblem, RequirementClass
from services.core.settings import AutoscalerSettings

REFUSED_SHARE = 0.02  # if more of a class's items are refused, its instances are full, whatever their profiles say ...
REFUSED_LEAST = 5  # ... unless these are fewer items in the last seconds, which may be chance ...
REFUSED_MUCH = 0.25  # ... and less than this part of a class with few queries


class ClassDemandShare(Struct, frozen=True):
    """A class's load as far as this worker must carry it.

    scope: the variants that may answer. load: the whole class; None: an app's minimum of instances. rate: items/s. least: instances.
    """

    app: str
    scope: tuple[VariantRecord, ...]
    load: ClassLoad | None
    rate: float
    least: int


def shares_of(
    mine: WorkerHeartbeat,
    others: OtherWorkers,
    catalog: Catalog,
    loads: list[ClassLoad],
    now: float,
    only: Mapping[str, str],
) -> list[ClassDemandShare]:
    """What this worker must carry: its part of each class's load, and the minimum of apps. only: as in `ProblemBuilder.build`.

    Of the workers that have instances for an app, the first by name takes care of the app's minimum.
    """
    worker = mine.worker
    by_app: dict[str, list[ClassLoad]] = {}
    for load in loads:
        by_app.setdefault(load.needs.app, []).append(load)
    loaded = {one.variant for one in mine.instances if needed(one)}
    shares: list[ClassDemandShare] = []
    for app in sorted({*by_app, *(record.app for record in catalog.apps)}):
        of_app = by_app.get(app, [])
        everything = _allowed(app, variants_named(app, None, None, None, catalog), only)
        holds = any(record.variant in loaded for record in everything)
        if not of_app and not holds:
            continue
        latest = max(of_app, key=lambda load: load.last, default=None)
        holder = others.holder(everything)
        first = holds and (holder is None or worker < holder)
        candidates = [worker] if first else [holder] if holder is not None else _able(everything, mine, others)
        for load in of_app:
            needs = load.needs
            named = (needs.model, needs.version, needs.variant)
            scope = _allowed(app, variants_for(app, *named, catalog, needs.accuracy), only)
            rate = share_of(worker, load, of_app, candidates)
            if rate <= 0 and first and now - load.last < LINGER:
                rate = 1.0 / LINGER
            if rate > 0 and scope:
                shares.append(ClassDemandShare(app, scope, load, rate, 0))
        record = catalog.app(app)
        least = record.min_instances if record is not None else 0
        if first and least and everything:
            # Without load, the minimum is kept for the class that had load last.
            busy = any(one.app == app for one in shares)
            # Other workers' instances count, but one is kept here: others unload theirs without asking.
            least = max(1, least - others.instances(everything, mine))
            accuracy = 0.0 if busy or latest is None else latest.needs.accuracy
            usual = _allowed(app, variants_for(app, None, None, None, catalog, accuracy), only) or everything
            shares.append(ClassDemandShare(app, usual, None if busy else latest, 0.0, least))
    return shares


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


def strictest(shares: Iterable[ClassDemandShare], profiles: ProfileCache) -> dict[str, float]:
    """By variant, the shortest latency in seconds of the classes that it can answer."""
    found: dict[str, float] = {}
    for one in shares:
        if one.load is None or one.load.needs.latency_ms is None:
            continue
        limit = one.load.needs.latency_ms / 1000.0
        for record in one.scope:
            if profiles.table(record).seconds(1) <= limit:
                found[record.variant] = min(limit, found.get(record.variant, inf))
    return found


def absent(
    one: ClassDemandShare,
    demand: RequirementClass,
    there: Collection[str],
    profiles: ProfileCache,
    prices: Mapping[str, float],
) -> tuple[str, ...]:
    """Variants that would serve a class on devices that no worker has, cheapest first: a machine with one may be added for it.

    there: variants that can be planned with. Cheapest is by the cost of an item at saturation, on a device without other instances.
    """
    found = []
    for record in one.scope:
        if record.variant in there:
            continue
        accuracy = record.accuracy is None or record.accuracy >= demand.accuracy
        if accuracy and profiles.table(record).seconds(1) * 1000.0 <= demand.latency_ms:
            rate = profiles.rate(record, demand.latency_ms / 1000.0)
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


class Situation(Struct, frozen=True, kw_only=True):
    """A planning problem and what it was made from.

    records: of the candidates. serving: instances of each that can answer now. here: candidates that this worker has devices for.
    By demand: classes, the load behind it, None for an app's minimum; apps; absent, variants that would serve it on devices that no
    worker has, cheapest first. alone: there is no other worker. offline: variants that compute only offline work here.
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
        """One app that this variant serves, for events."""
        for one in self.problem.candidates:
            if one.name == variant:
                return next((self.apps[k] for k, d in enumerate(self.problem.demands) if d.accepts(one)), self.apps[0])
        return ""


class ProblemBuilder:
    """Makes the planning problems of one worker. prices: US$ per hour by device kind. memory_share: of devices, for instances."""

    def __init__(
        self,
        catalog: Catalog,
        prices: Mapping[str, float],
        settings: AutoscalerSettings,
        memory_share: float,
        goal: Goal,
    ) -> None:
        self._catalog = catalog
        self._prices = prices
        self._settings = settings
        self._memory_share = memory_share
        self._goal = goal
        self._profiles = ProfileCache()

    def build(
        self,
        mine: WorkerHeartbeat,
        others: OtherWorkers,
        loads: Iterable[ClassLoad],
        now: float,
        *,
        barred: frozenset[str] = frozenset(),
        only: Mapping[str, str] | None = None,
        running_only: bool = False,
    ) -> Situation | None:
        """What this worker has to plan; None: no load and no app concerns it. mine: its last heartbeat.

        barred: variants of which no more may be loaded now. only: app to the one variant that may serve it. running_only: without
        variants that do not run, which suffices to tell whether the load is carried.
        """
        shares = shares_of(mine, others, self._catalog, list(loads), now, only or {})
        if not shares:
            return None
        if running_only:
            present = {one.variant for one in mine.instances} | {row.variant for row in others.variants}
            shares = [replace(one, scope=tuple(r for r in one.scope if r.variant in present)) for one in shares]
        records = {r.variant: r for one in shares for r in one.scope}
        supply = FleetSupply(mine, others, records, self._prices, self._memory_share, self._profiles, now)
        candidates = self._candidates(shares, records, supply, barred)
        demands = tuple(_requirement_class(i, one) for i, one in enumerate(shares))
        candidates = _saturated(mine.worker, candidates, demands, shares, supply)
        return Situation(
            problem=self._problem(candidates, demands, supply),
            records=records,
            serving={one.name: supply.serving.get(one.name, 0) for one in candidates},
            here=frozenset(one.name for one in candidates if supply.is_here(records[one.name])),
            classes=tuple(one.load for one in shares),
            apps=tuple(one.app for one in shares),
            alone=others.alone,
            offline=_offline(mine),
            absent=tuple(
                absent(one, demand, {c.name for c in candidates}, self._profiles, self._prices)
                for one, demand in zip(shares, demands, strict=True)
            ),
        )

    def _candidates(
        self,
        shares: Sequence[ClassDemandShare],
        records: Mapping[str, VariantRecord],
        supply: FleetSupply,
        barred: Collection[str],
    ) -> list[CandidateVariant]:
        limits = strictest(shares, self._profiles)
        serves: dict[str, list[str]] = {}
        for i, one in enumerate(shares):
            for record in one.scope:
                serves.setdefault(record.variant, []).append(_scope_name(i, one))
        found = []
        for name, record in sorted(records.items()):
            candidate = supply.candidate(
                record,
                tuple(serves[name]),
                limits.get(name, inf),
                barred=name in barred,
                stays=name in self._catalog.planned,
            )
            if candidate is not None:
                found.append(candidate)
        return found

    def _problem(
        self, candidates: Sequence[CandidateVariant], demands: tuple[RequirementClass, ...], supply: FleetSupply
    ) -> PlanningProblem:
        settings = self._settings
        resources, shared = supply.totals(candidates, demands, settings.slack), {}
        if self._goal == "accuracy":
            shared = supply.time_shared(candidates)
            resources |= shared
            candidates = supply.in_time(candidates, demands, settings.slack)
        return PlanningProblem(
            candidates=tuple(candidates),
            demands=demands,
            resources=resources,
            slack=settings.slack,
            loading_weight=settings.loading_weight,
            objective=settings.objective,
            budget_per_s=settings.budget_per_hour / 3600.0 if settings.budget_per_hour > 0 else inf,
            make_before_break=True,
            time_shared=frozenset(shared),
            goal=self._goal,
        )


def _scope_name(index: int, one: ClassDemandShare) -> str:
    return f"{one.app}/{index}"


def _requirement_class(index: int, one: ClassDemandShare) -> RequirementClass:
    return RequirementClass(
        app=_scope_name(index, one),
        load=one.rate,
        latency_ms=inf if one.load is None or one.load.needs.latency_ms is None else one.load.needs.latency_ms,
        accuracy=0.0 if one.load is None else one.load.needs.accuracy,
        cost=inf if one.load is None or one.load.needs.cost is None else one.load.needs.cost,
        least=one.least,
    )


def _offline(mine: WorkerHeartbeat) -> frozenset[str]:
    """Variants whose instances here have computed lately (mean_batch), but no queries (load)."""
    online = {one.variant for one in mine.instances if one.load > 0}
    return frozenset(one.variant for one in mine.instances if one.mean_batch > 0) - online


def _refuses(load: ClassLoad) -> bool:
    """Whether so many queries are refused that it is not chance."""
    enough = load.turned_away >= REFUSED_LEAST or load.turned_away >= REFUSED_MUCH * load.counted
    return load.refused > REFUSED_SHARE and enough


def _saturated(
    worker: str,
    candidates: list[CandidateVariant],
    demands: Sequence[RequirementClass],
    shares: Sequence[ClassDemandShare],
    supply: FleetSupply,
) -> list[CandidateVariant]:
    """The candidates, with lower rates for those whose class refuses queries: then what its instances take is all that they can."""
    factor: dict[str, float] = {}
    for demand, one in zip(demands, shares, strict=True):
        if one.load is None or not _refuses(one.load):
            continue
        running = [c for c in candidates if c.running and demand.accepts(c)]
        capacity = sum(c.running * c.saturation_qps for c in running)
        taken = one.load.by_worker.get(worker, 0.0)
        if supply.settled(running) and 0 < taken < capacity:
            for c in running:
                factor[c.name] = min(factor.get(c.name, 1.0), max(LEAST_RATE, taken / capacity))
    return [replace(c, saturation_qps=c.saturation_qps * factor[c.name]) if c.name in factor else c for c in candidates]
