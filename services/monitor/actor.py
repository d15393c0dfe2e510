"""The monitor of one worker: it alone admits loads here, follows instances and executors, and tells everybody by heartbeat.

Decisions are in policy.py and services.core; loads.py remembers what is loaded, journal.py tells. A monitor that starts while
its executors run adopts what they report; an executor that ends takes its instances along, and what served is loaded again.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from bus.messages.fleet import (
    EnsureLoaded,
    ExecutorExited,
    ExecutorReport,
    InstanceFailed,
    InstanceLoaded,
    InstanceSample,
    InstanceUnloaded,
    LoadAccepted,
    LoadRefused,
    Release,
)
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
    Started,
    Stopping,
    Synced,
    TimedOut,
    Watch,
)
from services.core.placement import Device
from services.monitor.devices import DeviceState
from services.monitor.instances import Instance, busy_by_app
from services.monitor.journal import Journal
from services.monitor.loads import Loads
from services.monitor.machine import SampleMachine
from services.monitor.policy import Knobs, scaler

MOST = 256  # instances of one variant on one worker; an order for more is a mistake
UNLISTED = 2  # reports in a row without an instance after which its executor has lost it
REORDER = 4  # reports in a row without an instance that should be loading after which the order is repeated


class Tick(Struct, frozen=True):
    """A timer of ours: "heartbeat", "sample" or "cost"."""

    of: str


class MonitorActor:
    """One worker's monitor. incarnation must grow with each start. devices: what the worker has.

    prices: US$ per hour by device kind. Raises UnknownPrice when a device's kind has none.
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
    ) -> None:
        self._worker = worker
        self._subjects = subjects
        self._knobs = knobs or Knobs()
        self._journal = Journal(worker, hardware, subjects, incarnation)
        self._devices = {spec.name: DeviceState(worker, spec, prices) for spec in devices}
        self._loads = Loads(worker, self._devices, self._journal, self._knobs)
        self._synced = False
        self._sampling = False
        self._leaving = False
        self._heard: set[str] = set()  # devices whose executor has listed its instances since we know the catalogue
        self._started = 0.0

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        worker, subjects = self._worker, self._subjects
        return (
            Inlet(subject=subjects.worker(worker, "load"), message=EnsureLoaded),
            Inlet(subject=subjects.worker(worker, "release"), message=Release),
            Inlet(subject=subjects.monitor(worker, "loaded"), message=InstanceLoaded),
            Inlet(subject=subjects.monitor(worker, "failed"), message=InstanceFailed),
            Inlet(subject=subjects.monitor(worker, "unloaded"), message=InstanceUnloaded),
            Inlet(subject=subjects.monitor(worker, "report"), message=ExecutorReport),
            Inlet(subject=subjects.exited(worker), message=ExecutorExited),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.catalog_bucket),)

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        message, journal = envelope.message, self._journal
        journal.turn(envelope.now)
        match message:
            case ExecutorReport():
                self._report(message)
            case Tick():
                self._tick(message.of)
            case Done():
                self._sampling = False
                journal.machine = message.result
            case Failed() | TimedOut():
                self._sampling = False
            case EnsureLoaded():
                journal.reply(envelope.reply, self._ensure(message))
            case Release():
                journal.reply(envelope.reply, self._release(message))
            case InstanceLoaded():
                self._loaded(message)
            case InstanceFailed():
                self._failed(message)
            case InstanceUnloaded():
                self._unloaded(message)
            case ExecutorExited():
                self._exited(message)
            case Changed():
                self._catalogued(message)
            case Synced():
                self._synced = True
            case Started():
                self._start()
            case Stopping():
                self._stop()
        if not journal.told and self._is_acquainted():
            journal.heartbeat(self._devices.values(), self._loads.instances.values(), leaving=self._leaving)
        return journal.effects()

    # -- life

    def _is_acquainted(self) -> bool:
        """Whether it knows what is loaded: a heartbeat before that would tell everybody that its executors are gone."""
        known = len(self._heard) == len(self._devices)
        return known or self._leaving or self._journal.now - self._started >= self._knobs.acquaint_s

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
        self._leaving = True
        self._journal.worker_state("Stopped", "asked to stop")

    def _tick(self, of: str) -> None:
        journal, knobs = self._journal, self._knobs
        if of == "heartbeat":
            journal.add(After(of, knobs.heartbeat_s, Tick(of)))
            self._look_for_the_silent()
            journal.told = False
            if not self._sampling:
                self._sampling = True
                journal.add(Do("machine", SampleMachine(), timeout=5.0))
        elif of == "sample":
            journal.add(After(of, knobs.sample_s, Tick(of)))
            for device in self._devices.values():
                journal.samples(device, knobs.sample_s)
        else:
            journal.add(After(of, knobs.cost_s, Tick(of)))
            self._charge()

    def _charge(self) -> None:
        for device in self._devices.values():
            self._journal.costs(device.meter.close(self._journal.now))

    def _look_for_the_silent(self) -> None:
        now = self._journal.now
        for device in self._devices.values():
            if device.alive and now - device.seen > self._knobs.failure_timeout_s:
                device.fell_silent(now)
                self._journal.worker_state("Failed", f"the executor of {device.spec.name} is silent")
        for instance in list(self._loads.instances.values()):
            if instance.state != "Loading" or instance.ordered is None:
                continue
            patience = self._knobs.load_timeout_s + instance.record.profile.load_ms / 100.0
            if now - instance.ordered > patience:
                reason = f"the executor did not answer the load order within {patience:.0f} s"
                self._journal.order_unload(instance.id, instance.device)
                self._loads.failures.failed(instance.record.variant, reason, now)
                self._loads.gone(instance, reason)

    # -- orders

    def _ensure(self, order: EnsureLoaded) -> LoadAccepted | LoadRefused:
        record = order.variant
        have = self._loads.of(record.variant)
        obstacle = "this worker is leaving" if self._leaving else ""
        if order.at_least > MOST:
            obstacle = f"at_least is {order.at_least}; one worker takes at most {MOST} instances of a variant"
        while len(have) < order.at_least and not obstacle:
            found = self._loads.place(record)
            if isinstance(found, str):
                obstacle = found
                break
            why = order.reason or f"ordered by {order.orderer or 'somebody'}"
            action = "replicate" if have else "load"
            have.append(self._loads.admit(found, record, order.app, why))
            self._journal.scaling(scaler(order.orderer), action, record, order.app, why)
        if obstacle:
            return LoadRefused(worker=self._worker, variant=record.variant, reason=obstacle)
        return LoadAccepted(worker=self._worker, variant=record.variant, instances=[i.id for i in have])

    def _release(self, order: Release) -> LoadAccepted:
        why = order.reason or f"ordered by {order.orderer or 'somebody'}"
        going = self._loads.release(order.variant, order.keep, why)
        if going:
            first = going[0]
            self._journal.scaling(scaler(order.orderer), "unload", first.record, first.owner, why, len(going))
        stay = [instance.id for instance in self._loads.of(order.variant)]
        return LoadAccepted(worker=self._worker, variant=order.variant, instances=stay)

    def _catalogued(self, change: Changed) -> None:
        catalog = self._loads.catalog
        catalog.apply(change.key, change.value)
        kind, _, name = change.key.partition(".")
        record = catalog.variant(name) if kind == "variant" else None
        if record is not None:
            for instance in self._loads.of(name):
                instance.record = record

    # -- facts from executors

    def _loaded(self, fact: InstanceLoaded) -> None:
        instance = self._told_of(fact)
        if instance is None:
            return
        if (
            instance.state == "Unloading"
        ):  # released while it was loading: say it again, now that there is something to go
            self._journal.order_unload(instance.id, instance.device)
        if instance.state != "Loading":
            return
        now = self._journal.now
        instance.memory_mb = max(instance.memory_mb, fact.memory_mb)
        instance.last_used = now
        self._loads.failures.succeeded(fact.variant)
        why = f"loaded in {fact.load_ms:.0f} ms; {fact.proof}"
        self._journal.states(instance, instance.move("Active", why, now))

    def _failed(self, fact: InstanceFailed) -> None:
        instance = self._told_of(fact)
        if instance is not None:
            self._loads.failures.failed(fact.variant, fact.reason, self._journal.now)
            self._loads.gone(instance, fact.reason)

    def _unloaded(self, fact: InstanceUnloaded) -> None:
        instance = self._told_of(fact)
        if instance is not None:
            self._loads.gone(instance, "unloaded")

    def _told_of(self, fact: InstanceLoaded | InstanceFailed | InstanceUnloaded) -> Instance | None:
        device = self._devices.get(fact.device)
        if device is None or not self._meet(device, fact.incarnation):
            return None
        return self._loads.instances.get(fact.instance)

    def _report(self, report: ExecutorReport) -> None:
        device = self._devices.get(report.device)
        if device is None or not self._meet(device, report.incarnation):
            return
        for sample in report.samples:
            instance = self._loads.instances.get(sample.instance)
            if instance is None:
                instance = self._loads.adopt(device, sample, synced=self._synced)
            if instance is not None:
                self._take(device, instance, sample, report.seconds)
        if self._synced:
            self._heard.add(report.device)
        self._miss(device, {sample.instance for sample in report.samples})

    def _miss(self, device: DeviceState, listed: set[str]) -> None:
        """What an executor should have and does not list: words were lost, or its actor was started again."""
        for instance in list(device.instances.values()):
            if instance.id in listed or (instance.state == "Loading" and instance.ordered is None):
                instance.unlisted = 0
                continue
            instance.unlisted += 1
            if instance.state == "Loading":
                if instance.unlisted % REORDER == 0:
                    self._loads.order(instance)
            elif instance.unlisted >= UNLISTED:
                self._loads.lost(instance, "the executor no longer has it")

    def _take(self, device: DeviceState, instance: Instance, sample: InstanceSample, seconds: float) -> None:
        """One instance's part of a report."""
        now = self._journal.now
        self._journal.states(instance, instance.observe(sample, seconds, now))
        device.meter.used(instance.id, busy_by_app(sample))
        self._loads.used.update(app.app for app in sample.apps if app.items > 0)
        self._journal.states(instance, instance.judge(self._knobs.thresholds, now))

    # -- executors that come and go

    def _meet(self, device: DeviceState, incarnation: int) -> bool:
        """Something was heard of this executor process; False when it is one that has ended."""
        if incarnation == device.dead:
            return False
        now, journal = self._journal.now, self._journal
        if device.incarnation is not None and incarnation != device.incarnation:
            self._loads.lose(device, "the executor died: another one has taken its place")
        if device.incarnation is None:
            device.incarnation, device.met = incarnation, now
        if device.spoke(now):
            journal.told = False
            if all(other.alive for other in self._devices.values()):
                journal.worker_state("Ready", f"the executor of {device.spec.name} runs")
            self._loads.order_waiting(device)
        return True

    def _exited(self, fact: ExecutorExited) -> None:
        device = self._devices.get(fact.device)
        if device is None or device.incarnation is None or fact.at < device.met:
            return
        self._loads.lose(device, f"the executor died: {fact.reason}")
        self._journal.worker_state("Failed", f"the executor of {fact.device} died: {fact.reason}")
