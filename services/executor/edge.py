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
from bus.messages.catalog import VariantRecord
from bus.messages.public import ObjectRef
from bus.port import Bus, BusError, ObjectStore
from bus.subjects import Subjects
from bus.tensors import BadTensor
from services.executor.assemble import NotANumber, most_bytes, several, single, split
from services.executor.backends import backend
from services.executor.backends.base import BackendError, Handle, plain, spec_of
from services.executor.work import (
    BatchResult,
    FetchInputs,
    LoadedModel,
    LoadModel,
    MeasureMemory,
    RunBatch,
    Shrink,
    StoreOutputs,
    UnloadModel,
)
from services.shell.clock import now

log = logging.getLogger(__name__)

HUNG = 71  # exit code: a run could not be ended
OBEY = 2.0  # s a framework has to end a run that was cancelled
INLINE_LIMIT = 0.25  # s; a run on the loop that takes longer is cancelled and done again in a thread
LOOK = 0.05  # s between looks at the run on the loop
MOST_LARGE = 256 * 2**20  # bytes of inputs fetched by reference


class Held:
    """A loaded model."""

    __slots__ = ("handle", "one", "record")

    def __init__(self, record: VariantRecord, handle: Handle) -> None:
        self.record = record
        self.handle = handle
        self.one = record.signature.inputs[0] if len(record.signature.inputs) == 1 else None


class ExecutorEdge:
    """One device's edge. cache: where fetched artifacts are kept, by their digest."""

    def __init__(
        self, bus: Bus, subjects: Subjects, device: str, cores: int, cache: Path, *, watchdog: float, least_s: float
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._device = device
        self._cache = cache
        self._watchdog = watchdog
        self._least = least_s
        self._models: dict[str, Held] = {}
        self._threads = ThreadPoolExecutor(max_workers=max(1, cores), thread_name_prefix="run")
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")
        self._inline_since = 0.0
        self._inline_handle: Handle | None = None
        self._slow: set[str] = set()
        self._artifacts: ObjectStore | None = None
        self._process = psutil.Process()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    # -- running

    def inline(self, command: Any) -> Any:
        """Run a short batch at once."""
        if type(command) is not RunBatch or not command.inline or command.instance in self._slow:
            return NotImplemented
        held = self._models.get(command.instance)
        if held is None:
            return NotImplemented
        self._inline_handle = held.handle
        self._inline_since = time.monotonic()
        result = self._compute(held, command)
        taken = time.monotonic() - self._inline_since
        self._inline_since = 0.0
        if taken > INLINE_LIMIT:
            self._slow.add(command.instance)
            if result.errors is not None:
                return NotImplemented  # cancelled, most likely: a thread has the time to find out
        return result

    async def perform(self, command: Any) -> Any:
        match command:
            case RunBatch():
                return await self._run(command)
            case LoadModel():
                return await self._load(command)
            case UnloadModel():
                return await self._unload(command)
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
                self._models[command.instance].handle.shrink()
                return None
        raise TypeError(f"unknown command {command!r}")

    def _compute(self, held: Held, command: RunBatch) -> BatchResult:
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
    def _pieces(held: Held, array: Any) -> list[Any]:
        """A query larger than the variant's largest batch runs in pieces."""
        import numpy as np  # noqa: PLC0415

        limit = held.record.max_batch
        parts = [held.handle.run_single(array[i : i + limit]) for i in range(0, len(array), limit)]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    async def _run(self, command: RunBatch) -> BatchResult:
        held = self._models.get(command.instance)
        if held is None:
            return BatchResult(now(), now(), [], ["the model is no longer loaded"] * len(command.works))
        if command.works[0].route.alone:
            with contextlib.suppress(BusError):
                await self._bus.flush(1.0)  # a suspect: what was said of it must be out before it may end this process
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._compute, held, command)
        limit = max(self._least, self._watchdog * command.predicted)
        done, _ = await asyncio.wait([work], timeout=limit)
        if done:
            return work.result()
        log.error("a run takes too long and is cancelled", extra={"instance": command.instance, "limit_s": limit})
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

    # -- models

    async def _load(self, command: LoadModel) -> LoadedModel:
        record = command.variant
        path = await self._fetch(record)
        before = self._process.memory_info().rss
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        handle = await loop.run_in_executor(self._loader, self._load_and_warm, path, record)
        load_ms = (time.perf_counter() - started) * 1000.0
        self._models[command.instance] = Held(record, handle)
        grown = max(0.0, (self._process.memory_info().rss - before) / 2**20)
        log.info("loaded", extra={"instance": command.instance, "proof": handle.proof, "load_ms": round(load_ms, 2)})
        return LoadedModel(load_ms, grown, handle.proof)

    def _load_and_warm(self, path: Path, record: VariantRecord) -> Handle:
        import numpy as np  # noqa: PLC0415

        handle = backend(record.framework).load(path, spec_of(record, self._device))
        from bus.tensors import NUMPY_NAMES  # noqa: PLC0415

        inputs = {
            spec.name: np.zeros((1, *(8 if n < 0 else n for n in spec.shape)), NUMPY_NAMES.get(spec.datatype, "<f4"))
            for spec in record.signature.inputs
            if spec.datatype != "BYTES"
        }
        if len(inputs) == len(record.signature.inputs):
            try:
                handle.run(inputs)  # the first run allocates; no query should pay for that
            except BackendError as error:
                log.info("the warm-up run failed: %s", error, extra={"variant": record.variant})
        return handle

    async def _fetch(self, record: VariantRecord) -> Path:
        """The artifact on this machine's disk, fetched once; it is named by its digest and checked by the store."""
        suffix = {"onnx": ".onnx", "pt2": ".pt2", "torchscript": ".pt"}.get(record.format, "")
        path = self._cache / f"{record.artifact}{suffix}"
        if not path.exists():
            if self._artifacts is None:
                self._artifacts = await self._bus.object_store(self._subjects.artifacts_bucket)
            self._cache.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
            await self._artifacts.get_to(record.artifact, part)
            part.rename(path)
        return path

    async def _unload(self, command: UnloadModel) -> None:
        held = self._models.pop(command.instance, None)
        self._slow.discard(command.instance)
        if held is not None:
            await asyncio.get_running_loop().run_in_executor(self._loader, held.handle.close)


def _give_up(what: str) -> None:
    """A run that nothing ends would hold the device for ever: end the process, loudly."""
    log.critical("a run could not be ended: this process stops and will be started again", extra={"instance": what})
    os._exit(HUNG)
