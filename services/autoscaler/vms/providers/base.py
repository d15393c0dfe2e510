"""The port of providers, which start and stop workers; and `local` and `simulated`: their workers are process groups on this machine, which
`infaas up` starts and stops.
"""

from typing import Protocol

from msgspec.structs import replace

from bus.codec import BadMessage, decode, encode
from bus.messages.scaling import MachineReply, StartMachine, StopMachine
from bus.port import Bus, NoResponders, RequestTimeout
from bus.subjects import Subjects
from services.autoscaler.vms.commands import Inventory, ProviderTraits
from services.core.settings import MachineSettings


class ProviderError(OSError):
    """The provider refuses; the text is a sentence for people. If it does not answer, that is a TimeoutError: it may have obeyed."""


class Provider(Protocol):
    """Starts and stops workers. Both are idempotent by the worker's name, carry the controller's epoch, and may be repeated.

    A worker that is started sends heartbeats under the name and kind of its order.
    """

    traits: ProviderTraits

    async def start(self, order: StartMachine) -> None:
        """Return once it is under way. order.boot_s: as the kind's settings say. Raises ProviderError, TimeoutError."""

    async def stop(self, order: StopMachine) -> None:
        """Return once nothing of it is left, also if there is no such worker. Raises ProviderError, TimeoutError."""

    async def inventory(self) -> Inventory:
        """Its own machines; empty if it has none. It does not raise: see `Inventory.error`."""


START_S = 5.0  # s
STOP_S = 15.0  # s for a worker's processes to end


class Local:
    """Asks `infaas up` over the bus. Workers start at once, whatever boot time their kind has."""

    traits = ProviderTraits(shared_machine=True)

    def __init__(self, bus: Bus, subjects: Subjects, settings: MachineSettings | None = None) -> None:
        del settings  # not used by this provider
        self._bus = bus
        self._subjects = subjects

    async def start(self, order: StartMachine) -> None:
        await self._ask("start", replace(order, boot_s=0.0), START_S)

    async def stop(self, order: StopMachine) -> None:
        await self._ask("stop", order, STOP_S)

    async def inventory(self) -> Inventory:
        return Inventory()

    async def _ask(self, what: str, order: StartMachine | StopMachine, timeout: float) -> None:
        try:
            reply = await self._bus.request(self._subjects.machines(what), encode(order), timeout)
            error = decode(MachineReply, reply.data).error
        except NoResponders:
            raise ProviderError(f"no process here can {what} workers: `infaas up` can, where it runs") from None
        except RequestTimeout as late:
            raise TimeoutError from late
        except BadMessage as bad:
            raise ProviderError(f"the answer to {what} cannot be read: {bad}") from bad
        if error:
            raise ProviderError(error)


class Simulated(Local):
    """As `Local`, but a worker starts only after its kind's `boot_s` (INFaaS: 20 to 30 s), and events say that it is simulated."""

    traits = ProviderTraits(simulated=True, shared_machine=True)

    async def start(self, order: StartMachine) -> None:
        await self._ask("start", replace(order, simulated=True), START_S)
