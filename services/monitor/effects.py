"""What a monitor tells: effects of one turn, events for history, heartbeats. It remembers nothing that decides. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.events import CostEvent, InstanceEventSample, ScalingEvent, StateEvent, WorkerEvent, WorkerSample
from bus.messages.fleet import LoadInstance, MoveInstance, PlannedBy, State, UnloadInstance, WorkerHeartbeat
from bus.messages.scaling import AskForCapacity
from bus.subjects import Subjects
from services.core.actor import After, Do, Effect, Publish, Record
from services.monitor.devices import MonitoredDevice
from services.monitor.instances import MonitoredInstance, StateChange


class Journal:
    """Collects the effects of one turn. told: everybody knows the present states, no heartbeat is due for them."""

    def __init__(self, worker: str, hardware: str, subjects: Subjects, incarnation: int, kind: str = "") -> None:
        self.now = 0.0
        self.told = True
        self.machine = MachineSample(utilisation=0.0, memory_used_mb=0.0)
        self._worker = worker
        self._hardware = hardware
        self._kind = kind or hardware
        self._subjects = subjects
        self._incarnation = incarnation
        self._state = "None"
        self._out: list[Effect] = []

    def turn(self, now: float) -> None:
        """A new message is being handled."""
        self.now = now
        self._out = []

    def effects(self) -> list[Effect]:
        return self._out

    def add(self, effect: After | Do) -> None:
        self._out.append(effect)

    def reply(self, subject: str, message: Any) -> None:
        """Answer an order; nothing when nobody waits."""
        if subject:
            self._out.append(Publish(subject, message))

    # -- to executors

    def order_load(self, instance: MonitoredInstance, price_per_s: float) -> None:
        subject = self._subjects.executor(self._worker, instance.device, "load")
        order = LoadInstance(instance=instance.id, variant=instance.record, price_per_s=price_per_s)
        self._out.append(Publish(subject, order))

    def order_unload(self, instance: str, device: str) -> None:
        subject = self._subjects.executor(self._worker, device, "unload")
        self._out.append(Publish(subject, UnloadInstance(instance=instance)))

    def order_move(self, instance: MonitoredInstance, cores: list[int]) -> None:
        subject = self._subjects.executor(self._worker, instance.device, "move")
        self._out.append(Publish(subject, MoveInstance(instance=instance.id, cores=cores)))

    # -- to everybody

    def ask(self, message: AskForCapacity) -> None:
        self._out.append(Publish(self._subjects.controller("ask"), message))

    def heartbeat(
        self,
        devices: Iterable[MonitoredDevice],
        instances: Iterable[MonitoredInstance],
        quarantined: Mapping[str, str],
        *,
        draining: bool,
        leaving: bool,
    ) -> None:
        self.told = True
        beat = WorkerHeartbeat(
            worker=self._worker,
            hardware=self._hardware,
            incarnation=self._incarnation,
            at=self.now,
            devices=[device.status(self.utilisation(device)) for device in devices],
            instances=[instance.status() for instance in instances],
            draining=draining or leaving,
            leaving=leaving,
            kind=self._kind,
            quarantined=dict(quarantined),
        )
        self._out.append(Publish(self._subjects.worker_heartbeat(self._worker), beat))

    # -- for history

    def states(self, instance: MonitoredInstance, changes: Iterable[StateChange]) -> None:
        """An instance changed its state, for some apps or all."""
        for app, old, new, reason in changes:
            self.told = False
            self._state_event(instance.record, instance.device, instance.id, app, old, new, reason)

    def _state_event(
        self,
        record: VariantRecord,
        device: str,
        instance: str,
        app: str | None,
        old: State | str,
        new: State | str,
        reason: str,
    ) -> None:
        event = StateEvent(
            time=self.now,
            app=app,
            model=record.model,
            variant=record.variant,
            worker=self._worker,
            device=device,
            instance=instance,
            from_state=old,
            to_state=new,
            reason=reason,
        )
        self._out.append(Record(event))

    def quarantine(self, record: VariantRecord | None, variant: str, reason: str, *, ended: bool = False) -> None:
        """A variant as a whole goes into quarantine on this worker, or comes out of it."""
        self.told = False
        if record is None:  # the catalogue does not know it any more
            return
        old, new = ("Quarantined", "Inactive") if ended else ("Inactive", "Quarantined")
        self._state_event(record, "", f"{variant}.{self._worker}", None, old, new, reason)

    def keep_quarantine(self, variant: str, reason: str) -> None:
        """So that the next monitor knows of it."""
        self._out.append(Do(("quarantine", variant), KeepQuarantine(self._worker, variant, reason), timeout=10.0))

    def worker_state(self, state: str, reason: str) -> None:
        """The worker as a whole goes to another state; nothing when it is there already."""
        if state == self._state:
            return
        self.told = False
        event = WorkerEvent(
            time=self.now,
            worker=self._worker,
            hardware=self._hardware,
            from_state=self._state,
            to_state=state,
            reason=reason,
        )
        self._state = state
        self._out.append(Record(event))

    def scaling(
        self,
        scaler: str,
        action: str,
        record: VariantRecord,
        app: str | None,
        reason: str,
        count: int = 1,
        planned: PlannedBy | None = None,
    ) -> None:
        event = ScalingEvent(
            time=self.now,
            scaler=scaler,
            worker=self._worker,
            app=app,
            model=record.model,
            variant=record.variant,
            action=action,
            count=count,
            reason=reason,
            solver=planned.solver if planned else None,
            solve_ms=planned.solve_ms if planned else None,
            objective=planned.objective if planned else None,
        )
        self._out.append(Record(event))

    def costs(self, rows: Iterable[CostEvent]) -> None:
        self._out.extend(Record(row) for row in rows)

    def samples(self, device: MonitoredDevice, seconds: float) -> None:
        """How the device and each of its instances did in the last so many seconds."""
        present = list(device.instances.values())
        event = WorkerSample(
            time=self.now,
            worker=self._worker,
            device=device.spec.name,
            hardware=device.spec.kind,
            utilisation=self.utilisation(device),
            memory_mb=device.spec.memory_mb,
            memory_used_mb=self.machine.memory_used_mb if device.is_machine else device.committed().memory_mb,
            load=sum(instance.load for instance in present),
            queue=sum(instance.queued for instance in present),
        )
        self._out.append(Record(event))
        for instance in present:
            self._instance_samples(instance, seconds)

    def _instance_samples(self, instance: MonitoredInstance, seconds: float) -> None:
        """A row for each app that used it: load and utilisation are the app's, the rest is the instance's."""
        for app, load, utilisation in instance.by_app(self.now - seconds):
            event = InstanceEventSample(
                time=self.now,
                worker=self._worker,
                device=instance.device,
                app=app,
                model=instance.record.model,
                variant=instance.record.variant,
                instance=instance.id,
                utilisation=utilisation,
                memory_mb=instance.memory_mb,
                load=load,
                queue=instance.queued,
                latency_ms=instance.latency_s * 1000.0,
                mean_batch=instance.mean_batch,
            )
            self._out.append(Record(event))

    def utilisation(self, device: MonitoredDevice) -> float:
        return self.machine.utilisation if device.is_machine else device.utilisation


# -- What a monitor asks of its edge. Pure.


class SampleMachine(Struct, frozen=True):
    """How busy is this machine? The answer is a `MachineSample`."""


class MachineSample(Struct, frozen=True, kw_only=True):
    """utilisation: of the worker's cores since the sample before, 0..1. memory_used_mb: of the machine, by everybody.

    cores: utilisation of each core that this worker may use, by its number.
    """

    utilisation: float
    memory_used_mb: float
    cores: dict[int, float] = {}


class KeepQuarantine(Struct, frozen=True):
    """Write down that this variant is not to be loaded on this worker, and why: it outlives this process."""

    worker: str
    variant: str
    reason: str
