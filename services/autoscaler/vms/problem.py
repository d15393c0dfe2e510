"""The problems of the plan for all workers: machines as pools, variants on them, and what each class of queries needs. Pure.

Two problems are posed together. `growth` is for the time at which a new machine would work: which machines there should be. `present` is for
the time at which a new instance would serve: what the machines that work now should have loaded.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from services.autoscaler.demand import DemandForecast, ForecastLoad, Reached, margin_factor, with_expected
from services.autoscaler.vms.commands import SolveFleet
from services.autoscaler.vms.fleet import Fleet, FleetWorker, devices_of, shape_of
from services.autoscaler.vms.rules import FleetLimits
from services.core.catalog import Catalog, accuracy_of, target_of
from services.core.cost import HANDLING_MS, Goal, cores_of, cost_per_1000, device_share, load_seconds, machine_price
from services.core.demand import Band, band, meeting, requirement_class, variants_for
from services.core.lifecycle import COUNTED, SERVING
from services.core.placement import Device, fits
from services.core.planning.capacity import LatencyTables, carried, instances_for, layers, service_rate, throughput
from services.core.planning.problem import (
    CandidateVariant,
    ClassNeed,
    FleetProblem,
    PlanningProblem,
    Pool,
    PooledVariant,
)
from services.core.settings import AutoscalerSettings, MonitorSettings

EXCEEDS = 10.0  # a forecast may be exceeded in so many times the share of queries that may miss: what exceeds it is a part of the load
PATIENCE = 0.5  # the part of a query's latency in which it may wait for what was not foreseen
# Where accuracy is the goal, the loads that a class had of late count beside the one that is expected: bursts come again, and swaps take time.
QUANTILES = (0.12, 0.37, 0.62, 0.87)
HIGH = 0.95  # quantile of them that is provided for
EXPECTED = 0.5  # weight of the expected load beside the past ones
POINTS = 100 * 3600 / 1000  # points in a whole, and 1,000 items an hour in one a second
OVERHEAD_S = 0.001  # of a query, beside computing


class ClassNeeds(Struct, frozen=True):
    """One class in a problem. limit_s: its latency. miss: the share of queries that bursts may cost. margin: factor on what is kept for
    them and for errors of the forecast.

    expected: items/s when a new instance would serve. soon, later: items/s that are hardly exceeded until a new instance, and a new machine,
    would serve. usual: (weight, items/s) of the loads that count for accuracy. wish: mean and worth as `ClassNeed` has them.
    """

    load: ForecastLoad
    app: str
    scope: tuple[VariantRecord, ...]
    limit_s: float
    miss: float
    margin: float
    expected: float
    soon: float
    later: float
    usual: tuple[tuple[float, float], ...] = ()
    wish: Mapping[str, Any] = {}

    def takes(self, record: VariantRecord) -> bool:
        """Whether this variant may answer it, as another app may see it otherwise."""
        return any(one.variant == record.variant for one in self.scope)


class Reservation(Struct, frozen=True):
    """Instances of a variant that are kept for vertices of deployed pipelines, whatever is asked of it."""

    replicas: int
    pipelines: tuple[str, ...]


class FleetSnapshot(Struct, frozen=True):
    """What the problems were made from. pools: by index, its workers now. reserved: by variant. leaving: workers that are being removed. wanted: by
    variant, instances that a policy wants.
    """

    classes: tuple[ClassNeeds, ...]
    records: tuple[VariantRecord, ...]
    pools: tuple[tuple[FleetWorker, ...], ...]
    problem: SolveFleet
    needs: Mapping[Band, float]
    reserved: Mapping[str, Reservation]
    leaving: Collection[str]
    wanted: Mapping[str, int] = {}


# A pool, the devices of one of its machines, and the workers there whose instances count.
_PoolDevices = tuple[Pool, Sequence[Device], Sequence[FleetWorker]]


@dataclass(slots=True, eq=False)
class FleetProblems:
    """Poses the problems. monitor: as the workers' monitors admit loads. goal: of the system. barred: until when a worker takes no more of
    a variant, by worker and variant. reserved: by variant, what is kept for pipelines.
    """

    fleet: Fleet
    catalog: Catalog
    limits: FleetLimits
    monitor: MonitorSettings
    settings: AutoscalerSettings
    goal: Goal
    barred: dict[tuple[str, str], float] = field(default_factory=dict)
    reserved: Mapping[str, Reservation] = field(default_factory=dict)
    tables: LatencyTables = field(default_factory=LatencyTables)
    demand: DemandForecast = field(init=False)
    share: float = field(init=False)

    def __post_init__(self) -> None:
        self.demand = DemandForecast(self.settings.forecaster, self.catalog)
        self.share = self.monitor.memory_share

    @property
    def instances_billed(self) -> bool:
        """Whether instances are paid while they are loaded."""
        return self.settings.bill == "instances"

    def snapshot(self, now: float, leaving: Collection[str]) -> FleetSnapshot | None:
        """Both problems; None: there is nothing to plan for. leaving: workers that are being removed."""
        workers = [one for one in self.fleet.ready(now) if one.name not in leaving]
        classes = self._classes(now)
        held = {one.variant for worker in workers for one in worker.instances}
        names = {record.variant: record for one in classes for record in one.scope}
        for app in self.catalog.apps:
            for record in self.catalog.variants_of(app.app):
                if record.variant in held or record.model in app.replicas:
                    names[record.variant] = record
            names |= {record.variant: record for arm in self.catalog.arms(app) for record in arm}
        for variant in self.reserved:
            kept = self.catalog.variant(variant)
            if kept is not None:
                names[variant] = kept
        records = tuple(record for _, record in sorted(names.items()))
        if not records:
            return None
        groups: dict[tuple[object, ...], list[FleetWorker]] = {}
        for worker in sorted(workers, key=lambda one: one.name):
            groups.setdefault((worker.kind, *shape_of(worker)), []).append(worker)
        pools = tuple(tuple(group) for group in groups.values())
        present = [(self._present(group), devices_of(group[0]), group) for group in pools]
        growth = self._growth(pools, now)
        fixed = all(pool.least == pool.most for pool, _, _ in growth)
        needs = {band(one.load.needs): one.soon for one in classes}
        problem = SolveFleet(
            growth=None if fixed else self._problem(growth, records, classes, now, soon=False),
            present=self._problem(present, records, classes, now, soon=True),
        )
        return FleetSnapshot(classes, records, pools, problem, needs, self.reserved, leaving)

    def for_policy(self, seen: FleetSnapshot) -> PlanningProblem:
        """The same as a policy's `scale` gets it: the forecast of each class, and the variants that the machines there are can serve it with."""
        workers = [worker for group in seen.pools for worker in group]
        devices = [device for worker in workers for device in devices_of(worker)]
        resources = _resources(devices, self.share)
        devices += [device for kind in self.limits.kinds.values() for device in kind.devices]
        candidates = []
        for record in seen.records:
            able = next((device for device in devices if _suits(record, device, self.share)), None)
            if able is None:
                continue
            ours = [(k, one) for k, one in enumerate(seen.classes) if one.takes(record)]
            running, factor, _ = self._running(record, workers, seen.classes)
            table = self.tables.table(record)
            alone_ms = (table.seconds(1) + table.tail_s) * 1000.0
            rate = throughput(table, min((one.limit_s for _, one in ours), default=inf)) / factor
            share = _instance_price(record, able.cores, able.memory_mb, self._price(able)) / 3600.0
            price = share if record.price_per_s is None else record.price_per_s
            name = _resource(able)
            candidates.append(
                CandidateVariant(
                    name=record.variant,
                    apps=tuple(f"{one.app}/{k}" for k, one in ours),
                    model=record.model,
                    hardware=record.hardware,
                    latency_ms=alone_ms,
                    saturation_qps=rate,
                    cost_per_s=price,
                    load_s=load_seconds(record),
                    accuracy=record.accuracy,
                    uses={f"{name}/time": cores_of(record), f"{name}/memory": record.profile.memory_mb},
                    running=running,
                    cost_per_1000=price * (alone_ms + HANDLING_MS),
                )
            )
        return PlanningProblem(
            candidates=tuple(candidates),
            demands=tuple(requirement_class(k, one.load.needs, one.soon) for k, one in enumerate(seen.classes)),
            resources=resources,
            slack=self.settings.slack,
            loading_weight=self.settings.loading_weight,
            goal=self.goal,
        )

    def _classes(self, now: float) -> tuple[ClassNeeds, ...]:
        found = []
        boot = max((kind.boot_s for kind in self.limits.kinds.values()), default=0.0)
        for load in with_expected(self.demand.loads(), self.catalog.apps, now, boot):
            needs = load.needs
            named = needs.model, needs.version, needs.variant
            able = variants_for(needs.app, *named, self.catalog, needs.accuracy, new=needs.new)
            scope = tuple(record for record in able if self._answers(record, load))
            if not scope:
                continue
            target = target_of(self.catalog.app(needs.app), self.settings.slo_target)
            miss = 1.0 - target
            share = 1.0 - min(0.5, EXCEEDS * miss)
            of_app = self.demand.reached.get(needs.app, Reached())
            factor = margin_factor(target, of_app.ended, of_app.missed)
            loads = [load_seconds(record) for record in scope]
            ahead = self.limits.settings.period_s
            soon, expected = _need(load, min(loads) + ahead, share)
            soon = max(soon, self.settings.slack * expected)
            later = max(soon, _need(load, boot + max(loads) + ahead, share)[0])
            limit = inf if needs.latency_ms is None else max(0.001, needs.latency_ms / 1000.0 - OVERHEAD_S)
            usual: tuple[tuple[float, float], ...] = ()
            if self.goal == "accuracy" and load.past:
                past = sorted(load.past)
                each = [past[int(q * len(past))] for q in (*QUANTILES, HIGH)]
                usual = ((EXPECTED, expected), *(((1.0 - EXPECTED) / len(QUANTILES), rate) for rate in each[:-1]))
                soon = max(soon, each[-1])
                later = max(soon, later)
            mean, worth = accuracy_of(self.catalog.app(needs.app), self.settings.accuracy_mean, self.settings.worth)
            wish = {"mean": mean, "worth": worth * expected * POINTS}
            found.append(
                ClassNeeds(load, needs.app, scope, limit, miss / 2, factor, expected, soon, later, usual, wish)
            )
        return tuple(found)

    def _answers(self, record: VariantRecord, load: ForecastLoad) -> bool:
        """Whether this variant may answer the class at all."""
        needs, table = load.needs, self.tables.table(record)
        alone = table.seconds(1) + table.tail_s + OVERHEAD_S
        if needs.latency_ms is not None and alone > needs.latency_ms / 1000.0:
            return False
        return needs.cost is None or self.cost(record) <= needs.cost

    def cost(self, record: VariantRecord, batch: int = 1) -> float:
        """US$ per 1,000 items in such batches, on the first device of its kind that is known."""
        price = record.price_per_s
        for worker in self.fleet.workers.values() if price is None else ():
            for device in worker.devices:
                if (device.kind, device.simulated) == (record.hardware, record.simulated):
                    price = _instance_price(record, device.cores, device.memory_mb, device.price_per_hour) / 3600.0
        return cost_per_1000(record, price or 0.0, batch)

    def _growth(self, pools: Sequence[Sequence[FleetWorker]], now: float) -> list[_PoolDevices]:
        """The pools of the first plan: the kinds of machine that may be started, and the workers that nobody may stop."""
        found: list[_PoolDevices] = []
        for kind in self.limits.kinds.values():
            have = self.fleet.available(kind.name, now)
            pool = Pool(
                name=kind.name,
                machines=have,
                least=min(kind.minimum, kind.maximum),
                most=max(kind.maximum, kind.minimum),
                price=kind.price_per_hour,
                resources=_resources(kind.devices, self.share),
                elastic=kind.maximum > kind.minimum and not self.instances_billed,
            )
            found.append((pool, kind.devices, ()))
        others = [group for group in pools if group[0].kind not in self.limits.kinds]
        return [*found, *((self._present(group), devices_of(group[0]), ()) for group in others)]

    def _present(self, group: Sequence[FleetWorker]) -> Pool:
        """Workers that are alike, as they are now."""
        kind = self.limits.kinds.get(group[0].kind)
        paid = not self.instances_billed and (kind is None or len(group) <= kind.minimum)
        return Pool(
            name=group[0].kind,
            machines=len(group),
            least=len(group),
            most=len(group),
            price=machine_price(group[0].devices),
            resources=_resources(devices_of(group[0]), self.share),
            elastic=False,
            spares=paid,
            paid=paid and (kind is None or kind.minimum == kind.maximum),
        )

    def _problem(
        self, pools: Sequence[_PoolDevices], records: Sequence[VariantRecord], classes: Sequence[ClassNeeds], now: float,
        *, soon: bool,
    ) -> FleetProblem:  # fmt: skip
        variants: list[PooledVariant] = []
        at: dict[str, list[int]] = {}
        factors: list[float] = []
        for p, (_, devices, group) in enumerate(pools):
            for record in records:
                fitting = [d for d in devices if _suits(record, d, self.share)]
                if not fitting:
                    continue
                running, factor, serves = self._running(record, group, classes)
                at.setdefault(record.variant, []).append(len(variants))
                warm = any(worker.warm(record.variant) for worker in group)
                limit = self._limit(record, group, running, now)
                variants.append(self._variant(record, p, fitting, running, serves, limit, warm=warm))
                factors.append(factor)
        needs = []
        for one in classes:
            peak = one.soon if soon else one.later
            load = min(one.expected, peak)
            if peak <= 0:
                continue
            found = {
                v: service_rate(self.tables.table(record), one.limit_s) / factors[v]
                for record in one.scope
                for v in at.get(record.variant, ())
            }
            if not found:
                continue
            if soon and one.usual:
                needs.append(self._layered(one, found, factors))
                continue
            options = {}
            for v, rate in found.items():
                carrying = load / rate
                whole = instances_for(peak, rate, one.limit_s / factors[v], one.miss, one.load.peakedness)
                options[v] = (carrying, one.margin * max(0.0, whole - carrying))
            needs.append(ClassNeed(name=one.app, load=load, options=options, **one.wish))
        return FleetProblem(
            pools=tuple(pool for pool, _, _ in pools),
            variants=tuple(variants),
            needs=tuple(needs),
            least=tuple(self._least(at)),
            reserved=tuple(
                (tuple(at[name]), one.replicas) for name, one in sorted(self.reserved.items()) if name in at
            ),
            goal=self.goal if soon else "cost",
            budget=None if soon or self.limits.budget_per_hour == inf else self._budget(pools),
        )

    @staticmethod
    def _layered(one: ClassNeeds, rates: Mapping[int, float], factors: Sequence[float]) -> ClassNeed:
        """A class in layers. How much each carries is reckoned with the middle one of the variants."""
        peakedness = one.load.peakedness
        high = max(rate for _, rate in one.usual)
        low = sorted(rate for _, rate in one.usual)[len(one.usual) // 2]
        ends = {
            v: layers((low, high), one.soon, rate, one.limit_s / factors[v], one.miss, peakedness, one.margin)
            for v, rate in rates.items()
        }
        middle = sorted(rates, key=lambda v: (rates[v], v))[len(rates) // 2]
        mean = sum(weight * load for weight, load in one.usual) or 1e-9
        shares = [
            sum(
                weight * carried(end, load, rates[middle], one.limit_s / factors[middle], peakedness)
                for weight, load in one.usual
            )
            / mean
            for end in ends[middle]
        ]
        options = {v: _steps(found) for v, found in ends.items()}
        return ClassNeed(name=one.app, load=mean, options=options, layers=_steps(shares), **one.wish)

    def _budget(self, pools: Iterable[_PoolDevices]) -> float:
        """US$ per hour. Machines that must be there are not given up for it: else there would be no plan at all."""
        return max(self.limits.budget_per_hour, (1 + 1e-9) * sum(pool.price * pool.least for pool, _, _ in pools))

    def _running(
        self, record: VariantRecord, group: Sequence[FleetWorker], classes: Sequence[ClassNeeds]
    ) -> tuple[int, float, float]:
        """Instances in these workers, their mean live correction of the profile, at least 1, and the items/s that one serves.

        Where these workers have none, the correction is that of the others' instances. What loads is taken to serve all that it can
        soon. Not so for accuracy, which swaps more than it gains then.
        """
        found = [one for worker in group for one in worker.held(record.variant)]
        measured = found or [one for worker in self.fleet.workers.values() for one in worker.held(record.variant)]
        factors = [max(1.0, one.busy_factor) for one in measured if one.state in SERVING]
        serves = sum(one.load for one in found)
        loading = sum(one.state == "Loading" for one in found)
        if loading and self.goal == "cost":
            table = self.tables.table(record)
            able = (min(one.soon, service_rate(table, one.limit_s)) for one in classes if one.takes(record))
            serves += loading * max(able, default=0.0)
        return len(found), sum(factors) / len(factors) if factors else 1.0, serves / len(found) if found else 0.0

    def _limit(self, record: VariantRecord, group: Sequence[FleetWorker], running: int, now: float) -> int | None:
        """The present number, if every worker has refused one more lately or has it in quarantine; None: there is no limit."""
        open_ = [
            worker
            for worker in group
            if now >= self.barred.get((worker.name, record.variant), 0.0)
            and worker.heartbeat is not None
            and record.variant not in worker.heartbeat.quarantined
        ]
        return running if group and not open_ else None

    def _variant(
        self, record: VariantRecord, pool: int, fitting: Sequence[Device], running: int, serves: float, limit: int | None,
        *, warm: bool,
    ) -> PooledVariant:  # fmt: skip
        memory, first = record.profile.memory_mb, fitting[0]
        name = _resource(first)
        uses = {f"{name}/memory": memory}
        most = sum(floor(self.share * d.memory_mb / memory + 1e-9) if memory > 0 else 256 for d in fitting)
        if record.hardware not in ("cpu", "gpu"):  # their cores are shared in time: `computes`
            uses[f"{name}/slots"] = 1.0
            most = min(most, sum(d.cores for d in fitting))
        price = _instance_price(record, first.cores, first.memory_mb, self._price(first))
        if self.instances_billed and record.price_per_s is not None:
            price = record.price_per_s * 3600.0
        return PooledVariant(
            name=record.variant,
            pool=pool,
            uses=uses,
            computes=(f"{name}/time", cores_of(record)),
            most=min(most, 256 * len(fitting)),
            running=running,
            price=price,
            load_s=load_seconds(record, warm=warm),
            serves=serves,
            accuracy=record.accuracy or 0.0,
            limit=limit,
        )

    def _price(self, device: Device) -> float:
        """US$ per hour of a device like this, as heartbeats tell it."""
        for worker in self.fleet.workers.values():
            for one in worker.devices:
                if (one.kind, one.simulated) == (device.kind, device.simulated):
                    return one.price_per_hour
        return 0.0

    def _least(self, at: Mapping[str, list[int]]) -> Iterable[tuple[tuple[int, ...], int]]:
        """The instances that apps keep that have any, or have demand; and those of single models, in any case."""
        with_demand = {one.needs.app for one in self.demand.loads()}
        held = {
            one.variant for worker in self.fleet.workers.values() for one in worker.instances if one.state in COUNTED
        }
        for app in self.catalog.apps:
            records = self.catalog.variants_of(app.app)
            serving = meeting(records, 0.0, app)
            if app.min_instances and (app.app in with_demand or any(record.variant in held for record in records)):
                variants = tuple(v for record in serving for v in at.get(record.variant, ()))
                if variants:
                    yield variants, app.min_instances
            for arm in self.catalog.arms(app):
                if variants := tuple(v for record in meeting(arm, 0.0, app) for v in at.get(record.variant, ())):
                    yield variants, 1
            for model, count in app.replicas.items():
                there = [one for one in serving if one.model == model and one.cascade is None and one.variant in at]
                if there:
                    best = min(there, key=lambda record: (self.cost(record, record.max_batch), record.variant))
                    yield tuple(at[best.variant]), count


def _need(load: ForecastLoad, lead_s: float, share: float) -> tuple[float, float]:
    """Items/s to be ready for after so many seconds, and those that are expected.

    Half of the time that queries may take goes on waiting for what was not foreseen. So the more of the lead time that bridges, the less
    must be foreseen.
    """
    peak, expected = load.peak(lead_s, share), load.point(lead_s)
    foreseen = min(1.0, lead_s / (PATIENCE * load.latency_s))
    return expected + foreseen * max(0.0, peak - expected), min(peak, expected)


def _steps(ends: Sequence[float]) -> tuple[float, ...]:
    """What each adds to the one before."""
    return tuple(max(0.0, here - before) for before, here in zip((0.0, *ends), ends, strict=False))


# -- pools


def _resource(device: Device) -> str:
    return f"{'simulated ' * device.simulated}{device.kind}"


def _resources(devices: Iterable[Device], share: float) -> dict[str, float]:
    """Of one machine: memory for instances in MB, slots of accelerators that hold one model a core, and cores that compute."""
    found: dict[str, float] = {}
    for d in devices:
        name = _resource(d)
        time = 1.0 if d.kind == "gpu" else float(d.cores)
        for key, amount in (("memory", share * d.memory_mb), ("slots", float(d.cores)), ("time", time)):
            found[f"{name}/{key}"] = found.get(f"{name}/{key}", 0.0) + amount
    return found


def _suits(record: VariantRecord, device: Device, share: float) -> bool:
    kind = (record.hardware, record.simulated) == (device.kind, device.simulated)
    return kind and fits(record, device.cores, device.memory_mb, share, device.arithmetic)


def _instance_price(record: VariantRecord, cores: int, memory_mb: float, price_per_hour: float) -> float:
    """US$ per hour of one instance: its share of the device."""
    return device_share(record, cores, memory_mb) * price_per_hour
