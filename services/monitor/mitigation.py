"""Interference mitigation: where an instance goes that is slower than its profile though it is not at its peak. Pure.

INFaaS, section 4.1: to idle resources of the same worker (other cores), in the background; if there are none, the controller
places it on the least loaded worker. Here in this order: other cores, another device of the same kind on this worker, another worker.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from bus.messages.fleet import InstanceMoved
from bus.messages.scaling import AskForCapacity
from services.monitor.devices import MonitoredDevice
from services.monitor.effects import Journal, MachineSample
from services.monitor.instances import MonitoredInstance
from services.monitor.loading import InstanceTable
from services.monitor.policy import Knobs

BUSIEST = 0.8  # a core that is busier than this, 0..1, is no place to go to
GAIN = 0.15  # the cores must be less busy by so much than those that the instance runs on now
PINNED = 0.3  # how busy an instance pinned to a core is expected to make it, beside what is measured
MEMORY = 0.5  # weight of the newest sample in a core's utilisation


class MoveToCores(Struct, frozen=True):
    """Run on these cores of the machine from now on."""

    cores: list[int]
    reason: str


class MoveToDevice(Struct, frozen=True):
    """Load it on this device of the worker, then unload it where it is."""

    device: str
    reason: str


class AskElsewhere(Struct, frozen=True):
    """This worker has no better place."""

    reason: str


Mitigation = MoveToCores | MoveToDevice | AskElsewhere


class CoreUse:
    """How busy each core of the machine is, 0..1, smoothed over the last samples."""

    def __init__(self) -> None:
        self.busy: dict[int, float] = {}

    def sample(self, cores: Mapping[int, float]) -> None:
        known = self.busy
        self.busy = {core: MEMORY * now + (1 - MEMORY) * known.get(core, now) for core, now in cores.items()}


def better_cores(
    threads: int, at: Sequence[int], busy: Mapping[int, float], pinned: Iterable[Sequence[int]]
) -> list[int]:
    """The least busy cores for so many threads; none when they are not clearly better than where it runs now.

    at: the cores that it runs on now, empty for any. busy: 0..1 by core, with everything that runs there. pinned: the cores
    of every other instance that is kept to some.
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


def mitigate(cores: Sequence[int], busy: Mapping[int, float], devices: Sequence[str], slow: str) -> Mitigation:
    """What to do about one interfered instance.

    cores: the better ones, if any; devices: others of its kind on this worker with room, best first. slow: how it does now.
    """
    if cores:
        names = ", ".join(f"{core} ({busy.get(core, 0.0):.0%} busy)" for core in cores)
        return MoveToCores(list(cores), f"{slow}; core{'s' * (len(cores) > 1)} {names} would be better")
    if devices:
        return MoveToDevice(devices[0], f"{slow}; {devices[0]} has room")
    return AskElsewhere(f"{slow}; this worker has no idler cores and no other device with room")


# -- Carries out interference mitigation: who is moved, when, and what becomes of it. Where to is decided in
# mitigation.py. Pure.


class Migrations:
    """The moves of one worker's instances. An instance is looked at once it has been Interfered for a while, then not again
    within the back-off, whatever came of it: moving costs, and what slows it may be over by itself.
    """

    def __init__(
        self, worker: str, devices: dict[str, MonitoredDevice], loads: InstanceTable, journal: Journal, knobs: Knobs
    ) -> None:
        self._worker = worker
        self._devices = devices
        self._loads = loads
        self._journal = journal
        self._knobs = knobs
        self._use = CoreUse()
        self._why: dict[str, str] = {}  # instance -> why it is being moved to other cores

    def sampled(self, machine: MachineSample) -> None:
        self._use.sample(machine.cores)

    def look(self) -> None:
        """Move what has been Interfered for long enough."""
        now, knobs = self._journal.now, self._knobs
        for instance in list(self._loads.instances.values()):
            waited = instance.state == "Interfered" and now - instance.since >= knobs.mitigate_after_s
            if waited and now >= instance.move_after and instance.latency_s > 0:  # its queries have not just ended
                instance.move_after = now + knobs.mitigate_again_s
                self._mitigate(instance)

    def _mitigate(self, instance: MonitoredInstance, *, cores: bool = True) -> None:
        device = self._devices[instance.device]
        found = self._cores(instance) if cores and device.is_machine else []
        others = [device.spec.name for device in self._loads.others_with_room(instance)]
        slow = f"a batch takes {instance.latency_s * 1e3:.3g} ms, its profile says {instance.profiled_s * 1e3:.3g} ms"
        match mitigate(found, self._use.busy, others, slow):
            case MoveToCores(cores=chosen, reason=reason):
                self._why[instance.id] = reason
                self._journal.order_move(instance, chosen)
            case MoveToDevice(device=name, reason=reason):
                self._to_device(instance, self._devices[name], reason)
            case elsewhere:
                self._ask(instance, elsewhere.reason)

    def _cores(self, instance: MonitoredInstance) -> list[int]:
        pinned = [other.cores for other in self._loads.instances.values() if other is not instance and other.cores]
        return better_cores(instance.record.threads, instance.cores, self._use.busy, pinned)

    # -- other cores

    def moved(self, instance: MonitoredInstance, fact: InstanceMoved) -> None:
        """The executor has moved it, or could not; then the next best place."""
        why = self._why.pop(instance.id, "ordered")
        if fact.error:
            if instance.state == "Interfered":
                self._mitigate(instance, cores=False)
            return
        reason = f"moved: {why}; {fact.proof}"
        self._journal.scaling("monitor", "migrate", instance.record, instance.owner, reason)
        self._journal.states(instance, instance.moved(fact.cores, self._journal.now, reason))
        self._journal.told = False

    # -- another device

    def _to_device(self, instance: MonitoredInstance, device: MonitoredDevice, reason: str) -> None:
        """Make before break: the old one goes once the new one serves."""
        fresh = self._loads.again(instance, device, reason)
        fresh.replaces = instance.id
        fresh.move_after = instance.move_after
        self._journal.scaling("monitor", "migrate", instance.record, instance.owner, reason)

    def serves(self, fresh: MonitoredInstance) -> None:
        """A new instance is Active: what it replaces goes."""
        old = self._loads.instances.get(fresh.replaces or "")
        fresh.replaces = None
        if old is not None and old.state != "Unloading":
            self._loads.unload(old, f"moved to {fresh.device}")

    # -- another worker

    def _ask(self, instance: MonitoredInstance, reason: str) -> None:
        slo = instance.slo_s(instance.owner)
        ask = AskForCapacity(
            worker=self._worker,
            at=self._journal.now,
            app=instance.owner or "",
            why="interfered",
            variants=[instance.record.variant],
            load=instance.load,
            latency_ms=slo * 1000.0 if slo > 0 else None,
            reason=reason,
        )
        self._journal.ask(ask)
