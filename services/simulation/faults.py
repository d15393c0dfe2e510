"""A scenario's faults, each at its time."""

from collections.abc import Iterable
from math import inf, prod

from bus.messages.catalog import VariantRecord
from services.simulation.hardware import SimulatedMachine
from services.simulation.kernel import Kernel
from services.simulation.scenario.model import FaultKind, FaultSpec
from services.simulation.system import SimulatedSystem


class Faults:
    """begins: the kernel's time at which the scenario begins."""

    def __init__(self, kernel: Kernel, system: SimulatedSystem, faults: Iterable[FaultSpec], begins: float) -> None:
        self._kernel = kernel
        self._system = system
        self._delay = kernel.delay
        self._present: list[FaultSpec] = []
        system.load_fails = self._load_fails
        if system.models is not None:
            system.models.wrong = self._errs
        system.appears = self._slow
        for fault in faults:
            kernel.at(begins + fault.at_s - kernel.now, self._begin, fault)
            if fault.until_s < inf:
                kernel.at(begins + fault.until_s - kernel.now, self._end, fault)

    def _begin(self, fault: FaultSpec) -> None:
        if fault.kind == "worker-dies":
            victim = next((name for name, one in sorted(self._system.machines.items()) if _meant(fault, one)), None)
            if victim is not None:
                self._system.kill(victim)
        else:
            self._present.append(fault)
            self._apply(fault)

    def _end(self, fault: FaultSpec) -> None:
        if fault.kind != "worker-dies":
            self._present.remove(fault)
            self._apply(fault)

    def _apply(self, fault: FaultSpec) -> None:
        """Apply exactly the present faults of this kind."""
        if fault.kind == "messages-delayed":
            self._kernel.delay = self._delay + sum(one.delay_s for one in self._all("messages-delayed"))
        elif fault.kind == "device-slow":
            for machine in self._system.machines.values():
                self._slow(machine)

    def _slow(self, machine: SimulatedMachine) -> None:
        for device in machine.devices.values():
            device.slow = prod(
                fault.factor
                for fault in self._all("device-slow")
                if fault.hardware in ("", device.spec.kind) and fault.worker in ("", machine.worker)
            )

    def _load_fails(self, record: VariantRecord) -> bool:
        return any(
            fault.variant in ("", record.variant) and fault.hardware in ("", record.hardware)
            for fault in self._all("load-fails")
        )

    def _errs(self, record: VariantRecord) -> bool:
        return any(fault.model == record.model for fault in self._all("model-errs"))

    def _all(self, kind: FaultKind) -> list[FaultSpec]:
        return [fault for fault in self._present if fault.kind == kind]


def _meant(fault: FaultSpec, machine: SimulatedMachine) -> bool:
    if fault.worker:
        return machine.worker == fault.worker
    return fault.hardware in ("", machine.spec.kind)
