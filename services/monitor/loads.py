"""What is loaded on a worker: admission, eviction, release, and the orders to executors that follow. Pure.

The monitor alone admits loads on its worker, so that two orders at once never take the same memory twice.
"""

from collections.abc import Iterable, Mapping

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import InstanceSample
from services.core.catalog import Catalog
from services.core.lifecycle import COUNTED, SERVING
from services.core.placement import Amount, cores_needed, misfit, short_of, shortage
from services.monitor.devices import DeviceState
from services.monitor.failures import Failures
from services.monitor.instances import Instance
from services.monitor.journal import Journal
from services.monitor.policy import Knobs, make_room, to_release

REFUSE_AFTER = 10.0  # s without an executor after which loads are refused instead of waiting for it
REMEMBERED = 1000


class Loads:
    """The instances of one worker by name, and on which device they are."""

    def __init__(self, worker: str, devices: Mapping[str, DeviceState], journal: Journal, knobs: Knobs) -> None:
        self.catalog = Catalog()
        self.failures = Failures(knobs.quarantine_after)
        self.instances: dict[str, Instance] = {}
        self.used: set[str] = set()  # apps that instances here have served or were loaded for
        self.draining = False  # nothing new, not even in place of what was lost
        self._worker = worker
        self._devices = devices
        self._journal = journal
        self._knobs = knobs
        self._minted: dict[str, int] = {}
        self._ended: dict[str, None] = {}  # the last instances that are no more, oldest first

    def of(self, variant: str) -> list[Instance]:
        """This variant's instances that are there or on their way."""
        return [i for i in self.instances.values() if i.record.variant == variant and i.state in COUNTED]

    # -- in

    def place(self, record: VariantRecord) -> DeviceState | str:
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

    def others_with_room(self, instance: Instance) -> list[DeviceState]:
        """Devices but its own where this instance would fit beside what is there, the emptiest first."""
        if self.failures.obstacle(instance.record.variant, self._journal.now):
            return []
        fitting, _ = self._fitting(instance.record)
        need = needs_of(instance.record)
        found = [
            d for d in fitting if d.spec.name != instance.device and d.alive and short_of(need, self._free(d)).none
        ]
        return sorted(found, key=lambda device: (device.utilisation, -self._free(device).memory_mb))

    def _fitting(self, record: VariantRecord) -> tuple[list[DeviceState], str]:
        """Devices that could run it if they were empty; and why the others could not."""
        fitting: list[DeviceState] = []
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

    def _limit(self, device: DeviceState) -> Amount:
        return device.limit(self._knobs.memory_share, self._knobs.cores_overcommit)

    def _free(self, device: DeviceState) -> Amount:
        return self._limit(device) - device.committed()

    def _evict(self, device: DeviceState, short: Amount, variant: str) -> bool:
        now = self._journal.now
        candidates = device.instances.values()
        victims = make_room(candidates, short, self._apps_of, self._least, now, self._knobs.idle_s)
        for victim in victims or ():
            why = f"makes room for {variant}; not used for {now - victim.last_used:.0f} s"
            self._journal.scaling("monitor", "evict", victim.record, victim.owner, why)
            self.unload(victim, why)
        return victims is not None

    def admit(self, device: DeviceState, record: VariantRecord, app: str | None, reason: str) -> Instance:
        """Make an instance; its load is ordered as soon as there is an executor and room."""
        now = self._journal.now
        instance = Instance(self._mint(record.variant), record, device.spec.name, "Loading", now, app)
        if app is not None:
            self.used.add(app)
        self._add(device, instance)
        self._journal.states(instance, [(app, "Inactive", "Loading", reason)])
        self.order_waiting(device)
        return instance

    def order_waiting(self, device: DeviceState) -> None:
        """Order the loads that were admitted, as far as what is being unloaded has left room for them."""
        if not device.alive:
            return
        for instance in device.waiting():
            unloading = any(other.state == "Unloading" for other in device.instances.values())
            if unloading and not short_of(instance.takes, self._limit(device) - device.held()).none:
                return
            instance.ordered = self._journal.now
            self.order(instance)

    def order(self, instance: Instance) -> None:
        """The order may have been lost; executors take one for an instance they have as said already."""
        self._journal.order_load(instance, self._devices[instance.device].price_per_s(instance.record))

    def adopt(self, device: DeviceState, sample: InstanceSample, *, synced: bool) -> Instance | None:
        """An instance that an earlier monitor had loaded: keep it, once the catalogue says what it is.

        One that this monitor has written off (its load order reached an executor late) must go.
        """
        record = self.catalog.variant(sample.variant)
        ended = sample.instance in self._ended
        if record is None or ended:
            if synced or ended:
                self._journal.order_unload(sample.instance, device.spec.name)
            return None
        instance = Instance(sample.instance, record, device.spec.name, "Active", self._journal.now)
        self._add(device, instance)
        number = sample.instance.rpartition("-")[2]
        if number.isdecimal():
            self._minted[record.variant] = max(self._minted.get(record.variant, 0), int(number))
        self._journal.states(instance, [(None, "Inactive", "Active", "found loaded")])
        self._journal.told = False
        return instance

    def _add(self, device: DeviceState, instance: Instance) -> None:
        self.instances[instance.id] = device.instances[instance.id] = instance
        share = device.share(instance.record)
        device.meter.occupy(instance.id, instance.record, share, instance.owner, self._journal.now)

    def _mint(self, variant: str) -> str:
        """An instance's name: unique in the cluster, and never given twice by this monitor."""
        number = self._minted[variant] = self._minted.get(variant, 0) + 1
        return f"{variant}.{self._worker}-{number}"

    # -- out

    def failed(self, instance: Instance, reason: str) -> None:
        """It could not be loaded; a variant that fails again and again is not tried any more."""
        variant = instance.record.variant
        if self.failures.failed(variant, reason, self._journal.now):
            why = self.failures.quarantined[variant]
            self._journal.quarantine(instance.record, variant, why)
            self._journal.keep_quarantine(variant, why)

    def release(self, variant: str, keep: int, reason: str) -> list[Instance]:
        """Unload this variant's instances down to so many; returns those that go."""
        going = to_release(self.of(variant), keep)
        for instance in going:
            self.unload(instance, reason)
        return going

    def unload(self, instance: Instance, reason: str) -> None:
        """Let it finish what is queued and go; at once when its load has not been ordered yet."""
        if instance.state == "Loading" and instance.ordered is None:
            self.gone(instance, reason)
            return
        self._journal.states(instance, instance.move("Unloading", reason, self._journal.now))
        self._journal.order_unload(instance.id, instance.device)

    def gone(self, instance: Instance, reason: str) -> None:
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

    def lose(self, device: DeviceState, reason: str) -> None:
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

    def lost(self, old: Instance, reason: str) -> None:
        """It went without an order; one that served is loaded again."""
        served = old.state in SERVING
        self.gone(old, reason)
        if not served or self.draining:
            return
        self.again(old, self._devices[old.device], reason)
        self._journal.scaling("monitor", "load", old.record, old.owner, reason)

    def again(self, old: Instance, device: DeviceState, reason: str) -> Instance:
        """Load one more like it, for the same apps."""
        instance = self.admit(device, old.record, old.owner, reason)
        instance.factor, instance.last_used = old.factor, old.last_used
        for app in old.apps:
            if app not in instance.apps:
                instance.apps[app] = "Loading"
                self._journal.states(instance, [(app, "Inactive", "Loading", reason)])
        return instance

    # -- who needs what

    def _apps_of(self, instance: Instance) -> Iterable[str]:
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
