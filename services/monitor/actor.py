"""The monitor of one worker. It alone admits loads there, follows instances and executors, and sends the worker's heartbeats.

policy.py, mitigation.py and services.core decide; loading.py holds what is loaded and obeys orders; executors.py handles what
executors say; effects.py makes what is sent. A monitor that starts while its executors run adopts the instances that they report.
The instances of an executor that ends are gone; those that served and are needed are loaded again. A new monitor does not know which
instances are reclaimable; whoever ordered that repeats its order.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import (
    DeviceStatus,
    EnsureLoaded,
    ExecutorExited,
    ExecutorReport,
    InstanceFailed,
    InstanceLoaded,
    InstanceMoved,
    InstanceUnloaded,
    LoadAccepted,
    LoadRefused,
    Release,
)
from bus.messages.scaling import Drain
from bus.subjects import Subjects
from services.core.actor import (
    NOTHING,
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Handler,
    Inlet,
    Publish,
    Recorded,
    Started,
    Stopping,
    Synced,
    TableActor,
    Tick,
    TimedOut,
    Watch,
)
from services.core.metric import MetricFamily, gauge
from services.core.placement import Device, quarantined_at
from services.core.settings import MonitorSettings, Settings
from services.monitor.devices import MonitoredDevice
from services.monitor.effects import MonitorEffects, SampleMachine
from services.monitor.executors import ExecutorEvents
from services.monitor.loading import InstanceTable, last
from services.monitor.mitigation import Migrations
from services.monitor.orders import LEADER, WorkerOrders

KEEP_AGAIN = 2.0  # s until a quarantine that could not be written down is written again
SAMPLE_TIMEOUT_S = 5.0  # s that a sample of the machine may take
STARTUP_S = 1.0  # s after its start in which a monitor waits for its executors, which report every 0.5 s


class MonitorActor(TableActor):
    """One worker's monitor. Raises UnknownPrice if a device's kind has no price.

    hardware: as lists and tables name it; kind: of machine, as heartbeats name it, empty: the hardware. devices: what the worker
    has. prices: US$ per hour by device kind. incarnation: must grow with each start. failure_timeout_s: an executor that is
    silent for so long counts as failed. startup_s: the first heartbeat waits so long for executors that have not reported yet.
    keeps: a variant that is loaded here as long as this worker takes work, whoever needs it.
    """

    def __init__(
        self,
        worker: str,
        hardware: str,
        devices: Sequence[Device],
        prices: Mapping[str, float],
        subjects: Subjects,
        incarnation: int,
        settings: MonitorSettings | None = None,
        *,
        kind: str = "",
        failure_timeout_s: float = 2.0,
        startup_s: float = 0.0,
        keeps: VariantRecord | None = None,
    ) -> None:
        self._worker = worker
        self._subjects = subjects
        self._settings = settings = settings or MonitorSettings()
        self._startup = startup_s
        self._keeps = keeps
        self._effects = effects = MonitorEffects(worker, hardware, subjects, incarnation, kind)
        self._devices = {spec.name: MonitoredDevice(worker, spec, prices) for spec in devices}
        self._table = table = InstanceTable(worker, self._devices, effects, settings)
        self._migrations = migrations = Migrations(worker, self._devices, table, effects, settings)
        self._orders = orders = WorkerOrders(worker, table, effects, settings)
        self._executors = executors = ExecutorEvents(
            self._devices, table, migrations, orders, effects, settings, failure_timeout_s
        )
        self._sampling = False
        self._started_at = 0.0
        self._on: dict[type, Handler] = {
            EnsureLoaded: _obeying(orders.ensure),
            Release: _obeying(orders.release),
            Drain: _obeying(orders.drain),
            InstanceLoaded: _reading(executors.loaded),
            InstanceFailed: _reading(executors.failed),
            InstanceUnloaded: _reading(executors.unloaded),
            InstanceMoved: _reading(executors.moved),
            ExecutorReport: _reading(executors.report),
            ExecutorExited: _reading(executors.exited),
            Tick: self._tick,
            Done: self._done,
            Failed: self._not_done,
            TimedOut: self._not_done,
            Changed: self._changed,
            Synced: self._synced,
            Started: self._start,
            Stopping: self._stop,
            Recorded: lambda _: NOTHING,
        }
        worker, subjects = self._worker, self._subjects
        self.inlets = (
            Inlet(subject=subjects.worker(worker, "load"), message=EnsureLoaded),
            Inlet(subject=subjects.worker(worker, "release"), message=Release),
            Inlet(subject=subjects.worker(worker, "drain"), message=Drain),
            Inlet(subject=subjects.monitor(worker, "loaded"), message=InstanceLoaded),
            Inlet(subject=subjects.monitor(worker, "failed"), message=InstanceFailed),
            Inlet(subject=subjects.monitor(worker, "unloaded"), message=InstanceUnloaded),
            Inlet(subject=subjects.monitor(worker, "moved"), message=InstanceMoved),
            Inlet(subject=subjects.monitor(worker, "report"), message=ExecutorReport),
            Inlet(subject=subjects.exited(worker), message=ExecutorExited),
        )
        self.watches = (Watch(bucket=self._subjects.catalog_bucket), Watch(bucket=self._subjects.control_bucket))

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        effects = self._on[type(envelope.message)](envelope)
        if self._effects.heartbeat_due and self._knows_instances(envelope.now):
            return [*effects, self._heartbeat(envelope.now)]
        return effects

    def _heartbeat(self, now: float) -> Effect:
        return self._effects.heartbeat(
            self._devices.values(),
            self._table.instances.values(),
            self._table.failures.quarantined,
            now,
            draining=self._orders.draining,
            leaving=self._orders.leaving,
        )

    def _knows_instances(self, now: float) -> bool:
        """Whether it knows what is loaded. An earlier heartbeat would say that its executors and their instances are gone."""
        all_listed = all(device.listed for device in self._devices.values())
        return all_listed or self._orders.leaving or now - self._started_at >= self._startup

    # -- start, timers, end

    def _start(self, envelope: Envelope) -> Iterable[Effect]:
        now = self._started_at = envelope.now
        for device in self._devices.values():
            device.open(now)
        settings = self._settings
        timers = (("heartbeat", 0.0), ("sample", settings.sample_s), ("cost", settings.cost_s))
        booting = self._effects.worker_state("Booting", "the monitor started", now)
        return [*booting, *(After(of, period, Tick(of)) for of, period in timers)]

    def _stop(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        found = self._costs(now)
        if envelope.message.succeeded:  # nothing of the worker changes
            self._effects.heartbeat_due = True
            return found
        for instance in list(self._table.instances.values()):
            found += self._table.gone(instance, "the worker stopped", now)
        self._orders.leaving = True
        return found + self._effects.worker_state("Stopped", "asked to stop", now)

    def _tick(self, envelope: Envelope) -> Iterable[Effect]:
        of, now, settings = envelope.message.of, envelope.now, self._settings
        if of == "heartbeat":
            return [After(of, settings.heartbeat_s, Tick(of)), *self._check(now)]
        if of == "sample":
            devices = self._devices.values()
            samples = [self._effects.samples(device, devices, settings.sample_s, now) for device in devices]
            return [After(of, settings.sample_s, Tick(of)), *(effect for one in samples for effect in one)]
        if of == "cost":
            return [After(of, settings.cost_s, Tick(of)), *self._costs(now)]
        if of == "room":
            return self._orders.try_again(now)
        return self._keep_quarantine(of[1])

    def _check(self, now: float) -> list[Effect]:
        """Before each heartbeat: silent executors, interfered instances, and how busy the machine is."""
        found = self._executors.check_silence(now)
        if not self._orders.draining:
            found += self._migrations.advance(now)
            found += self._keep(now)
        self._effects.heartbeat_due = True
        if not self._sampling:
            self._sampling = True
            found.append(Do("machine", SampleMachine(), timeout=SAMPLE_TIMEOUT_S))
        return found

    def _keep(self, now: float) -> list[Effect]:
        keeps = self._keeps
        if keeps is None or self._table.of(keeps.variant) or not self._knows_instances(now):
            return []
        order = EnsureLoaded(variant=keeps, orderer="monitor", reason="this worker is there for it")
        return self._orders.ensure(order, now)[1]

    def _costs(self, now: float) -> list[Effect]:
        rows = [row for device in self._devices.values() for row in device.meter.close(now)]
        return self._effects.costs(rows)

    # -- answers of the edge

    def _done(self, envelope: Envelope) -> Iterable[Effect]:
        done: Done = envelope.message
        if done.id == "machine":
            self._sampling = False
            self._effects.machine = done.result
            self._migrations.sampled(done.result)
        return NOTHING

    def _not_done(self, envelope: Envelope) -> Iterable[Effect]:
        failed: Failed | TimedOut = envelope.message
        if failed.id == "machine":
            self._sampling = False
            return NOTHING
        return (After(failed.id, KEEP_AGAIN, Tick(failed.id)),)

    def _keep_quarantine(self, variant: str) -> Iterable[Effect]:
        reason = self._table.failures.quarantined.get(variant)
        return NOTHING if reason is None else (self._effects.keep_quarantine(variant, reason),)

    # -- the catalogue and the control bucket

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        change: Changed = envelope.message
        if change.bucket == self._subjects.control_bucket:
            return self._control_changed(change, envelope.now)
        catalog = self._table.catalog
        catalog.apply(change.key, change.value)
        kind, _, name = change.key.partition(".")
        record = catalog.variant(name) if kind == "variant" else None
        if record is not None:
            for instance in self._table.of(name):
                instance.record = record
            self._table.removed.pop(name, None)
            return NOTHING
        if kind == "app" and change.value is None:
            self._table.forget_apps()
        if kind == "variant":  # it was removed
            why, now = "the variant was removed", envelope.now
            host, warm = self._table.host, [one for one in self._table.warm(name) if one.state == "Warm"]
            _, released = self._table.release(name, 0, why, now)  # no query can be given to them
            found = [*released, *(effect for one in warm for effect in host.drop(one, why, now))]
            self._table.failures.release(name)
            self._table.forget(name)
            last(self._table.removed, name)
            return found
        return NOTHING

    def _control_changed(self, change: Changed, now: float) -> Iterable[Effect]:
        if change.key == LEADER:
            self._orders.leader_changed(change.value)
        where = quarantined_at(change.key)
        if where is not None and where[0] == self._worker:
            return self._quarantine_changed(where[1], change.value, now)
        return NOTHING

    def _quarantine_changed(self, variant: str, value: bytes | None, now: float) -> Iterable[Effect]:
        """An earlier monitor of this worker, or this one, has quarantined the variant; or an operator has released it."""
        failures, record = self._table.failures, self._table.catalog.variant(variant)
        if value is None:
            if failures.release(variant):
                return self._effects.quarantine(record, variant, "released by an operator", now, ended=True)
        elif variant not in failures.quarantined:
            failures.quarantined[variant] = value.decode(errors="replace")
            return self._effects.quarantine(record, variant, failures.quarantined[variant], now)
        return NOTHING

    def _synced(self, envelope: Envelope) -> Iterable[Effect]:
        if envelope.message.bucket == self._subjects.catalog_bucket:
            self._executors.synced = True
        return NOTHING


def _reading(handle: Callable[[Any, float], list[Effect]]) -> Handler:
    """The handler of a message to which nobody expects a reply."""
    return lambda envelope: handle(envelope.message, envelope.now)


def _obeying(obey: Callable[[Any, float], tuple[LoadAccepted | LoadRefused, list[Effect]]]) -> Handler:
    """The handler of an order, which is answered where an answer is expected."""

    def handle(envelope: Envelope) -> Iterable[Effect]:
        reply, found = obey(envelope.message, envelope.now)
        return [*found, Publish(envelope.reply, reply)] if envelope.reply else found

    return handle


def make_monitor(
    settings: Settings,
    subjects: Subjects,
    worker: str,
    hardware: str,
    kind: str,
    devices: Sequence[Device],
    prices: Mapping[str, float],
    incarnation: int,
    keeps: VariantRecord | None = None,
) -> MonitorActor:
    """The monitor of this worker. Parameters as for `MonitorActor`. Raises UnknownPrice."""
    return MonitorActor(
        worker,
        hardware,
        devices,
        prices,
        subjects,
        incarnation,
        settings.monitor,
        kind=kind,
        failure_timeout_s=settings.dispatcher.failure_timeout_s,
        startup_s=STARTUP_S,
        keeps=keeps,
    )


# -- metrics

MB = 2**20


def _statuses(actor: MonitorActor) -> list[DeviceStatus]:
    effects = actor._effects
    return effects.statuses(actor._devices.values())


def families(actor: MonitorActor) -> Iterable[MetricFamily]:
    worker, devices = actor._worker, _statuses(actor)
    alive = gauge("infaas_device_up", "1 while the device's executor is heard.")
    utilisation = gauge("infaas_device_utilisation_ratio", "How busy the device is, with what foreign processes use.")
    foreign = gauge(
        "infaas_device_foreign_use_ratio", "The part of the utilisation that no executor of the worker used."
    )
    memory = gauge("infaas_device_memory_bytes", "What the device has.")
    promised = gauge(
        "infaas_device_memory_promised_bytes", "What its instances have been promised, without reclaimable ones."
    )
    price = gauge("infaas_device_price_dollars_per_hour", "What the device costs.")
    for status in devices:
        where = {
            "worker": worker,
            "device": status.device,
            "hardware": status.kind,
            "simulated": "true" if status.simulated else "false",
        }
        alive.add(int(status.alive), **where)
        utilisation.add(status.utilisation, **where)
        foreign.add(status.foreign_use, **where)
        memory.add(status.memory_mb * MB, **where)
        promised.add(status.memory_used_mb * MB, **where)
        price.add(status.price_per_hour, **where)
    states = Counter((worker, one.device, one.record.variant, one.state) for one in actor._table.instances.values())
    instances = gauge("infaas_instances", "Instances of a variant by their state.")
    instances.add_all(states, "worker", "device", "variant", "state")
    quarantined = gauge("infaas_quarantined_variants", "Variants that are not loaded here until they are released.")
    quarantined.add(len(actor._table.failures.quarantined), worker=worker)
    draining = gauge("infaas_worker_draining", "1 while the worker takes nothing new.")
    draining.add(int(actor._orders.draining), worker=worker)
    return alive, utilisation, foreign, memory, promised, price, instances, quarantined, draining


def missing(actor: MonitorActor, _now: float) -> str:
    if not actor._executors.synced:
        return "the catalogue"
    silent = [status.device for status in _statuses(actor) if not status.alive]
    return f"executors that are heard: {', '.join(silent)}" if silent else ""
