"""Shared by the backends that run on GPUs: the device of an address, its memory, batch buckets."""

import os
import threading
from contextlib import AbstractContextManager
from functools import cache, partial

from services.executor.backends.base import BackendUnavailable, Grown, Growth
from services.shell.host.accelerators import Accelerator, DriverError, cuda_device, cuda_memory_used_mb


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
def bus(device: str) -> threading.Lock:
    """What weights travel over to this device and back: one model at a time."""
    del device
    return threading.Lock()


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
