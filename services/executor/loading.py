"""The models of one device come and go: loaded, moved between cores and between tiers of memory, unloaded, on the monitor's orders. Pure.

A model is on the device, or in host memory (its instance is Warm), or nowhere. An order says where it is to be. One step at a time is
taken to there, while the instance computes nothing and, unless it is to serve, once its queue is empty.

In a planned restart another process succeeds this one: the new one loads what the old one has, then both are the same executor. The new
process has the old one's incarnation and its instances by their ids. So nothing changes for monitor and dispatchers, and each of the two,
which share the queries by queue group, computes what it gets. The new one takes none and reports nothing before it has loaded everything.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bus.fields import filled
from bus.messages.fleet import (
    DemoteInstance,
    HeldInstances,
    InstanceFailed,
    InstanceLoaded,
    InstanceMoved,
    InstanceUnloaded,
    LoadInstance,
    MoveInstance,
    SucceedExecutor,
    UnloadInstance,
)
from bus.subjects import Subjects
from services.core.actor import NOTHING, Do, Effect, Envelope, Handler, Inlet, Publish
from services.core.placement import Device
from services.executor.commands import LoadedModel, LoadModel, MovedModel, MoveModel, TransferModel, UnloadModel
from services.executor.instances import BatchTally, HeldInstance

TALLIES = 100  # variants, beside those of its instances, whose batches a device has counted


class InstanceManager:
    """The instances of one device, by id. Everything that happens to one is reported to the monitor. hand_on: what queues for one goes elsewhere."""

    def __init__(
        self,
        worker: str,
        device: str,
        incarnation: int,
        subjects: Subjects,
        hand_on: Callable[[HeldInstance], Iterable[Effect]],
    ) -> None:
        self.instances: dict[str, HeldInstance] = {}
        self.tallies: dict[str, BatchTally] = {}  # by variant
        orders: dict[str, tuple[type, Callable[[Any], Iterable[Effect]]]] = {
            "load": (LoadInstance, self.load),
            "unload": (UnloadInstance, self.unload),
            "demote": (DemoteInstance, self.demote),
            "move": (MoveInstance, self.move),
        }
        self.inlets = tuple(
            Inlet(subject=subjects.executor(worker, device, order), message=message)
            for order, (message, _) in orders.items()
        )
        self.handlers = {message: _obeying(obey) for message, obey in orders.values()}
        self._hand_on = hand_on
        self._device = device
        self._incarnation = incarnation
        self._subjects = {fact: subjects.monitor(worker, fact) for fact in ("loaded", "unloaded", "failed", "moved")}

    # -- orders

    def load(self, order: LoadInstance) -> Iterable[Effect]:
        """Begin to load an instance, or to bring one to the device that is Warm or will be. Queries may already queue for it."""
        loaded = self.instances.get(order.instance)
        if loaded is not None:
            return self._promote(loaded) if loaded.goal == "host" and order.tier == "device" else NOTHING
        tally = self.tallies.setdefault(order.variant.variant, BatchTally())
        if len(self.tallies) > TALLIES + len(self.instances):
            held = {one.record.variant for one in self.instances.values()} | {order.variant.variant}
            self.tallies.pop(next((name for name in self.tallies if name not in held), ""), None)
        loaded = self.instances[order.instance] = HeldInstance(order.instance, order.variant, order.price_per_s, tally)
        loaded.cores = order.cores
        loaded.head_for(order.tier)
        loaded.moving = True
        return (Do(("load", loaded.id), LoadModel(loaded.id, loaded.record, tuple(order.cores), order.tier)),)

    def _promote(self, loaded: HeldInstance) -> Iterable[Effect]:
        loaded.head_for("device")
        if loaded.ready and loaded.model is not None:  # it had not left yet
            return (self._is_loaded(loaded, loaded.model),)
        return self.settle(loaded)

    def demote(self, order: DemoteInstance) -> Iterable[Effect]:
        """The instance takes no new queries, and is moved to host memory once it is idle."""
        loaded = self.instances.get(order.instance)
        if loaded is None or loaded.goal is None:
            return NOTHING
        loaded.head_for("host")
        return self.settle(loaded)

    def unload(self, order: UnloadInstance) -> Iterable[Effect]:
        """The instance takes no new queries, and is unloaded once it is idle. Or only its copy in host memory goes."""
        loaded = self.instances.get(order.instance)
        if loaded is None:  # the order to load it was lost, or it has gone
            gone = InstanceUnloaded(
                instance=order.instance, variant="", device=self._device, incarnation=self._incarnation
            )
            return NOTHING if order.tier else (Publish(self._subjects["unloaded"], gone),)
        if order.tier == "host":
            if loaded.moving or not loaded.ready or loaded.model is None or not loaded.model.copied:
                return NOTHING
            loaded.moving = True
            return (Do(("transfer", loaded.id), TransferModel(loaded.id, "device", copied=False)),)
        loaded.head_for(None)
        return self.settle(loaded)

    def settle(self, loaded: HeldInstance) -> Iterable[Effect]:
        """The next step to where its model is to be, if it is idle. What queued for it, and it is not to compute after all, is handed on."""
        if loaded.moving or loaded.running or (loaded.ready and len(loaded.queue)):
            return NOTHING
        handed = self._hand_on(loaded) if loaded.goal != "device" and len(loaded.queue) else NOTHING
        if loaded.tier == loaded.goal:
            return handed
        loaded.ready = False
        if loaded.goal is not None:
            loaded.moving = True
            return (*handed, Do(("transfer", loaded.id), TransferModel(loaded.id, loaded.goal)))
        del self.instances[loaded.id]
        unloading = Do(("unload", loaded.id), UnloadModel(loaded.id))
        return (*handed, unloading, self._tell("unloaded", InstanceUnloaded, loaded))

    def _tell(self, fact: str, kind: type[Any], loaded: HeldInstance, *sources: Any, **more: Any) -> Publish:
        """A message of this kind to the monitor, about this instance. sources, more: as for `filled`."""
        more |= {"instance": loaded.id, "variant": loaded.record.variant, "device": self._device}
        return Publish(self._subjects[fact], filled(kind, *sources, **more, incarnation=self._incarnation))

    # -- what the edge has done

    def loaded(self, instance: str, model: LoadedModel) -> Iterable[Effect]:
        """Its model is in memory. If the instance was removed meanwhile, the model is unloaded."""
        loaded = self.instances.get(instance)
        if loaded is None:
            return (Do(("unload", instance), UnloadModel(instance)),)
        loaded.moving = False
        loaded.model, loaded.tier, loaded.ready = model, model.tier, model.tier == "device"
        loaded.limit_contexts(model.one_at_a_time)
        return (self._is_loaded(loaded, model), *self.settle(loaded))

    def _is_loaded(self, loaded: HeldInstance, model: LoadedModel) -> Publish:
        why = f"; one batch at a time: {model.one_at_a_time}" if model.one_at_a_time else ""
        return self._tell("loaded", InstanceLoaded, loaded, model, proof=model.proof + why)

    def transfer_failed(self, instance: str, reason: str) -> tuple[HeldInstance | None, Iterable[Effect]]:
        """A model that cannot be kept in host memory is unloaded. One that does not come back has failed: it, whose queue the caller empties."""
        loaded = self.instances.get(instance)
        if loaded is None:
            return None, NOTHING
        if loaded.tier == "host":
            return self.failed(instance, reason)
        loaded.moving = False
        loaded.head_for(None)
        return None, self.settle(loaded)

    def failed(self, instance: str, reason: str) -> tuple[HeldInstance | None, Iterable[Effect]]:
        """An instance could not be loaded: it, whose queue the caller empties, and the message to the monitor."""
        loaded = self.instances.pop(instance, None)
        if loaded is None:
            return None, NOTHING
        return loaded, (self._tell("failed", InstanceFailed, loaded, reason=reason),)

    # -- cores

    def move(self, order: MoveInstance) -> Iterable[Effect]:
        """Move an instance to these cores. It serves where it is until its copy there is ready."""
        loaded = self.instances.get(order.instance)
        if loaded is None or not loaded.ready or loaded.leaving:
            return NOTHING
        cores = tuple(order.cores)
        return (Do(("move", (loaded, cores)), MoveModel(loaded.id, loaded.record, cores)),)

    def moved(
        self, key: tuple[HeldInstance, tuple[int, ...]], model: MovedModel | None, error: str = ""
    ) -> Iterable[Effect]:
        """The instance runs there now, or it could not be moved and serves as before."""
        loaded, cores = key
        if self.instances.get(loaded.id) is not loaded:
            return NOTHING
        if model is not None:
            loaded.cores = list(cores)
            loaded.queue.factor = 1.0  # it was learnt on the other cores
            loaded.limit_contexts(model.one_at_a_time)
        proof = model.proof if model is not None else ""
        return (self._tell("moved", InstanceMoved, loaded, cores=list(cores), proof=proof, error=error),)


def _obeying(obey: Callable[[Any], Iterable[Effect]]) -> Handler:
    def handle(envelope: Envelope) -> Iterable[Effect]:
        return obey(envelope.message)

    return handle


@dataclass(eq=False)
class Succession:
    """One executor's. held: what the process before it had; None: it succeeds none."""

    worker: str
    device: str
    incarnation: int
    subjects: Subjects
    manager: InstanceManager
    held: HeldInstances | None

    def __post_init__(self) -> None:
        self.inlets = (
            Inlet(subject=self.subjects.executor(self.worker, self.device, "succeed"), message=SucceedExecutor),
        )
        self.handlers: dict[type, Handler] = {SucceedExecutor: self._asked}
        self._orders = self.held.instances if self.held is not None else []

    def begin(self) -> list[Effect]:
        """Load what the process before this one has."""
        return [effect for order in self._orders for effect in self.manager.load(order)]

    @property
    def missing(self) -> str:
        """What is not loaded yet, in words; empty when nothing."""
        known = self.manager.instances
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
            for one in self.manager.instances.values()
            if one.goal is not None
        ]
        return (Publish(envelope.reply, HeldInstances(incarnation=self.incarnation, instances=held)),)


def fits_twice(held: HeldInstances, device: Device) -> bool:
    """Whether the models of both processes have room on the device at once, by their profiles."""
    return 2.0 * sum(one.variant.profile.memory_mb for one in held.instances) <= device.memory_mb
