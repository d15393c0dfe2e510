"""The port of providers, which start and stop workers."""

from typing import Protocol

from bus.messages.scaling import StartMachine, StopMachine
from services.autoscaler.vms.commands import Inventory, ProviderTraits


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
