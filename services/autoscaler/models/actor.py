"""The model-autoscaler of one worker: between two plans it reacts to load that has doubled and that its worker cannot carry. Pure.

The leader (services/autoscaler/vms) plans for all workers. A plan takes a moment, and a new leader a few seconds. Meanwhile a
worker whose load grows loads more by itself: the paper's greedy reaction (services/core/planning/problem.py) with the variants and
devices that it has. It never unloads anything, since only a plan for all knows what can be spared. Orders go to this worker's
monitor, which alone admits loads.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, EnsureLoaded, InstanceStatus, LoadReply, WorkerHeartbeat
from bus.messages.scaling import ClassDemand, DemandReport, ObjectiveReport
from bus.subjects import Subjects
from services.autoscaler.demand import DemandForecast, ForecastLoad
from services.core.actor import (
    NOTHING,
    After,
    Changed,
    Effect,
    Envelope,
    Handler,
    Inlet,
    Publish,
    Recorded,
    Started,
    Stopping,
    Synced,
    TableActor,
    Tick,
    Undelivered,
    Watch,
)
from services.core.catalog import Catalog, variant_key
from services.core.cost import HANDLING_MS, PER_CORE, UnknownPrice, cores_of, instance_price_per_s, load_seconds
from services.core.demand import Band, band, requirement_class, variants_for
from services.core.lifecycle import COUNTED, SERVING, needed
from services.core.metric import MetricFamily, gauge
from services.core.placement import how_many_fit
from services.core.planning.capacity import LatencyTables, throughput
from services.core.planning.problem import CandidateVariant, PlanningProblem, lacking, react
from services.core.settings import AutoscalerSettings, MonitorSettings, Settings

GONE = 2.0  # s without a heartbeat of this worker's monitor, after which the last is ignored
BARRED = 5.0  # s for which a variant that was refused here is not ordered again; doubles
BARRED_MOST = 60.0  # s
GROWN = 2.0  # a load that has not grown by this factor since the last plan is the plan's to carry
WAIT_S = 1.9  # s for which load must lack capacity: so long the leader has, which hears the same reports
YOUNG = 3.0  # s for which a new instance counts as busy, since its work has not arrived yet
SETTLE_S = 2.0  # s between an order and its instance in the heartbeats


class SeenLoad(Struct, frozen=True):
    """What a reaction is for. classes, records: of the problem's demands and candidates, in their order."""

    problem: PlanningProblem
    classes: tuple[ForecastLoad, ...]
    records: Mapping[str, VariantRecord]


class ModelAutoscaler(TableActor):
    """One worker's. prices: US$ per hour by device kind. monitor: as this worker's monitor admits loads."""

    def __init__(
        self,
        worker: str,
        subjects: Subjects,
        prices: Mapping[str, float],
        settings: AutoscalerSettings | None = None,
        monitor: MonitorSettings | None = None,
    ) -> None:
        self._worker = worker
        self._name = f"model-{worker}"
        self._subjects = subjects
        self._prices = prices
        self._settings = settings or AutoscalerSettings()
        self._monitor = monitor or MonitorSettings()
        self._catalog = Catalog()
        self._synced = False
        self._demand = DemandForecast("", self._catalog)
        self._heartbeat: tuple[float, WorkerHeartbeat | None] = (0.0, None)
        self._tables = LatencyTables()
        self._planned: dict[Band, float] = {}  # items/s here when the leader planned last
        self._short: dict[Band, float] = {}  # since when a class lacks capacity that the plan does not know of
        self._ordered: dict[str, tuple[int, float]] = {}  # instances, and until when heartbeats may not show them yet
        self._barred: dict[str, tuple[float, float]] = {}  # until when, and for how long the next time
        self._on: dict[type, Handler] = {
            WorkerHeartbeat: self._heard,
            ObjectiveReport: self._led,
            DemandReport: self._reported,
            Tick: self._check_again,
            LoadReply: self._load_answered,
            Changed: self._changed,
            Synced: self._synced_all,
            Started: self._start,
            Stopping: lambda _: NOTHING,
            Undelivered: lambda _: NOTHING,
            Recorded: lambda _: NOTHING,
        }
        s, worker = self._subjects, self._worker
        self.inlets = (
            Inlet(subject=s.worker_heartbeat(worker), message=WorkerHeartbeat),
            Inlet(subject=s.loads(self._name), message=LoadReply),
            Inlet(subject=s.worker(worker, "demand"), message=DemandReport),
            Inlet(subject=s.controller("objectives"), message=ObjectiveReport),
        )
        self.watches = (Watch(bucket=self._subjects.catalog_bucket),)

    # -- what is known

    def _start(self, _envelope: Envelope) -> Iterable[Effect]:
        """Only the leader's own planner is helped between two plans: the other policies say themselves how many instances there
        are.
        """
        return (self._next_check(),) if self._settings.policy == "infaas" else NOTHING

    def _next_check(self) -> Effect:
        return After("check", self._settings.period_s, Tick())

    def _heard(self, envelope: Envelope) -> Iterable[Effect]:
        self._heartbeat = envelope.now, envelope.message
        return NOTHING

    def _led(self, envelope: Envelope) -> Iterable[Effect]:
        """The leader has planned: what is asked of this worker now is the plan's to carry."""
        self._demand.tick(envelope.now)
        self._planned = {band(load.needs): load.rate for load in self._loads()}
        self._short = {}
        return NOTHING

    def _reported(self, envelope: Envelope) -> Iterable[Effect]:
        self._demand.take(envelope.message, envelope.now)
        return self._react(envelope.now) if self._settings.policy == "infaas" else NOTHING

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        change: Changed = envelope.message
        self._catalog.apply(change.key, change.value)
        self._tables.changed(change.key)
        if change.value is None:
            for known in (self._ordered, self._barred):
                known.pop(change.key.removeprefix(variant_key("")), None)
        return NOTHING

    def _synced_all(self, _envelope: Envelope) -> Iterable[Effect]:
        self._synced = True
        return NOTHING

    def _load_answered(self, envelope: Envelope) -> Iterable[Effect]:
        """The monitor alone admits loads. For a while, reactions do without what it refuses."""
        reply: LoadReply = envelope.message
        if not reply.reason:
            self._barred.pop(reply.variant, None)
            return NOTHING
        self._ordered.pop(reply.variant, None)
        pause = self._barred.get(reply.variant, (0.0, BARRED))[1]
        self._barred[reply.variant] = (envelope.now + pause, min(BARRED_MOST, 2 * pause))
        return NOTHING

    # -- reactions

    def _check_again(self, envelope: Envelope) -> Iterable[Effect]:
        return [self._next_check(), *self._react(envelope.now)]

    def _react(self, now: float) -> list[Effect]:
        """Order what load lacks that has grown since the last plan and has lacked it for a moment."""
        self._demand.tick(now)
        heard, mine = self._heartbeat
        if not self._synced or mine is None or now - heard > GONE or mine.draining:
            return []
        classes = self._loads()
        if not any(load.rate > GROWN * self._planned.get(band(load.needs), 0.0) for load in classes):
            self._short = {}
            return []
        seen = self._seen(classes, mine, now)
        short = {}
        for k in lacking(seen.problem):
            load = seen.classes[k]
            of = band(load.needs)
            if load.rate > GROWN * self._planned.get(of, 0.0):
                short[of] = self._short.get(of, now)
        self._short = short
        if not any(now - since >= WAIT_S for since in short.values()):
            return []
        found = react(seen.problem)
        return [self._order(seen, name, count, mine, now) for name, count in found.added.items()]

    def _order(self, seen: SeenLoad, variant: str, count: int, mine: WorkerHeartbeat, now: float) -> Effect:
        record = seen.records[variant]
        [one] = [each for each in seen.problem.candidates if each.name == variant]
        self._ordered[variant] = one.running + count, now + SETTLE_S
        there = {each.variant for each in mine.instances if each.state in COUNTED}
        apps = [
            load.needs.app
            for load, demand in zip(seen.classes, seen.problem.demands, strict=True)
            if demand.accepts(one)
        ]
        asked = sum(load.rate for load in seen.classes if load.needs.app in apps)
        can = sum(c.saturation_qps * c.running for c in seen.problem.candidates if set(c.apps) & set(one.apps))
        order = EnsureLoaded(
            variant=record,
            at_least=one.running + count,
            app=apps[0] if apps else None,
            orderer=self._name,
            reason=f"can carry {can:.3g} of {asked:.4g} items/s of {', '.join(sorted(set(apps)))} until the next plan",
            action="replicate" if variant in there else "upgrade" if can > 0 else "load",
        )
        return Publish(self._subjects.worker(self._worker, "load"), order, self._subjects.loads(self._name))

    def _loads(self) -> tuple[ForecastLoad, ...]:
        """What this worker is asked for now. A step counts from the first report on."""
        found = ((load, max(load.rate, newest)) for load, newest in self._demand.surges())
        return tuple(replace(load, rate=rate) for load, rate in found if rate > 0)

    def _seen(self, classes: tuple[ForecastLoad, ...], mine: WorkerHeartbeat, now: float) -> SeenLoad:
        """This load, and the variants that the worker's devices can serve it with."""
        scopes = [self._scope(load.needs) for load in classes]
        limits: dict[str, float] = {}
        apps: dict[str, list[str]] = {}
        records: dict[str, VariantRecord] = {}
        for k, (load, scope) in enumerate(zip(classes, scopes, strict=True)):
            limit = inf if load.needs.latency_ms is None else load.needs.latency_ms / 1000.0
            for record in scope:
                if (table := self._tables.table(record)).seconds(1) + table.tail_s <= limit:
                    records[record.variant] = record
                    apps.setdefault(record.variant, []).append(f"{load.needs.app}/{k}")
                    limits[record.variant] = min(limit, limits.get(record.variant, inf))
        candidates = [
            one
            for name, record in sorted(records.items())
            if (one := self._candidate(record, mine, limits[name], tuple(apps[name]), now)) is not None
        ]
        problem = PlanningProblem(
            candidates=tuple(candidates),
            demands=tuple(requirement_class(k, load.needs, load.rate) for k, load in enumerate(classes)),
            resources=self._free_cores(mine, candidates, now),
            slack=self._settings.slack,
            loading_weight=self._settings.loading_weight,
        )
        return SeenLoad(problem, classes, records)

    def _scope(self, needs: ClassDemand) -> Sequence[VariantRecord]:
        return variants_for(
            needs.app, needs.model, needs.version, needs.variant, self._catalog, needs.accuracy, new=needs.new
        )

    def _candidate(
        self, record: VariantRecord, mine: WorkerHeartbeat, limit_s: float, apps: tuple[str, ...], now: float
    ) -> CandidateVariant | None:
        devices = [d for d in mine.devices if d.alive and (d.kind, d.simulated) == (record.hardware, record.simulated)]
        held = [one for one in mine.instances if one.variant == record.variant and one.state in COUNTED]
        if not devices:
            return None
        table = self._tables.table(record)
        factors = [max(1.0, one.busy_factor) for one in held if one.state in SERVING]
        slow = sum(factors) / len(factors) if factors else 1.0
        price = self._price(record, devices[0])
        count, until = self._ordered.get(record.variant, (0, 0.0))
        running = max(len(held), count if now < until else 0)
        closed = now < self._barred.get(record.variant, (0.0, 0.0))[0]
        room = 0 if closed else sum(how_many_fit(record, d, self._monitor.memory_share, inf) for d in devices)
        warm = any(one.variant == record.variant and one.state == "Warm" for one in mine.instances)
        return CandidateVariant(
            name=record.variant,
            apps=apps,
            model=record.model,
            hardware=record.hardware,
            latency_ms=(table.seconds(1) + table.tail_s) * 1000.0,
            saturation_qps=throughput(table, limit_s) / slow,
            cost_per_s=price,
            load_s=load_seconds(record, warm=warm),
            accuracy=record.accuracy,
            uses={_cores(record): cores_of(record)} if record.hardware in PER_CORE else {},  # others take turns
            running=running,
            most=max(running, len(held) + room),
            cost_per_1000=price * (table.seconds(1) * 1000.0 + HANDLING_MS),
        )

    def _free_cores(
        self, mine: WorkerHeartbeat, candidates: Iterable[CandidateVariant], now: float
    ) -> dict[str, float]:
        """By kind of device, the cores that no instance computes on, and those that the candidates' instances take."""
        free: dict[str, float] = {}
        kinds = {device.device: _kind(device.kind, device.simulated) for device in mine.devices if device.alive}
        for device in mine.devices:
            if device.alive:
                name = kinds[device.device]
                free[name] = free.get(name, 0.0) + device.cores
        for status in mine.instances:
            record = self._catalog.variant(status.variant)
            if record is not None and status.device in kinds and needed(status):
                free[kinds[status.device]] -= _busy_cores(status, record, now)
        taken: dict[str, float] = {}
        for one in candidates:
            coming = one.running - sum(each.variant == one.name and each.state in COUNTED for each in mine.instances)
            for name, cores in one.uses.items():
                taken[name] = taken.get(name, 0.0) + cores * one.running
                free[name] -= cores * coming
        return {name: max(0.0, cores) + taken.get(name, 0.0) for name, cores in free.items()}

    def _price(self, record: VariantRecord, device: DeviceStatus) -> float:
        try:
            return instance_price_per_s(record, self._prices, device.cores, device.memory_mb)
        except UnknownPrice:
            return 0.0


def _kind(kind: str, simulated: bool) -> str:
    return f"{'simulated ' * simulated}{kind}"


def _cores(record: VariantRecord) -> str:
    return _kind(record.hardware, record.simulated)


def _busy_cores(status: InstanceStatus, record: VariantRecord, now: float) -> float:
    """How many of its cores this instance uses. One that is new, or not in state Active, counts as using all."""
    cores, saturation = cores_of(record), record.profile.saturation_qps
    if status.state != "Active" or now - status.since < YOUNG or saturation <= 0:
        return cores
    return cores * min(1.0, status.load * status.busy_factor / saturation)


def make_model_autoscaler(
    settings: Settings, subjects: Subjects, worker: str, prices: Mapping[str, float]
) -> ModelAutoscaler:
    """The model-autoscaler of this worker. prices: US$ per hour by device kind."""
    return ModelAutoscaler(worker, subjects, prices, settings.autoscaler, settings.monitor)


# -- metrics


def families(actor: ModelAutoscaler) -> Iterable[MetricFamily]:
    load = gauge("infaas_autoscaler_load_items_per_second", "Load of this worker when last looked at.")
    barred = gauge("infaas_autoscaler_barred_variants", "Variants that were refused here, planned without for now.")
    rate, worker = sum(one.rate for one in actor._demand.loads()), actor._worker
    return load.add(rate, worker=worker), barred.add(len(actor._barred), worker=worker)


def missing(actor: ModelAutoscaler, now: float) -> str:
    if not actor._synced:
        return "the catalogue"
    return "" if now - actor._heartbeat[0] <= GONE else "a heartbeat of its worker's monitor"
