"""The monitor's edge: measures how busy this machine is, without waiting, and keeps quarantines in the control bucket."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bus.port import Bus
from services.core.placement import quarantine_key
from services.monitor.effects import KeepQuarantine, MachineSample, SampleMachine
from services.shell.host.accelerators import DriverError, cuda_utilisation

CGROUP = Path("/sys/fs/cgroup")


class MachineEdge:
    """Samples the cores this process may use, and the memory of the machine or of its cgroup. A sample takes about 0.1 ms.

    bus, bucket: where quarantines are kept. Without a bus they are not kept. gpus: addresses of GPUs whose driver is asked, too.
    """

    def __init__(
        self, cgroup: Path = CGROUP, *, gpus: Sequence[str] = (), bus: Bus | None = None, bucket: str = ""
    ) -> None:
        self._gpus = gpus
        self._bus = bus
        self._bucket = bucket
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        limited = _number(cgroup / "memory.max") is not None
        self._memory = cgroup / "memory.current" if limited else None
        psutil.cpu_percent(interval=None, percpu=True)  # the first call only begins the measurement

    def inline(self, command: Any) -> Any:
        """Carry out a SampleMachine at once: it reads two small files of the kernel."""
        return self._sample() if isinstance(command, SampleMachine) else NotImplemented

    async def perform(self, command: Any) -> Any:
        if isinstance(command, KeepQuarantine):
            if self._bus is not None:
                bucket = await self._bus.key_value(self._bucket)
                await bucket.put(quarantine_key(command.worker, command.variant), command.reason.encode())
            return None
        raise ValueError(f"the monitor's edge knows no {type(command).__name__}")

    def _sample(self) -> MachineSample:
        percents = psutil.cpu_percent(interval=None, percpu=True)
        cpus = self._cpus if self._cpus is not None else range(len(percents))
        cores = {cpu: percents[cpu] / 100.0 for cpu in cpus if cpu < len(percents)}
        ours = list(cores.values()) or [percent / 100.0 for percent in percents]
        used = _number(self._memory) if self._memory is not None else None
        if used is None:
            memory = psutil.virtual_memory()
            used = memory.total - memory.available
        gpus: dict[str, float] = {}
        for address in self._gpus:
            with suppress(DriverError):
                gpus[address] = cuda_utilisation(address)
        return MachineSample(utilisation=sum(ours) / len(ours), memory_used_mb=used / 2**20, cores=cores, gpus=gpus)


def _number(path: Path) -> int | None:
    """The number in a file of the kernel; None if it holds none ("max"), or if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
