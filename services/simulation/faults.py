"""What a scenario lets go wrong, brought about at its time."""

from collections.abc import Iterable
from math import inf

from bus.messages.catalog import VariantRecord
from services.simulation.hardware import Machine
from services.simulation.kernel import Kernel
from services.simulation.scenario.model import FaultSpec
from services.simulation.system import System


class Faults:
    """begins: the kernel's time at which the scenario does."""

    def __init__(self, kernel: Kernel, system: System, faults: Iterable[FaultSpec], begins: float) -> None:
        self._kernel = kernel
        self._system = system
        self._failing: list[FaultSpec] = []
        system.load_fails = self._load_fails
        for fault in faults:
            kernel.at(begins + fault.at_s - kernel.now, self._begin, fault)
            if fault.until_s < inf:
                kernel.at(begins + fault.until_s - kernel.now, self._end, fault)

    def _begin(self, fault: FaultSpec) -> None:
        if fault.kind == "worker-dies":
            victim = next((name for name, one in sorted(self._system.machines.items()) if _meant(fault, one)), None)
            if victim is not None:
                self._system.kill(victim)
        elif fault.kind == "device-slow":
            self._slow(fault, fault.factor)
        elif fault.kind == "load-fails":
            self._failing.append(fault)
        else:
            self._kernel.delay += fault.delay_s

    def _end(self, fault: FaultSpec) -> None:
        if fault.kind == "device-slow":
            self._slow(fault, 1.0 / fault.factor)
        elif fault.kind == "load-fails":
            self._failing.remove(fault)
        elif fault.kind == "messages-delayed":
            self._kernel.delay -= fault.delay_s

    def _slow(self, fault: FaultSpec, factor: float) -> None:
        for machine in self._system.machines.values():
            for device in machine.devices.values():
                if fault.hardware in ("", device.spec.kind) and fault.worker in ("", machine.worker):
                    device.slow *= factor

    def _load_fails(self, record: VariantRecord) -> bool:
        return any(
            fault.variant in ("", record.variant) and fault.hardware in ("", record.hardware) for fault in self._failing
        )


def _meant(fault: FaultSpec, machine: Machine) -> bool:
    if fault.worker:
        return machine.worker == fault.worker
    return fault.hardware in ("", machine.spec.kind)
