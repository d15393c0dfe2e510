"""The simulated edges of the services' actors. They say how long each command takes, and its result. They decide nothing."""

from collections.abc import Callable
from heapq import heapreplace
from math import inf
from typing import Any

from msgspec import Struct, field

from bus.codec import decode_kept, encode
from bus.messages.catalog import VariantRecord
from bus.messages.fleet import Tier
from bus.messages.public import Tensor
from bus.messages.quality import AppQuality
from bus.messages.scaling import LeaderRecord, StartMachine
from services.autoscaler.vms.commands import (
    LEADER,
    ClaimLease,
    FleetSolved,
    LeaseClaimed,
    SaveMachine,
    SaveReplicas,
    SolveFleet,
    Start,
    Stop,
    machine_key,
)
from services.core.catalog import quality_key, replicas_key
from services.core.emulation import one_at_a_time, zeros
from services.core.placement import quarantine_key
from services.core.planning.fleet import Unsolved, solve_fleet
from services.dispatcher.commands import ContextWritten, PutQuality, ReadContext, StoredContext, WriteContext
from services.executor.commands import (
    LOADERS,
    BatchResult,
    LoadedModel,
    LoadModel,
    MeasureProcess,
    MovedModel,
    MoveModel,
    ProcessUse,
    RunBatch,
    TransferModel,
    UnloadModel,
)
from services.executor.queue import QueuedQuery
from services.monitor.effects import KeepQuarantine, MachineSample, SampleMachine
from services.simulation.composites import SimulatedModels, told
from services.simulation.hardware import SimulatedDevice, SimulatedMachine, Transfers
from services.simulation.hosts import Promised
from services.simulation.kernel import Environment

STORE = 0.001  # s for one write to a bucket
UNLOAD = 0.01  # s
FAILS = 0.05  # s that a failing load takes
NODES = 200  # limit of a branch-and-bound search in place of time, so that every machine finds the same plan
NOT_STORED = StoredContext(None, 0)
NO_OUTPUTS: dict[str, Tensor] = {}
NOTES = "simulated"
NO_CONTENTS = "outputs are zeros: nothing is computed on virtual time"


class LoadFault(RuntimeError):
    """A load that fails, as the scenario says."""


class SimulatedExecutorEdge(Struct, eq=False):
    """An executor's edge. load_seconds: time to load a variant now; raises LoadFault. holds: called with each loaded (+1) or unloaded (-1) instance.

    As on a real device, up to LOADERS models are loaded at once.

    models: what models say; where they have nothing to say, outputs are zeros, for later stages. None: outputs are empty, as nobody looks at them.
    skew: seconds by which its clock is ahead. tells: whether its dispatchers hear which classes were answered (`told`).
    """

    computes = True  # what it does stops with its process

    environment: Environment
    device: SimulatedDevice
    load_seconds: Callable[[VariantRecord], float]
    holds: Callable[[VariantRecord, int], None]
    models: SimulatedModels | None = None
    skew: float = 0.0
    tells: bool = False
    _computing: dict[str, tuple[float, list[QueuedQuery]]] = {}  # by instance: when its last batch ends
    # When each has done the loads that it was given: a heap.
    _loaders: list[float] = field(default_factory=lambda: [0.0] * LOADERS)
    _warm: dict[str, VariantRecord] = {}
    _copied: set[str] = set()  # on the device, and in host memory, too
    _transfers: Transfers = field(default_factory=Transfers)
    _under_way: dict[int, tuple[Promised, RunBatch, VariantRecord, float]] = {}  # those that overlap; and begins
    _timer: int = 0

    def __call__(self, command: Any) -> tuple[float, Any] | Promised:
        if type(command) is RunBatch:
            if not self.device.exclusive or (command.contexts > 1 and self.device.spec.kind == "gpu"):
                return self._overlap(command)
            queries = command.queries
            items = (
                len(queries) if len(queries) == 1 and queries[0].items == 1 else sum(query.items for query in queries)
            )
            now = self.environment.now
            seconds = self.device.run(command.instance, items, queries[0].route.length, now)
            self._computing[command.instance] = now + seconds, queries
            return seconds, self._result(command, self.device.residents[command.instance].record, now, now + seconds)
        match command:
            case LoadModel():
                try:
                    seconds = self.load_seconds(command.variant)
                except LoadFault as fault:
                    return FAILS, fault
                return self._load(command, seconds)
            case TransferModel():
                return self._transfer(command)
            case UnloadModel():
                self._unload(command.instance)
                return UNLOAD, None
            case MoveModel():
                return self.load_seconds(command.variant), MovedModel(NOTES)
            case MeasureProcess():
                return STORE, ProcessUse(self.device.memory_mb)
        return 0.0, ValueError(f"simulated devices cannot {type(command).__name__}")

    def computing(self) -> list[bytes]:
        """The uids of the queries in the batches under way."""
        now = self.environment.now
        batches = [queries for ends, queries in self._computing.values() if ends > now]
        batches += [command.queries for _, command, _, _ in self._under_way.values()]
        return [query.route.uid for queries in batches for query in queries]

    def close(self) -> None:
        """Its process has died: what it computed ends."""
        self.device.stop(self.environment.now)
        self.device.overlapping.advance(self.environment.now)
        for number in self._under_way:
            self.device.overlapping.drop(number)
        self._under_way.clear()
        self._timer += 1

    def _load(self, command: LoadModel, seconds: float) -> tuple[float, LoadedModel]:
        """seconds: of the load, if no other is in the way."""
        record, now = command.variant, self.environment.now
        transfer_s = min((record.profile.transfer_ms or 0.0) / 1000.0, seconds)
        made = max(now, self._loaders[0]) + seconds - transfer_s
        heapreplace(self._loaders, made)
        if command.tier == "host":
            self._warm[command.instance] = record
            return made - now, self._is_in(command.instance, "host", record, seconds - transfer_s)
        self._arrives(command.instance, record)
        takes = self._transfers.take(now, made - now, transfer_s) if transfer_s > 0.0 else made - now
        return takes, self._is_in(command.instance, "device", record, seconds)

    def _transfer(self, command: TransferModel) -> tuple[float, LoadedModel | Exception]:
        instance, resident = command.instance, self.device.residents.get(command.instance)
        record = resident.record if resident is not None else self._warm.get(instance)
        if record is None or record.profile.host_mb is None:
            return 0.0, ValueError("it is not there, or its device keeps no models in host memory")
        has_copy = instance in self._copied
        self._copied.discard(instance)
        if command.tier == "device" and not command.copied:
            return 0.0, self._is_in(instance, "device", record, 0.0)
        self._unload(instance)
        if command.tier == "device":
            self._arrives(instance, record)
            self._copied.add(instance)
        else:
            self._warm[instance] = record
        if has_copy:
            return 0.0, self._is_in(instance, command.tier, record, 0.0)
        transfer_s = (record.profile.transfer_ms or 0.0) / 1000.0
        takes = self._transfers.take(self.environment.now, 0.0, transfer_s)
        return takes, self._is_in(instance, command.tier, record, transfer_s)

    def _arrives(self, instance: str, record: VariantRecord) -> None:
        self.device.load(instance, record)
        self.holds(record, 1)

    def _is_in(self, instance: str, tier: Tier, record: VariantRecord, seconds: float) -> LoadedModel:
        memory_mb = record.profile.memory_mb if tier == "device" else record.profile.host_mb or 0.0
        one = one_at_a_time(self.device.spec.kind)
        return LoadedModel(1000.0 * seconds, memory_mb, NOTES, one, tier, copied=instance in self._copied)

    def _result(self, command: RunBatch, record: VariantRecord, started: float, finished: float) -> BatchResult:
        queries = command.queries
        started, finished = started + self.skew, finished + self.skew
        known: list[list[Any] | None] | None = None
        if self.tells:
            known = [[told(record, query.route.uid, item) for item in range(query.items)] for query in queries]
        if self.models is None:
            return BatchResult(started, finished, [NO_OUTPUTS] * len(queries), said=known)
        said = [self.models.outputs(record, query.inputs) for query in queries]
        outputs = [
            one or zeros(record.signature.outputs, query.items) for one, query in zip(said, queries, strict=True)
        ]
        return BatchResult(started, finished, outputs, note="" if all(said) else NO_CONTENTS, said=known)

    def _overlap(self, command: RunBatch) -> Promised:
        """Begin a batch among others. When it ends depends on those that come and go meanwhile."""
        now, queries = self.environment.now, command.queries
        self._end()
        items = sum(query.items for query in queries)
        number = self.device.overlap(command.instance, items, queries[0].route.length, now)
        promised = Promised()
        self._under_way[number] = promised, command, self.device.residents[command.instance].record, now
        self._await_next()
        return promised

    def _end(self) -> None:
        """Hand over the results of the batches that have ended."""
        now = self.environment.now
        for number in self.device.overlapping.advance(now):
            promised, command, record, started = self._under_way.pop(number)
            self.environment.at(0.0, promised.keep, self._result(command, record, started, now))

    def _await_next(self) -> None:
        due = self.device.overlapping.next_end()
        self._timer += 1
        if due < inf:
            self.environment.at(max(0.0, due - self.environment.now), self._due, self._timer)

    def _due(self, timer: int) -> None:
        """A batch ends, unless another one has begun since the timer was set."""
        if timer == self._timer:
            self._end()
            self._await_next()

    def _unload(self, instance: str) -> None:
        self._warm.pop(instance, None)
        self._copied.discard(instance)
        resident = self.device.residents.get(instance)
        if resident is not None:
            self.device.unload(instance)
            self.holds(resident.record, -1)


class SimulatedDispatcherEdge(Struct, eq=False):
    """A dispatcher's edge. catalog: the bucket. stored: the selection bucket of all dispatchers, by key."""

    remote = frozenset((ReadContext, WriteContext, PutQuality))  # what travels on its process's connection

    environment: Environment
    catalog: str
    stored: dict[str, StoredContext]

    def __call__(self, command: Any) -> tuple[float, Any]:
        match command:
            case ReadContext():
                return STORE, self.stored.get(command.key, NOT_STORED)
            case WriteContext():
                present = self.stored.get(command.key, NOT_STORED)
                if present.revision != command.revision:
                    return STORE, present
                self.stored[command.key] = StoredContext(command.value, command.revision + 1)
                return STORE, ContextWritten(command.revision + 1)
            case PutQuality():
                key = quality_key(command.app)
                held = decode_kept(AppQuality, self.environment.get(self.catalog, key))
                if held is None or held.revision < command.revision:
                    self.environment.put(self.catalog, key, command.value)
                return STORE, None
        return 0.0, ValueError(f"simulated dispatchers cannot {type(command).__name__}")


class SimulatedMonitorEdge(Struct, eq=False):
    """A monitor's edge."""

    remote = frozenset((KeepQuarantine,))

    environment: Environment
    machine: SimulatedMachine
    control_bucket: str

    def __call__(self, command: Any) -> tuple[float, Any]:
        match command:
            case SampleMachine():
                used = self.machine.utilisation_of("cpu", self.environment.now)
                memory = sum(d.memory_mb for d in self.machine.devices.values() if d.spec.kind == "cpu")
                return 0.0, MachineSample(utilisation=used, memory_used_mb=memory)
            case KeepQuarantine():
                self.environment.put(
                    self.control_bucket, quarantine_key(command.worker, command.variant), command.reason.encode()
                )
                return STORE, None
        return 0.0, ValueError(f"simulated machines cannot {type(command).__name__}")


class SimulatedControllerEdge(Struct, eq=False):
    """The VM-autoscaler's edge: the control bucket, and functions that start and stop machines."""

    remote = frozenset((ClaimLease, SaveMachine, SaveReplicas))

    environment: Environment
    bucket: str
    start: Callable[[StartMachine], None]
    stop: Callable[[str], None]

    def __call__(self, command: Any) -> tuple[float, Any]:
        match command:
            case ClaimLease():
                return STORE, self._claim(command)
            case SaveMachine():
                self._save(machine_key(command.worker), command.record)
            case SaveReplicas():
                self._save(replicas_key(command.pipeline), command.record)
            case Start():
                self.start(command.order)
            case Stop():
                self.stop(command.order.worker)
            case SolveFleet():
                return plans_for(command)
            case _:
                return 0.0, ValueError(f"simulated controllers cannot {type(command).__name__}")
        return STORE, None

    def _save(self, key: str, record: Struct | None) -> None:
        self.environment.put(self.bucket, key, None if record is None else encode(record))

    def _claim(self, claim: ClaimLease) -> LeaseClaimed:
        present: LeaderRecord | None = decode_kept(LeaderRecord, self.environment.get(self.bucket, LEADER))
        if not claim.allows(present):
            return LeaseClaimed(ok=False, present=present)
        self.environment.put(self.bucket, LEADER, encode(claim.record))
        return LeaseClaimed(ok=True)


def plans_for(command: SolveFleet) -> tuple[float, FleetSolved | Exception]:
    """Both plans. The seconds that they take are computed from the size of the problems, because the wall clock must not count."""
    seconds = 0.005 + 50e-6 * command.size
    try:
        present = solve_fleet(command.present, time_limit_s=None, node_limit=NODES)
        growth = None if command.growth is None else solve_fleet(command.growth, time_limit_s=None, node_limit=NODES)
    except Unsolved as error:
        return seconds, error
    return seconds, FleetSolved(growth, present, 1000.0 * seconds)
