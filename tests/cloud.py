"""Controllers on stage, with real monitors and executors: a bucket changed by compare-and-set, and machines that boot."""

from typing import Any

import msgspec

from bus.codec import encode
from bus.messages.scaling import LeaderRecord, MachineRecord, StartMachine, StopMachine
from services.autoscaler.vms.actor import Controller
from services.autoscaler.vms.commands import Claim, Claimed, Drop, Save, Start, Stop
from services.autoscaler.vms.notes import LEADER, key_of
from services.autoscaler.vms.policy import Kind, Limits
from services.core.actor import Changed, Synced
from services.core.catalog import key_of as catalog_key
from services.core.cost import price_per_hour
from services.core.placement import Device
from services.core.selection import InfaasPolicy, SelectionPolicy
from services.monitor.actor import MonitorActor
from services.monitor.machine import MachineSample
from tests.fleet import PRICES, Fleet, variant

CPU = Device(name="cpu", kind="cpu", cores=2, memory_mb=4000.0)
BUCKET = "infaas-control"


def kind(name: str = "cpu", **more: Any) -> Kind:
    return Kind(
        name=name,
        devices=(CPU,),
        price_per_hour=price_per_hour("cpu", PRICES, 2),
        **({"minimum": 1, "maximum": 3} | more),
    )


class CloudFleet(Fleet):
    """A fleet with controllers c0, c1, ...; workers are of kind "cpu". broken: what the provider says instead of starting;
    dead_on_arrival: what it starts never speaks.

    used: utilisation that every worker's machine shows, and of single ones.
    """

    def __init__(
        self, *variants: Any, controllers: int = 1, policy: SelectionPolicy | None = None, **more: Any
    ) -> None:
        self.kinds = more.pop("kinds", (kind(),))
        self.limits = Limits(kinds={each.name: each for each in self.kinds}, **more.pop("limits", {}))
        self.bucket: dict[str, bytes] = {}
        self.started: list[StartMachine] = []
        self.stopped: list[StopMachine] = []
        self.acted: list[tuple[float, str, str, int]] = []  # time, controller, what, epoch
        self.broken = ""
        self.dead_on_arrival = False
        self.mute = 0  # starts that are carried out without an answer
        self.used = 0.2
        self.used_on: dict[str, float] = {}
        self.cut_off: set[str] = set()  # controllers that cannot reach the bucket
        super().__init__(*(variants or (variant(),)), policy=policy or InfaasPolicy(dispatch="pack"), **more)
        for number in range(controllers):
            self.start_controller(f"c{number}")
        self.stage.run(4.0)

    def start_worker(self, worker: str) -> None:
        actor = MonitorActor(worker, "cpu", [CPU], PRICES, self.subjects, next(self._incarnations), kind="cpu")
        self.stage.enter(
            worker,
            actor,
            lambda _: (0.0, MachineSample(utilisation=self.used_on.get(worker, self.used), memory_used_mb=500.0)),
        )
        for record in self.records:
            self.stage.send(worker, Changed("infaas-catalog", catalog_key(record), encode(record)))
        self.stage.send(worker, Synced("infaas-catalog"))
        self.start_executor(worker)

    def register(self, *records: Any) -> None:
        """More of the catalogue, for everybody."""
        self.records.extend(records)
        for name in list(self.stage.members):
            if "/" not in name:
                for record in records:
                    self.stage.send(name, Changed("infaas-catalog", catalog_key(record), encode(record)))

    def start_controller(self, name: str) -> None:
        actor = Controller(f"vm-{name}", self.subjects, self.limits)
        self.stage.enter(name, actor, lambda command: self._edge(name, command))
        for record in self.records:
            self.stage.send(name, Changed("infaas-catalog", catalog_key(record), encode(record)))
        self.stage.send(name, Synced("infaas-catalog"))
        for key, value in self.bucket.items():
            self.stage.send(name, Changed(BUCKET, key, value))
        self.stage.send(name, Synced(BUCKET))

    @property
    def workers(self) -> list[str]:
        """Those that run."""
        return sorted(name for name, one in self.stage.members.items() if isinstance(one.actor, MonitorActor))

    @property
    def leader(self) -> str:
        """Whoever leads now; raises when it is not exactly one."""
        [name] = [n for n, c in self._controllers() if c.lease.leads(self.stage.now)]
        return name

    def _controllers(self) -> list[tuple[str, Controller]]:
        return [(name, m.actor) for name, m in self.stage.members.items() if isinstance(m.actor, Controller)]

    def scalings(self, action: str = "") -> list[Any]:
        found = [event for what, event in self.stage.records if what == "scaling" and event.scaler == "vm"]
        return [event for event in found if action in ("", event.action)]

    def worker_events(self, to_state: str) -> list[Any]:
        return [event for what, event in self.stage.records if what == "worker" and event.to_state == to_state]

    def states(self, variant_name: str) -> dict[str, list[str]]:
        """Worker to the states of this variant's instances there."""
        found = {}
        for name in self.workers:
            instances = self.stage.members[name].actor._loads.instances.values()
            states = [i.state for i in instances if i.record.variant == variant_name]
            if states:
                found[name] = states
        return found

    # -- the controllers' edge

    def _edge(self, name: str, command: Any) -> tuple[float, Any]:
        if name in self.cut_off and not isinstance(command, Start | Stop):
            return 0.5, OSError("the bucket cannot be reached")
        match command:
            case Claim():
                value = self.bucket.get(LEADER)
                present = msgspec.msgpack.decode(value, type=LeaderRecord) if value else None
                if not command.allows(present):
                    return 0.01, Claimed(ok=False, present=present)
                self._write(LEADER, encode(command.record))
                return 0.01, Claimed(ok=True)
            case Save():
                self._write(key_of(command.record.worker), encode(command.record))
            case Drop():
                self._write(key_of(command.worker), None)
            case Start():
                order = command.order
                self.acted.append((self.stage.now, name, f"start {order.worker}", order.epoch))
                if self.broken:
                    return 0.05, ValueError(self.broken)
                if order.worker not in [one.worker for one in self.started] and not self.dead_on_arrival:
                    self.stage._at(order.boot_s, lambda: self.start_worker(order.worker))
                self.started.append(order)
                self.mute -= 1
                return (1e6 if self.mute >= 0 else 0.05), None
            case Stop():
                order = command.order
                self.acted.append((self.stage.now, name, f"stop {order.worker}", order.epoch))
                self.stopped.append(order)
                if order.worker in self.stage.members:
                    self.stage.stop(order.worker)
                    self.stage.kill(f"{order.worker}/cpu")
                return 0.3, None
        return 0.01, None

    def _write(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.bucket.pop(key, None)
        else:
            self.bucket[key] = value
        for name, _ in self._controllers():
            if name not in self.cut_off:
                self.stage._at(0.02, lambda name=name: self._tell(name, key, value))

    def _tell(self, name: str, key: str, value: bytes | None) -> None:
        if name in self.stage.members:
            self.stage.send(name, Changed(BUCKET, key, value))

    def machine(self, worker: str) -> MachineRecord | None:
        value = self.bucket.get(key_of(worker))
        return msgspec.msgpack.decode(value, type=MachineRecord) if value else None
