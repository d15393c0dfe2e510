"""Workers that the operator's commands start and stop, each under the name that it is told (INFAAS_WORKER__NAME)."""

import logging

from bus.messages.scaling import StartMachine, StopMachine
from services.autoscaler.vms.commands import Inventory
from services.autoscaler.vms.providers.hook import Hook
from services.core.settings import CommandSettings, words

log = logging.getLogger(__name__)


class Command:
    """`add KIND NAME` and `remove KIND NAME` are run; nothing else is known of these machines than their heartbeats."""

    simulated = False
    shared_machine = False
    inventory = False
    insists = True

    def __init__(self, settings: CommandSettings) -> None:
        self.dry_run = settings.dry_run
        self._hook = Hook(words(settings.add), words(settings.remove), settings.command_s)

    async def start(self, order: StartMachine) -> None:
        if self.dry_run:
            log.info("dry run: `add` would be run", extra={"kind": order.kind, "worker": order.worker})
        else:
            await self._hook.add(order.kind, order.worker)

    async def stop(self, order: StopMachine) -> None:
        if self.dry_run:
            log.info("dry run: `remove` would be run", extra={"kind": order.kind, "worker": order.worker})
        else:
            await self._hook.remove(order.kind, order.worker)

    async def survey(self) -> Inventory:
        return Inventory()

    async def close(self) -> None:
        """End what runs."""
        await self._hook.close()
