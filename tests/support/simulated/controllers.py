"""Controllers on stage, with real monitors and executors: a bucket changed by compare-and-set, and machines that boot."""

from math import inf
from typing import Any

import msgspec
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import VariantRecord
from bus.messages.scaling import LeaderRecord, MachineRecord, StartMachine, StopMachine
from services.autoscaler.vms.actor import Controller
from services.autoscaler.vms.commands import (
    LEADER,
    ClaimLease,
    Inventory,
    LeaseClaimed,
    ListMachines,
    Node,
    ProviderTraits,
    SaveMachine,
    SaveReplicas,
    SolveFleet,
    Start,
    Stop,
    machine_key,
)
from services.autoscaler.vms.rules import FleetLimits, PricedKind
from services.core.actor import Changed, Synced
from services.core.catalog import replicas_key
from services.core.cost import price_per_hour
from services.core.placement import Device
from services.core.planning.fleet import Unsolved
from services.core.selection.policy import InfaasPolicy, SelectionPolicy
from services.core.settings import AutoscalerSettings, MachineSettings
from services.monitor.actor import MonitorActor
from services.monitor.effects import MachineSample
from services.simulation.edges import plans_for
from tests.support.data.events import change_of
from tests.support.simulated.fleet import PRICES, Fleet, variant

CPU = Device(name="cpu", kind="cpu", cores=2, memory_mb=4000.0)
NAME = "m-v1-ort-fp32-t1-b8"
BUCKET = "infaas-control"


def kind(name: str = "cpu", device: Device = CPU, **more: Any) -> PricedKind:
    return PricedKind(
        name=name,
        devices=(device,),
        price_per_hour=price_per_hour("cpu", PRICES, device.cores),
        **({"minimum": 1, "maximum": 3} | more),
    )


def slow(name: str = NAME, **more: Any) -> VariantRecord:
    """89 items/s in batches of 8, which take 90 ms; a worker's cores are for two."""
    return variant(name, base_ms=10.0, per_item_ms=10.0, **more)


class CloudFleet(Fleet):
    """A fleet with controllers c0, c1, ...; workers are of kind "cpu", with one device. broken: what the provider says instead of starting;
    dead_on_arrival: what it starts never speaks.

    used: utilisation that every worker's machine shows, and of single ones. autoscaler: the controllers' settings, or the name of a policy:
    "off" has them follow the paper's three rules, "infaas" plan for all workers. unsolved: the solver finds nothing. solve_s: seconds that
    it takes; None: as the simulator has it. plans: when it was asked for plans, by which controller, and for what.
    """

    def __init__(
        self, *variants: Any, controllers: int = 1, policy: SelectionPolicy | None = None, **more: Any
    ) -> None:
        self.kinds = more.pop("kinds", (kind(),))
        self.device = more.pop("device", CPU)
        self.traits: ProviderTraits = more.pop("traits", ProviderTraits())
        given = more.pop("autoscaler", "infaas")
        self.autoscaler = AutoscalerSettings(policy=given) if isinstance(given, str) else given
        self.unsolved = False
        self.solve_s: float | None = None
        self.plans: list[tuple[float, str, SolveFleet]] = []
        limits = more.pop("limits", {})
        budget = limits.pop("budget_per_hour", inf)
        self.limits = FleetLimits(
            kinds={each.name: each for each in self.kinds}, settings=MachineSettings(**limits), budget_per_hour=budget
        )
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

    def start_worker(self, worker: str, seconds: float = 0.0) -> None:
        actor = MonitorActor(worker, "cpu", [self.device], PRICES, self.subjects, next(self._incarnations), kind="cpu")
        self.stage.enter(
            worker,
            actor,
            lambda _: (0.0, MachineSample(utilisation=self.used_on.get(worker, self.used), memory_used_mb=500.0)),
        )
        self.follow(worker)
        self.start_executor(worker)
        self.after(seconds)

    def register(self, *records: Any, seconds: float = 0.0) -> None:
        """More of the catalogue, for everybody."""
        self.records.extend(records)
        for name in list(self.stage.members):
            if "/" not in name:
                for record in records:
                    self.stage.send(name, change_of(record))
        self.after(seconds)

    def start_controller(self, name: str) -> None:
        actor = Controller(f"vm-{name}", self.subjects, self.limits, traits=self.traits, autoscaler=self.autoscaler)
        self.stage.enter(name, actor, lambda command: self._edge(name, command))
        self.follow(name)
        for key, value in self.bucket.items():
            self.stage.send(name, Changed(BUCKET, key, value))
        self.stage.send(name, Synced(BUCKET))

    @property
    def workers(self) -> list[str]:
        """Those that run."""
        return sorted(name for name, one in self.stage.members.items() if isinstance(one.actor, MonitorActor))

    def workers_after(self, seconds: float, used: float | None = None) -> list[str]:
        """Those that run after so much more time. used: of every machine, from now on."""
        self.use(self.used if used is None else used, seconds)
        return self.workers

    def use(self, used: float, seconds: float) -> None:
        """For so long, every machine is used so much, and from then on."""
        self.used = used
        self.stage.run(seconds)

    def burst(self, rate: float, seconds: float, **needs: Any) -> list[str]:
        """Evenly spaced queries; their ids."""
        asked, end = [], self.stage.now + seconds
        while self.stage.now < end:
            asked.append(self.ask(**needs))
            self.stage.run(1.0 / rate)
        return asked

    def all_answered(self, asked: list[str]) -> bool:
        return all(["outputs" in reply for reply in self.replies(one)] == [True] for one in asked)

    def drained(self) -> str:
        """Lets time pass until a worker drains; which."""
        while not (events := self.worker_events("Draining")):
            self.stage.run(0.05)
        [event] = events
        return event.worker

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
            instances = self.stage.members[name].actor._table.instances.values()
            states = [i.state for i in instances if i.record.variant == variant_name]
            if states:
                found[name] = states
        return found

    # -- the controllers' edge

    def _edge(self, name: str, command: Any) -> tuple[float, Any]:
        if name in self.cut_off and not isinstance(command, Start | Stop):
            return 0.5, OSError("the bucket cannot be reached")
        match command:
            case ClaimLease():
                value = self.bucket.get(LEADER)
                present = msgspec.msgpack.decode(value, type=LeaderRecord) if value else None
                if not command.allows(present):
                    return 0.01, LeaseClaimed(ok=False, present=present)
                self._write(LEADER, encode(command.record))
                return 0.01, LeaseClaimed(ok=True)
            case SaveMachine(worker=worker, record=record):
                self._write(machine_key(worker), None if record is None else encode(record))
            case SaveReplicas(pipeline=pipeline, record=kept):
                self._write(replicas_key(pipeline), None if kept is None else encode(kept))
            case ListMachines():
                return 0.05, self.inventory()
            case SolveFleet():
                self.plans.append((self.stage.now, name, command))
                seconds, plans = plans_for(command)
                return self.solve_s or seconds, Unsolved("nothing was found") if self.unsolved else plans
            case Start():
                order = command.order
                self.acted.append((self.stage.now, name, f"start {order.worker}", order.epoch))
                if self.broken:
                    return 0.05, ValueError(self.broken)
                if error := self.carry_out_start(order):
                    return 0.05, ValueError(error)
                self.started.append(order)
                self.mute -= 1
                return (1e6 if self.mute >= 0 else 0.05), None
            case Stop():
                order = command.order
                self.acted.append((self.stage.now, name, f"stop {order.worker}", order.epoch))
                if error := self.carry_out_stop(order):
                    return 0.3, ValueError(error)
                self.stopped.append(order)
                return 0.3, None
        return 0.01, None

    # -- whoever starts and stops machines

    def inventory(self) -> Inventory:
        return Inventory()

    def carry_out_start(self, order: StartMachine) -> str:
        """Returns why not."""
        if order.worker not in [one.worker for one in self.started] and not self.dead_on_arrival:
            self.stage.at(order.boot_s, lambda: self.start_worker(order.worker))
        return ""

    def carry_out_stop(self, order: StopMachine) -> str:
        self.stop_worker(order.worker)
        return ""

    def stop_worker(self, worker: str) -> None:
        """It says goodbye."""
        if worker in self.stage.members:
            self.stage.stop(worker)
            self.stage.kill(f"{worker}/cpu")

    def _write(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.bucket.pop(key, None)
        else:
            self.bucket[key] = value
        for name, _ in self._controllers():
            if name not in self.cut_off:
                self.stage.at(0.02, lambda name=name: self._tell(name, key, value))

    def _tell(self, name: str, key: str, value: bytes | None) -> None:
        if name in self.stage.members:
            self.stage.send(name, Changed(BUCKET, key, value))

    def machine(self, worker: str) -> MachineRecord | None:
        value = self.bucket.get(machine_key(worker))
        return msgspec.msgpack.decode(value, type=MachineRecord) if value else None


class PoolFleet(CloudFleet):
    """Machines of the provider's own, as nodes of a Swarm: a label makes one carry a worker. pool: names, all of kind "cpu".

    labelled: those of them that the operator has told to carry one. buys: how long a machine takes that is made by order, None: none is.
    away: why the provider cannot say anything. stuck: nodes whose worker does not end in time.
    """

    def __init__(
        self,
        *variants: Any,
        pool: Any = (),
        labelled: Any = (),
        buys: float | None = None,
        dry_run: bool = False,
        **more: Any,
    ) -> None:
        self.nodes = {name: Node(name=name, kind="cpu", worker="cpu" if name in labelled else "") for name in pool}
        self.buys = buys
        self.away = ""
        self.stuck: set[str] = set()
        self.made: list[str] = []
        self.removed: list[str] = []
        self.rehearsed: list[StartMachine | StopMachine] = []
        self._due: dict[str, float] = {}
        self._carried: set[str] = set()
        traits = ProviderTraits(has_inventory=True, confirm_stops=True, dry_run=dry_run)
        super().__init__(*variants, traits=traits, **({"workers": 0} | more))
        self._settle()

    def change(self, name: str, *, seconds: float = 0.0, **fields: Any) -> None:
        """The operator or the world changes a node; down: all on it dies, drain: the Swarm ends what runs there."""
        self.nodes[name] = replace(self.nodes[name], **fields)
        self._settle()
        self.after(seconds)

    def leave(self, name: str) -> None:
        """The machine dies and its node is removed."""
        self.change(name, up=False)
        del self.nodes[name]

    def inventory(self) -> Inventory:
        if self.away:
            return Inventory(error=self.away)
        return Inventory(nodes=tuple(self.nodes.values()), buys=self.buys is not None)

    def carry_out_start(self, order: StartMachine) -> str:
        if self.away:
            return self.away
        if self.traits.dry_run:
            self.rehearsed.append(order)
            return ""
        node = self.nodes.get(order.worker)
        if node is None:
            if not order.bought or self.buys is None:
                return f"no node is called {order.worker}"
            if order.worker not in self.made:
                self.made.append(order.worker)
                self.stage.at(self.buys, lambda: self._join(order.worker))
            return ""
        if not node.open:
            return f"{order.worker} is down or shut"
        if not node.worker:
            assert node.empty
            self.change(order.worker, worker=order.kind, order=order.order, bought=order.bought)
        return ""

    def carry_out_stop(self, order: StopMachine) -> str:
        if self.away:
            return self.away
        if self.traits.dry_run:
            self.rehearsed.append(order)
            return ""
        node = self.nodes.get(order.worker)
        if order.worker in self.stuck:
            return "its worker does not end"
        if node is not None:
            self.change(order.worker, worker="", order="")
        if order.bought or (node is not None and node.bought):
            self.removed.append(order.worker)
            self.nodes.pop(order.worker, None)
        return ""

    def _join(self, name: str) -> None:
        if name not in self.removed:
            self.nodes[name] = Node(name=name, kind="cpu")

    def _settle(self) -> None:
        """The Swarm has run what the labels say, or ended what they do not."""
        for node in self.nodes.values():
            wanted = bool(node.worker) and node.up and node.availability != "drain"
            starts = wanted and node.availability == "active"
            if not node.up and node.name in self._carried:
                self.stage.kill(node.name)
                self.stage.kill(f"{node.name}/cpu")
                self._carried.discard(node.name)
            elif not wanted and node.name in self._carried:
                self.stop_worker(node.name)
                self._carried.discard(node.name)
            elif starts and node.name not in self._carried and node.name not in self._due and not self.dead_on_arrival:
                self._due[node.name] = self.stage.now
                self.stage.at(1.0, lambda name=node.name: self._arrive(name))

    def _arrive(self, name: str) -> None:
        self._due.pop(name, None)
        node = self.nodes.get(name)
        if node is not None and node.worker and node.open and name not in self._carried:
            self._carried.add(name)
            self.start_worker(name)
