"""The models in a device's memory: fetched once, loaded, moved to other cores, unloaded."""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
from msgspec.structs import replace

from bus.messages.catalog import Signature, TensorSpec, VariantRecord
from bus.port import Bus, BusError, ObjectStore
from bus.subjects import Subjects
from bus.tensors import zeros
from services.core.catalog import UNREAD
from services.core.placement import REMOTE
from services.executor.backends import backend
from services.executor.backends.base import (
    BackendError,
    BackendUnavailable,
    Demotable,
    Growth,
    Handle,
    LoadFailed,
    spec_of,
    trim_memory,
)
from services.executor.backends.functions import WithFunctions, with_functions
from services.executor.commands import (
    LOADERS,
    LoadedModel,
    LoadModel,
    MovedModel,
    MoveModel,
    TransferModel,
    UnloadModel,
)

log = logging.getLogger(__name__)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, quota or limit
POLL = 0.01  # s between checks whether a run has ended
ENGINE_S = 2.0  # s that the first run on a remote engine may take


@dataclass(slots=True, eq=False)
class ModelInMemory:
    """A loaded model. threads: where its batches are computed. own: whether no other model uses them. running: batches computed now."""

    record: VariantRecord
    handle: Handle
    threads: ThreadPoolExecutor
    own: bool = False
    running: int = 0
    one: TensorSpec | None = field(init=False)  # its input, if it has only one

    def __post_init__(self) -> None:
        inputs = self.record.signature.inputs
        self.one = inputs[0] if len(inputs) == 1 else None

    @property
    def one_at_a_time(self) -> str:
        """Why it computes one batch at a time; empty: it takes several."""
        return "it has one thread, which is kept to its cores" if self.own else self.handle.one_at_a_time


class DeviceModels:
    """Loaded models by instance. cache: directory of fetched artifacts, which are named by their digests. threads: shared by all
    models that are not kept to some cores.

    Up to LOADERS models are made at once; what one takes long delays no other. An unload waits for no load.

    off_loop: instances that are never computed on the event loop, since they are slow or have threads of their own.
    """

    def __init__(self, bus: Bus, subjects: Subjects, device: str, cache: Path, threads: ThreadPoolExecutor) -> None:
        self.loaded: dict[str, ModelInMemory] = {}
        self.off_loop: set[str] = set()
        self._bus = bus
        self._subjects = subjects
        self._device = device
        self._cache = cache
        self._threads = threads
        self._loaders = ThreadPoolExecutor(max_workers=LOADERS, thread_name_prefix="load")
        self._transfers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transfer")  # one at a time
        self._artifacts: ObjectStore | None = None
        process = psutil.Process()
        self._memory = Growth(lambda: process.memory_info().rss / 2**20)

    async def load(self, command: LoadModel) -> LoadedModel:
        """Raises BackendError, BusError."""
        record = command.variant
        path = await self._fetch(record)
        try:
            model, loaded = await self._make(path, record, command.cores)
        except LoadFailed:
            path.unlink(missing_ok=True)  # the copy may be damaged: the next try fetches another
            raise
        self._take(command.instance, model)
        about = {"instance": command.instance, "proof": loaded.proof, "load_ms": round(loaded.load_ms, 2)}
        log.info("loaded", extra=about)
        if command.tier == "device":
            return loaded
        there = await self.transfer(TransferModel(command.instance, "host"))
        return replace(there, load_ms=loaded.load_ms, proof=loaded.proof)

    async def transfer(self, command: TransferModel) -> LoadedModel:
        """No batch of the model runs meanwhile. If it fails half-way, the model is unloaded. Raises BackendError."""
        model = self.loaded.get(command.instance)
        if model is None:
            raise LoadFailed("it is not loaded any more")
        handle = model.handle
        try:
            if not isinstance(handle, Demotable):
                raise BackendUnavailable(f"{model.record.framework} keeps no models in host memory")
            if not command.copied:
                handle.drop_copy()
                return LoadedModel(0.0, handle.memory_mb, handle.proof, model.one_at_a_time)
            step = handle.demote if command.tier == "host" else handle.promote
            seconds = await asyncio.get_running_loop().run_in_executor(self._transfers, _timed, step)
        except BackendError:
            await self.unload(UnloadModel(command.instance))
            raise
        memory_mb = handle.host_mb if command.tier == "host" else handle.memory_mb
        copied = command.tier == "device"
        return LoadedModel(seconds * 1000.0, memory_mb, handle.proof, model.one_at_a_time, command.tier, copied)

    async def move(self, command: MoveModel) -> MovedModel:
        """Load a copy on these cores; the old one serves until the copy is ready. Raises BackendError, BusError."""
        old = self.loaded.get(command.instance)
        if old is None:
            raise LoadFailed("it is not loaded any more")
        model, made = await self._make(await self._fetch(command.variant), command.variant, command.cores)
        if self.loaded.get(command.instance) is not old:
            await self._close(model)
            raise LoadFailed("it was unloaded, or moved by another order, meanwhile")
        self._take(command.instance, model)
        while old.running:  # noqa: ASYNC110  # an event would cost every batch something, and moves are rare
            await asyncio.sleep(POLL)
        await self._close(old)
        log.info("moved", extra={"instance": command.instance, "proof": made.proof})
        return MovedModel(made.proof, made.one_at_a_time)

    async def unload(self, command: UnloadModel) -> None:
        model = self.loaded.pop(command.instance, None)
        self.off_loop.discard(command.instance)
        if model is not None:
            await self._close(model)

    def beside(self) -> tuple[float, float]:
        """Memory in MB of the processes of models' functions, and CPU seconds that they have used."""
        found = [model.handle for model in self.loaded.values() if isinstance(model.handle, WithFunctions)]
        return sum(one.beside_mb for one in found), sum(one.beside_cpu_s for one in found)

    def _take(self, instance: str, model: ModelInMemory) -> None:
        self.loaded[instance] = model
        if model.own or isinstance(model.handle, WithFunctions):
            self.off_loop.add(instance)
        else:
            self.off_loop.discard(instance)

    async def _make(
        self, path: Path, record: VariantRecord, cores: tuple[int, ...]
    ) -> tuple[ModelInMemory, LoadedModel]:
        loop = asyncio.get_running_loop()
        make = partial(_load_and_warm, path, record, self._device, self._memory)
        if not cores:
            handle, load_ms, grown = await loop.run_in_executor(self._loaders, make)
            model = ModelInMemory(record, handle, self._threads)
            return model, LoadedModel(load_ms, grown, handle.proof, model.one_at_a_time)
        own = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pinned")
        try:
            (handle, load_ms, grown), proof = await loop.run_in_executor(own, make_on, cores, make)
        except BaseException:
            own.shutdown(wait=False)
            raise
        model = ModelInMemory(record, handle, own, own=True)
        return model, LoadedModel(load_ms, grown, f"{handle.proof}, {proof}", model.one_at_a_time)

    async def _close(self, model: ModelInMemory) -> None:
        def close() -> None:
            with self._memory.measure():
                model.handle.close()

        await asyncio.to_thread(close)
        if model.own:
            model.threads.shutdown(wait=False)

    async def _fetch(self, record: VariantRecord) -> Path:
        """The artifact on this machine's disk, fetched once and checked against its digest each time."""
        path = self._cache / f"{record.artifact}.{record.format}"
        if not path.exists() or await asyncio.to_thread(_digest, path) != record.artifact:
            if self._artifacts is None:
                self._artifacts = await self._bus.object_store(self._subjects.artifacts_bucket)
            self._cache.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
            try:
                await self._artifacts.get_to(record.artifact, part)
                if await asyncio.to_thread(_digest, part) != record.artifact:
                    raise BackendError(f"{UNREAD}: what is stored as {record.artifact[:12]}… is another one")
                part.rename(path)
            except BusError as error:
                raise BackendError(f"{UNREAD}: {error}") from error
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                raise LoadFailed(
                    f"the disk has no room for the model's file: {error.strerror}; free some of {self._cache}, or set data_dir to a larger disk"
                ) from error
            finally:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
        return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _timed(step: Callable[[], None]) -> float:
    """Seconds that it takes, without waiting for a thread."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


_started: set[str] = set()  # frameworks that have loaded a model in this process


def _load_and_warm(path: Path, record: VariantRecord, device: str, memory: Growth) -> tuple[Handle, float, float]:
    """A handle that has run once, the ms that it took, and the MB that this process grew by.

    A framework's first model also brings what the framework keeps for all: then nobody knows what is the model's, as in `Grown`.
    """
    started, first = time.perf_counter(), record.framework not in _started
    with memory.measure() as grown:
        spec = spec_of(record, device)
        handle = backend(record.framework).load(path, spec)
        _warm(handle, record.framework, spec.signature or record.signature)
        trim_memory()  # a file's contents, and all that only the load needed
    _started.add(record.framework)
    grown_mb = 0.0 if first else grown.mb
    if record.functions is not None:
        try:
            handle = whole = with_functions(handle, record.functions, record.signature)
        except LoadFailed:
            handle.close()
            raise
        grown_mb += whole.beside_mb
    return handle, (time.perf_counter() - started) * 1000.0, grown_mb


def _warm(handle: Handle, framework: str, signature: Signature) -> None:
    """Run it once: that allocates, or connects, and no query should pay for it."""
    inputs = {spec.name: zeros(spec) for spec in signature.inputs if spec.datatype != "BYTES"}
    if len(inputs) == len(signature.inputs):
        timer = threading.Timer(ENGINE_S, handle.cancel)
        if framework == REMOTE:
            timer.start()
        try:
            handle.run(inputs)
        except BackendError as error:
            log.info("the warm-up run failed: %s", error, extra={"framework": framework})
        finally:
            timer.cancel()


# -- threads that are kept to some cores, and the proof that they are

_TASKS = Path("/proc/self/task")
_Made = TypeVar("_Made")


def make_on(cores: Sequence[int], make: Callable[[], _Made]) -> tuple[_Made, str]:
    """Keep the calling thread to these cores, then make something whose threads run there, too.

    A thread inherits the affinity of the one that starts it, so a framework's own pool runs on the same cores. Returns what was
    made, and a proof: how many threads the operating system reports as kept to exactly these cores. Raises BackendUnavailable.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise BackendUnavailable("this operating system cannot keep a thread to some cores")
    names = ", ".join(map(str, cores))
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        raise BackendUnavailable(f"this process cannot run on core {names}: {error}") from error
    before = _tasks()
    made = make()
    wanted = set(cores)
    there = [task for task in (_tasks() - before) | {threading.get_native_id()} if _affinity(task) == wanted]
    if threading.get_native_id() not in there:
        raise BackendUnavailable(f"the system did not keep the thread to core {names}")
    return (
        made,
        f"{len(there)} thread{'s' * (len(there) > 1)} kept to core{'s' * (len(cores) > 1)} {names} by the system",
    )


def _tasks() -> set[int]:
    try:
        return {int(entry.name) for entry in _TASKS.iterdir()}
    except OSError:
        return set()


def _affinity(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except OSError:  # it has ended
        return set()
