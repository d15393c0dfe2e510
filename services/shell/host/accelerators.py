"""The accelerators that this machine has, as their drivers say. No framework is imported, and no context is made.

NVIDIA: the driver's own library (NVML), which comes with it and takes a few MB.
"""

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

_NVML = ("libnvidia-ml.so.1", "libnvidia-ml.so")
_TEXT = 96


class Accelerator(Struct, frozen=True, kw_only=True):
    """One device. address: what frameworks call it ("cuda:0"); kind: as prices know it; memory_mb: all it has."""

    address: str
    kind: str
    name: str
    memory_mb: float
    uuid: str = ""


class DriverError(Exception):
    """The driver is missing or does not work. The text says which, and what to do."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Nvml:
    """The few calls needed of NVML. Raises DriverError when there is no driver, or it does not answer."""

    def __init__(self) -> None:
        self._library = _first_library()
        self._check("nvmlInit_v2")

    def handles(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        self._check("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._check("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            found.append(handle)
        return found

    def text(self, call: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        self._check(call, handle, buffer, ctypes.c_uint(_TEXT))
        return buffer.value.decode(errors="replace")

    def memory(self, handle: ctypes.c_void_p) -> _Memory:
        memory = _Memory()
        self._check("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory

    def utilisation(self, handle: ctypes.c_void_p) -> float:
        """0..1: the part of the driver's last period (up to 1 s) in which a kernel of any process ran."""
        rates = _Utilisation()
        self._check("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
        return min(1.0, float(rates.gpu) / 100.0)

    def _check(self, call: str, *arguments: Any) -> None:
        code = getattr(self._library, call)(*arguments)
        if code != 0:
            raise DriverError(f"the NVIDIA driver does not answer ({call}: error {code}): run nvidia-smi, it says more")


def _first_library() -> ctypes.CDLL:
    for name in _NVML:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError(
        "no NVIDIA driver is installed (libnvidia-ml.so.1): install it, or pass the GPU into the container"
    )


@cache
def _nvml() -> _Nvml:
    return _Nvml()


def cuda_devices(environ: Mapping[str, str] | None = None) -> list[Accelerator]:
    """The GPUs that this process may use, in CUDA's order (by bus address); raises DriverError."""
    nvml = _nvml()
    seen = [
        Accelerator(
            address=f"cuda:{index}",
            kind="gpu",
            name=nvml.text("nvmlDeviceGetName", handle),
            memory_mb=nvml.memory(handle).total / 2**20,
            uuid=nvml.text("nvmlDeviceGetUUID", handle),
        )
        for index, handle in enumerate(nvml.handles())
    ]
    return visible(seen, (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES"))


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
    return float(_nvml().memory(_handle(address)).used) / 2**20


def cuda_utilisation(address: str) -> float:
    """The part of the time, 0..1, in which some process's kernel ran on this GPU lately; raises DriverError."""
    return _nvml().utilisation(_handle(address))


@cache
def _handle(address: str) -> ctypes.c_void_p:
    uuid = cuda_device(address).uuid
    nvml = _nvml()
    for handle in nvml.handles():
        if nvml.text("nvmlDeviceGetUUID", handle) == uuid:
            return handle
    raise DriverError(f"the GPU {address} is gone")


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
