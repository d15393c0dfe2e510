"""What is loaded on a worker: admission, eviction, release, and the orders to executors that follow. Pure.

The monitor alone admits loads on its worker, so that two orders at once never take the same memory twice.
"""

from collections.abc import Iterable, Mapping

import msgspec

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import EnsureLoaded, InstanceSample, LoadAccepted, LoadRefused, Release
from bus.messages.scaling import Drain, LeaderRecord
from services.core.catalog import Catalog
from services.core.lifecycle import COUNTED, SERVING
from services.core.placement import Amount, cores_needed, misfit, short_of, shortage
from services.monitor.devices import MonitoredDevice
from services.monitor.effects import Journal
from services.monitor.instances import MonitoredInstance
from services.monitor.policy import Knobs, LoadFailures, make_room, scaler, to_release

REFUSE_AFTER = 10.0  # s without an executor after which loads are refused instead of waiting for it
REMEMBERED = 1000


class InstanceTable:
    """The instances of one worker by name, and on which device they are."""

    def __init__(self, worker: str, devices: Mapping[str, MonitoredDevice], journal: Journal, knobs: Knobs) -> None:
        self.catalog = Catalog()
        self.failures = LoadFailures(knobs.quarantine_after)
        self.instances: dict[str, MonitoredInstance] = {}
        self.used: set[str] = set()  # apps that instances here have served or were loaded for
        self.draining = False  # nothing new, not even in place of what was lost
        self._worker = worker
        self._devices = devices
        self._journal = journal
        self._knobs = knobs
        self._minted: dict[str, int] = {}
        self._ended: dict[str, None] = {}  # the last instances that are no more, oldest first

    def of(self, variant: str) -> list[MonitoredInstance]:
        """This variant's instances that are there or on their way."""
        return [i for i in self.instances.values() if i.record.variant == variant and i.state in COUNTED]

    # -- in

    def place(self, record: VariantRecord) -> MonitoredDevice | str:
        """A device with room for one more instance, made by eviction where it must; or why there is none."""
        obstacle = self.failures.obstacle(record.variant, self._journal.now)
        if obstacle:
            return obstacle
        fitting, obstacle = self._fitting(record)
        need = needs_of(record)
        for device in sorted(fitting, key=lambda device: -self._free(device).memory_mb):
            short = short_of(need, self._free(device))
            if short.none or self._evict(device, short, record.variant):
                return device
            obstacle = shortage(record.variant, need, device.committed(), self._limit(device), device.spec.name)
        return obstacle or "this worker has no device"

    def others_with_room(self, instance: MonitoredInstance) -> list[MonitoredDevice]:
        """Devices but its own where this instance would fit beside what is there, the emptiest first."""
        if self.failures.obstacle(instance.record.variant, self._journal.now):
            return []
        fitting, _ = self._fitting(instance.record)
        need = needs_of(instance.record)
        found = [
            d for d in fitting if d.spec.name != instance.device and d.alive and short_of(need, self._free(d)).none
        ]
        return sorted(found, key=lambda device: (device.utilisation, -self._free(device).memory_mb))

    def _fitting(self, record: VariantRecord) -> tuple[list[MonitoredDevice], str]:
        """Devices that could run it if they were empty; and why the others could not."""
        fitting: list[MonitoredDevice] = []
        obstacle = ""
        for device in self._devices.values():
            why = misfit(record, device.spec, self._knobs.memory_share)
            if not why and not device.alive and self._journal.now - device.silent_since > REFUSE_AFTER:
                why = f"the executor of {device.spec.name} does not run"
            if not why:
                fitting.append(device)
            elif not obstacle or record.hardware == device.spec.kind:
                obstacle = why
        return fitting, obstacle

    def _limit(self, device: MonitoredDevice) -> Amount:
        return device.limit(self._knobs.memory_share, self._knobs.cores_overcommit)

    def _free(self, device: MonitoredDevice) -> Amount:
        return self._limit(device) - device.committed()

    def _evict(self, device: MonitoredDevice, short: Amount, variant: str) -> bool:
        now = self._journal.now
        candidates = device.instances.values()
        victims = make_room(candidates, short, self._apps_of, self._least, now, self._knobs.idle_s)
        for victim in victims or ():
            why = f"makes room for {variant}; not used for {now - victim.last_used:.0f} s"
            self._journal.scaling("monitor", "evict", victim.record, victim.owner, why)
            self.unload(victim, why)
        return victims is not None

    def admit(self, device: MonitoredDevice, record: VariantRecord, app: str | None, reason: str) -> MonitoredInstance:
        """Make an instance; its load is ordered as soon as there is an executor and room."""
        now = self._journal.now
        instance = MonitoredInstance(self._mint(record.variant), record, device.spec.name, "Loading", now, app)
        if app is not None:
            self.used.add(app)
        self._add(device, instance)
        self._journal.states(instance, [(app, "Inactive", "Loading", reason)])
        self.order_waiting(device)
        return instance

    def order_waiting(self, device: MonitoredDevice) -> None:
        """Order the loads that were admitted, as far as what is being unloaded has left room for them."""
        if not device.alive:
            return
        for instance in device.waiting():
            unloading = any(other.state == "Unloading" for other in device.instances.values())
            if unloading and not short_of(instance.takes, self._limit(device) - device.held()).none:
                return
            instance.ordered = self._journal.now
            self.order(instance)

    def order(self, instance: MonitoredInstance) -> None:
        """The order may have been lost; executors take one for an instance they have as said already."""
        self._journal.order_load(instance, self._devices[instance.device].price_per_s(instance.record))

    def adopt(self, device: MonitoredDevice, sample: InstanceSample, *, synced: bool) -> MonitoredInstance | None:
        """An instance that an earlier monitor had loaded: keep it, once the catalogue says what it is.

        One that this monitor has written off (its load order reached an executor late) must go.
        """
        record = self.catalog.variant(sample.variant)
        ended = sample.instance in self._ended
        if record is None or ended:
            if synced or ended:
                self._journal.order_unload(sample.instance, device.spec.name)
            return None
        instance = MonitoredInstance(sample.instance, record, device.spec.name, "Active", self._journal.now)
        self._add(device, instance)
        number = sample.instance.rpartition("-")[2]
        if number.isdecimal():
            self._minted[record.variant] = max(self._minted.get(record.variant, 0), int(number))
        self._journal.states(instance, [(None, "Inactive", "Active", "found loaded")])
        self._journal.told = False
        return instance

    def _add(self, device: MonitoredDevice, instance: MonitoredInstance) -> None:
        self.instances[instance.id] = device.instances[instance.id] = instance
        share = device.share(instance.record)
        device.meter.occupy(instance.id, instance.record, share, instance.owner, self._journal.now)

    def _mint(self, variant: str) -> str:
        """An instance's name: unique in the cluster, and never given twice by this monitor."""
        number = self._minted[variant] = self._minted.get(variant, 0) + 1
        return f"{variant}.{self._worker}-{number}"

    # -- out

    def failed(self, instance: MonitoredInstance, reason: str) -> None:
        """It could not be loaded; a variant that fails again and again is not tried any more."""
        variant = instance.record.variant
        if self.failures.failed(variant, reason, self._journal.now):
            why = self.failures.quarantined[variant]
            self._journal.quarantine(instance.record, variant, why)
            self._journal.keep_quarantine(variant, why)

    def release(self, variant: str, keep: int, reason: str) -> list[MonitoredInstance]:
        """Unload this variant's instances down to so many; returns those that go."""
        going = to_release(self.of(variant), keep)
        for instance in going:
            self.unload(instance, reason)
        return going

    def unload(self, instance: MonitoredInstance, reason: str) -> None:
        """Let it finish what is queued and go; at once when its load has not been ordered yet."""
        if instance.state == "Loading" and instance.ordered is None:
            self.gone(instance, reason)
            return
        self._journal.states(instance, instance.move("Unloading", reason, self._journal.now))
        self._journal.order_unload(instance.id, instance.device)

    def gone(self, instance: MonitoredInstance, reason: str) -> None:
        """It is not there any more."""
        journal = self._journal
        journal.states(instance, instance.move("Inactive", reason, journal.now))
        journal.told = False
        device = self._devices[instance.device]
        device.meter.vacate(instance.id, journal.now)
        del self.instances[instance.id], device.instances[instance.id]
        self._ended[instance.id] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self.order_waiting(device)

    def lose(self, device: MonitoredDevice, reason: str) -> None:
        """The executor process is gone and its instances with it; those that served are loaded again by the next one."""
        device.dead, device.incarnation = device.incarnation, None
        device.fell_silent(self._journal.now)
        self._journal.told = False
        waiting = device.waiting()
        for old in list(device.instances.values()):
            if old in waiting:
                continue
            if old.state == "Loading":  # it may be what killed the executor: whoever wants it asks again
                self.failed(old, reason)
            self.lost(old, reason)

    def lost(self, old: MonitoredInstance, reason: str) -> None:
        """It went without an order; one that served is loaded again."""
        served = old.state in SERVING
        self.gone(old, reason)
        if not served or self.draining:
            return
        self.again(old, self._devices[old.device], reason)
        self._journal.scaling("monitor", "load", old.record, old.owner, reason)

    def again(self, old: MonitoredInstance, device: MonitoredDevice, reason: str) -> MonitoredInstance:
        """Load one more like it, for the same apps."""
        instance = self.admit(device, old.record, old.owner, reason)
        instance.factor, instance.last_used = old.factor, old.last_used
        for app in old.apps:
            if app not in instance.apps:
                instance.apps[app] = "Loading"
                self._journal.states(instance, [(app, "Inactive", "Loading", reason)])
        return instance

    # -- who needs what

    def _apps_of(self, instance: MonitoredInstance) -> Iterable[str]:
        """The apps in use that this instance can serve."""
        model, version = instance.record.model, instance.record.version
        apps = {app for app in instance.apps if app is not None}
        for name in self.used - apps:
            app = self.catalog.app(name)
            if app is not None and app.links.get(model) == version:
                apps.add(name)
        return apps

    def _least(self, app: str) -> int:
        record = self.catalog.app(app)
        return record.min_instances if record is not None else 1


def needs_of(record: VariantRecord) -> Amount:
    """What an instance takes by its profile."""
    return Amount(record.profile.memory_mb, cores_needed(record))


# -- What a worker is told to do: load, release, drain. It alone admits, and refuses with a reason. Pure.

LEADER = "controller"  # key of the control bucket
_leader = msgspec.msgpack.Decoder(LeaderRecord)
MOST_INSTANCES = 256  # instances of one variant on one worker; an order for more is a mistake


class WorkerOrders:
    """One worker's. leaving: it is being stopped; draining: it takes nothing new, so that it can be.

    Orders of the controller carry its epoch, which grows with each leader: one below the largest heard, or written down by who
    leads, comes from a leader that has lost its lease, and is refused. 0: not the controller's.
    """

    def __init__(self, worker: str, loads: InstanceTable, journal: Journal) -> None:
        self.leaving = False
        self._worker = worker
        self._loads = loads
        self._journal = journal
        self._epoch = 0
        self._draining = ""  # why

    @property
    def draining(self) -> bool:
        return self._loads.draining

    @property
    def rest(self) -> str:
        """The state of a worker that works as it should."""
        return "Draining" if self.draining else "Ready"

    def ensure(self, order: EnsureLoaded) -> LoadAccepted | LoadRefused:
        record = order.variant
        have = self._loads.of(record.variant)
        obstacle = self._outdated(order.epoch) or self._closed()
        if order.at_least > MOST_INSTANCES:
            obstacle = f"at_least is {order.at_least}; one worker takes at most {MOST_INSTANCES} instances of a variant"
        while len(have) < order.at_least and not obstacle:
            found = self._loads.place(record)
            if isinstance(found, str):
                obstacle = found
                break
            why = order.reason or f"ordered by {order.orderer or 'somebody'}"
            action = order.action or ("replicate" if have else "load")
            have.append(self._loads.admit(found, record, order.app, why))
            self._journal.scaling(scaler(order.orderer), action, record, order.app, why, planned=order.planned)
        if obstacle:
            return self._refused(record.variant, obstacle)
        return LoadAccepted(worker=self._worker, variant=record.variant, instances=[i.id for i in have])

    def release(self, order: Release) -> LoadAccepted | LoadRefused:
        obstacle = self._outdated(order.epoch)
        if obstacle:
            return self._refused(order.variant, obstacle)
        why = order.reason or f"ordered by {order.orderer or 'somebody'}"
        going = self._loads.release(order.variant, order.keep, why)
        if going:
            first = going[0]
            by, count = scaler(order.orderer), len(going)
            self._journal.scaling(by, "unload", first.record, first.owner, why, count, order.planned)
        stay = [instance.id for instance in self._loads.of(order.variant)]
        return LoadAccepted(worker=self._worker, variant=order.variant, instances=stay)

    def drain(self, order: Drain) -> LoadAccepted | LoadRefused:
        """Take nothing new; instances stay and answer what is queued. The reply lists them."""
        obstacle = self._outdated(order.epoch) or ("this worker is leaving" if self.leaving else "")
        if obstacle:
            return self._refused("", obstacle)
        if order.resume == self.draining:
            self._loads.draining = not order.resume
            self._draining = order.reason or f"ordered by {order.orderer or 'somebody'}"
            self._journal.told = False
            self._journal.worker_state(self.rest, self._draining)
        return LoadAccepted(worker=self._worker, variant="", instances=list(self._loads.instances))

    def led(self, value: bytes | None) -> None:
        """The leader's record is this now: a monitor that has only just started knows whose orders are late, too."""
        try:
            record = _leader.decode(value) if value else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if record is not None:
            self._epoch = max(self._epoch, record.epoch)

    def _closed(self) -> str:
        if self.leaving:
            return "this worker is leaving"
        return f"this worker is draining: {self._draining}" if self.draining else ""

    def _outdated(self, epoch: int) -> str:
        """Why an order of this epoch is not obeyed; empty when it is."""
        if 0 < epoch < self._epoch:
            return f"the order is of epoch {epoch}, and a later leader has spoken in epoch {self._epoch}"
        self._epoch = max(self._epoch, epoch)
        return ""

    def _refused(self, variant: str, reason: str) -> LoadRefused:
        return LoadRefused(worker=self._worker, variant=variant, reason=reason)
