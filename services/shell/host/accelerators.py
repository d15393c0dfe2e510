"""The processor and the accelerators that this machine has: instruction sets, and what drivers say. No framework is imported, and no context is made.

NVIDIA: the driver's own library (NVML), which comes with it, by nvidia-ml-py.
"""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

# Instruction sets that decide how fast, and for int8 how accurate, a model runs; the best one is named.
_SETS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "i8mm", "asimddp", "asimd")
_EXACT = frozenset({"amx_int8", "avx512_vnni", "avx_vnni"})
X86 = ("x86_64", "AMD64", "i686")


class Processor(Struct, frozen=True, kw_only=True):
    """isa: the best instruction set. arithmetic: "exact", or "saturating": sums of two products of int8 are cut off at 16 bits, so that
    a quantised model may give other answers there (x86 without VNNI).
    """

    model: str
    isa: str
    arithmetic: str


def processor_of(text: str, machine: str) -> Processor:
    """The processor that /proc/cpuinfo describes so. machine: as `platform.machine()`."""
    model, flags = machine, set[str]()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() in {"flags", "Features"}:
            flags = set(value.split())
            break
    exact = machine not in X86 or bool(flags & _EXACT)
    isa = next((one for one in _SETS if one in flags), machine)
    return Processor(model=model, isa=isa, arithmetic="exact" if exact else "saturating")


@lru_cache(maxsize=1)
def processor() -> Processor:
    """This machine's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    return processor_of(text, platform.machine())


class Accelerator(Struct, frozen=True, kw_only=True):
    """One device. address: what frameworks call it ("cuda:0"); kind: as prices know it; memory_mb: all it has."""

    address: str
    kind: str
    name: str
    memory_mb: float
    uuid: str = ""


class DriverError(Exception):
    """The driver is missing or does not work. The text says which, and what to do."""


@contextmanager
def _driver() -> Iterator[Any]:
    """NVIDIA's bindings of its driver's library. Raises DriverError when there is no driver, or it does not answer."""
    import pynvml  # noqa: PLC0415  (30 ms and 4 MB, for the few processes that ask)

    try:
        _begin()
        yield pynvml
    except pynvml.NVMLError_LibraryNotFound:
        raise DriverError(
            "no NVIDIA driver is installed (libnvidia-ml.so.1): install it, or pass the GPU into the container"
        ) from None
    except pynvml.NVMLError as error:
        raise DriverError(f"the NVIDIA driver does not answer ({error}): run nvidia-smi, it says more") from error


@cache
def _begin() -> None:
    import pynvml  # noqa: PLC0415

    pynvml.nvmlInit()


def cuda_devices() -> list[Accelerator]:
    """The GPUs that this process may use, in CUDA's order (by bus address); raises DriverError."""
    with _driver() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        seen = [
            Accelerator(
                address=f"cuda:{index}",
                kind="gpu",
                name=nvml.nvmlDeviceGetName(handle),
                memory_mb=nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**20,
                uuid=nvml.nvmlDeviceGetUUID(handle),
            )
            for index, handle in enumerate(handles)
        ]
    return visible(seen, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(devices: Sequence[Accelerator], chosen: str | None) -> list[Accelerator]:
    """What CUDA_VISIBLE_DEVICES leaves, renumbered as CUDA does: numbers or the beginning of a UUID, up to the first wrong one."""
    if chosen is None:
        return list(devices)
    left: list[int] = []
    for word in (part.strip() for part in chosen.split(",")):
        if re.fullmatch(r"\d+", word):
            named = [int(word)] if int(word) < len(devices) else []
        else:
            named = [number for number, one in enumerate(devices) if word and one.uuid.startswith(word)]
        if len(named) != 1 or named[0] in left:
            break
        left.append(named[0])
    return [replace(devices[old], address=f"cuda:{new}") for new, old in enumerate(left)]


def cuda_device(address: str) -> Accelerator:
    """The GPU with this address; raises DriverError when there is none."""
    found = cuda_devices()
    for device in found:
        if device.address == address:
            return device
    there = ", ".join(f"{device.address} ({device.name})" for device in found) or "none"
    raise DriverError(
        f"there is no GPU {address}: the driver sees {there}; look at CUDA_VISIBLE_DEVICES and worker.gpus"
    )


def cuda_memory_used_mb(address: str) -> float:
    """Memory of one GPU that all processes together use now, in MB; raises DriverError."""
    handle = _handle(address)
    with _driver() as nvml:
        return float(nvml.nvmlDeviceGetMemoryInfo(handle).used) / 2**20


def cuda_utilisation(address: str) -> float:
    """0..1: the part of the driver's last period (up to 1 s) in which some process's kernel ran on this GPU; raises DriverError."""
    handle = _handle(address)
    with _driver() as nvml:
        return min(1.0, float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0)


@cache
def _handle(address: str) -> Any:
    uuid = cuda_device(address).uuid
    with _driver() as nvml:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """All accelerators of this machine. The driver is asked once a process; one that is missing or does not answer has none."""
    try:
        return tuple(cuda_devices())
    except DriverError:
        return ()


def why_no_gpu() -> str:
    """Why no GPU can be used here; empty when one can."""
    try:
        return "" if cuda_devices() else "CUDA_VISIBLE_DEVICES leaves none"
    except DriverError as error:
        return str(error)
