"""Interference mitigation: an instance that is slower than its profile, though not at its peak, is moved. Pure.

INFaaS, section 4.1, moves it to idle cores of the same worker; without any, the controller places it on the least loaded worker.
Here the order is: other cores, another device of the same kind on this worker, another worker.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from bus.messages.fleet import InstanceMoved, MoveInstance
from bus.messages.scaling import AskToMove
from services.core.actor import Effect
from services.core.settings import MonitorSettings
from services.monitor.devices import MonitoredDevice
from services.monitor.effects import MachineSample, MonitorEffects
from services.monitor.instances import MonitoredInstance
from services.monitor.loading import InstanceTable

BUSIEST = 0.8  # nothing is moved to a core that is busier than this, 0..1
GAIN = 0.15  # the new cores must be less busy than the present ones by so much
PINNED = 0.3  # load that each pinned instance is expected to add to its core, beside what is measured
SMOOTHING = 0.5  # weight of the newest sample in a core's utilisation


def better_cores(
    threads: int, at: Sequence[int], busy: Mapping[int, float], pinned: Iterable[Sequence[int]]
) -> list[int]:
    """The least busy cores for so many threads. Empty if they are not clearly better than the present ones.

    at: the cores that it runs on now; empty: any. busy: utilisation of each core, 0..1, by all processes. pinned: the cores of
    every other instance that is pinned.
    """
    load = dict(busy)
    for cores in pinned:
        for core in cores:
            if core in load:
                load[core] += PINNED
    if not load or threads >= len(load):
        return []
    chosen = sorted(load, key=lambda core: (load[core], core))[: max(1, threads)]
    here = [core for core in at if core in load] or list(load)
    if set(chosen) == set(here) or max(busy[core] for core in chosen) > BUSIEST:
        return []
    before = sum(load[core] for core in here) / len(here)
    after = sum(load[core] for core in chosen) / len(chosen)
    return sorted(chosen) if before - after >= GAIN else []


def smoothed(before: Mapping[int, float], cores: Mapping[int, float]) -> dict[int, float]:
    """How busy each core is, 0..1, with what the last samples said."""
    return {core: SMOOTHING * now + (1 - SMOOTHING) * before.get(core, now) for core, now in cores.items()}


class Migrations(Struct, eq=False):
    """Carries out the mitigation of one worker's interfered instances.

    An instance is moved once it has been Interfered for `mitigate_after_s`, and not again within `mitigate_again_s`, whatever
    came of it: a move costs, and the interference may end by itself.
    """

    worker: str
    devices: dict[str, MonitoredDevice]
    table: InstanceTable
    effects: MonitorEffects
    settings: MonitorSettings
    _busy: dict[int, float] = {}  # by core
    _reasons: dict[str, str] = {}  # instance -> why it is being moved to other cores

    def sampled(self, machine: MachineSample) -> None:
        self._busy = smoothed(self._busy, machine.cores)

    def advance(self, now: float) -> list[Effect]:
        """Move what has been Interfered for long enough."""
        found: list[Effect] = []
        settings = self.settings
        for instance in list(self.table.instances.values()):
            waited = instance.state == "Interfered" and now - instance.since >= settings.mitigate_after_s
            if (
                waited and not instance.reclaimable and now >= instance.move_after and instance.latency_s > 0
            ):  # its queries have not just ended
                instance.move_after = now + settings.mitigate_again_s
                found += self._mitigate(instance, now)
        return found

    def _mitigate(self, instance: MonitoredInstance, now: float, *, cores: bool = True) -> list[Effect]:
        device = self.devices[instance.device]
        better = self._better_cores(instance) if cores and device.is_machine else []
        others = self.table.others_with_room(instance, now)
        slow = f"a batch takes {instance.latency_s * 1e3:.3g} ms, its profile says {instance.profiled_s * 1e3:.3g} ms"
        if better:
            names = ", ".join(f"{core} ({self._busy.get(core, 0.0):.0%} busy)" for core in better)
            self._reasons[instance.id] = f"{slow}; core{'s' * (len(better) > 1)} {names} would be better"
            return [self.effects.order(instance.device, MoveInstance(instance=instance.id, cores=better))]
        if others:
            return self._to_device(instance, others[0], f"{slow}; {others[0].spec.name} has room", now)
        why = f"{slow}; this worker has no idler cores and no other device with room"
        ask = AskToMove(
            worker=self.worker, at=now, app=instance.owner or "", variant=instance.record.variant, reason=why
        )
        return [self.effects.ask(ask)]

    def _better_cores(self, instance: MonitoredInstance) -> list[int]:
        pinned = [other.cores for other in self.table.instances.values() if other is not instance and other.cores]
        return better_cores(instance.record.threads, instance.cores, self._busy, pinned)

    # -- to other cores

    def moved(self, instance: MonitoredInstance, message: InstanceMoved, now: float) -> list[Effect]:
        """The executor has moved it. If it could not, the next best place is tried."""
        why = self._reasons.pop(instance.id, "ordered")
        if message.error:
            return self._mitigate(instance, now, cores=False) if instance.state == "Interfered" else []
        reason = f"moved: {why}; {message.proof}"
        event = self.effects.scaling("monitor", "migrate", instance.record, instance.owner, reason, now)
        changes = self.effects.state_changes(instance, instance.moved(message.cores, now, reason), now)
        self.effects.heartbeat_due = True
        return [event, *changes]

    # -- to another device

    def _to_device(self, instance: MonitoredInstance, device: MonitoredDevice, reason: str, now: float) -> list[Effect]:
        """Make before break: the old instance is unloaded once the new one serves."""
        new, found = self.table.load_again(instance, device, reason, now)
        new.replaces = instance.id
        new.move_after = instance.move_after
        return [*found, self.effects.scaling("monitor", "migrate", instance.record, instance.owner, reason, now)]

    def serves(self, new: MonitoredInstance, now: float) -> list[Effect]:
        """A new instance is Active. The one that it replaces is unloaded."""
        old = self.table.instances.get(new.replaces or "")
        new.replaces = None
        if old is None or old.state == "Unloading":
            return []
        return self.table.unload(old, f"moved to {new.device}", now)
