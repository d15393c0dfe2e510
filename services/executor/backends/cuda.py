"""Shared by the CUDA backends: the device of an address, its memory, batch buckets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from services.executor.backends.base import BackendUnavailable
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


class Growth:
    """MB that a device's memory grew by while a block ran. Memory that other processes take meanwhile counts as well."""

    def __init__(self) -> None:
        self.mb = 0.0


@contextmanager
def growth(device: str) -> Iterator[Growth]:
    """Measure what a load takes of the device's memory."""
    seen = Growth()
    before = cuda_memory_used_mb(device)
    yield seen
    seen.mb = max(0.0, cuda_memory_used_mb(device) - before)


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
