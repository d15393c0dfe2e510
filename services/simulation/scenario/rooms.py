"""What machines can hold: room for instances, taken one after the other."""

from collections.abc import Sequence

from bus.messages.catalog import VariantRecord
from services.core.cost import PER_CORE
from services.core.placement import Amount, Device, cores_needed, misfit, total
from services.shell.settings import MonitorSettings
from services.simulation.scenario.model import MachineSpec


class Rooms:
    """All devices of a policy's machines. fixed: of those that run at time 0; else of as many as may run."""

    def __init__(self, machines: Sequence[MachineSpec], monitor: MonitorSettings, *, fixed: bool) -> None:
        self._share = monitor.memory_share
        self._devices: dict[str, list[Device]] = {}
        self._free: dict[str, list[Amount]] = {}
        self._turn: dict[str, int] = {}
        for machine in machines:
            for device in machine.devices * (machine.start if fixed else machine.maximum):
                self._devices.setdefault(device.kind, []).append(device)
                self._free.setdefault(device.kind, []).append(total(device, self._share, monitor.cores_overcommit))

    def device(self, record: VariantRecord) -> Device | None:
        """The first device that could have it, were it empty."""
        return next(
            (one for one in self._devices.get(record.hardware, ()) if not misfit(record, one, self._share)), None
        )

    def lanes(self, record: VariantRecord) -> int:
        """How many of its instances can compute at a time on all devices, at least 1: more would serve no more."""
        able = (one for one in self._devices.get(record.hardware, ()) if not misfit(record, one, self._share))
        return max(1, sum(one.cores // max(1, record.threads) if one.kind in PER_CORE else 1 for one in able))

    def take(self, record: VariantRecord, count: int) -> bool:
        """Room for so many, device after device in turn; False, with as many taken as fitted, when they do not fit."""
        devices, free = self._devices.get(record.hardware, []), self._free.get(record.hardware, [])
        need = Amount(record.profile.memory_mb, cores_needed(record))
        for _ in range(count):
            start = self._turn.get(record.hardware, 0)
            for step in range(len(devices)):
                at = (start + step) % len(devices)
                left = free[at]
                if (
                    need.memory_mb <= left.memory_mb
                    and need.cores <= left.cores
                    and not misfit(record, devices[at], self._share)
                ):
                    free[at] = left - need
                    self._turn[record.hardware] = at + 1
                    break
            else:
                return False
        return True
