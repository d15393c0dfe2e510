"""What is loaded on a worker, and what it is ordered to load, release and drain: admission, eviction, quarantine. Pure.

The monitor alone admits loads on its worker. So two orders at once never take the same memory twice.
"""

from collections.abc import Iterable, Mapping

import msgspec

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import EnsureLoaded, InstanceSample, LoadAccepted, LoadRefused, Release
from bus.messages.scaling import Drain, LeaderRecord
from services.core.actor import Effect
from services.core.catalog import Catalog
from services.core.lifecycle import COUNTED, SERVING
from services.core.placement import Amount, cores_needed, misfit, short_of, shortage
from services.core.settings import MonitorSettings
from services.monitor.devices import MonitoredDevice
from services.monitor.effects import MonitorEffects
from services.monitor.instances import MonitoredInstance
from services.monitor.policy import LoadFailures, make_room, scaler, to_keep, to_release

REFUSE_AFTER = 10.0  # s without an executor after which loads are refused; before, they wait for it
REMEMBERED = 1000  # instances that ended
LEADER = "controller"  # key of the control bucket: who leads
MOST_INSTANCES = 256  # of one variant on one worker; an order for more is a mistake
_leader = msgspec.msgpack.Decoder(LeaderRecord)


class InstanceTable:
    """The instances of one worker, by name, and the device of each.

    used: apps that instances here have served or were loaded for. draining: nothing new is loaded, not even in place of what
    was lost.
    """

    def __init__(
        self, worker: str, devices: Mapping[str, MonitoredDevice], effects: MonitorEffects, settings: MonitorSettings
    ) -> None:
        self.catalog = Catalog()
        self.failures = LoadFailures(settings.quarantine_after)
        self.instances: dict[str, MonitoredInstance] = {}
        self.used: set[str] = set()
        self.draining = False
        self._worker = worker
        self._devices = devices
        self._effects = effects
        self._settings = settings
        self._numbers: dict[str, int] = {}  # by variant: the last number in an instance's name
        self._ended: dict[str, None] = {}  # the last instances that ended, oldest first

    def of(self, variant: str) -> list[MonitoredInstance]:
        """This variant's instances that are loaded or loading."""
        return [i for i in self.instances.values() if i.record.variant == variant and i.state in COUNTED]

    # -- admission

    def place(self, record: VariantRecord, now: float) -> tuple[MonitoredDevice, list[Effect]] | str:
        """A device with room for one more instance, and the evictions that make the room. Or why there is none.

        It is the device on which the fewest instances that are needed go, then the fewest reclaimable ones. Among equals one where
        the load can begin at once, of these the one with most free memory. Where the load must wait for others to go, it takes the place
        that it fits best, so that larger loads, whose orders may follow, fit into the others.
        """
        obstacle = self.failures.obstacle(record.variant, now)
        if obstacle:
            return obstacle
        fitting, obstacle = self._fitting(record, now)
        need = needs_of(record)
        best: tuple[tuple[int, int, bool, float], MonitoredDevice, list[MonitoredInstance]] | None = None
        for device in sorted(fitting, key=lambda device: -self._free(device).memory_mb):
            victims = self._victims(device, short_of(need, self._free(device)), now)
            if victims is None:
                taken = device.committed() - device.reclaimable()
                obstacle = shortage(record.variant, need, taken, self._limit(device), device.spec.name)
                continue
            now_free = self._limit(device) - device.occupied()
            waits = not device.alive or bool(device.waiting()) or not short_of(need, now_free).none
            left = self._free(device).memory_mb + sum(victim.memory_mb for victim in victims) - need.memory_mb
            order = (sum(not victim.reclaimable for victim in victims), len(victims), waits, left if waits else -left)
            if best is None or order < best[0]:
                best = order, device, victims
        if best is None:
            return obstacle or "this worker has no device"
        return best[1], self._evict(best[2], record.variant, now)

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
        for device in self._devices.values():
            why = misfit(record, device.spec, self._settings.memory_share)
            if not why and not device.alive and now - device.silent_since > REFUSE_AFTER:
                why = f"the executor of {device.spec.name} does not run"
            if not why:
                fitting.append(device)
            elif not obstacle or record.hardware == device.spec.kind:
                obstacle = why
        return fitting, obstacle

    def _limit(self, device: MonitoredDevice) -> Amount:
        return device.limit(self._settings.memory_share, self._settings.cores_overcommit)

    def _free(self, device: MonitoredDevice) -> Amount:
        return self._limit(device) - device.committed()

    def _victims(self, device: MonitoredDevice, short: Amount, now: float) -> list[MonitoredInstance] | None:
        """The instances whose eviction frees so much; None if reclaimable and idle ones do not suffice."""
        if short.none:
            return []
        candidates = [
            one
            for one in device.instances.values()
            if one.reclaimable
            or one.record.variant not in self.catalog.planned  # the leader keeps replicas of pipelines
        ]
        return make_room(candidates, short, self._apps_of, self._least, now, self._settings.idle_s)

    def _evict(self, victims: Iterable[MonitoredInstance], variant: str, now: float) -> list[Effect]:
        found: list[Effect] = []
        for victim in victims:
            unused = f"not used for {now - victim.last_used:.0f} s"
            why = f"makes room for {variant}; {'reclaimable' if victim.reclaimable else unused}"
            found.append(self._effects.scaling("monitor", "evict", victim.record, victim.owner, why, now))
            found += self.unload(victim, why, now)
        return found

    def admit(
        self, device: MonitoredDevice, record: VariantRecord, app: str | None, reason: str, now: float
    ) -> tuple[MonitoredInstance, list[Effect]]:
        """Add an instance. Its load is ordered as soon as there is an executor and room."""
        instance = MonitoredInstance(self._new_name(record.variant), record, device.spec.name, "Loading", now, app)
        if app is not None:
            self.used.add(app)
        self._add(device, instance, now)
        changes = self._effects.state_changes(instance, [(app, "Inactive", "Loading", reason)], now)
        return instance, changes + self.order_waiting(device, now)

    def order_waiting(self, device: MonitoredDevice, now: float) -> list[Effect]:
        """Orders for the loads that were admitted, as far as instances that are being unloaded leave room."""
        found: list[Effect] = []
        if not device.alive:
            return found
        for instance in device.waiting():
            unloading = any(other.state == "Unloading" for other in device.instances.values())
            if unloading and not short_of(instance.takes, self._limit(device) - device.occupied()).none:
                break
            instance.ordered = now
            found.append(self.order(instance))
        return found

    def order(self, instance: MonitoredInstance) -> Effect:
        """The order to load it. It may be repeated: an executor ignores one for an instance that it has."""
        return self._effects.order_load(instance, self._devices[instance.device].price_per_s(instance.record))

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
            return None, [self._effects.order_unload(sample.instance, device.spec.name)] if unload else []
        instance = MonitoredInstance(sample.instance, record, device.spec.name, "Active", now)
        self._add(device, instance, now)
        number = sample.instance.rpartition("-")[2]
        if number.isdecimal():
            self._numbers[record.variant] = max(self._numbers.get(record.variant, 0), int(number))
        return instance, self._effects.state_changes(instance, [(None, "Inactive", "Active", "found loaded")], now)

    def _add(self, device: MonitoredDevice, instance: MonitoredInstance, now: float) -> None:
        self.instances[instance.id] = device.instances[instance.id] = instance
        share = device.share(instance.record)
        device.meter.occupy(instance.id, instance.record, share, instance.owner, now)

    def _new_name(self, variant: str) -> str:
        """An instance's name. It is unique in the cluster, and this monitor never gives it twice."""
        number = self._numbers[variant] = self._numbers.get(variant, 0) + 1
        return f"{variant}.{self._worker}-{number}"

    # -- removal

    def failed(self, instance: MonitoredInstance, reason: str, now: float) -> list[Effect]:
        """It could not be loaded. A variant that fails again and again is quarantined."""
        variant = instance.record.variant
        if not self.failures.failed(variant, reason, now):
            return []
        why = self.failures.quarantined[variant]
        return [
            *self._effects.quarantine(instance.record, variant, why, now),
            self._effects.keep_quarantine(variant, why),
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
            if instance.state == "Loading" and instance.ordered is None:
                found += self.gone(instance, reason, now)
                continue
            instance.reclaimable = True
            self._devices[instance.device].meter.release(instance.id, now)
        self._effects.heartbeat_due |= bool(marked)
        return marked, found

    def claim(self, variant: str, count: int, app: str | None, now: float) -> list[MonitoredInstance]:
        """Up to so many of this variant's reclaimable instances are needed again. Returns them."""
        claimed = to_keep(self.of(variant), count)
        for instance in claimed:
            instance.reclaimable = False
            instance.owner = app or instance.owner
            self._devices[instance.device].meter.claim(instance.id, app, now)
        if claimed:
            self._effects.heartbeat_due = True
            self.used.update([app] if app is not None else [])
        return claimed

    def unload(self, instance: MonitoredInstance, reason: str, now: float) -> list[Effect]:
        """Unload it once its queue is empty; at once if its load has not been ordered yet."""
        if instance.state == "Loading" and instance.ordered is None:
            return self.gone(instance, reason, now)
        changes = self._effects.state_changes(instance, instance.move("Unloading", reason, now), now)
        return [*changes, self._effects.order_unload(instance.id, instance.device)]

    def gone(self, instance: MonitoredInstance, reason: str, now: float) -> list[Effect]:
        """The instance does not exist any more. Its room goes to loads that wait."""
        found = self._effects.state_changes(instance, instance.move("Inactive", reason, now), now)
        self._effects.heartbeat_due = True
        device = self._devices[instance.device]
        device.meter.vacate(instance.id, now)
        del self.instances[instance.id], device.instances[instance.id]
        self._ended[instance.id] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return found + self.order_waiting(device, now)

    def executor_ended(self, device: MonitoredDevice, reason: str, now: float) -> list[Effect]:
        """The executor process and its instances are gone. Those that are needed are loaded again by the next process."""
        device.dead, device.incarnation = device.incarnation, None
        device.became_silent(now)
        self._effects.heartbeat_due = True
        waiting = device.waiting()
        found: list[Effect] = []
        for old in list(device.instances.values()):
            if old in waiting:
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
        _, again = self.load_again(old, self._devices[old.device], reason, now)
        return [*found, *again, self._effects.scaling("monitor", "load", old.record, old.owner, reason, now)]

    def load_again(
        self, old: MonitoredInstance, device: MonitoredDevice, reason: str, now: float
    ) -> tuple[MonitoredInstance, list[Effect]]:
        """Admit one more instance like this one, for the same apps."""
        instance, found = self.admit(device, old.record, old.owner, reason, now)
        instance.factor, instance.last_used = old.factor, old.last_used
        for app in old.apps:
            if app not in instance.apps:
                instance.apps[app] = "Loading"
                found += self._effects.state_changes(instance, [(app, "Inactive", "Loading", reason)], now)
        return instance, found

    # -- which apps need an instance

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
    """What an instance takes, by its profile."""
    return Amount(record.profile.memory_mb, cores_needed(record))


class WorkerOrders:
    """Obeys the orders to load, release and drain that a worker gets, or refuses them with a reason.

    leaving: the worker is being stopped. draining: it takes nothing new, so that it can be stopped.

    An order of the controller carries its epoch, which grows with each leader. The worker refuses an order whose epoch is below
    the largest that it has seen: its sender does not lead any more. Epoch 0: the order is not the controller's.
    """

    def __init__(self, worker: str, table: InstanceTable, effects: MonitorEffects) -> None:
        self.leaving = False
        self._worker = worker
        self._table = table
        self._effects = effects
        self._epoch = 0
        self._draining = ""  # why

    @property
    def draining(self) -> bool:
        return self._table.draining

    @property
    def usual_state(self) -> str:
        """The state of a worker that works as it should."""
        return "Draining" if self.draining else "Ready"

    def ensure(self, order: EnsureLoaded, now: float) -> tuple[LoadAccepted | LoadRefused, list[Effect]]:
        record = order.variant
        have = [instance for instance in self._table.of(record.variant) if not instance.reclaimable]
        found: list[Effect] = []
        why, by = order.reason or f"ordered by {order.orderer or 'somebody'}", scaler(order.orderer)
        obstacle = self._outdated(order.epoch) or self._closed()
        if order.at_least > MOST_INSTANCES:
            obstacle = f"at_least is {order.at_least}; one worker takes at most {MOST_INSTANCES} instances of a variant"
        if len(have) < order.at_least and not obstacle:
            claimed = self._table.claim(record.variant, order.at_least - len(have), order.app, now)
            if claimed:
                owner, count = order.app or claimed[0].owner, len(claimed)
                found.append(self._effects.scaling(by, "keep", record, owner, why, now, count, order.planned))
                have += claimed
        while len(have) < order.at_least and not obstacle:
            place = self._table.place(record, now)
            if isinstance(place, str):
                obstacle = place
                break
            device, evictions = place
            action = order.action or ("replicate" if have else "load")
            instance, admitted = self._table.admit(device, record, order.app, why, now)
            have.append(instance)
            event = self._effects.scaling(by, action, record, order.app, why, now, planned=order.planned)
            found += [*evictions, *admitted, event]
        if obstacle:
            return self._refused(record.variant, obstacle), found
        accepted = LoadAccepted(worker=self._worker, variant=record.variant, instances=[i.id for i in have])
        return accepted, found

    def release(self, order: Release, now: float) -> tuple[LoadAccepted | LoadRefused, list[Effect]]:
        obstacle = self._outdated(order.epoch)
        if obstacle:
            return self._refused(order.variant, obstacle), []
        why = order.reason or f"ordered by {order.orderer or 'somebody'}"
        action, obey = ("release", self._table.mark) if order.reclaim else ("unload", self._table.release)
        released, found = obey(order.variant, order.keep, why, now)
        if released:
            first = released[0]
            by, count = scaler(order.orderer), len(released)
            found.append(self._effects.scaling(by, action, first.record, first.owner, why, now, count, order.planned))
        left = [instance.id for instance in self._table.of(order.variant)]
        return LoadAccepted(worker=self._worker, variant=order.variant, instances=left), found

    def drain(self, order: Drain, now: float) -> tuple[LoadAccepted | LoadRefused, list[Effect]]:
        """Take nothing new. Instances stay and answer what is queued; the reply lists them."""
        obstacle = self._outdated(order.epoch) or ("this worker is leaving" if self.leaving else "")
        if obstacle:
            return self._refused("", obstacle), []
        found: list[Effect] = []
        if order.resume == self.draining:
            self._table.draining = not order.resume
            self._draining = order.reason or f"ordered by {order.orderer or 'somebody'}"
            self._effects.heartbeat_due = True
            found = self._effects.worker_state(self.usual_state, self._draining, now)
        return LoadAccepted(worker=self._worker, variant="", instances=list(self._table.instances)), found

    def leader_changed(self, value: bytes | None) -> None:
        """The leader's record in the control bucket has this value now. So a new monitor refuses outdated orders, too."""
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
        """Why an order of this epoch is refused; empty if it is obeyed."""
        if 0 < epoch < self._epoch:
            return f"the order is of epoch {epoch}, and a later leader has spoken in epoch {self._epoch}"
        self._epoch = max(self._epoch, epoch)
        return ""

    def _refused(self, variant: str, reason: str) -> LoadRefused:
        return LoadRefused(worker=self._worker, variant=variant, reason=reason)
