"""The port for machines: whoever can start and stop workers, one file each."""

from typing import Protocol

from bus.messages.scaling import StartMachine, StopMachine
from services.autoscaler.vms.commands import Inventory


class ProviderError(OSError):
    """The provider says no; the text is a sentence for people. Silence is a TimeoutError instead: it may have happened."""


class Provider(Protocol):
    """Starts and stops workers. Both are idempotent by name, carry the controller's epoch, and may be repeated.

    What is started makes itself known by heartbeats, under the name and kind that it was ordered with. simulated: machines are.
    shared_machine: workers are processes of one machine. inventory: it has machines of its own and can say which are free. insists:
    what is given up must be stopped for certain. dry_run: it does nothing and says what it would do.
    """

    simulated: bool
    shared_machine: bool
    inventory: bool
    insists: bool
    dry_run: bool

    async def start(self, order: StartMachine) -> None:
        """Return once it is under way. order.boot_s: what the kind's settings say. Raises ProviderError, TimeoutError."""

    async def stop(self, order: StopMachine) -> None:
        """Return once nothing of it is left; also when there is no such worker. Raises ProviderError, TimeoutError."""

    async def survey(self) -> Inventory:
        """Which machines there are; an empty inventory where it has none of its own. Never raises: `Inventory.error`."""
