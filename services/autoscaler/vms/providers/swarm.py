"""Workers as nodes of a Docker Swarm: a label of a node starts the worker service's task there, its removal ends it."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from bus.messages.scaling import StartMachine, StopMachine
from services.autoscaler.vms.commands import Inventory
from services.autoscaler.vms.providers import swarmnodes
from services.autoscaler.vms.providers.base import ProviderError
from services.autoscaler.vms.providers.hook import Hook
from services.autoscaler.vms.providers.managers import Managers, OutOfSequence
from services.autoscaler.vms.providers.swarmnodes import Machine
from services.core.settings import SwarmSettings, listed, words

log = logging.getLogger(__name__)

EMPTY_S = 12.0  # s for which one order waits for a worker to end; the next order waits again
POLL_S = 0.5
ATTEMPTS = 12  # at a node that others change at the same time
PAUSE_S = 0.02  # after the first of them; later ones twice as long, up to 32 times


class Swarm:
    """settings.hosts: at least one. Raises ProviderError where docker-py is missing."""

    simulated = False
    shared_machine = False
    inventory = True
    insists = True

    def __init__(self, settings: SwarmSettings) -> None:
        self.dry_run = settings.dry_run
        self._managers = Managers(listed(settings.hosts), settings.token, settings.timeout_s)
        add, remove = words(settings.add), words(settings.remove)
        self._hook = Hook(add, remove, settings.command_s) if add else None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # as long as somebody holds one
        self._unusable: set[str] = set()

    async def survey(self) -> Inventory:
        try:
            machines = await self._machines()
            tasks = await self._managers.ask(lambda client: client.tasks())
        except (ProviderError, TimeoutError) as error:
            return Inventory(error=str(error))
        nodes, unusable = swarmnodes.inventory(machines, tasks, time.time())
        for name in set(unusable) - self._unusable:
            log.warning(
                "the node %r carries no worker: give each node a host name of its own, 1 to 64 letters, digits, - or _",
                name,
            )
        self._unusable = set(unusable)
        return Inventory(nodes=tuple(nodes), buys=self._hook is not None)

    # -- in

    async def start(self, order: StartMachine) -> None:
        """Label the node; where it is to be bought and is not there yet, have it made: a later start labels it."""
        async with self._alone(order.worker):
            if order.bought and not await self._is_up(order.worker):
                if self._hook is None:
                    raise ProviderError(f"no command makes {order.worker}: machines.swarm.add is empty")
                if self.dry_run:
                    log.info("dry run: `add` would be run", extra={"kind": order.kind, "worker": order.worker})
                    return
                await self._hook.add(order.kind, order.worker)
                if not await self._is_up(order.worker):
                    return
            await self._change(order.worker, lambda one: _started(one, order))

    # -- out

    async def stop(self, order: StopMachine) -> None:
        """Take the label off, wait until the worker has ended, and have the machine removed if it was bought."""
        name = order.worker
        async with self._alone(name):
            same = await self._named(name)
            if any(swarmnodes.later(one.order, order.order) for one in same if one.worker and order.order):
                log.warning("the node %s was given to a later order: this one to stop is of an earlier worker", name)
                return
            bought = order.bought or any(one.bought for one in same)
            kind = order.kind or next((one.worker or one.pool for one in same), "")
            for one in same:
                await self._change(name, lambda found: _stopped(found, order), one.id)
            if self.dry_run:
                if bought and self._hook is not None:
                    log.info("dry run: `remove` would be run", extra={"kind": kind, "worker": name})
                return
            await self._emptied(name)
            if bought and self._hook is not None:
                await self._hook.remove(kind, name)

    async def _emptied(self, name: str) -> None:
        """Return when no worker's task is left on a node of this name that is up, as far as the Swarm tells. Raises TimeoutError."""
        until = time.monotonic() + EMPTY_S
        while ids := [one.id for one in await self._named(name) if one.up]:
            tasks: list[Any] = []
            for id_ in ids:
                tasks += await self._managers.ask(_tasks_of(id_))
            if not swarmnodes.busy(tasks):
                return
            if time.monotonic() > until:
                raise TimeoutError
            await asyncio.sleep(POLL_S)

    # -- the Docker API

    async def _machines(self) -> list[Machine]:
        return [swarmnodes.machine(found) for found in await self._managers.ask(lambda client: client.nodes())]

    async def _named(self, name: str) -> list[Machine]:
        return swarmnodes.named(await self._machines(), name)

    async def _is_up(self, name: str) -> bool:
        return any(one.up for one in await self._named(name))

    async def _change(self, name: str, labels: Callable[[Machine], dict[str, str]], id_: str = "") -> None:
        """Give the node of this name, or of this id, the labels that it is to have; by version, again when others were faster.

        Nothing is written when it has them already. Raises ProviderError, TimeoutError.
        """
        for attempt in range(ATTEMPTS):
            same = [one for one in await self._named(name) if id_ in ("", one.id)]
            if not same:
                if id_:
                    return  # it has left the Swarm
                raise ProviderError(f"no node of the Swarm has the host name {name}")
            if not id_ and swarmnodes.ambiguous(same):
                raise ProviderError(f"several nodes of the Swarm have the host name {name}")
            one = same[0]
            wanted = labels(one)
            if wanted == one.labels:
                return
            about = {"node": one.id, "worker": name, "labels": _difference(one.labels, wanted)}
            if self.dry_run:
                log.info("dry run: labels of a node would be changed", extra=about)
                return
            try:
                await self._managers.ask(_update(one, wanted))
            except OutOfSequence:
                await asyncio.sleep(PAUSE_S * 2 ** min(attempt, 5) * random.uniform(0.5, 1.5))  # noqa: S311
                continue
            log.info("labels of a node were changed", extra=about)
            return
        raise TimeoutError

    def _alone(self, name: str) -> asyncio.Lock:
        """One order at a time for a machine."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def close(self) -> None:
        """End what runs."""
        if self._hook is not None:
            await self._hook.close()
        await self._managers.close()


def _started(one: Machine, order: StartMachine) -> dict[str, str]:
    if why := swarmnodes.obstacle(one, order, time.time()):
        raise ProviderError(why)
    return swarmnodes.started(one, order)


def _stopped(one: Machine, order: StopMachine) -> dict[str, str]:
    if one.worker and (why := swarmnodes.outdated(one, order.epoch, time.time())):
        raise ProviderError(why)
    return swarmnodes.stopped(one, order)


def _tasks_of(node: str) -> Callable[[Any], Any]:
    return lambda client: client.tasks(filters={"node": node})


def _update(one: Machine, labels: dict[str, str]) -> Callable[[Any], Any]:
    spec = one.spec | {"Labels": labels}
    return lambda client: client.update_node(one.id, one.version, spec)


def _difference(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    """Labels that change: name to value, None = removed."""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return {name: after.get(name) for name in names}
