"""The executor's edge: batches on the device, large bodies in the object store; models are in `edge_models`.

Short batches run on the event loop itself, since a change of thread costs more than they do. Longer ones run in a pool, where the
frameworks release the GIL. A watchdog ends runs that take many times their profile: it first cancels them, and if the framework
does not react it ends this process, which the supervisor starts again.

Queries become one array, and its outputs become theirs again: n items in, n items out, in order.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil
from msgspec.structs import replace
from numpy.typing import NDArray

from bus.codec import encode
from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.public import Tensor, TensorView
from bus.port import Bus, BusError
from bus.subjects import Subjects
from bus.tensors import BadTensor, check_finite, datatype_of, dtype_of, fit, from_array, to_array
from services.core.ensemble.outputs import MOST_SAID, class_names, said
from services.core.settings import ExecutorSettings
from services.executor.backends.base import BackendError, Handle, ItemRefused, RunFailed, plain
from services.executor.backends.functions import WithFunctions
from services.executor.commands import (
    BatchResult,
    FetchInputs,
    LoadedModel,
    LoadModel,
    MeasureProcess,
    MoveModel,
    ProcessUse,
    RunBatch,
    StoreOutputs,
    TransferModel,
    UnloadModel,
)
from services.executor.edge_models import DeviceModels, ModelInMemory
from services.executor.edge_samples import PayloadKeeper, QuerySampler
from services.executor.queue import Inputs, QueuedQuery
from services.shell.host.running import Running
from services.shell.objects import fetch, fetch_tensors, store_outputs
from services.shell.runtime.runtime import unix_now
from services.shell.runtime.telemetry import about

if TYPE_CHECKING:
    from services.executor.backends.container import UserProcess


Array = NDArray[Any]
UNKNOWN = 2**62


class NotANumber(ValueError):
    """The model returned NaN or infinity for this query."""


def single(queries: list[QueuedQuery], spec: TensorSpec, *, allow_nan: bool = False) -> Array:
    """One array [items, ...] of the model's only input. Raises BadTensor, also where it holds NaN or an infinite value."""
    array = _single(queries, spec)
    if not allow_nan:
        check_finite(array, "inputs")
    return array


def _single(queries: list[QueuedQuery], spec: TensorSpec) -> Array:
    if (
        len(queries) > 1
        and DATATYPES[spec.datatype].code
        and all(type(query.inputs) is TensorView and query.inputs.datatype == spec.datatype for query in queries)
    ):
        # The usual case: the bytes are the model's own layout, checked for size by the dispatcher.
        views: list[TensorView] = [query.inputs for query in queries]  # type: ignore[misc]
        joined = b"".join([view.data for view in views])
        whole: Array = np.frombuffer(joined, dtype_of(spec.datatype)).reshape((-1, *views[0].shape[1:]))
        return fit(whole, spec, "inputs")
    parts = [_one(query.inputs, spec, "inputs") for query in queries]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _together(parts: Sequence[Array]) -> Array:
    """One output of a query that ran in pieces. Raises ItemRefused where items differ in shape, as the boxes of detectors do."""
    shapes = sorted({part.shape[1:] for part in parts})
    if len(shapes) > 1:
        raise ItemRefused(
            f"its items have outputs of different shapes, {list(shapes[0])} and {list(shapes[-1])}: ask one item a query"
        )
    return np.concatenate(parts)


def several(queries: list[QueuedQuery], signature: Signature, *, allow_nan: bool = False) -> dict[str, Array]:
    """The arrays of a model with several inputs, by name. Raises BadTensor, also where one holds NaN or an infinite value."""
    arrays = {}
    for spec in signature.inputs:
        where = f"inputs.{spec.name}"
        parts = [_one(query.inputs[spec.name], spec, where) for query in queries]  # type: ignore[index,call-overload]
        arrays[spec.name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not allow_nan:
            check_finite(arrays[spec.name], where)
    return arrays


def _one(inputs: Inputs | None, spec: TensorSpec, where: str) -> Array:
    if isinstance(inputs, dict):
        inputs = inputs[spec.name]
    if inputs is None:
        raise ValueError(f"{where} is missing")
    return fit(to_array(inputs, where, binary=spec.binary), spec, where)


def split(outputs: list[Array], names: tuple[str, ...], queries: list[QueuedQuery]) -> list[dict[str, Tensor]]:
    """Each query's rows of every output. Raises NotANumber, or ValueError if the model returned another number of rows."""
    total = sum(query.items for query in queries)
    answers: list[dict[str, Tensor]] = [{} for _ in queries]
    for name, array in zip(names, outputs, strict=True):
        if array.ndim == 0 or array.shape[0] != total:
            raise ValueError(f"output {name!r} has shape {list(array.shape)} for {total} items")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise NotANumber(f"the model returned NaN or infinity in output {name!r}")
        if array.dtype.kind in "OUS":
            _split_strings(array, name, queries, answers)
            continue
        datatype = datatype_of(array)
        whole = array.tobytes()
        row = len(whole) // total
        tail = list(array.shape[1:])
        at = 0
        for query, answer in zip(queries, answers, strict=True):
            n = query.items
            answer[name] = Tensor(datatype, [n, *tail], whole[at : at + n * row])
            at += n * row
    return answers


def named_classes(outputs: list[Array], labels: list[str], queries: list[QueuedQuery]) -> list[list[str]] | None:
    """The name of each item's class, by query: of class numbers, else of the largest score. None: no output tells the class."""
    names = class_names(outputs, labels)
    if names is None:
        return None
    found, at = [], 0
    for query in queries:
        found.append(names[at : at + query.items])
        at += query.items
    return found


def by_query(items: list[Any] | None, queries: list[QueuedQuery]) -> list[list[Any] | None] | None:
    """What all items said, by query. None: it is not known, or a query has too many."""
    if items is None:
        return None
    found: list[list[Any] | None] = []
    at = 0
    for query in queries:
        found.append(items[at : at + query.items] if query.items <= MOST_SAID else None)
        at += query.items
    return found


def most_bytes(outputs: list[Array]) -> int:
    """How many bytes all outputs have at most. UNKNOWN if there are texts, before they are encoded."""
    return sum(UNKNOWN if array.dtype.kind in "OUS" else array.nbytes for array in outputs)


def _split_strings(array: Array, name: str, queries: list[QueuedQuery], answers: list[dict[str, Tensor]]) -> None:
    at = 0
    for query, answer in zip(queries, answers, strict=True):
        answer[name] = from_array(array[at : at + query.items])
        at += query.items


log = logging.getLogger(__name__)

HUNG = 71  # exit code: a run could not be ended
CANCEL_GRACE = 2.0  # s that a framework has to end a cancelled run
INLINE_LIMIT = 0.25  # s; a run on the loop that takes longer is cancelled and repeated in a thread
MOST_RUNS = 64  # at once on an accelerator
WATCH_EVERY = 0.05  # s between checks of the run on the loop
_named = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


class ExecutorEdge:
    """One device's edge. device: its address. cache: directory of fetched artifacts, which are named by their digests. running: shows the
    supervisor what is loaded and computed. sample_share: of the queries, compared with the validation set. payloads: whether they may be kept.
    may_end_process: not one that others' code runs in (`infaas.serve`). may_block: short batches run on the loop.
    """

    may_end_process = may_block = True

    def __init__(
        self, bus: Bus, subjects: Subjects, device: str, cores: int, cache: Path, settings: ExecutorSettings,
        running: Running | None = None, sample_share: float = 0.0, *, payloads: bool = False,
    ) -> None:  # fmt: skip
        self._running = running
        self._bus = bus
        self._subjects = subjects
        self._settings = settings
        # A GPU counts as one core, but may run batches of several contexts and instances. Threads are made as they are needed.
        most = max(1, cores) if device == "cpu" else MOST_RUNS
        self._threads = ThreadPoolExecutor(max_workers=most, thread_name_prefix="run")
        self._samples = QuerySampler(bus, subjects, sample_share)
        self._payloads = PayloadKeeper(bus, subjects, on=payloads)
        self._models = DeviceModels(bus, subjects, device, cache, self._threads)
        self._loaded = self._models.loaded
        self._off_loop = self._models.off_loop
        self._inline_since = 0.0
        self._inline_handle: Handle | None = None
        self._over = False
        self._process = psutil.Process()
        threading.Thread(target=self._watch_loop, name="watchdog", daemon=True).start()

    # -- running

    def inline(self, command: Any) -> Any:
        """Run a short batch at once."""
        if not self.may_block or type(command) is not RunBatch or not command.inline:
            return NotImplemented
        model = self._loaded.get(command.instance)
        if model is None or command.instance in self._off_loop:
            return NotImplemented
        self._inline_handle = model.handle
        self._inline_since = time.monotonic()
        result = self._compute(model, command)
        taken = time.monotonic() - self._inline_since
        self._inline_since = 0.0
        if taken > INLINE_LIMIT:
            self._off_loop.add(command.instance)
            if result.errors is not None:
                return NotImplemented  # most likely cancelled: it is repeated in a thread
        return result

    def _loading(self) -> contextlib.AbstractContextManager[None]:
        return self._running.loading() if self._running is not None else contextlib.nullcontext()

    async def perform(self, command: Any) -> Any:
        match command:
            case RunBatch():
                return await self._run(command)
            case LoadModel():
                with self._loading():
                    loaded = await self._models.load(command)
                self._samples.begin(command.variant)
                self._payloads.begin()
                return loaded
            case MoveModel():
                with self._loading():
                    return await self._models.move(command)
            case TransferModel():
                with self._loading():
                    return await self._models.transfer(command)
            case UnloadModel():
                return await self._models.unload(command)
            case FetchInputs():
                if command.ref is not None:
                    return await fetch(self._bus, command.ref.bucket, command.ref.key)
                return await self._gather(command)
            case StoreOutputs():
                return await store_outputs(self._bus, self._subjects.outputs_bucket, command.key, command.outputs)
            case MeasureProcess():
                cpu = self._process.cpu_times()
                memory_mb, cpu_s = self._models.beside()
                return ProcessUse(self._process.memory_info().rss / 2**20 + memory_mb, cpu.user + cpu.system + cpu_s)
        raise TypeError(f"unknown command {command!r}")

    async def _gather(self, command: FetchInputs) -> bytes:
        """All inputs of a part, those of its body and those in the object store, as one map."""
        inputs = _named(command.inputs) if command.inputs else {}
        return encode(inputs | await fetch_tensors(self._bus, command.refs))

    def _compute(self, model: ModelInMemory, command: RunBatch) -> BatchResult:
        """Compute a batch. If it ends this process, its queries, and no others, are suspect."""
        running = self._running
        if running is None:
            return self._result(model, command)
        number = running.begin([query.route.uid for query in command.queries])
        try:
            return self._result(model, command)
        finally:
            running.end(number)

    def _result(self, model: ModelInMemory, command: RunBatch) -> BatchResult:
        """Assemble, run, split. An error is reported for the whole batch; the actor then runs its queries one by one."""
        queries, record = command.queries, model.record
        started = unix_now()
        unfit, handle = True, model.handle
        try:
            limit = record.max_batch
            if model.one is not None:
                array = single(queries, model.one, allow_nan=record.allow_nan)
                unfit, arrays = False, {model.one.name: array}
                outputs = handle.run_single(array) if len(array) <= limit else self._pieces(model, arrays)
            else:
                arrays = several(queries, record.signature, allow_nan=record.allow_nan)
                unfit = False
                outputs = self._pieces(model, arrays)
            parts = split(outputs, handle.outputs, queries)
            labels = named_classes(outputs, record.labels, queries) if record.labels or record.says_class else None
            named = dict(zip(handle.outputs, outputs, strict=True))
            known = by_query(said(named, record.metric), queries)
            result = BatchResult(started, unix_now(), parts, None, most_bytes(outputs), labels=labels, said=known)
            if record.distribution:
                self._samples.take(record, queries, arrays, named)
            self._payloads.take(record, queries, arrays, parts)
        except (BackendError, BadTensor, NotANumber, ValueError, KeyError, MemoryError) as error:
            found = [plain(error)] * len(queries)
            result = BatchResult(
                started, unix_now(), [], found, unfit=isinstance(error, BadTensor if unfit else ItemRefused)
            )
        return replace(result, functions_s=handle.took()) if isinstance(handle, WithFunctions) else result

    @staticmethod
    def _pieces(model: ModelInMemory, arrays: dict[str, Any]) -> list[Any]:
        """A query larger than the variant's largest batch runs in pieces."""
        limit, handle = model.record.max_batch, model.handle
        count = len(next(iter(arrays.values())))
        pieces = [{name: one[i : i + limit] for name, one in arrays.items()} for i in range(0, count, limit)]
        parts = [handle.run(piece) for piece in pieces]
        return [
            _together([part[name] for part in parts]) if len(parts) > 1 else parts[0][name] for name in handle.outputs
        ]

    async def _run(self, command: RunBatch) -> BatchResult:
        model = self._loaded.get(command.instance)
        if model is None:
            return BatchResult(unix_now(), unix_now(), [], ["the model is no longer loaded"] * len(command.queries))
        model.running += 1
        try:
            if command.queries[0].route.alone:
                # It may end this process: the message that it begins must have been sent before.
                with contextlib.suppress(BusError):
                    await self._bus.flush(1.0)
            return await self._watched(model, command)
        finally:
            model.running -= 1

    async def _watched(self, model: ModelInMemory, command: RunBatch) -> BatchResult:
        """Compute in a thread; cancel a run that takes many times its profile."""
        run = asyncio.get_running_loop().run_in_executor(model.threads, self._compute, model, command)
        limit = max(self._settings.watchdog_least_s, self._settings.watchdog * command.predicted)
        done, _ = await asyncio.wait([run], timeout=limit)
        if done:
            return run.result()
        log.error(
            "a run takes too long and is cancelled",
            extra={"instance": command.instance, "limit_s": limit, **about(command)},
        )
        model.handle.cancel()
        done, _ = await asyncio.wait([run], timeout=CANCEL_GRACE)
        if not done:
            self._end_process(command.instance)
            raise RunFailed("the run could not be ended, and goes on")
        return run.result()

    async def ended(self) -> None:
        """Nothing is watched any more."""
        self._over = True
        await asyncio.gather(self._samples.close(), self._payloads.close())

    def _watch_loop(self) -> None:
        """A run on the loop blocks everything else: this thread cancels it."""
        while not self._over:
            time.sleep(WATCH_EVERY)
            since = self._inline_since
            if not since or self._inline_handle is None:
                continue
            taken = time.monotonic() - since
            if taken > INLINE_LIMIT + CANCEL_GRACE:
                self._end_process("inline")
            elif taken > INLINE_LIMIT:
                self._inline_handle.cancel()

    def _end_process(self, what: str) -> None:
        """A run that cannot be cancelled would occupy the device for ever: end the process with a log entry, if it is ours."""
        if self.may_end_process:
            log.critical(
                "a run could not be ended: this process stops and will be started again", extra={"instance": what}
            )
            os._exit(HUNG)


# -- real accelerators: memory is the device's own, and some errors end the process

BROKEN = 72  # exit code: the device refuses all further work of this process
# After these the CUDA context is lost: every later call of the process fails, whatever model it is for.
_FINAL = ("illegal memory access", "unspecified launch failure", "device-side assert", "uncorrectable ECC error")


class AcceleratedEdge(ExecutorEdge):
    """The edge of a GPU."""

    def _result(self, model: ModelInMemory, command: RunBatch) -> BatchResult:
        """A process that has lost its device ends, and is started again."""
        result = super()._result(model, command)
        if error := final(result):
            log.critical("the device does no more work for this process, which stops and is started again: %s", error)
            os._exit(BROKEN)
        return result

    async def perform(self, command: Any) -> Any:
        if isinstance(command, MeasureProcess):
            used: ProcessUse = await super().perform(command)
            models = self._loaded.values()
            memory_mb = sum(model.handle.memory_mb or model.record.profile.memory_mb for model in models)
            return ProcessUse(memory_mb, used.cpu_s)
        result = await super().perform(command)
        if isinstance(command, LoadModel) and isinstance(result, LoadedModel) and result.tier == "device":
            model = self._loaded.get(command.instance)
            return replace(result, memory_mb=model.handle.memory_mb if model is not None else 0.0)
        return result


def final(result: Any) -> str:
    """The error after which the device does no more work for this process. Empty if there was none."""
    errors = result.errors if isinstance(result, BatchResult) else None
    return next((error for error in errors or () if any(words in error for words in _FINAL)), "")


# -- engines on other machines: nothing of theirs is computed here


class RemoteEdge(ExecutorEdge):
    """The edge of remote engines. device: their hosts."""

    may_block = False  # no engine may keep the loop waiting

    async def perform(self, command: Any) -> Any:
        if isinstance(command, MeasureProcess):
            used: ProcessUse = await super().perform(command)
            return ProcessUse(0.0, used.cpu_s)
        result = await super().perform(command)
        return replace(result, memory_mb=0.0) if isinstance(result, LoadedModel) else result


# -- a user's own process: it holds one model, from its start


class ContainerEdge(ExecutorEdge):
    """The edge of a user's own process (`infaas container`). process: the model in it. loaded: is called when the model serves."""

    may_block = False  # nothing of the user's runs on the loop

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        process: "UserProcess",
        settings: ExecutorSettings,
        loaded: Callable[[], None] = lambda: None,
        sample_share: float = 0.0,
    ) -> None:
        super().__init__(bus, subjects, "container", 1, Path(), settings, sample_share=sample_share, payloads=True)
        self._user = process
        self._tell = loaded

    async def perform(self, command: Any) -> Any:
        match command:
            case LoadModel():
                self._loaded[command.instance] = ModelInMemory(command.variant, self._user, self._threads)
                self._samples.begin(command.variant)
                self._payloads.begin()
                self._tell()
                return LoadedModel(0.0, self._user.measure_memory(), self._user.proof, self._user.one_at_a_time)
            case UnloadModel():
                self._loaded.pop(command.instance, None)
                return None
            case MeasureProcess():
                return ProcessUse(self._user.measure_memory())
        return await super().perform(command)
