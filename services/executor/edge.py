"""The executor's hands: models in memory, batches on the device, large bodies in the object store.

Short batches run on the loop itself (a thread hop costs more than they do); everything longer runs in a pool, where the
frameworks release the GIL. A watchdog ends runs that take many times their profile: first by asking the framework, then,
if it does not obey, by ending this process, which the supervisor starts again.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from bus.codec import encode
from bus.messages.public import ObjectRef
from bus.port import Bus, BusError
from bus.subjects import Subjects
from bus.tensors import BadTensor
from services.executor.assemble import NotANumber, most_bytes, several, single, split
from services.executor.backends.base import BackendError, Handle, plain
from services.executor.commands import (
    BatchResult,
    FetchInputs,
    LoadedModel,
    LoadModel,
    MeasureMemory,
    MoveModel,
    RunBatch,
    Shrink,
    StoreOutputs,
    UnloadModel,
)
from services.executor.edge_models import DeviceModels, ModelInMemory
from services.shell.clock import now
from services.shell.runtime.telemetry import about

log = logging.getLogger(__name__)

HUNG = 71  # exit code: a run could not be ended
OBEY = 2.0  # s a framework has to end a run that was cancelled
INLINE_LIMIT = 0.25  # s; a run on the loop that takes longer is cancelled and done again in a thread
LOOK = 0.05  # s between looks at the run on the loop
MOST_LARGE = 256 * 2**20  # bytes of inputs fetched by reference


class ExecutorEdge:
    """One device's edge. cache: where fetched artifacts are kept, by their digest."""

    def __init__(
        self, bus: Bus, subjects: Subjects, device: str, cores: int, cache: Path, *, watchdog: float, least_s: float
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._watchdog = watchdog
        self._least = least_s
        threads = ThreadPoolExecutor(max_workers=max(1, cores), thread_name_prefix="run")
        self._models = DeviceModels(bus, subjects, device, cache, threads)
        self._held = self._models.held
        self._off_loop = self._models.off_loop
        self._inline_since = 0.0
        self._inline_handle: Handle | None = None
        self._process = psutil.Process()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    # -- running

    def inline(self, command: Any) -> Any:
        """Run a short batch at once."""
        if type(command) is not RunBatch or not command.inline or command.instance in self._off_loop:
            return NotImplemented
        held = self._held.get(command.instance)
        if held is None:
            return NotImplemented
        self._inline_handle = held.handle
        self._inline_since = time.monotonic()
        result = self._compute(held, command)
        taken = time.monotonic() - self._inline_since
        self._inline_since = 0.0
        if taken > INLINE_LIMIT:
            self._off_loop.add(command.instance)
            if result.errors is not None:
                return NotImplemented  # cancelled, most likely: a thread has the time to find out
        return result

    async def perform(self, command: Any) -> Any:
        match command:
            case RunBatch():
                return await self._run(command)
            case LoadModel():
                return await self._models.load(command)
            case MoveModel():
                return await self._models.move(command)
            case UnloadModel():
                return await self._models.unload(command)
            case FetchInputs():
                store = await self._bus.object_store(command.ref.bucket, create=False)
                data = await store.get(command.ref.key)
                if len(data) > MOST_LARGE:
                    raise BadTensor(f"the object holds {len(data)} bytes, at most {MOST_LARGE} are taken")
                return data
            case StoreOutputs():
                bucket = f"{self._subjects.prefix}-outputs"
                store = await self._bus.object_store(bucket, max_age_s=600.0)
                await store.put(command.key, encode(command.outputs))
                return ObjectRef(bucket=bucket, key=command.key)
            case MeasureMemory():
                return self._process.memory_info().rss / 2**20
            case Shrink():
                self._held[command.instance].handle.shrink()
                return None
        raise TypeError(f"unknown command {command!r}")

    def _compute(self, held: ModelInMemory, command: RunBatch) -> BatchResult:
        """Assemble, run, split; what fails is reported for the whole batch and sorted out by the actor."""
        works = command.works
        started = now()
        try:
            handle = held.handle
            limit = held.record.max_batch
            if held.one is not None:
                array = single(works, held.one)
                outputs = handle.run_single(array) if len(array) <= limit else self._pieces(held, array)
            else:
                named = handle.run(several(works, held.record.signature))
                outputs = [named[name] for name in handle.outputs]
            return BatchResult(started, now(), split(outputs, handle.outputs, works), None, most_bytes(outputs))
        except (BackendError, BadTensor, NotANumber, ValueError, KeyError, MemoryError) as error:
            return BatchResult(started, now(), [], [plain(error)] * len(works))

    @staticmethod
    def _pieces(held: ModelInMemory, array: Any) -> list[Any]:
        """A query larger than the variant's largest batch runs in pieces."""
        import numpy as np  # noqa: PLC0415

        limit = held.record.max_batch
        parts = [held.handle.run_single(array[i : i + limit]) for i in range(0, len(array), limit)]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    async def _run(self, command: RunBatch) -> BatchResult:
        held = self._held.get(command.instance)
        if held is None:
            return BatchResult(now(), now(), [], ["the model is no longer loaded"] * len(command.works))
        held.running = True
        try:
            if command.works[0].route.alone:
                # A suspect: what was said of it must be out before it may end this process.
                with contextlib.suppress(BusError):
                    await self._bus.flush(1.0)
            return await self._watched(held, command)
        finally:
            held.running = False

    async def _watched(self, held: ModelInMemory, command: RunBatch) -> BatchResult:
        """Compute in a thread, and end it when it takes many times its profile."""
        work = asyncio.get_running_loop().run_in_executor(held.threads, self._compute, held, command)
        limit = max(self._least, self._watchdog * command.predicted)
        done, _ = await asyncio.wait([work], timeout=limit)
        if done:
            return work.result()
        log.error(
            "a run takes too long and is cancelled",
            extra={"instance": command.instance, "limit_s": limit, **about(command)},
        )
        held.handle.cancel()
        done, _ = await asyncio.wait([work], timeout=OBEY)
        if not done:
            _give_up(command.instance)
        return work.result()

    def _watch(self) -> None:
        """A run on the loop blocks everything else: end it from here."""
        while True:
            time.sleep(LOOK)
            since = self._inline_since
            if not since or self._inline_handle is None:
                continue
            taken = time.monotonic() - since
            if taken > INLINE_LIMIT + OBEY:
                _give_up("inline")
            elif taken > INLINE_LIMIT:
                self._inline_handle.cancel()


def _give_up(what: str) -> None:
    """A run that nothing ends would hold the device for ever: end the process, loudly."""
    log.critical("a run could not be ended: this process stops and will be started again", extra={"instance": what})
    os._exit(HUNG)


# -- The hands of a real accelerator: those of any device, except that memory is the device's own, and that its
# faults are final.

BROKEN = 72  # exit code: the device refuses all further work of this process
# After these the CUDA context is lost: every later call of the process fails, whatever model it is for.
_FINAL = ("illegal memory access", "unspecified launch failure", "device-side assert", "uncorrectable ECC error")


class AcceleratedEdge(ExecutorEdge):
    """One GPU's or Neuron chip's edge."""

    def inline(self, command: Any) -> Any:
        return _whole(super().inline(command))

    async def perform(self, command: Any) -> Any:
        if isinstance(command, MeasureMemory):
            return sum(held.handle.memory_mb for held in self._held.values())
        result = _whole(await super().perform(command))
        if isinstance(command, LoadModel) and isinstance(result, LoadedModel):
            held = self._held.get(command.instance)
            memory_mb = held.handle.memory_mb if held is not None else 0.0
            return LoadedModel(result.load_ms, memory_mb, result.proof)
        return result


def final(result: Any) -> str:
    """The error after which the device serves this process no more; empty when there was none."""
    errors = result.errors if isinstance(result, BatchResult) else None
    return next((error for error in errors or () if any(words in error for words in _FINAL)), "")


def _whole(result: Any) -> Any:
    """The result; a process whose device is lost ends, and is started again."""
    error = final(result)
    if error:
        log.critical("the device is lost to this process, which stops and will be started again: %s", error)
        os._exit(BROKEN)
    return result
