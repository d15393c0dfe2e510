"""Which instances a device holds: loaded on the monitor's order, let go once what was queued is answered."""

from collections.abc import Iterable

from bus.messages.fleet import (
    InstanceFailed,
    InstanceLoaded,
    InstanceMoved,
    InstanceUnloaded,
    LoadInstance,
    MoveInstance,
)
from bus.subjects import Subjects
from services.core.actor import Do, Effect, Publish
from services.executor.instances import Loaded
from services.executor.tally import BatchTally
from services.executor.work import LoadedModel, LoadModel, MovedModel, MoveModel, UnloadModel

NOTHING: tuple[Effect, ...] = ()


class Residents:
    """The instances of one device, by id; the monitor is told what becomes of each."""

    def __init__(self, worker: str, device: str, incarnation: int, subjects: Subjects) -> None:
        self.instances: dict[str, Loaded] = {}
        self.tallies: dict[str, BatchTally] = {}  # by variant: what was ever computed here
        self._device = device
        self._incarnation = incarnation
        self._told = {fact: subjects.monitor(worker, fact) for fact in ("loaded", "unloaded", "failed", "moved")}

    def load(self, order: LoadInstance) -> Iterable[Effect]:
        """Begin to load; queries may already queue for it."""
        if order.instance in self.instances:
            return NOTHING
        tally = self.tallies.setdefault(order.variant.variant, BatchTally())
        self.instances[order.instance] = Loaded(order.instance, order.variant, order.price_per_s, tally)
        return (Do(("load", order.instance), LoadModel(order.instance, order.variant, tuple(order.cores))),)

    def loaded(self, instance: str, model: LoadedModel) -> Iterable[Effect]:
        """Its model is in memory; one that nobody wants any more goes again."""
        loaded = self.instances.get(instance)
        if loaded is None:
            return (Do(("unload", instance), UnloadModel(instance)),)
        loaded.ready = True
        fact = InstanceLoaded(
            instance=instance,
            variant=loaded.record.variant,
            device=self._device,
            incarnation=self._incarnation,
            load_ms=model.load_ms,
            memory_mb=model.memory_mb,
            proof=model.proof,
        )
        return (Publish(self._told["loaded"], fact), *(self.let_go(loaded) if loaded.leaving else NOTHING))

    def move(self, order: MoveInstance) -> Iterable[Effect]:
        """Run it on these cores from now on; until its copy there is ready it serves where it is."""
        loaded = self.instances.get(order.instance)
        if loaded is None or not loaded.ready or loaded.leaving:
            return NOTHING
        cores = tuple(order.cores)
        return (Do(("move", (loaded, cores)), MoveModel(loaded.id, loaded.record, cores)),)

    def moved(self, key: tuple[Loaded, tuple[int, ...]], model: MovedModel | None, error: str = "") -> Iterable[Effect]:
        """It runs there now, or could not be moved and serves as before."""
        loaded, cores = key
        if self.instances.get(loaded.id) is not loaded:
            return NOTHING
        if model is not None:
            loaded.queue.factor = 1.0  # what was learnt where it was slow says nothing any more
        fact = InstanceMoved(
            instance=loaded.id,
            variant=loaded.record.variant,
            device=self._device,
            incarnation=self._incarnation,
            cores=list(cores),
            proof=model.proof if model is not None else "",
            error=error,
        )
        return (Publish(self._told["moved"], fact),)

    def unload(self, instance: str) -> Iterable[Effect]:
        """Take nothing new for it."""
        loaded = self.instances.get(instance)
        if loaded is None:
            return NOTHING
        loaded.leaving = True
        return self.let_go(loaded)

    def let_go(self, loaded: Loaded) -> Iterable[Effect]:
        """Unload an instance that leaves, once it is loaded and idle."""
        if loaded.running or len(loaded.queue) or not loaded.ready:
            return NOTHING
        del self.instances[loaded.id]
        fact = InstanceUnloaded(
            instance=loaded.id, variant=loaded.record.variant, device=self._device, incarnation=self._incarnation
        )
        return (Do(("unload", loaded.id), UnloadModel(loaded.id)), Publish(self._told["unloaded"], fact))

    def failed(self, instance: str, reason: str) -> tuple[Loaded, Publish] | None:
        """It could not be loaded: the instance, whose queue is the caller's to clear, and what the monitor is told."""
        loaded = self.instances.pop(instance, None)
        if loaded is None:
            return None
        fact = InstanceFailed(
            instance=instance,
            variant=loaded.record.variant,
            device=self._device,
            incarnation=self._incarnation,
            reason=reason,
        )
        return loaded, Publish(self._told["failed"], fact)
