"""The monitor of one worker: it alone admits loads here, follows instances and executors, and tells everybody by heartbeat.

Decisions are in policy.py, mitigation.py and services.core; loads.py remembers what is loaded, orders.py obeys, facts.py listens to
executors, moves.py brings slowed instances elsewhere, journal.py tells. A monitor that starts while its executors run adopts what
they report; an executor that ends takes its instances along, and what served is loaded again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from bus.messages.fleet import (
    EnsureLoaded,
    ExecutorExited,
    ExecutorReport,
    InstanceFailed,
    InstanceLoaded,
    InstanceMoved,
    InstanceUnloaded,
    Release,
)
from bus.messages.scaling import Drain
from bus.subjects import Subjects
from services.core.actor import (
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Inlet,
    Recorded,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Watch,
)
from services.core.placement import Device, quarantined_at
from services.monitor.devices import MonitoredDevice
from services.monitor.effects import Journal, SampleMachine
from services.monitor.executors import ExecutorEvents
from services.monitor.loading import LEADER, InstanceTable, WorkerOrders
from services.monitor.mitigation import Migrations
from services.monitor.policy import Knobs

KEEP_AGAIN = 2.0  # s until a quarantine that could not be written down is written again


class Tick(Struct, frozen=True):
    """A timer of ours: "heartbeat", "sample", "cost", or ("quarantine", variant)."""

    of: Any


class MonitorActor:
    """One worker's monitor. incarnation must grow with each start. devices: what the worker has.

    prices: US$ per hour by device kind. Raises UnknownPrice when a device's kind has none. kind: of machine, as heartbeats
    name it; empty: the hardware.
    """

    def __init__(
        self,
        worker: str,
        hardware: str,
        devices: Sequence[Device],
        prices: Mapping[str, float],
        subjects: Subjects,
        incarnation: int,
        knobs: Knobs | None = None,
        kind: str = "",
    ) -> None:
        self._worker = worker
        self._subjects = subjects
        self._knobs = knobs = knobs or Knobs()
        self._journal = journal = Journal(worker, hardware, subjects, incarnation, kind)
        self._devices = {spec.name: MonitoredDevice(worker, spec, prices) for spec in devices}
        self._loads = InstanceTable(worker, self._devices, journal, knobs)
        self._moves = Migrations(worker, self._devices, self._loads, journal, knobs)
        self._orders = orders = WorkerOrders(worker, self._loads, journal)
        self._facts = facts = ExecutorEvents(self._devices, self._loads, self._moves, orders, journal, knobs)
        self._sampling = False
        self._started = 0.0
        self._takes: dict[type, Callable[[Any], None]] = {
            InstanceLoaded: facts.loaded,
            InstanceFailed: facts.failed,
            InstanceUnloaded: facts.unloaded,
            InstanceMoved: facts.moved,
            ExecutorReport: facts.report,
            ExecutorExited: facts.exited,
            Tick: lambda tick: self._tick(tick.of),
            Done: self._done,
            Failed: self._not_done,
            TimedOut: self._not_done,
            Changed: self._changed,
            Synced: self._synced,
            Started: lambda _: self._start(),
            Stopping: lambda _: self._stop(),
            Recorded: lambda _: None,
        }
        self._obeys: dict[type, Callable[[Any], Any]] = {
            EnsureLoaded: orders.ensure,
            Release: orders.release,
            Drain: orders.drain,
        }

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        worker, subjects = self._worker, self._subjects
        return (
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

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.catalog_bucket), Watch(bucket=self._subjects.control_bucket))

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        message, journal = envelope.message, self._journal
        journal.turn(envelope.now)
        obey = self._obeys.get(type(message))
        if obey is not None:
            journal.reply(envelope.reply, obey(message))
        else:
            self._takes[type(message)](message)
        if not journal.told and self._is_acquainted():
            self._beat()
        return journal.effects()

    def _beat(self) -> None:
        self._journal.heartbeat(
            self._devices.values(),
            self._loads.instances.values(),
            self._loads.failures.quarantined,
            draining=self._orders.draining,
            leaving=self._orders.leaving,
        )

    # -- life

    def _is_acquainted(self) -> bool:
        """Whether it knows what is loaded: a heartbeat before that would tell everybody that its executors are gone."""
        known = len(self._facts.heard) == len(self._devices)
        return known or self._orders.leaving or self._journal.now - self._started >= self._knobs.acquaint_s

    def _start(self) -> None:
        self._started = self._journal.now
        for device in self._devices.values():
            device.open(self._journal.now)
        self._journal.worker_state("Booting", "the monitor started")
        for of, period in (("heartbeat", 0.0), ("sample", self._knobs.sample_s), ("cost", self._knobs.cost_s)):
            self._journal.add(After(of, period, Tick(of)))

    def _stop(self) -> None:
        self._charge()
        for instance in list(self._loads.instances.values()):
            self._loads.gone(instance, "the worker stopped")
        self._orders.leaving = True
        self._journal.worker_state("Stopped", "asked to stop")

    def _tick(self, of: Any) -> None:
        journal, knobs = self._journal, self._knobs
        if of == "heartbeat":
            journal.add(After(of, knobs.heartbeat_s, Tick(of)))
            self._facts.look_for_the_silent()
            if not self._orders.draining:
                self._moves.look()
            journal.told = False
            if not self._sampling:
                self._sampling = True
                journal.add(Do("machine", SampleMachine(), timeout=5.0))
        elif of == "sample":
            journal.add(After(of, knobs.sample_s, Tick(of)))
            for device in self._devices.values():
                journal.samples(device, knobs.sample_s)
        elif of == "cost":
            journal.add(After(of, knobs.cost_s, Tick(of)))
            self._charge()
        else:
            self._keep(of[1])

    def _charge(self) -> None:
        for device in self._devices.values():
            self._journal.costs(device.meter.close(self._journal.now))

    # -- what the edge did

    def _done(self, done: Done) -> None:
        if done.id == "machine":
            self._sampling = False
            self._journal.machine = done.result
            self._moves.sampled(done.result)

    def _not_done(self, failed: Failed | TimedOut) -> None:
        if failed.id == "machine":
            self._sampling = False
        else:
            self._journal.add(After(failed.id, KEEP_AGAIN, Tick(failed.id)))

    def _keep(self, variant: str) -> None:
        reason = self._loads.failures.quarantined.get(variant)
        if reason is not None:
            self._journal.keep_quarantine(variant, reason)

    # -- what the buckets hold

    def _changed(self, change: Changed) -> None:
        if change.bucket == self._subjects.control_bucket:
            if change.key == LEADER:
                self._orders.led(change.value)
            where = quarantined_at(change.key)
            if where is not None and where[0] == self._worker:
                self._quarantined(where[1], change.value)
            return
        catalog = self._loads.catalog
        catalog.apply(change.key, change.value)
        kind, _, name = change.key.partition(".")
        record = catalog.variant(name) if kind == "variant" else None
        if record is not None:
            for instance in self._loads.of(name):
                instance.record = record

    def _quarantined(self, variant: str, value: bytes | None) -> None:
        """By an earlier monitor of this worker, or by ourselves; or an operator has released it."""
        failures, record = self._loads.failures, self._loads.catalog.variant(variant)
        if value is None:
            if failures.release(variant):
                self._journal.quarantine(record, variant, "released by an operator", ended=True)
        elif variant not in failures.quarantined:
            failures.quarantined[variant] = value.decode(errors="replace")
            self._journal.quarantine(record, variant, failures.quarantined[variant])

    def _synced(self, synced: Synced) -> None:
        if synced.bucket == self._subjects.catalog_bucket:
            self._facts.synced = True
