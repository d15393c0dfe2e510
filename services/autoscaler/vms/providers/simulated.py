"""Machines that take their time: workers of this machine that are started only after their kind's `boot_s` (INFaaS: 20 to 30 s)."""

from msgspec.structs import replace

from bus.messages.scaling import StartMachine
from services.autoscaler.vms.providers.local import START_S, Local


class Simulated(Local):
    """As `Local`, with the boot time; every event about what it starts says that it is simulated."""

    simulated = True
    shared_machine = True

    async def start(self, order: StartMachine) -> None:
        await self._ask("start", replace(order, simulated=True), START_S)
