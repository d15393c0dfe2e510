"""What is loaded on a worker: admission, eviction, quarantine. Pure.

The monitor alone admits loads on its worker. So two orders at once never take the same memory twice.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import InstanceSample, LoadInstance, State, UnloadInstance
from bus.subjects import WITHOUT_APP
from services.core.actor import Effect
from services.core.catalog import Catalog
from services.core.lifecycle import SERVING
from services.core.placement import Amount, busy_quarters, cores_needed, misfit, short_of, shortage
from services.core.settings import MonitorSettings
from services.monitor.devices import MonitoredDevice
from services.monitor.effects import MonitorEffects
from services.monitor.instances import MonitoredInstance
from services.monitor.policy import (
    HostTier,
    LoadFailures,
    Uses,
    is_idle,
    make_room,
    share_of,
    sufficient,
    to_keep,
    to_release,
)

REFUSE_AFTER = 10.0  # s without an executor after which loads are refused; before, they wait for it
REMEMBERED = 1000  # instances that ended, and variants that were removed


@dataclass(eq=False)
class InstanceTable:
    """The instances of one worker, by name, and the device of each.

    used: apps that instances here have served or were loaded for. draining: nothing new is loaded, not even in place of what
    was lost.
    """

    worker: str
    devices: Mapping[str, MonitoredDevice]
    effects: MonitorEffects
    settings: MonitorSettings

    def __post_init__(self) -> None:
        self.catalog = Catalog()
        self.failures = LoadFailures(self.settings.quarantine_after)
        self.instances: dict[str, MonitoredInstance] = {}
        self.uses = Uses(recent=self.settings.cache == "lru")
        self.host = HostTier(self.instances, self.uses, self.effects, self.settings.host_mb)
        self.used: set[str] = set()
        self.draining = False
        self._swaps = self.settings.cache != "reserve"
        self._numbers: dict[str, int] = {}  # by variant: the last number in an instance's name
        self._forgotten = 0  # the largest of those of variants that are gone
        self._ended: dict[str, None] = {}  # the last instances that ended, oldest first
        self.removed: dict[str, None] = {}  # the last variants that were: an order may be on its way still

    def of(self, variant: str) -> list[MonitoredInstance]:
        """This variant's instances that are loaded or loading."""
        return [i for i in self.instances.values() if i.record.variant == variant and i.counts]

    def warm(self, variant: str) -> list[MonitoredInstance]:
        """This variant's instances that are in host memory, and then those that are on their way there."""
        found = [i for i in self.instances.values() if i.record.variant == variant and i.in_host and not i.counts]
        return sorted((i for i in found if i.state == "Warm" or i.goes == "host"), key=lambda i: i.state != "Warm")

    # -- admission

    def provide(
        self, record: VariantRecord, app: str | None, reason: str, now: float, *, for_query: bool
    ) -> tuple[MonitoredInstance, list[Effect]] | str:
        """One more instance: a Warm one comes to its device, else a new one is loaded; with the evictions that make room. Or why not.

        for_query: a query waits for it. Unless `cache = "reserve"`, anything that is idle makes room for that.
        """
        swap = for_query and self._swaps
        for warm in self.warm(record.variant):
            place = self._place(record, now, self.devices[warm.device], swap=swap)
            if not isinstance(place, str):
                warm.wanted = reason  # so that it does not leave host memory for those that come there
                return warm, [*self._evict(place[1], record.variant, now), *self.promote(warm, app, reason, now)]
        place = self._place(record, now, swap=swap)
        if isinstance(place, str):
            return place
        evictions = self._evict(place[1], record.variant, now)
        instance, admitted = self.admit(place[0], record, app, reason, now)
        return instance, [*evictions, *admitted]

    def _place(
        self, record: VariantRecord, now: float, only: MonitoredDevice | None = None, *, swap: bool
    ) -> tuple[MonitoredDevice, list[MonitoredInstance]] | str:
        """A device with room for one more instance, and the instances whose eviction makes the room. Or why there is none.

        It is the device on which the fewest instances that are needed go, then one that is used less (`busy_quarters`), then the one where
        the fewest reclaimable instances go. Among equals one where the load can begin at once, of these the one with most free memory. Where the load must wait for others to go, it takes the place
        that it fits best, so that larger loads, whose orders may follow, fit into the others.
        """
        removed = "the variant was removed" if record.variant in self.removed else ""
        obstacle = removed or self.failures.obstacle(record.variant, now)
        if obstacle:
            return obstacle
        fitting, obstacle = self._fitting(record, now)
        if only is not None:
            fitting = [device for device in fitting if device is only]
        need = needs_of(record)
        best: tuple[tuple[int, int, int, bool, float], MonitoredDevice, list[MonitoredInstance]] | None = None
        for device in sorted(fitting, key=lambda device: -self._free(device).memory_mb):
            victims = self._victims(device, short_of(need, self._free(device)), now, swap=swap)
            if victims is None:
                taken = device.committed() - device.reclaimable()
                obstacle = shortage(record.variant, need, taken, self._limit(device), device.spec.name)
                continue
            now_free = self._limit(device) - device.occupied()
            waits = not device.alive or bool(device.waiting()) or not short_of(need, now_free).none
            left = self._free(device).memory_mb + sum(victim.memory_mb for victim in victims) - need.memory_mb
            go = sum(not victim.reclaimable for victim in victims)
            used = busy_quarters(record, device.needed_use + self.effects.foreign_gpu_use(device))
            order = (go, used, len(victims), waits, left if waits else -left)
            if best is None or order < best[0]:
                best = order, device, victims
        if best is None:
            return obstacle or "this worker has no device"
        return best[1], best[2]

    def would_fit(self, record: VariantRecord, now: float) -> bool:
        """Whether there is room once all instances have gone that are at work now."""
        return not self.failures.obstacle(record.variant, now) and bool(self._fitting(record, now)[0])

    def never_loads(self, record: VariantRecord) -> bool:
        """Whether it is quarantined here, or fits on no device even if that is empty."""
        share, limit = self.settings.memory_share, self.settings.device_mb
        fits = any(not misfit(record, device.spec, share, limit) for device in self.devices.values())
        return record.variant in self.failures.quarantined or not fits

    def preload(self, record: VariantRecord, device: MonitoredDevice, now: float, *, warm: bool) -> list[Effect]:
        """Load it if it is not here and fits without evictions. warm: into host memory only."""
        variant, limits = record.variant, self.settings
        if self.of(variant) or self.warm(variant) or self.failures.obstacle(variant, now):
            return []
        if misfit(record, device.spec, limits.memory_share, limits.device_mb):
            return []
        why = f"preloaded: monitor.preload is {limits.preload}"
        event = self.effects.scaling("monitor", "load", record, None, why, now)
        if not warm:
            fits = short_of(needs_of(record), self._free(device)).none
            return [*self.admit(device, record, None, why, now)[1], event] if fits else []
        instance = MonitoredInstance(self._new_name(variant), record, device.spec.name, "Loading", now)
        if self.host.obstacle(instance) or not self.host.has_room(instance.host_mb or 0.0):
            return []
        instance.goes, instance.in_host, instance.ordered = "host", True, now
        self._add(device, instance, now)
        return [
            *self.effects.state_changes(instance, [(None, "Inactive", "Loading", why)], now),
            self.order(instance),
            event,
        ]

    def others_with_room(self, instance: MonitoredInstance, now: float) -> list[MonitoredDevice]:
        """Other devices than its own where this instance fits without evictions, the least used first."""
        if self.failures.obstacle(instance.record.variant, now):
            return []
        fitting, _ = self._fitting(instance.record, now)
        need = needs_of(instance.record)
        found = [
            d for d in fitting if d.spec.name != instance.device and d.alive and short_of(need, self._free(d)).none
        ]
        return sorted(found, key=lambda device: (device.utilisation, -self._free(device).memory_mb))

    def _fitting(self, record: VariantRecord, now: float) -> tuple[list[MonitoredDevice], str]:
        """Devices that could run it if they were empty; and why the others could not."""
        fitting: list[MonitoredDevice] = []
        obstacle = ""
        for device in self.devices.values():
            why = misfit(record, device.spec, self.settings.memory_share, self.settings.device_mb)
            if not why and not device.alive and now - device.silent_since > REFUSE_AFTER:
                why = f"the executor of {device.spec.name} does not run"
            if not why:
                fitting.append(device)
            elif not obstacle or record.hardware == device.spec.kind:
                obstacle = why
        return fitting, obstacle

    def _limit(self, device: MonitoredDevice) -> Amount:
        return device.limit(self.settings)

    def _free(self, device: MonitoredDevice) -> Amount:
        return self._limit(device) - device.committed()

    def _victims(
        self, device: MonitoredDevice, short: Amount, now: float, *, swap: bool
    ) -> list[MonitoredInstance] | None:
        """The instances whose eviction frees so much; None if reclaimable and idle ones do not suffice. swap: whatever is idle."""
        if short.none:
            return []
        candidates = [
            one
            for one in device.instances.values()
            if one.reclaimable
            or one.record.variant not in self.catalog.planned  # the leader keeps replicas of pipelines
        ]

        def missed(one: MonitoredInstance) -> tuple[float, float]:
            warm = self._swaps and not self.host.obstacle(one)
            return self.uses.missed(one, share_of(one.takes, short), now, warm=warm)

        if self._swaps:
            candidates = [one for one in candidates if is_idle(one, now)]
        if swap:
            return sufficient(sorted(candidates, key=missed), short)
        return make_room(candidates, missed, short, self._apps_of, self._least, now, self.settings.idle_s)

    def _evict(self, victims: Iterable[MonitoredInstance], variant: str, now: float) -> list[Effect]:
        found: list[Effect] = []
        for victim in victims:
            unused = f"not used for {now - victim.last_used:.0f} s"
            why = f"makes room for {variant}; {'reclaimable' if victim.reclaimable else unused}"
            demoted = self._demote(victim, why, now) if self._swaps else ""
            if not isinstance(demoted, str):
                found += demoted
                continue
            why += f"; {demoted}" if demoted else ""
            found.append(self.effects.scaling("monitor", "evict", victim.record, victim.owner, why, now))
            found += self.unload(victim, why, now)
        return found

    def _demote(self, victim: MonitoredInstance, why: str, now: float) -> list[Effect] | str:
        found = self.host.demote(victim, why, now)
        if isinstance(found, str):
            return found
        return [self.effects.scaling("monitor", "demote", victim.record, victim.owner, why, now), *found]

    def promote(self, warm: MonitoredInstance, app: str | None, reason: str, now: float) -> list[Effect]:
        """Bring it to its device once it is in host memory and there is room. It stays Warm until then."""
        found: list[Effect] = []
        if app is not None:
            warm.owner = app
            self.used.add(app)
            if app not in warm.apps:
                warm.apps[app] = warm.state
                found += self.effects.state_changes(warm, [(app, "Inactive", warm.state, reason)], now)
        warm.wanted = reason
        return found + self.order_waiting(self.devices[warm.device], now)

    def became_warm(self, instance: MonitoredInstance, reason: str, now: float) -> list[Effect]:
        """Its model is in host memory only. What waited for its room on the device goes on."""
        device = self.devices[instance.device]
        found = self.effects.state_changes(instance, instance.move("Warm", reason, now), now)
        instance.goes, instance.in_host, instance.on_device, instance.reclaimable = None, True, False, False
        instance.copied = instance.dropping = False
        device.meter.vacate(instance.id, now)
        found += self.host.make_room(0.0, "host memory is full", now) or []
        return found + self.order_waiting(device, now)

    def became_active(self, instance: MonitoredInstance, reason: str, now: float, *, copied: bool) -> list[Effect]:
        """Its model is on the device. copied: host memory has it, too."""
        found = self.effects.state_changes(instance, instance.move("Active", reason, now), now)
        instance.goes, instance.in_host, instance.on_device = None, False, True
        instance.copied, instance.dropping = copied, False
        instance.last_used, instance.used = now, False
        instance.begins(now)  # queries that waited for it
        return found + self.host.advance(now)

    def admit(
        self, device: MonitoredDevice, record: VariantRecord, app: str | None, reason: str, now: float
    ) -> tuple[MonitoredInstance, list[Effect]]:
        """Add an instance. Its load is ordered as soon as there is an executor and room."""
        instance = MonitoredInstance(self._new_name(record.variant), record, device.spec.name, "Loading", now, app)
        if app is not None:
            self.used.add(app)
        self._add(device, instance, now)
        changes = self.effects.state_changes(instance, [(app, "Inactive", "Loading", reason)], now)
        return instance, changes + self.order_waiting(device, now)

    def order_waiting(self, device: MonitoredDevice, now: float) -> list[Effect]:
        """Orders for the loads that were admitted, as far as instances that are being unloaded leave room. What an executor had when this monitor began
        it says first, and that may leave none.
        """
        found: list[Effect] = []
        if not device.alive or not device.listed:
            return found
        for instance in device.waiting():
            unloading = any(other.state == "Unloading" for other in device.instances.values())
            short = short_of(instance.takes, self._limit(device) - device.occupied())
            if unloading and not short.none:
                break
            if short.memory_mb and instance.state == "Loading":
                limit, record = self._limit(device), instance.record
                why = shortage(record.variant, instance.takes, device.occupied(), limit, device.spec.name)
                return found + self.gone(instance, why, now)
            if instance.state == "Warm":
                why, instance.wanted, instance.goes = instance.wanted, "", "device"
                found += self.effects.state_changes(instance, instance.move("Loading", why, now), now)
                self.occupy(instance, now)
            instance.ordered, instance.on_device = now, True
            found.append(self.order(instance))
        return found

    def order(self, instance: MonitoredInstance) -> Effect:
        """The order to load it. It may be repeated: an executor ignores one for an instance that it has."""
        record, price = instance.record, self.devices[instance.device].price_per_s(instance.record)
        order = LoadInstance(instance=instance.id, variant=record, price_per_s=price, tier=instance.goes or "device")
        return self.effects.order(instance.device, order)

    def adopt(
        self, device: MonitoredDevice, sample: InstanceSample, now: float, *, synced: bool
    ) -> tuple[MonitoredInstance | None, list[Effect]]:
        """Take on an instance that an earlier monitor had loaded, once the catalogue knows its variant.

        An instance that this monitor has given up (its load order reached the executor late) is unloaded.
        """
        record = self.catalog.variant(sample.variant)
        ended = sample.instance in self._ended
        if record is None or ended:
            unload = synced or ended
            return None, [
                self.effects.order(device.spec.name, UnloadInstance(instance=sample.instance))
            ] if unload else []
        state: State = "Warm" if sample.tier == "host" else "Active"
        instance = MonitoredInstance(sample.instance, record, device.spec.name, state, now)
        self._add(device, instance, now)
        number = sample.instance.rpartition("-")[2]
        if number.isdecimal():
            self._numbers[record.variant] = max(self._numbers.get(record.variant, 0), int(number))
        return instance, self.effects.state_changes(instance, [(None, "Inactive", state, "found loaded")], now)

    def _add(self, device: MonitoredDevice, instance: MonitoredInstance, now: float) -> None:
        self.instances[instance.id] = device.instances[instance.id] = instance
        if instance.counts:
            self.occupy(instance, now)

    def occupy(self, instance: MonitoredInstance, now: float) -> None:
        """It costs its share of the device from now on."""
        device = self.devices[instance.device]
        device.meter.occupy(instance.id, instance.record, device.share(instance.record), instance.owner, now)

    def _new_name(self, variant: str) -> str:
        """An instance's name. It is unique in the cluster, and this monitor never gives it twice."""
        number = self._numbers[variant] = self._numbers.get(variant, self._forgotten) + 1
        return f"{variant}.{self.worker}-{number}"

    # -- removal

    def forget(self, variant: str) -> None:
        """Of a variant that was removed and has no instance its uses and the number are not known any more; no name is given twice."""
        if self.catalog.variant(variant) is None and all(i.record.variant != variant for i in self.instances.values()):
            self.uses.forget(variant)
            self._forgotten = max(self._forgotten, self._numbers.pop(variant, 0))

    def forget_apps(self) -> None:
        """An app was deleted. With it goes what was told late of those before."""
        self.used = {app for app in self.used if not self._is_gone(app)}
        for instance in self.instances.values():
            instance.forget(self._is_gone)
        for device in self.devices.values():
            device.meter.forget(self._is_gone)

    def _is_gone(self, app: str) -> bool:
        return self.catalog.app(app) is None and not app.startswith(WITHOUT_APP)

    def failed(self, instance: MonitoredInstance, reason: str, now: float) -> list[Effect]:
        """It could not be loaded. A variant that fails again and again is quarantined."""
        variant = instance.record.variant
        if instance.state == "Unloading" or not self.failures.failed(variant, reason, now):  # nobody wanted it any more
            return []
        why = self.failures.quarantined[variant]
        return [
            *self.effects.quarantine(instance.record, variant, why, now),
            self.effects.keep_quarantine(variant, why),
        ]

    def release(self, variant: str, keep: int, reason: str, now: float) -> tuple[list[MonitoredInstance], list[Effect]]:
        """Unload this variant's instances until so many are left. Returns those that are unloaded, too."""
        released = to_release(self.of(variant), keep)
        found: list[Effect] = []
        for instance in released:
            found += self.unload(instance, reason, now)
        return released, found

    def mark(self, variant: str, keep: int, reason: str, now: float) -> tuple[list[MonitoredInstance], list[Effect]]:
        """Mark this variant's instances as reclaimable until so many others are left. Returns those that change, too.

        A load that has not been ordered yet is given up instead, since it serves nobody.
        """
        marked = [instance for instance in to_release(self.of(variant), keep) if not instance.reclaimable]
        found: list[Effect] = []
        for instance in marked:
            if instance.waits or instance.wanted:
                found += self.unload(instance, reason, now)
                continue
            instance.reclaimable = True
            self.devices[instance.device].meter.release(instance.id, now)
        self.effects.heartbeat_due |= bool(marked)
        return marked, found

    def claim(self, variant: str, count: int, app: str | None, now: float) -> list[MonitoredInstance]:
        """Up to so many of this variant's reclaimable instances are needed again. Returns them."""
        claimed = to_keep(self.of(variant), count)
        for instance in claimed:
            instance.reclaimable = False
            instance.owner = app or instance.owner
            self.devices[instance.device].meter.claim(instance.id, app, now)
        if claimed:
            self.effects.heartbeat_due = True
            self.used.update([app] if app is not None else [])
        return claimed

    def unload(self, instance: MonitoredInstance, reason: str, now: float) -> list[Effect]:
        """Unload it once its queue is empty; at once if its load has not been ordered yet. What is in host memory stays there."""
        if instance.wanted:
            instance.wanted = ""
            return self.order_waiting(self.devices[instance.device], now)
        if instance.waits:
            return self.gone(instance, reason, now)
        instance.goes = None
        changes = self.effects.state_changes(instance, instance.move("Unloading", reason, now), now)
        return [*changes, self.effects.order(instance.device, UnloadInstance(instance=instance.id))]

    def gone(self, instance: MonitoredInstance, reason: str, now: float) -> list[Effect]:
        """The instance does not exist any more. Its room goes to loads that wait."""
        found = self.effects.state_changes(instance, instance.move("Inactive", reason, now), now)
        self.effects.heartbeat_due = True
        device = self.devices[instance.device]
        device.meter.vacate(instance.id, now)
        del self.instances[instance.id], device.instances[instance.id]
        self.forget(instance.record.variant)
        last(self._ended, instance.id)
        return found + self.host.advance(now) + self.order_waiting(device, now)

    def executor_ended(self, device: MonitoredDevice, reason: str, now: float) -> list[Effect]:
        """The executor process and its instances are gone. Those that are needed are loaded again by the next process."""
        device.dead, device.incarnation = device.incarnation, None
        device.became_silent(now)
        self.effects.heartbeat_due = True
        waiting = device.waiting()
        found: list[Effect] = []
        for old in list(device.instances.values()):
            if old in waiting and old.state != "Warm":
                continue
            if old.state == "Loading":  # it may have killed the executor, so it is not loaded again by itself
                found += self.failed(old, reason, now)
            found += self.lost(old, reason, now)
        return found

    def lost(self, old: MonitoredInstance, reason: str, now: float) -> list[Effect]:
        """It is gone though nobody ordered that. An instance that served and that somebody needs is loaded again."""
        served = old.state in SERVING and not old.reclaimable
        found = self.gone(old, reason, now)
        if not served or self.draining:
            return found
        _, again = self.load_again(old, self.devices[old.device], reason, now)
        return [*found, *again, self.effects.scaling("monitor", "load", old.record, old.owner, reason, now)]

    def load_again(
        self, old: MonitoredInstance, device: MonitoredDevice, reason: str, now: float
    ) -> tuple[MonitoredInstance, list[Effect]]:
        """Admit one more instance like this one, for the same apps."""
        instance, found = self.admit(device, old.record, old.owner, reason, now)
        instance.factor, instance.last_used = old.factor, old.last_used
        for app in old.apps:
            if app not in instance.apps:
                instance.apps[app] = "Loading"
                found += self.effects.state_changes(instance, [(app, "Inactive", "Loading", reason)], now)
        return instance, found

    # -- which apps need an instance

    def _apps_of(self, instance: MonitoredInstance) -> Iterable[str]:
        """The apps in use that this instance can serve."""
        model, version = instance.record.model, instance.record.version
        apps = {app for app in instance.apps if app is not None}
        for name in self.used - apps:
            app = self.catalog.app(name)
            if app is not None and app.serves(model, version):
                apps.add(name)
        return apps

    def _least(self, app: str) -> int:
        record = self.catalog.app(app)
        return record.min_instances if record is not None else 1


def last(names: dict[str, None], name: str) -> None:
    """Remember it, among the last ones."""
    names[name] = None
    if len(names) > REMEMBERED:
        del names[next(iter(names))]


def needs_of(record: VariantRecord) -> Amount:
    """What an instance takes, by its profile."""
    return Amount(record.profile.memory_mb, cores_needed(record), 1.0)
