"""What a monitor sends and records: orders to executors, heartbeats, events, and commands to its edge. It decides nothing. Pure."""

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from bus.fields import filled
from bus.messages.catalog import VariantRecord
from bus.messages.events import CostEvent, InstanceEventSample, ScalingEvent, StateEvent, WorkerEvent, WorkerSample
from bus.messages.fleet import (
    DemoteInstance,
    DeviceStatus,
    LoadInstance,
    MoveInstance,
    PlannedBy,
    State,
    UnloadInstance,
    WorkerHeartbeat,
)
from bus.messages.scaling import AskToMove
from bus.subjects import Subjects
from services.core.actor import Do, Effect, Publish, Record
from services.monitor.devices import MonitoredDevice
from services.monitor.instances import MonitoredInstance, StateChange

InstanceOrder = LoadInstance | DemoteInstance | UnloadInstance | MoveInstance
# The end of their subjects.
ORDERS = {LoadInstance: "load", DemoteInstance: "demote", UnloadInstance: "unload", MoveInstance: "move"}
KEEP_S = 10.0  # s for one write to the control bucket


class SampleMachine(Struct, frozen=True):
    """Command to the edge: measure how busy this machine is. The answer is a `MachineSample`."""


class MachineSample(Struct, frozen=True, kw_only=True):
    """utilisation: of the worker's cores since the sample before, 0..1. memory_used_mb: of the machine, by all processes.

    cores: utilisation of each core that this worker may use, by its number. gpus: of GPUs whose driver tells it, by address.
    """

    utilisation: float
    memory_used_mb: float
    cores: dict[int, float] = {}
    gpus: dict[str, float] = {}


class KeepQuarantine(Struct, frozen=True):
    """Command to the edge: write down that this worker does not load this variant, and why. It outlives this process."""

    worker: str
    variant: str
    reason: str


class MonitorEffects:
    """Makes the effects of one worker's monitor. Each method returns them; times are Unix seconds.

    heartbeat_due: something has changed since the last heartbeat. machine: the last sample.
    """

    def __init__(self, worker: str, hardware: str, subjects: Subjects, incarnation: int, kind: str = "") -> None:
        self.heartbeat_due = False
        self.machine = MachineSample(utilisation=0.0, memory_used_mb=0.0)
        self._worker = worker
        self._hardware = hardware
        self._kind = kind or hardware
        self._subjects = subjects
        self._incarnation = incarnation
        self._state = "None"  # of the worker, as its last event says

    # -- to executors

    def order(self, device: str, order: InstanceOrder) -> Effect:
        """Order a device's executor."""
        return Publish(self._subjects.executor(self._worker, device, ORDERS[type(order)]), order)

    # -- to all services

    def ask(self, message: AskToMove) -> Effect:
        return Publish(self._subjects.controller("ask"), message)

    def heartbeat(
        self,
        devices: Collection[MonitoredDevice],
        instances: Iterable[MonitoredInstance],
        quarantined: Mapping[str, str],
        now: float,
        *,
        draining: bool,
        leaving: bool,
    ) -> Effect:
        self.heartbeat_due = False
        heartbeat = WorkerHeartbeat(
            worker=self._worker,
            hardware=self._hardware,
            incarnation=self._incarnation,
            at=now,
            devices=self.statuses(devices),
            instances=[i.status(now) for i in instances if i.state != "Loading" or i.goes == "device"],
            draining=draining or leaving,
            leaving=leaving,
            kind=self._kind,
            quarantined=dict(quarantined),
        )
        return Publish(self._subjects.worker_heartbeat(self._worker), heartbeat)

    # -- to the edge

    def keep_quarantine(self, variant: str, reason: str) -> Effect:
        """Write the quarantine down for the next monitor of this worker."""
        return Do(("quarantine", variant), KeepQuarantine(self._worker, variant, reason), timeout=KEEP_S)

    # -- events

    def state_changes(self, instance: MonitoredInstance, changes: Iterable[StateChange], now: float) -> list[Effect]:
        """An instance's changes of state, one event for each app."""
        found: list[Effect] = []
        for app, old, new, reason in changes:
            self.heartbeat_due = True
            found.append(self._state_event(instance.record, instance.device, instance.id, app, old, new, reason, now))
        return found

    def _state_event(
        self,
        record: VariantRecord,
        device: str,
        instance: str,
        app: str | None,
        old: State | str,
        new: State | str,
        reason: str,
        now: float,
    ) -> Effect:
        return Record(
            StateEvent(
                time=now,
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
        )

    def quarantine(
        self, record: VariantRecord | None, variant: str, reason: str, now: float, *, ended: bool = False
    ) -> list[Effect]:
        """A variant enters quarantine on this worker, or leaves it. No event if the catalogue does not know the variant."""
        self.heartbeat_due = True
        if record is None:
            return []
        old, new = ("Quarantined", "Inactive") if ended else ("Inactive", "Quarantined")
        return [self._state_event(record, "", f"{variant}.{self._worker}", None, old, new, reason, now)]

    def worker_state(self, state: str, reason: str, now: float) -> list[Effect]:
        """The worker goes to another state. Nothing if it is there already."""
        return [] if state == self._state else self._worker_event(state, reason, now)

    def worker_note(self, reason: str, now: float) -> list[Effect]:
        """Something that happened to the worker and changes no state of it."""
        return self._worker_event(self._state, reason, now)

    def _worker_event(self, state: str, reason: str, now: float) -> list[Effect]:
        self.heartbeat_due = True
        old, self._state = self._state, state
        return [
            Record(
                WorkerEvent(
                    time=now,
                    worker=self._worker,
                    hardware=self._hardware,
                    from_state=old,
                    to_state=state,
                    reason=reason,
                )
            )
        ]

    def scaling(
        self,
        scaler: str,
        action: str,
        record: VariantRecord,
        app: str | None,
        reason: str,
        now: float,
        count: int = 1,
        planned: PlannedBy | None = None,
    ) -> Effect:
        return Record(
            ScalingEvent(
                time=now,
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
        )

    @staticmethod
    def costs(rows: Iterable[CostEvent]) -> list[Effect]:
        return [Record(row) for row in rows]

    def samples(
        self, device: MonitoredDevice, devices: Iterable[MonitoredDevice], seconds: float, now: float
    ) -> list[Effect]:
        """Figures of one of the worker's devices and its instances over the last so many seconds.

        Each app that used an instance has a row: load and utilisation are the app's, the rest is the instance's.
        """
        present = [instance for instance in device.instances.values() if instance.state != "Warm"]
        sample = WorkerSample(
            time=now,
            worker=self._worker,
            device=device.spec.name,
            hardware=device.spec.kind,
            utilisation=self._utilisation(device),
            foreign_use=self._foreign_use(device, devices),
            memory_mb=device.spec.memory_mb,
            memory_used_mb=self.machine.memory_used_mb if device.is_machine else device.committed().memory_mb,
            load=sum(instance.load for instance in present),
            queue=sum(instance.queued for instance in present),
            host_used_mb=device.host_used_mb,
        )
        rows = [
            filled(
                InstanceEventSample,
                instance,
                instance.record,
                time=now,
                worker=self._worker,
                app=app,
                instance=instance.id,
                utilisation=utilisation,
                load=load,
                queue=instance.queued,
                latency_ms=instance.latency_s * 1000.0,
            )
            for instance in present
            for app, load, utilisation in instance.by_app(now - seconds)
        ]
        return [Record(sample), *(Record(row) for row in rows)]

    def statuses(self, devices: Collection[MonitoredDevice]) -> list[DeviceStatus]:
        """All devices of the worker, as heartbeats carry them."""
        return [one.status(self._utilisation(one), self._foreign_use(one, devices)) for one in devices]

    def _utilisation(self, device: MonitoredDevice) -> float:
        """0..1. As measured where the machine tells it, with what all processes use; of other devices what their instances computed."""
        if device.is_machine:
            return self.machine.utilisation
        return max(device.utilisation, self.machine.gpus.get(device.spec.address, 0.0))

    def foreign_gpu_use(self, device: MonitoredDevice) -> float:
        """The part of a GPU's time that other processes use, 0..1; 0 for other devices."""
        return 0.0 if device.is_machine else max(0.0, self._utilisation(device) - device.utilisation)

    def _foreign_use(self, device: MonitoredDevice, devices: Iterable[MonitoredDevice]) -> float:
        """The part of the utilisation that is not this worker's: of a CPU all that its executors' processes do not use."""
        if not device.is_machine:
            return self.foreign_gpu_use(device)
        own = device.utilisation
        if device.cpu_cores is not None:
            own = sum(one.cpu_cores or 0.0 for one in devices) / (len(self.machine.cores) or device.spec.cores)
        return max(0.0, self._utilisation(device) - own)
