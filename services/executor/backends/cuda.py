"""Shared by the backends that run on GPUs: the device of an address, its memory, batch buckets; and, by torch, staging memory,
weights, and one CUDA stream for each model.

Staging is page-locked host memory and device memory: one pair for each input and output, sized once for the largest batch. A smaller
batch uses the first rows. The rows beyond it hold old values, which the model computes since a graph has one shape. Nobody sees the
results: registration has proved that items do not influence each other.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from bus.datatypes import DATATYPES
from services.executor.backends.base import BackendUnavailable, Grown, Growth, InputRejected
from services.shell.host.accelerators import Accelerator, DriverError, cuda_device, cuda_memory_used_mb

if TYPE_CHECKING:
    from bus.tensors import Array


def gpu(device: str, framework: str) -> Accelerator:
    """The GPU "cuda:0", ... Raises BackendUnavailable with the reason. Only the driver is asked: the framework is not imported."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdigit():
        raise BackendUnavailable(f"{framework} runs on a CUDA device (cuda:0, ...), not on {device!r}")
    try:
        found = cuda_device(device)
    except DriverError as error:
        raise BackendUnavailable(str(error)) from error
    # The driver counts by bus address, CUDA by speed unless told otherwise: both must mean the same device.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return found


def placed(hardware: str, device: str, framework: str) -> Accelerator | None:
    """The GPU that a backend of this kind of hardware gets as `device`; None: it is the CPU. Raises BackendUnavailable for another kind."""
    if hardware == "gpu":
        return gpu(device, framework)
    if device.partition(":")[0] != "cpu":
        raise BackendUnavailable(f"{framework} runs here on the CPU, not on {device!r}")
    return None


@cache
def _memory(device: str) -> Growth:
    return Growth(partial(cuda_memory_used_mb, device))


def growth(device: str) -> AbstractContextManager[Grown]:
    """Measure what a load takes of the device's memory. Memory that other processes take meanwhile counts as well."""
    return _memory(device).measure()


@cache
def bus(_device: str) -> threading.Lock:
    """What weights travel over to this device and back: one model at a time."""
    return threading.Lock()


@cache
def quiet(_device: str) -> threading.RLock:
    """Held while graphs are captured on this device, and by all that would spoil it: what waits for the whole device, or frees its memory."""
    return threading.RLock()


def buckets(largest: int) -> tuple[int, ...]:
    """Batch sizes that get a graph of their own: powers of two, and the largest itself."""
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return (*sizes, largest) if largest > 1 else (1,)


def bucket_for(items: int, sizes: tuple[int, ...]) -> int:
    """The smallest bucket that holds so many items. Raises ValueError if none does."""
    for size in sizes:
        if items <= size:
            return size
    raise ValueError(f"a batch of {items} is larger than the largest bucket, {sizes[-1]}")


# By numpy's name, as slots have it.
TORCH_NAMES = {row.array: row.torch for row in DATATYPES.values() if row.code}


class Slot(Struct, frozen=True):
    """One input or output. shape: of one item; dtype: numpy's name, on the wire and in staging memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Staging:
    """The pair of buffers of one slot. device: a torch.device; None for an output, which a graph keeps. pinned: page-locked."""

    def __init__(self, torch: Any, slot: Slot, largest: int, device: Any, *, pinned: bool) -> None:
        dtype = TORCH_NAMES[slot.dtype]
        self.slot = slot
        self._torch = torch
        self.host = torch.zeros((largest, *slot.shape), dtype=getattr(torch, dtype), pin_memory=pinned)
        whole = (largest, *slot.shape) if device is not None else (0,)
        self.device = torch.zeros(whole, dtype=getattr(torch, dtype), device=device)
        self._array: Array = self.host.numpy()

    def put(self, array: "Array", bucket: int) -> None:
        """Queue the copy of a batch to the device, rounded up to a bucket. Raises InputRejected."""
        self.check(array)
        self._array[: len(array)] = array
        self.device[:bucket].copy_(self.host[:bucket], non_blocking=True)

    def fetch(self, bucket_output: Any, items: int) -> None:
        """Queue the copy of a bucket's first rows to the host."""
        self.host[:items].copy_(bucket_output[:items], non_blocking=True)

    def taken(self, items: int) -> "Array":
        """A copy of the rows that `fetch` brought, once its copy is done."""
        rows: Array = self._array[:items].copy()
        return rows

    def leave(self) -> None:
        """Give the device's half back. `come` takes it again."""
        self._there = self.device.shape, self.device.device
        self.device = self._torch.zeros(0)

    def come(self) -> None:
        shape, device = self._there
        self.device = self._torch.zeros(shape, dtype=self.host.dtype, device=device)

    def check(self, array: "Array") -> None:
        """Raises InputRejected if shape or datatype are not the model's."""
        slot = self.slot
        if array.shape[1:] != slot.shape:
            raise InputRejected(
                f"input {slot.name!r} has items of shape {list(array.shape[1:])}, not {list(slot.shape)}"
            )
        if array.dtype.str.lstrip("<|=") != slot.dtype.lstrip("<|="):
            raise InputRejected(f"input {slot.name!r} is {array.dtype}, the model takes {TORCH_NAMES[slot.dtype]}")


# -- the weights of one model: on the device, or in page-locked host memory


class Weights:
    """Parameters and buffers of a module. Those that share memory share it wherever they are.

    copy: where they were before the last move, if they stay there, too.
    """

    def __init__(self, torch: Any, module: Any) -> None:
        self.copy: list[Any] | None = None
        self._torch = torch
        self._tensors = [*module.parameters(), *module.buffers()]

    @property
    def mb(self) -> float:
        """What they take."""
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in self._tensors}
        return float(sum(storages.values())) / 2**20

    def move(self, device: Any, *, pinned: bool, wait: Callable[[], None], keep: bool = False) -> None:
        """Copy them to this torch.device, on the current stream. wait: until the stream is done. keep: where they were stays as `copy`."""
        torch = self._torch
        made: dict[int, Any] = {}
        found = []
        for tensor in self._tensors:
            storage = tensor.untyped_storage()
            there = made.get(storage.data_ptr())
            if there is None:
                here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                there = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device, pin_memory=pinned)
                there.copy_(here, non_blocking=True)
                made[storage.data_ptr()] = there
            view = torch.empty(0, dtype=tensor.dtype, device=device)
            found.append(view.set_(there.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()))
        wait()
        self.copy = [tensor.data for tensor in self._tensors] if keep else None
        self._set(found)

    def back(self) -> None:
        """To their copy, which is as good: inference changes no weights."""
        assert self.copy is not None
        self._set(self.copy)
        self.copy = None

    def drop(self) -> None:
        """Give their memory back. A program refers to itself, so that Python would keep them for a while."""
        self._set([self._torch.empty(0, dtype=one.dtype, device=one.device) for one in self._tensors])
        self._tensors, self.copy = [], None

    def _set(self, found: list[Any]) -> None:
        for tensor, view in zip(self._tensors, found, strict=True):
            tensor.data = view


# -- the CUDA stream of one model: it runs in order, beside those of other models, and is recorded into graphs

Compute = Callable[[], list[Any]]


class DeviceStream(Protocol):
    """device: a torch.device. pinned: whether host memory for it is to be page-locked."""

    device: Any
    pinned: bool

    def on(self) -> Any:
        """A context in which operators are queued here, without gradients. Any thread may use it, one at a time."""

    def capture(self, compute: Compute) -> tuple[Callable[[], None], list[Any]]:
        """Record what `compute` queues. Returns a function that queues it again, and its outputs, the same memory each time."""

    def wait(self) -> None:
        """Wait until all queued operators are done. Other threads continue meanwhile."""

    def forget(self) -> None:
        """Nothing that was recorded is used any more."""

    def trim(self) -> None:
        """Give unused memory back to the device."""


_LIBRARY, _NON_BLOCKING = "libcuda.so.1", 1


@cache
def _unused(_device: str) -> list[int]:
    """Streams of closed models. Libraries keep a workspace for each stream (64 MB on a H200) until the process ends, so they are used again."""
    return []


def _made() -> int:
    """A stream on the current device that nobody else has: torch deals the same 32 again and again, and what another one queues would be captured."""
    made = ctypes.c_void_p()
    failed = ctypes.CDLL(_LIBRARY).cuStreamCreate(ctypes.byref(made), _NON_BLOCKING)
    if failed or made.value is None:
        raise BackendUnavailable(f"the driver makes no stream on this GPU (error {failed})")
    return made.value


class CudaStream:
    """One stream on one GPU, its own until nothing refers to this any more."""

    pinned = True

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self.device = torch.device(device)
        unused = _unused(device)
        with torch.cuda.device(self.device), quiet(device):
            torch.cuda.synchronize()  # weights were moved on another stream, for which this one does not wait
            self.pointer = unused.pop() if unused else _made()
        weakref.finalize(self, unused.append, self.pointer)
        self._stream = torch.cuda.ExternalStream(self.pointer, self.device)
        self._done = torch.cuda.Event(blocking=True)  # waiting must not use a core
        self._pool: Any = None  # all graphs share their scratch memory: one replays at a time

    @contextmanager
    def on(self) -> Iterator[None]:
        torch = self._torch
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.inference_mode():
            yield

    def capture(self, compute: Compute) -> tuple[Callable[[], None], list[Any]]:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        # Other models may run on other streams meanwhile: only this thread's calls count as wrong.
        with (
            quiet(str(self.device)),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            outputs = compute()
        if self._pool is None:
            self._pool = graph.pool()
        return graph.replay, outputs

    def wait(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()

    def forget(self) -> None:
        self._pool = None

    def trim(self) -> None:
        with self._torch.cuda.device(self.device), quiet(str(self.device)):
            self._torch.cuda.empty_cache()
