"""Carries out interference mitigation: who is moved, when, and what becomes of it. Where to is decided in mitigation.py. Pure."""

from bus.messages.fleet import InstanceMoved
from bus.messages.scaling import AskForCapacity
from services.monitor.devices import DeviceState
from services.monitor.instances import Instance
from services.monitor.journal import Journal
from services.monitor.loads import Loads
from services.monitor.machine import MachineSample
from services.monitor.mitigation import CoreUse, MoveToCores, MoveToDevice, better_cores, mitigate
from services.monitor.policy import Knobs


class Moves:
    """The moves of one worker's instances. An instance is looked at once it has been Interfered for a while, then not again
    within the back-off, whatever came of it: moving costs, and what slows it may be over by itself.
    """

    def __init__(
        self, worker: str, devices: dict[str, DeviceState], loads: Loads, journal: Journal, knobs: Knobs
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

    def _mitigate(self, instance: Instance, *, cores: bool = True) -> None:
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

    def _cores(self, instance: Instance) -> list[int]:
        pinned = [other.cores for other in self._loads.instances.values() if other is not instance and other.cores]
        return better_cores(instance.record.threads, instance.cores, self._use.busy, pinned)

    # -- other cores

    def moved(self, instance: Instance, fact: InstanceMoved) -> None:
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

    def _to_device(self, instance: Instance, device: DeviceState, reason: str) -> None:
        """Make before break: the old one goes once the new one serves."""
        fresh = self._loads.again(instance, device, reason)
        fresh.replaces = instance.id
        fresh.move_after = instance.move_after
        self._journal.scaling("monitor", "migrate", instance.record, instance.owner, reason)

    def serves(self, fresh: Instance) -> None:
        """A new instance is Active: what it replaces goes."""
        old = self._loads.instances.get(fresh.replaces or "")
        fresh.replaces = None
        if old is not None and old.state != "Unloading":
            self._loads.unload(old, f"moved to {fresh.device}")

    # -- another worker

    def _ask(self, instance: Instance, reason: str) -> None:
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
