"""The leader's plan for all workers: which machines there should be, and which instances each worker should have. Pure.

Two plans are made together. The first is for the time at which a new machine would work. It says how many machines of each kind to have.
The second is for the time at which a new instance would serve. It says what the machines that work now should have loaded. What the second
plan does not need becomes reclaimable: it goes on serving until its place is needed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import floor, inf

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.events import AppObjective
from bus.messages.fleet import EnsureLoaded, LoadReply, PlannedBy, Release
from bus.messages.scaling import DemandReport, ObjectiveReport
from bus.subjects import Subjects
from services.autoscaler.vms.commands import ControllerEffects, Turn
from services.autoscaler.vms.demand import DemandForecast, ForecastLoad, Reached, margin_factor
from services.autoscaler.vms.fleet import Fleet, FleetWorker
from services.autoscaler.vms.policy import FleetLimits, PricedKind
from services.core.actor import Do, Effect, Publish, Record
from services.core.catalog import Catalog, target_of
from services.core.cost import Goal, LatencyTable, cost_per_1000, device_share, load_seconds
from services.core.demand import Band, band, variants_for
from services.core.digest import cores_of
from services.core.lifecycle import COUNTED, SERVING
from services.core.placement import Device, fits
from services.core.planning.capacity import instances_for, service_rate
from services.core.planning.fleet import ClassNeed, FleetPlan, FleetProblem, Pool, PooledVariant
from services.core.settings import AutoscalerSettings, MonitorSettings

SOLVE_S = 5.0  # s that both solutions may take
EXPIRES_S = 10.0  # s after which a plan does not count any more
KEEP_S = 10.0  # s for which a plan is kept unless a class needs more
CHANGED = 0.1  # relative growth of a class's need that counts
EXCEEDS = 10.0  # a forecast may be exceeded in so many times the share of queries that may miss: what exceeds it is a part of the load
OVERHEAD_S = 0.001  # of a query, beside computing
BARRED_S = 5.0  # s for which a variant that a worker has refused is not ordered there again
RECLAIM_S = 15.0  # s for which an instance must be too much before it becomes reclaimable without need
RECORD_S = 10.0  # s between two records of objectives
SETTLE_S = 3.0  # s between a load order and its instance in the heartbeats, beside its load time


class SolveFleet(Struct, frozen=True):
    """Command to the edge: make both plans. The answer is `FleetSolved`."""

    growth: FleetProblem
    present: FleetProblem


class FleetSolved(Struct, frozen=True):
    """The plans for both problems, and the milliseconds that they took."""

    growth: FleetPlan
    present: FleetPlan
    milliseconds: float


class Wish(Struct, frozen=True):
    """How many more machines of a kind are wanted; fewer if below 0. reason: for the event."""

    kind: str
    count: int
    reason: str


class _Class(Struct, frozen=True):
    """One class in a problem. limit_s: its latency. miss: the share of queries that bursts may cost. margin: factor on what is kept for
    them and for errors of the forecast.

    expected: items/s when a new instance would serve. soon, later: items/s that are hardly exceeded until a new instance, and a new machine,
    would serve.
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


class Snapshot(Struct, frozen=True):
    """What the problems were made from. pools: by index, its workers now."""

    classes: tuple[_Class, ...]
    records: tuple[VariantRecord, ...]
    pools: tuple[tuple[FleetWorker, ...], ...]
    problem: SolveFleet
    needs: Mapping[Band, float]


class FleetPlanner:
    """monitor: as the workers' monitors admit loads. goal: of the system. It acts only in turns in which its controller leads."""

    def __init__(
        self,
        subjects: Subjects,
        fleet: Fleet,
        catalog: Catalog,
        effects: ControllerEffects,
        limits: FleetLimits,
        monitor: MonitorSettings,
        settings: AutoscalerSettings,
        goal: Goal,
    ) -> None:
        self.demand = DemandForecast(settings.forecaster)
        self._subjects = subjects
        self._fleet = fleet
        self._catalog = catalog
        self._effects = effects
        self._limits = limits
        self._share = monitor.memory_share
        self._overcommit = monitor.cores_overcommit
        self._settings = settings
        self._goal: Goal = goal
        self._tables: dict[str, tuple[VariantRecord, LatencyTable]] = {}
        self._solving: Snapshot | None = None
        self._planned: tuple[float, Mapping[Band, float]] = (-inf, {})  # when, and for which needs
        self._fleet_then: tuple[object, ...] = ()
        self._wanted: dict[str, dict[str, int]] = {}  # by worker: instances by variant
        self._barred: dict[tuple[str, str], float] = {}
        self._ordered: dict[
            tuple[str, str], tuple[int, float]
        ] = {}  # worker, variant: at_least, and until when it is not repeated
        self._replies: dict[str, tuple[str, str]] = {}
        self._surplus: dict[str, float] = {}  # by kind: since when there are too many machines
        self._unneeded: dict[tuple[str, str], float] = {}  # worker, variant: since when there are too many instances
        self._recorded = -inf

    # -- what is heard

    def take(self, report: DemandReport, turn: Turn) -> bool:
        """Add a report. True if a class needs more than the plan is for, so that a new plan is due at once."""
        self.demand.take(report, turn.now)
        needs = self._planned[1]
        return any(rate > max(needs.get(band(load.needs), 0.0), 1.0) for load, rate in self.demand.surges())

    def replied(self, subject: str, reply: LoadReply | None, now: float) -> None:
        """A worker has answered an order; None: it has not."""
        order = self._replies.pop(subject, None)
        if order is not None and (reply is None or reply.reason):
            self._barred[order] = now + BARRED_S
            self._ordered.pop(order, None)

    def forget(self) -> None:
        """A new epoch begins."""
        self._solving, self._planned = None, (-inf, {})
        self._ordered.clear()
        self._replies.clear()
        self._surplus.clear()

    def current(self, now: float) -> bool:
        """Whether there is a plan that counts."""
        return now - self._planned[0] <= EXPIRES_S

    # -- problems

    def plan(self, turn: Turn, leaving: Collection[str], *, at_once: bool = False) -> list[Effect]:
        """Have a new plan made, if one is due. leaving: workers that are being removed."""
        self.demand.tick(turn.now)
        if self._solving is not None:
            return []
        seen = self._snapshot(turn, leaving)
        if seen is None or not (at_once or self._due(seen, turn.now)):
            return []
        self._solving = seen
        return [Do(("plan", str(turn.epoch)), seen.problem, SOLVE_S)]

    def _due(self, seen: Snapshot, now: float) -> bool:
        at, before = self._planned
        if now - at >= KEEP_S or before.keys() != seen.needs.keys():
            return True
        if any(need > (1 + CHANGED) * before[of] for of, need in seen.needs.items()):
            return True
        return self._fleet_then != self._state()

    def _state(self) -> tuple[object, ...]:
        """What the plan was made for, of the fleet: workers, and instances that serve."""
        return tuple(
            (name, worker.draining, tuple(sorted((one.variant, one.state == "Loading") for one in worker.instances)))
            for name, worker in sorted(self._fleet.workers.items())
        )

    def _table(self, record: VariantRecord) -> LatencyTable:
        known = self._tables.get(record.variant)
        if known is None or known[0] is not record:
            known = self._tables[record.variant] = (record, LatencyTable(record))
        return known[1]

    def _snapshot(self, turn: Turn, leaving: Collection[str]) -> Snapshot | None:
        workers = [one for one in self._fleet.ready(turn.now) if one.name not in leaving]
        classes = self._classes()
        held = {one.variant for worker in workers for one in worker.instances}
        names = {record.variant: record for one in classes for record in one.scope}
        for app in self._catalog.apps:
            for record in self._catalog.variants_of(app.app):
                if record.variant in held:
                    names[record.variant] = record
        records = tuple(record for _, record in sorted(names.items()))
        if not records:
            return None
        groups: dict[tuple[object, ...], list[FleetWorker]] = {}
        for worker in sorted(workers, key=lambda one: one.name):
            groups.setdefault((worker.kind, *_shape(worker)), []).append(worker)
        pools = tuple(tuple(group) for group in groups.values())
        present = self._problem(
            [_present(group, self._share) for group in pools], pools, records, classes, turn.now, soon=True
        )
        growth = self._problem(self._growth(pools, turn.now), (), records, classes, turn.now, soon=False)
        needs = {band(one.load.needs): one.soon for one in classes}
        return Snapshot(classes, records, pools, SolveFleet(growth, present), needs)

    def _classes(self) -> tuple[_Class, ...]:
        found = []
        boot = max((kind.boot_s for kind in self._limits.kinds.values()), default=0.0)
        for load in self.demand.loads():
            needs = load.needs
            scope = tuple(
                record
                for record in variants_for(needs.app, needs.model, needs.version, needs.variant, self._catalog)
                if self._answers(record, load)
            )
            if not scope:
                continue
            target = target_of(self._catalog.app(needs.app), self._settings.slo_target)
            miss = 1.0 - target
            share = 1.0 - min(0.5, EXCEEDS * miss)
            of_app = self.demand.reached.get(needs.app, Reached())
            factor = margin_factor(target, of_app.ended, of_app.missed)
            loads = [load_seconds(record) for record in scope]
            ahead = self._limits.settings.period_s
            soon = load.forecast.peak(min(loads) + ahead, share)
            expected = min(soon, load.forecast.point(min(loads) + ahead))
            later = max(soon, load.forecast.peak(boot + max(loads) + ahead, share))
            limit = inf if needs.latency_ms is None else max(0.001, needs.latency_ms / 1000.0 - OVERHEAD_S)
            found.append(_Class(load, needs.app, scope, limit, miss / 2, factor, expected, soon, later))
        return tuple(found)

    def _answers(self, record: VariantRecord, load: ForecastLoad) -> bool:
        """Whether this variant may answer the class at all."""
        needs = load.needs
        if record.accuracy is not None and record.accuracy < needs.accuracy:
            return False
        if needs.latency_ms is not None and self._table(record).seconds(1) + OVERHEAD_S > needs.latency_ms / 1000.0:
            return False
        return needs.cost is None or self._cost(record) <= needs.cost

    def _cost(self, record: VariantRecord) -> float:
        """US$ per 1,000 items, one at a time, on the first device of its kind that is known."""
        price = record.price_per_s
        for worker in self._fleet.workers.values() if price is None else ():
            for device in worker.devices:
                if (device.kind, device.simulated) == (record.hardware, record.simulated):
                    price = _instance_price(record, device.cores, device.memory_mb, device.price_per_hour) / 3600.0
        return cost_per_1000(record, price or 0.0)

    def _growth(self, pools: Sequence[Sequence[FleetWorker]], now: float) -> list[Pool]:
        """The pools of the first plan: the kinds of machine that may be started, and the workers that nobody may stop."""
        found = []
        for kind in self._limits.kinds.values():
            have = self._have(kind.name, now)
            found.append(
                Pool(
                    name=kind.name,
                    machines=have,
                    least=min(kind.minimum, kind.maximum),
                    most=max(kind.maximum, kind.minimum),
                    price=kind.price_per_hour,
                    resources=_resources(kind.devices, self._share),
                    elastic=kind.maximum > kind.minimum and not self._instances_billed,
                )
            )
        managed = set(self._limits.kinds)
        found += [_present(group, self._share) for group in pools if group[0].kind not in managed]
        return found

    def _have(self, kind: str, now: float) -> int:
        """Machines of a kind that serve or will serve soon."""
        return sum(
            one.kind == kind and self._fleet.state(one, now) in ("Ready", "Booting")
            for one in self._fleet.workers.values()
        )

    def _problem(
        self,
        pools: Sequence[Pool],
        groups: Sequence[Sequence[FleetWorker]],
        records: Sequence[VariantRecord],
        classes: Sequence[_Class],
        now: float,
        *,
        soon: bool,
    ) -> FleetProblem:
        variants: list[PooledVariant] = []
        at: dict[str, list[int]] = {}
        factors: list[float] = []
        for p, pool in enumerate(pools):
            group = groups[p] if groups else ()
            devices = _devices_of(group[0]) if group else self._devices(pool.name)
            for record in records:
                fitting = [d for d in devices if _suits(record, d, self._share)]
                if not fitting:
                    continue
                running, factor = self._running(record, group)
                at.setdefault(record.variant, []).append(len(variants))
                variants.append(self._variant(record, p, fitting, running, self._limit(record, group, running, now)))
                factors.append(factor)
        needs = []
        for one in classes:
            peak = one.soon if soon else one.later
            load = min(one.expected, peak)
            if peak <= 0:
                continue
            options = {}
            for record in one.scope:
                for v in at.get(record.variant, ()):
                    rate = service_rate(self._table(record), one.limit_s) / factors[v]
                    carrying = load / rate
                    whole = instances_for(peak, rate, one.limit_s / factors[v], one.miss, one.load.peakedness)
                    options[v] = (carrying, one.margin * max(0.0, whole - carrying))
            if options:
                needs.append(ClassNeed(name=one.app, load=load, options=options))
        return FleetProblem(
            pools=tuple(pools),
            variants=tuple(variants),
            needs=tuple(needs),
            least=tuple(self._least(at)),
            goal=self._goal if soon else "cost",
            budget=self._limits.budget_per_hour if self._limits.budget_per_hour < inf and not soon else None,
        )

    def _devices(self, kind: str) -> Sequence[Device]:
        known = self._limits.kinds.get(kind)
        if known is not None:
            return known.devices
        return next((_devices_of(one) for one in self._fleet.workers.values() if one.kind == kind), ())

    def _running(self, record: VariantRecord, group: Sequence[FleetWorker]) -> tuple[int, float]:
        """Instances in these workers, and their mean live correction of the profile, at least 1."""
        found = [one for worker in group for one in worker.of(record.variant)]
        factors = [max(1.0, one.factor) for one in found if one.state in SERVING]
        return len(found), sum(factors) / len(factors) if factors else 1.0

    def _limit(self, record: VariantRecord, group: Sequence[FleetWorker], running: int, now: float) -> int | None:
        """The present number, if every worker has refused one more lately or has it in quarantine; None: there is no limit."""
        open_ = [
            worker
            for worker in group
            if now >= self._barred.get((worker.name, record.variant), 0.0)
            and worker.heartbeat is not None
            and record.variant not in worker.heartbeat.quarantined
        ]
        return running if group and not open_ else None

    def _variant(
        self, record: VariantRecord, pool: int, fitting: Sequence[Device], running: int, limit: int | None
    ) -> PooledVariant:
        memory, first = record.profile.memory_mb, fitting[0]
        name = _resource(first)
        uses = {f"{name}/memory": memory}
        most = sum(floor(self._share * d.memory_mb / memory + 1e-9) if memory > 0 else 256 for d in fitting)
        if record.hardware == "cpu":
            threads = max(1, record.threads)
            most = min(most, sum(floor(d.cores * max(1.0, self._overcommit) / threads) for d in fitting))
        elif record.hardware != "gpu":
            uses[f"{name}/slots"] = 1.0
            most = min(most, sum(d.cores for d in fitting))
        price = _instance_price(record, first.cores, first.memory_mb, self._price(first))
        if self._instances_billed and record.price_per_s is not None:
            price = record.price_per_s * 3600.0
        rate = service_rate(self._table(record), inf)
        return PooledVariant(
            name=record.variant,
            pool=pool,
            uses=uses,
            computes=(f"{name}/time", cores_of(record)),
            most=min(most, 256 * len(fitting)),
            running=running,
            price=price,
            load_s=load_seconds(record),
            rate=rate,
            accuracy=record.accuracy or 0.0,
            limit=limit,
        )

    def _price(self, device: Device) -> float:
        """US$ per hour of a device like this, as heartbeats tell it."""
        for worker in self._fleet.workers.values():
            for one in worker.devices:
                if (one.kind, one.simulated) == (device.kind, device.simulated):
                    return one.price_per_hour
        return 0.0

    def _least(self, at: Mapping[str, list[int]]) -> Iterable[tuple[tuple[int, ...], int]]:
        """The instances that apps keep that have any, or have demand."""
        with_demand = {one.needs.app for one in self.demand.loads()}
        held = {
            one.variant for worker in self._fleet.workers.values() for one in worker.instances if one.state in COUNTED
        }
        for app in self._catalog.apps:
            records = self._catalog.variants_of(app.app)
            if app.min_instances and (app.app in with_demand or any(record.variant in held for record in records)):
                variants = tuple(v for record in records for v in at.get(record.variant, ()))
                if variants:
                    yield variants, app.min_instances

    # -- plans

    def solved(self, result: FleetSolved, turn: Turn) -> tuple[list[Effect], list[Wish]]:
        """Carry the plans out: orders to workers, and how many machines to add or remove."""
        seen, self._solving = self._solving, None
        if seen is None:
            return [], []
        self._planned = turn.now, seen.needs
        self._fleet_then = self._state()
        by = PlannedBy("ilp", result.milliseconds, result.present.objective)
        found = self._orders(seen, result.present, by, turn)
        wishes = self._wishes(seen, result.growth, turn.now)
        return [*found, *self._report(seen, result, turn)], wishes

    def _report(self, seen: Snapshot, result: FleetSolved, turn: Turn) -> list[Effect]:
        """The objectives of all apps: to all who listen, and now and then for the record."""
        instances: dict[str, int] = {}
        for one, count in zip(seen.problem.present.variants, result.present.instances, strict=True):
            instances[one.name] = instances.get(one.name, 0) + count
        machines = {
            pool.name: count for pool, count in zip(seen.problem.growth.pools, result.growth.machines, strict=True)
        }
        apps = list(self._objectives(seen, turn.now))
        report = ObjectiveReport(at=turn.now, epoch=turn.epoch, apps=apps, machines=machines, instances=instances)
        found: list[Effect] = [Publish(self._subjects.controller("objectives"), report)]
        if turn.now - self._recorded >= RECORD_S:
            self._recorded = turn.now
            found += [Record(one) for one in apps]
        return found

    def _objectives(self, seen: Snapshot, now: float) -> Iterable[AppObjective]:
        """What each app wants and gets. Its capacity is what the instances that serve carry in time, as a multiple of the forecast."""
        problem = seen.problem.present
        serving = [
            sum(one.state in SERVING for worker in seen.pools[v.pool] for one in worker.of(v.name))
            for v in problem.variants
        ]
        for app in sorted({one.app for one in seen.classes}):
            ours = [one for one in seen.classes if one.app == app]
            whole: dict[int, float] = {}  # instances of each variant that would carry the app alone
            for need in problem.needs:
                if need.name == app:
                    for v, (carrying, beside) in need.options.items():
                        whole[v] = whole.get(v, 0.0) + carrying + beside
            forecast = sum(one.soon for one in ours)
            covered = sum(serving[v] / count for v, count in whole.items() if count > 0)
            reached = self.demand.reached.get(app)
            yield AppObjective(
                time=now,
                app=app,
                slo_target=target_of(self._catalog.app(app), self._settings.slo_target),
                reached=reached.share if reached is not None else None,
                load=sum(one.load.rate for one in ours),
                forecast=forecast,
                capacity=covered * forecast,
                headroom=covered if forecast > 0 else None,
            )

    def not_solved(self) -> None:
        """The solver failed, or took too long."""
        self._solving = None

    def settled(self, worker: str, now: float) -> bool:
        """Whether all instances that the plan wants on the other workers serve."""
        for name, wanted in self._wanted.items():
            known = self._fleet.workers.get(name)
            if name == worker or known is None or not known.alive(now):
                continue
            for variant, count in wanted.items():
                if sum(one.state in SERVING for one in known.of(variant)) < count:
                    return False
        return True

    def weight(self, worker: str) -> tuple[int, float]:
        """What a worker has to do by the plan: instances that are needed there, and items/s that it serves."""
        known = self._fleet.workers.get(worker)
        load = sum(one.load for one in known.instances) if known is not None else 0.0
        return sum(self._wanted.get(worker, {}).values()), load

    def _wishes(self, seen: Snapshot, plan: FleetPlan, now: float) -> list[Wish]:
        found = []
        load = sum(one.later for one in seen.classes)
        for pool, wanted in zip(seen.problem.growth.pools, plan.machines, strict=True):
            kind = self._limits.kinds.get(pool.name)
            if kind is None:
                continue
            have = self._have(pool.name, now)
            why = (
                f"the plan wants {wanted} {pool.name}, there are {have}, for {load:.4g} items/s in {kind.boot_s:.0f} s"
            )
            if wanted > have:
                found.append(Wish(pool.name, wanted - have, why))
            if wanted < have:
                since = self._surplus.setdefault(pool.name, now)
                if now - since >= self._hold(kind):
                    found.append(Wish(pool.name, wanted - have, f"{why}, for {now - since:.0f} s"))
            else:
                self._surplus.pop(pool.name, None)
        return found

    def _hold(self, kind: PricedKind) -> float:
        """Seconds for which a machine must be too much: as long as another one would take to come (the rule of ski rental)."""
        return max(kind.boot_s, self._limits.settings.idle_s)

    def _orders(self, seen: Snapshot, plan: FleetPlan, by: PlannedBy, turn: Turn) -> list[Effect]:
        found: list[Effect] = []
        self._wanted = {}
        unneeded: dict[tuple[str, str], float] = {}
        self._ordered = {key: order for key, order in self._ordered.items() if turn.now < order[1]}
        records = {record.variant: record for record in seen.records}
        for p, group in enumerate(seen.pools):
            counts = {
                one.name: (count, one)
                for one, count in zip(seen.problem.present.variants, plan.instances, strict=True)
                if one.pool == p
            }
            for worker, wanted in self._assign(group, counts, records, turn.now).items():
                self._wanted[worker.name] = wanted
                releases: list[Effect] = []
                loads: list[Effect] = []
                waiting: list[Effect] = []
                for variant in sorted(counts):
                    count = wanted.get(variant, 0)
                    claimed = sum(not one.reclaimable for one in worker.of(variant))
                    if count > claimed:
                        loads += self._load(worker, records[variant], count, seen, by, turn)
                    elif count < claimed:
                        key = (worker.name, variant)
                        since = unneeded[key] = self._unneeded.get(key, turn.now)
                        long = turn.now - since >= max(RECLAIM_S, load_seconds(records[variant]))
                        (releases if long else waiting).append(self._release(worker, variant, count, by, turn))
                # What is needed no longer stays as it is for a while, unless others need the room now.
                found += [*releases, *(waiting if loads and not self._instances_billed else ()), *loads]
        self._unneeded = unneeded
        return found

    @property
    def _instances_billed(self) -> bool:
        return self._settings.bill == "instances"

    def _release(self, worker: FleetWorker, variant: str, keep: int, by: PlannedBy, turn: Turn) -> Effect:
        order = Release(
            variant=variant,
            keep=keep,
            orderer=self._effects.name,
            reason=f"the plan needs {keep} here",
            epoch=turn.epoch,
            planned=by,
            reclaim=not self._instances_billed,
        )
        return self._effects.order(worker.name, "release", order)

    def _load(
        self, worker: FleetWorker, record: VariantRecord, count: int, seen: Snapshot, by: PlannedBy, turn: Turn
    ) -> list[Effect]:
        key = (worker.name, record.variant)
        if self._ordered.get(key, (0, 0.0))[0] >= count or turn.now < self._barred.get(key, 0.0):
            return []
        self._ordered[key] = count, turn.now + load_seconds(record) + SETTLE_S
        subject = self._effects.reply_subject()
        self._replies[subject] = key
        ours = [one for one in seen.classes if record in one.scope]
        load = sum(one.soon for one in ours)
        order = EnsureLoaded(
            variant=record,
            at_least=count,
            app=ours[0].app if ours else None,
            orderer=self._effects.name,
            reason=f"the plan wants {count} here, for {load:.4g} items/s of {', '.join(sorted({one.app for one in ours})) or 'no app'}",
            epoch=turn.epoch,
            planned=by,
        )
        return [self._effects.order(worker.name, "load", order, subject)]

    def _assign(
        self,
        group: Sequence[FleetWorker],
        counts: Mapping[str, tuple[int, PooledVariant]],
        records: Mapping[str, VariantRecord],
        now: float,
    ) -> dict[FleetWorker, dict[str, int]]:
        """Which worker has how many instances: those that run stay where they are, others go where most is free."""
        found: dict[FleetWorker, dict[str, int]] = {worker: {} for worker in group}
        rooms = {worker: _Room(worker, self._share) for worker in group}
        more: list[tuple[VariantRecord, int]] = []
        for variant, (count, _) in sorted(counts.items()):
            left = count
            running = [(worker, one) for worker in group for one in worker.of(variant)]
            running.sort(key=lambda each: (each[1].reclaimable, each[1].state == "Loading", each[0].name))
            for worker, one in running[:left]:
                found[worker][variant] = found[worker].get(variant, 0) + 1
                rooms[worker].take(records[variant], one.device)
                left -= 1
            if left > 0:
                more.append((records[variant], left))
        more.sort(key=lambda each: (-each[0].profile.memory_mb, each[0].variant))
        for record, left in more:
            for _ in range(left):
                open_ = [
                    worker
                    for worker in group
                    if rooms[worker].fits(record) and now >= self._barred.get((worker.name, record.variant), 0.0)
                ]
                if not open_:
                    break
                worker = min(open_, key=lambda each: (rooms[each].computing, each.name))
                rooms[worker].take(record)
                found[worker][record.variant] = found[worker].get(record.variant, 0) + 1
        return found


class _Place:
    """What is free on one device."""

    __slots__ = ("device", "memory", "slots")

    def __init__(self, device: Device, share: float) -> None:
        self.device = device
        self.memory = share * device.memory_mb
        self.slots = device.cores


class _Room:
    """What is free on the devices of a worker. computing: cores of the instances there."""

    def __init__(self, worker: FleetWorker, share: float) -> None:
        self.computing = 0.0
        self._places = {device.name: _Place(device, share) for device in _devices_of(worker)}

    def _open(self, record: VariantRecord) -> list[_Place]:
        memory = record.profile.memory_mb
        return [
            place
            for place in self._places.values()
            if (place.device.kind, place.device.simulated) == (record.hardware, record.simulated)
            and place.memory + 1e-6 >= memory
            and (record.hardware in ("cpu", "gpu") or place.slots >= 1)
        ]

    def fits(self, record: VariantRecord) -> bool:
        return bool(self._open(record))

    def take(self, record: VariantRecord, device: str = "") -> None:
        """Put an instance on this device, else on the one with most memory, as the monitor does."""
        place = self._places.get(device) or max(self._open(record), key=lambda each: each.memory, default=None)
        if place is not None:
            place.memory -= record.profile.memory_mb
            place.slots -= 1
            self.computing += cores_of(record)


# -- pools


def _shape(worker: FleetWorker) -> tuple[object, ...]:
    return tuple(sorted((d.kind, d.simulated, d.cores, round(d.memory_mb)) for d in worker.devices))


def _devices_of(worker: FleetWorker) -> tuple[Device, ...]:
    return tuple(
        Device(name=d.device, kind=d.kind, cores=d.cores, memory_mb=d.memory_mb, simulated=d.simulated)
        for d in worker.devices
    )


def _present(group: Sequence[FleetWorker], share: float) -> Pool:
    devices = _devices_of(group[0])
    price = sum(d.price_per_hour for d in group[0].devices)
    number = len(group)
    return Pool(
        name=group[0].kind,
        machines=number,
        least=number,
        most=number,
        price=price,
        resources=_resources(devices, share),
        elastic=False,
    )


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
    return kind and fits(record, device.cores, device.memory_mb, share)


def _instance_price(record: VariantRecord, cores: int, memory_mb: float, price_per_hour: float) -> float:
    """US$ per hour of one instance: its share of the device."""
    return device_share(record, cores, memory_mb) * price_per_hour
