"""A whole simulated system: the services' own actors, made by the factories that production uses, on simulated machines."""

from collections.abc import Callable
from functools import partial
from itertools import count
from math import inf
from time import perf_counter
from typing import Literal

from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import AppRecord, ModelRecord, VariantRecord
from bus.messages.fleet import ExecutorExited
from bus.messages.scaling import StartMachine
from bus.subjects import Subjects
from services.autoscaler.models.actor import make_model_autoscaler
from services.autoscaler.vms.actor import make_controller
from services.autoscaler.vms.edge import load_forecaster
from services.autoscaler.vms.rules import PricedKind
from services.core.catalog import key_of
from services.core.outcomes import LAST_WORDS
from services.core.settings import MachineKind
from services.dispatcher.actor import make_dispatcher
from services.dispatcher.commands import StoredContext
from services.dispatcher.metrics import SampledPolicy
from services.executor.actor import make_executor
from services.jobs.actor import make_coordinator
from services.jobs.runner.actor import make_runner
from services.monitor.actor import make_monitor
from services.shell.policies import load_policy, load_scaling
from services.simulation.composites import SimulatedModels, drawn
from services.simulation.edges import (
    SimulatedControllerEdge,
    SimulatedDispatcherEdge,
    SimulatedExecutorEdge,
    SimulatedMonitorEdge,
)
from services.simulation.hardware import RunningCost, SimulatedDevice, SimulatedMachine
from services.simulation.kernel import Environment
from services.simulation.offline import OfflineWork
from services.simulation.scenario.model import MachineSpec, PolicySpec, Scenario

SPREAD = 0.5  # s over which the starts of the first machines are spread, because real machines do not start in step
INSTANT = 0.001  # s that a load takes before the scenario begins
GOLDEN = 0.6180339887
_PRICED = tuple(field for field in PricedKind.__struct_fields__ if field in MachineSpec.__struct_fields__)


def process_of(name: str) -> str:
    """The process in which production runs an actor: one for all devices of a worker, one for the other actors of a worker."""
    worker, slash, _ = name.partition("/")
    if slash:
        return f"executor-{worker}"
    role, _, worker = name.partition("-")
    return f"monitor-{worker}" if role in ("model", "offline") else "vm-0" if role == "jobs" else name


def processes_of(worker: str) -> tuple[str, str, str]:
    """A worker's processes. The last one runs no actor: it says when the executor has ended."""
    return f"executor-{worker}", f"monitor-{worker}", f"supervisor-{worker}"


class SimulatedSystem:
    """All machines and services of one run. begins: time at which the scenario begins; loads before are instant.

    machines: the running ones, by worker. decided: called with the seconds of each timed selection.
    """

    def __init__(
        self,
        environment: Environment,
        scenario: Scenario,
        policy: PolicySpec,
        begins: float,
        decided: Callable[[float], None],
    ) -> None:
        self.machines: dict[str, SimulatedMachine] = {}
        self.bill = RunningCost(scenario.cost, begins)
        self.subjects = Subjects()
        self.load_takes: Callable[[VariantRecord, float], float] = lambda _, seconds: seconds
        self.boots: Callable[[MachineSpec], float] = lambda spec: spec.boot_s
        self.booted: Callable[[str, MachineSpec], None] = lambda *_: None
        self.skew: Callable[[str], float] = lambda _: 0.0
        self.controllers = 1
        self._tells = any(fault.kind == "labels-late" for fault in scenario.faults)
        several = any(app.selection is not None or app.pipeline is not None for app in scenario.apps)
        self.models = SimulatedModels() if several else None
        self.appears: Callable[[SimulatedMachine], None] = lambda _: None
        self._environment = environment
        self._scenario = scenario
        self._policy = policy
        self._begins = begins
        self._decided = decided
        self._specs = {spec.kind: spec for spec in policy.machines}
        bill: Literal["machines", "instances"] = "machines" if scenario.cost.meter == "worker" else "instances"
        autoscaler = replace(policy.settings.autoscaler, bill=bill)
        self._settings = replace(policy.settings, autoscaler=autoscaler)
        self.booting: dict[str, MachineSpec] = {}
        self.contexts: dict[str, StoredContext] = {}
        self._executors: dict[str, SimulatedExecutorEdge] = {}
        self._incarnations = count(1)
        self._uids = count(1)
        self._first_uid = drawn("uids", scenario.seed)
        self.offline = OfflineWork(environment, self.subjects, scenario.jobs)
        self._selection = self._make_selection()

    # -- at the beginning

    def build(self) -> None:
        """Start the dispatchers, the controller, the coordinator and the machines of time 0, with the catalogue."""
        self._catalogue()
        settings = self._settings
        load_forecaster(settings.autoscaler)
        for number in range(settings.dispatcher.count):
            self._start_dispatcher(f"d-{number}")
        for number in range(self.controllers):
            self._start_controller(f"vm-{number}")
        if self._scenario.jobs:
            self._start_coordinator("jobs-0")
        number = 0
        for spec in self._policy.machines:
            for index in range(spec.start):
                name = spec.workers[index] if spec.workers else f"{spec.kind}-{index}"
                self._environment.at(SPREAD * (number * GOLDEN % 1.0), self._appear, (name, spec))
                number += 1

    def _start_dispatcher(self, name: str, life: str = "") -> None:
        """Life: what its name ends with after a restart, as each start in production has a name of its own."""
        dispatcher = make_dispatcher(
            self._settings, self.subjects, name + life, self._selection, self._scenario.prices, self._new_uid
        )
        self._environment.enter(
            name, dispatcher, SimulatedDispatcherEdge(self._environment, self.subjects.catalog_bucket, self.contexts)
        )

    def _start_controller(self, name: str, life: str = "") -> None:
        scaling = load_scaling(self._settings, strict=True)
        controller = make_controller(self._settings, self.subjects, name + life, self._kinds(), policy=scaling)
        edge = SimulatedControllerEdge(self._environment, self.subjects.control_bucket, self._ordered, self.stop)
        self._environment.enter(name, controller, edge)

    def _start_coordinator(self, name: str, life: str = "") -> None:
        coordinator = make_coordinator(
            self._settings, self.subjects, name + life, self._scenario.prices, lambda: "job", simulated=True
        )
        self._environment.enter(name, coordinator, self.offline.coordinate)

    def _catalogue(self) -> None:
        kinds = self._policy.hardware
        records: list[VariantRecord | ModelRecord | AppRecord] = [
            *(one for one in self._scenario.variants if kinds is None or one.hardware in kinds),
            *self._scenario.models,
            *(replace(one, plan=self._policy.plans.get(one.app)) for one in self._scenario.apps),
        ]
        for record in records:
            self._environment.put(self.subjects.catalog_bucket, key_of(record), encode(record))
        for key, rule in self._scenario.batching.items():
            self._environment.put(self.subjects.control_bucket, key, encode(rule))

    def _new_uid(self) -> bytes:
        # Draws read the first 8 bytes. With another seed they are others.
        return ((self._first_uid + next(self._uids)) % 2**64).to_bytes(16, "little")

    def _make_selection(self) -> SampledPolicy:
        settings = self._settings
        kinds = {
            spec.kind: MachineKind(minimum=spec.minimum, maximum=spec.maximum)
            for spec in self._policy.machines
            if spec.maximum
        }
        machines = replace(settings.machines, provider="simulated", kinds=kinds)
        return SampledPolicy(
            load_policy(replace(settings, machines=machines), strict=True), perf_counter, self._decided
        )

    def _kinds(self) -> dict[str, PricedKind]:
        """The kinds of machine that the controller may start."""
        return {
            spec.kind: PricedKind(name=spec.kind, **{field: getattr(spec, field) for field in _PRICED})
            for spec in self._policy.machines
        }

    # -- machines

    def _ordered(self, order: StartMachine) -> None:
        """The controller ordered a machine."""
        if order.worker not in self.machines and order.worker not in self.booting:
            self._boot(order.worker, self._specs[order.kind])

    def _boot(self, worker: str, spec: MachineSpec) -> None:
        """A machine costs from now on, and works once it has booted."""
        self.booting[worker] = spec
        self.bill.machine(spec, 1, self._environment.now)
        seconds = self.boots(spec)
        if seconds < inf:
            self._environment.at(seconds, self._appear, (worker, spec, True))

    def _appear(self, what: tuple[str, MachineSpec] | tuple[str, MachineSpec, bool]) -> None:
        """A machine works: start its executors, monitor, autoscaler and runner."""
        worker, spec, *booted = what
        if worker in self.machines:
            return
        now = self._environment.now
        if not booted:
            self.bill.machine(spec, 1, now)
        elif self.booting.pop(worker, None) is None:
            return  # stopped while it booted
        machine = self.machines[worker] = SimulatedMachine(
            worker, spec, self._scenario.interference, now, self._settings.executor
        )
        self.appears(machine)
        self._start_executors(machine)
        self._start_monitor(machine)
        if booted:
            self.booted(worker, spec)

    def _start_executors(self, machine: SimulatedMachine) -> None:
        worker, settings = machine.worker, self._settings
        for name, device in machine.devices.items():
            executor = make_executor(settings, self.subjects, worker, device.spec, next(self._incarnations))
            edge = SimulatedExecutorEdge(
                self._environment, device, self._load_seconds, self._holds, self.models, self.skew(worker), self._tells
            )
            self._executors[f"{worker}/{name}"] = edge
            self._environment.enter(f"{worker}/{name}", executor, edge)

    def _start_monitor(self, machine: SimulatedMachine) -> None:
        """The monitor, the model-autoscaler and the runner of jobs."""
        worker, spec, settings, prices = machine.worker, machine.spec, self._settings, self._scenario.prices
        hardware, incarnation = spec.devices[0].kind, next(self._incarnations)
        monitor = make_monitor(
            settings, self.subjects, worker, hardware, spec.kind, spec.devices, prices, incarnation
        )  # fmt: skip
        self._environment.enter(
            f"monitor-{worker}", monitor, SimulatedMonitorEdge(self._environment, machine, self.subjects.control_bucket)
        )
        autoscaler = make_model_autoscaler(settings, self.subjects, worker, prices)
        self._environment.enter(f"model-{worker}", autoscaler)
        if self._scenario.jobs:
            name = f"offline-{worker}-{next(self._incarnations)}"
            runner = make_runner(settings, self.subjects, name, worker, prices, simulated=True)
            self._environment.enter(f"offline-{worker}", runner, self.offline.runner())

    def join(self, worker: str, kind: str) -> None:
        """A machine of this kind appears. worker: its name; "": one of its own."""
        names = (f"{kind}-{number}" for number in count())
        self._appear((worker or next(name for name in names if name not in self.machines), self._specs[kind]))

    def reboot(self, worker: str) -> None:
        """A machine that the controller ordered goes without a word, and boots again."""
        machine = self.machines.get(worker)
        if machine is not None:
            self.stop(worker, goodbye=False)
            self._boot(worker, machine.spec)

    # -- processes

    def died(self, process: str) -> None:
        """The process has ended: tell what its supervisor tells."""
        role, _, worker = process.partition("-")
        machine = self.machines.get(worker) if role == "executor" else None
        if machine is None:
            return
        now = self._environment.now + self.skew(worker)
        edges = {device: self._executors[f"{worker}/{device}"] for device in machine.devices}
        running = [uid for edge in edges.values() for uid in edge.computing()]
        for name, device in machine.devices.items():
            edges[name].close()
            self._empty(device)
            fact = ExecutorExited(worker=worker, device=name, at=now, reason="killed by SIGKILL", running=running)
            by = f"supervisor-{worker}"
            tell = partial(self._environment.publish, self.subjects.exited(worker, name), by=by)
            self._environment.at(LAST_WORDS, tell, fact)

    def restart(self, process: str) -> None:
        """Start the actors of a process that has died, as its supervisor does. Nothing happens if its machine is gone."""
        role, _, rest = process.partition("-")
        life = f"-{next(self._incarnations)}"
        if role == "d":
            self._start_dispatcher(process, life)
        elif role == "vm":
            self._start_controller(process, life)
            if process == "vm-0" and self._scenario.jobs:
                self._start_coordinator("jobs-0", life)
        elif (machine := self.machines.get(rest)) is not None:
            (self._start_executors if role == "executor" else self._start_monitor)(machine)

    def stop(self, worker: str, *, goodbye: bool = True) -> None:
        """Stop a worker: its services get Stopping, or end without a message."""
        booting = self.booting.pop(worker, None)
        if booting is not None:
            self.bill.machine(booting, -1, self._environment.now)
        machine = self.machines.pop(worker, None)
        if machine is None:
            return
        for name in (
            f"offline-{worker}",
            f"model-{worker}",
            f"monitor-{worker}",
            *(f"{worker}/{device}" for device in machine.devices),
        ):
            self._environment.leave(name, goodbye=goodbye)
        now = self._environment.now
        for device in machine.devices.values():
            self._empty(device)
        self.bill.machine(machine.spec, -1, now)

    def _empty(self, device: SimulatedDevice) -> None:
        """What was loaded is gone."""
        for resident in device.residents.values():
            self.bill.instance(resident.record, -1, self._environment.now)
        device.residents.clear()

    def _holds(self, record: VariantRecord, number: int) -> None:
        self.bill.instance(record, number, self._environment.now)

    def _load_seconds(self, record: VariantRecord) -> float:
        if self._environment.now < self._begins:
            return INSTANT
        return self.load_takes(record, record.profile.load_ms / 1000.0)
