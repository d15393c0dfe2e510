"""Workers as process groups on this machine, started and stopped by who owns its processes (`infaas up`)."""

from msgspec.structs import replace

from bus.codec import BadMessage, decode, encode
from bus.messages.scaling import MachineReply, StartMachine, StopMachine
from bus.port import Bus, NoResponders, RequestTimeout
from bus.subjects import Subjects
from services.autoscaler.vms.commands import Inventory
from services.autoscaler.vms.providers.base import ProviderError
from services.core.settings import MachineSettings

START_S = 5.0
STOP_S = 15.0  # a worker's processes may take their time to finish


class Local:
    """Asks over the bus. Nothing boots here: what the settings say of boot times is left out."""

    simulated = False
    shared_machine = True  # its workers are processes of this one
    inventory = False
    insists = False
    dry_run = False

    def __init__(self, bus: Bus, subjects: Subjects, settings: MachineSettings | None = None) -> None:
        del settings  # nothing of it concerns this machine
        self._bus = bus
        self._subjects = subjects

    async def start(self, order: StartMachine) -> None:
        await self._ask("start", replace(order, boot_s=0.0), START_S)

    async def stop(self, order: StopMachine) -> None:
        await self._ask("stop", order, STOP_S)

    async def survey(self) -> Inventory:
        return Inventory()

    async def _ask(self, what: str, order: StartMachine | StopMachine, timeout: float) -> None:
        try:
            reply = await self._bus.request(self._subjects.machines(what), encode(order), timeout)
            error = decode(MachineReply, reply.data).error
        except NoResponders:
            raise ProviderError(f"nobody here can {what} workers: `infaas up` does, where it runs") from None
        except RequestTimeout as late:
            raise TimeoutError from late
        except BadMessage as bad:
            raise ProviderError(f"the answer to {what} cannot be read: {bad}") from bad
        if error:
            raise ProviderError(error)


# -- Machines that take their time: workers of this machine that are started only after their kind's `boot_s`
# (INFaaS: 20 to 30 s).


class Simulated(Local):
    """As `Local`, with the boot time; every event about what it starts says that it is simulated."""

    simulated = True
    shared_machine = True

    async def start(self, order: StartMachine) -> None:
        await self._ask("start", replace(order, simulated=True), START_S)
