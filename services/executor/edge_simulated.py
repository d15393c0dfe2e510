"""The edge of a simulated device: a batch takes the time that its profile says, and no CPU except for its outputs.

Batches that overlap on a GPU slow each other (`SharedSpeed`): contexts of an instance, and all batches where `executor.exclusive` is false.

An ordinary edge computes the model's own outputs on the CPU if the CPU is predicted to be done in the batch's time. If not, since
the simulated device is faster than this machine, computing them would make the device as slow as the CPU. Then outputs are zeros
of the model's shape, and the answer's `reason` says so. Every answer of a simulated device says `simulated`.
"""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec.structs import replace

from bus.datatypes import SIZES
from bus.messages.catalog import VariantRecord
from bus.messages.fleet import Tier
from services.core.cost import LatencyTable
from services.core.emulation import SharedSpeed, computable, one_at_a_time, zeros
from services.executor.backends.base import BackendUnavailable
from services.executor.commands import (
    LOADERS,
    BatchResult,
    LoadedModel,
    LoadModel,
    MeasureProcess,
    ProcessUse,
    RunBatch,
    TransferModel,
    UnloadModel,
)
from services.executor.edge import MOST_RUNS, ExecutorEdge
from services.shell.runtime.runtime import unix_now

NOTE = "outputs are zeros: this simulated device is faster than the CPU that would have to compute them"


class SimulatedEdge:
    """One simulated device's edge. cpu_edge: computes outputs; several devices may share it. cores: of the device.

    A load makes the model, then transfers it. Transfers come one after the other, while other models are made and compute.

    sharing: how much batches that overlap slow each other.
    """

    def __init__(self, cpu_edge: ExecutorEdge, kind: str, cores: int, sharing: float = 1.0) -> None:
        self._cpu_edge = cpu_edge
        self._kind = kind
        self._tables: dict[str, tuple[VariantRecord, LatencyTable]] = {}
        self._loaders = asyncio.Semaphore(LOADERS)
        self._warm: dict[str, VariantRecord] = {}
        self._copied: set[str] = set()  # on the device, and in host memory, too
        self._transfers = asyncio.Lock()  # one at a time
        # uvloop's timers are exact to a millisecond, a sleeping thread to a tenth of one.
        most = MOST_RUNS if kind == "gpu" else max(1, cores)
        self._sleeping = ThreadPoolExecutor(max_workers=most, thread_name_prefix="sleep")
        self._overlapping = SharedSpeed(sharing) if kind == "gpu" else None
        self._ended: set[int] = set()
        self._changed = threading.Condition()  # a batch has begun or ended: the others' ends are others now

    async def perform(self, command: Any) -> Any:
        match command:
            case RunBatch():
                return await self._run(command)
            case LoadModel():
                return await self._load(command)
            case TransferModel():
                return await self._transfer(command)
            case UnloadModel():
                self._tables.pop(command.instance, None)
                self._warm.pop(command.instance, None)
                self._copied.discard(command.instance)
            case MeasureProcess():
                return ProcessUse(sum(record.profile.memory_mb for record, _ in self._tables.values()))
        return await self._cpu_edge.perform(command)

    async def _load(self, command: LoadModel) -> LoadedModel:
        record = command.variant
        self._check(record, command.tier)
        async with self._loaders:
            started = time.perf_counter()
            loaded: LoadedModel = await self._cpu_edge.perform(replace(command, tier="device"))
            init_s = (record.profile.load_ms - (record.profile.transfer_ms or 0.0)) / 1000.0
            await asyncio.sleep(init_s - (time.perf_counter() - started))
            took = time.perf_counter() - started
        proof = f"simulated {self._kind}: times by profile, outputs by {loaded.proof}"
        if command.tier == "device":
            took += await self._over_the_bus(record)
        return self._is_in(command.instance, record, command.tier, took, proof)

    async def _transfer(self, command: TransferModel) -> LoadedModel:
        """The weights need no artifact and nothing is made again. The CPU's model, which computes the outputs, stays as it is."""
        known = self._tables.get(command.instance)
        record = known[0] if known is not None else self._warm.get(command.instance)
        if record is None:
            raise BackendUnavailable("it is not loaded any more")
        self._check(record, command.tier)
        has_copy = command.instance in self._copied
        self._copied.discard(command.instance)
        took = 0.0 if has_copy else await self._over_the_bus(record)
        if command.tier == "device" and command.copied:
            self._copied.add(command.instance)
        proof = f"simulated {self._kind}: times by profile"
        return self._is_in(command.instance, record, command.tier, took, proof)

    def _check(self, record: VariantRecord, tier: Tier) -> None:
        if tier == "host" and record.profile.host_mb is None:
            raise BackendUnavailable(f"a simulated {self._kind} keeps no models in host memory")

    async def _over_the_bus(self, record: VariantRecord) -> float:
        """Returns the seconds that it took, without the wait for others."""
        async with self._transfers:
            started = time.perf_counter()
            await asyncio.sleep((record.profile.transfer_ms or 0.0) / 1000.0)
            return time.perf_counter() - started

    def _is_in(self, instance: str, record: VariantRecord, tier: Tier, took: float, proof: str) -> LoadedModel:
        memory_mb = record.profile.memory_mb
        if tier == "device":
            self._warm.pop(instance, None)
            self._tables[instance] = record, LatencyTable(record)
        else:
            self._tables.pop(instance, None)
            self._warm[instance] = record
            memory_mb = record.profile.host_mb or 0.0
        one = one_at_a_time(self._kind)
        return LoadedModel(took * 1000.0, memory_mb, proof, one, tier, copied=instance in self._copied)

    async def _run(self, command: RunBatch) -> BatchResult:
        known = self._tables.get(command.instance)
        if known is None:
            unloaded: BatchResult = await self._cpu_edge.perform(command)
            return unloaded
        record, table = known
        started = unix_now()
        items = sum(query.items for query in command.queries)
        seconds = table.at(command.queries[0].route.length).seconds(items)
        number = self._begin(seconds)
        if not _known_size(record) or computable(record, items, seconds):
            result: BatchResult = await self._cpu_edge.perform(command)
        else:
            result = _zeros(record, command)
        loop = asyncio.get_running_loop()
        if result.errors is not None:
            self._drop(number)
        elif number:
            await loop.run_in_executor(self._sleeping, self._sleep_among_others, number)
        elif (rest := started + seconds - unix_now()) > 0:
            await loop.run_in_executor(self._sleeping, time.sleep, rest)
        return replace(result, started=started, finished=unix_now())

    def _begin(self, seconds: float) -> int:
        """A batch begins on a GPU; returns its number there. 0: the device has cores of its own for each batch."""
        if self._overlapping is None:
            return 0
        with self._changed:
            self._advance()
            number = self._overlapping.begin(seconds, time.perf_counter())
            self._changed.notify_all()
        return number

    def _drop(self, number: int) -> None:
        """A batch has failed."""
        if self._overlapping is not None:
            with self._changed:
                self._advance()
                self._overlapping.drop(number)
                self._ended.discard(number)
                self._changed.notify_all()

    def _sleep_among_others(self, number: int) -> None:
        """Wait for a batch's end, in a thread."""
        assert self._overlapping is not None
        with self._changed:
            self._advance()
            while number not in self._ended:
                self._changed.wait(self._overlapping.next_end() - time.perf_counter())
                self._advance()
            self._ended.discard(number)

    def _advance(self) -> None:
        assert self._overlapping is not None
        self._ended.update(self._overlapping.advance(time.perf_counter()))


def _known_size(record: VariantRecord) -> bool:
    """Whether the signature says how large outputs are. Otherwise only the model knows."""
    return all(SIZES.get(spec.datatype) and min(spec.shape, default=0) >= 0 for spec in record.signature.outputs)


def _zeros(record: VariantRecord, command: RunBatch) -> BatchResult:
    outputs = [zeros(record.signature.outputs, query.items) for query in command.queries]
    size = sum(len(tensor.data) for answer in outputs for tensor in answer.values())
    return BatchResult(0.0, 0.0, outputs, None, size, NOTE)
