"""An executor process that another one succeeds, in a planned restart: the new one loads what the old one has, then both are the same executor. Pure.

The new process has the old one's incarnation and its instances by their ids. So nothing changes for monitor and dispatchers, and each of the
two, which share the queries by queue group, computes what it gets. The new one takes none and reports nothing before it has loaded
everything.
"""

from collections.abc import Iterable

from bus.messages.fleet import HeldInstances, LoadInstance, SucceedExecutor
from bus.subjects import Subjects
from services.core.actor import NOTHING, Effect, Envelope, Handler, Inlet, Publish
from services.core.placement import Device
from services.executor.loading import InstanceManager


class Succession:
    """One executor's. held: what the process before it had; None: it succeeds none."""

    def __init__(
        self,
        worker: str,
        device: str,
        incarnation: int,
        subjects: Subjects,
        manager: InstanceManager,
        held: HeldInstances | None,
    ) -> None:
        self.inlets = (Inlet(subject=subjects.executor(worker, device, "succeed"), message=SucceedExecutor),)
        self.handlers: dict[type, Handler] = {SucceedExecutor: self._asked}
        self._incarnation = incarnation
        self._manager = manager
        self._orders = held.instances if held is not None else []

    def begin(self) -> list[Effect]:
        """Load what the process before this one has."""
        return [effect for order in self._orders for effect in self._manager.load(order)]

    @property
    def missing(self) -> str:
        """What is not loaded yet, in words; empty when nothing."""
        known = self._manager.instances
        left = [known[one.instance] for one in self._orders if one.instance in known]
        variants = sorted({one.record.variant for one in left if one.tier != one.goal})
        return f"models that it loads: {', '.join(variants)}" if variants else ""

    def _asked(self, envelope: Envelope) -> Iterable[Effect]:
        if not envelope.reply:
            return NOTHING
        held = [
            LoadInstance(
                instance=one.id, variant=one.record, price_per_s=one.price_per_s, cores=one.cores, tier=one.goal
            )
            for one in self._manager.instances.values()
            if one.goal is not None
        ]
        return (Publish(envelope.reply, HeldInstances(incarnation=self._incarnation, instances=held)),)


def fits_twice(held: HeldInstances, device: Device) -> bool:
    """Whether the models of both processes have room on the device at once, by their profiles."""
    return 2.0 * sum(one.variant.profile.memory_mb for one in held.instances) <= device.memory_mb
