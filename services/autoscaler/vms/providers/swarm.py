"""Workers as nodes of a Docker Swarm: a label of a node starts the worker service's task there, its removal ends it."""

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from bus.messages.scaling import StartMachine, StopMachine
from services.autoscaler.vms.commands import Inventory
from services.autoscaler.vms.providers import swarmnodes
from services.autoscaler.vms.providers.base import ProviderError
from services.autoscaler.vms.providers.command import Hook
from services.autoscaler.vms.providers.swarmnodes import SwarmNode
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

    async def _machines(self) -> list[SwarmNode]:
        return [swarmnodes.machine(found) for found in await self._managers.ask(lambda client: client.nodes())]

    async def _named(self, name: str) -> list[SwarmNode]:
        return swarmnodes.named(await self._machines(), name)

    async def _is_up(self, name: str) -> bool:
        return any(one.up for one in await self._named(name))

    async def _change(self, name: str, labels: Callable[[SwarmNode], dict[str, str]], id_: str = "") -> None:
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


def _started(one: SwarmNode, order: StartMachine) -> dict[str, str]:
    if why := swarmnodes.obstacle(one, order, time.time()):
        raise ProviderError(why)
    return swarmnodes.started(one, order)


def _stopped(one: SwarmNode, order: StopMachine) -> dict[str, str]:
    if one.worker and (why := swarmnodes.outdated(one, order.epoch, time.time())):
        raise ProviderError(why)
    return swarmnodes.stopped(one, order)


def _tasks_of(node: str) -> Callable[[Any], Any]:
    return lambda client: client.tasks(filters={"node": node})


def _update(one: SwarmNode, labels: dict[str, str]) -> Callable[[Any], Any]:
    spec = one.spec | {"Labels": labels}
    return lambda client: client.update_node(one.id, one.version, spec)


def _difference(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    """Labels that change: name to value, None = removed."""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return {name: after.get(name) for name in names}


# -- The Docker API of a Swarm's managers, by docker-py: of several hosts one is asked, and when it fails the next.

T = TypeVar("T")
_SEQUENCE = "update out of sequence"  # HTTP 500, by its text alone
MOST = 100  # hosts whose failures are remembered; addresses of tasks change
_ELSEWHERE = (
    500,
    502,
    503,
    504,
)  # this manager cannot; another may: no leader, no manager any more, no engine behind the proxy


class OutOfSequence(Exception):
    """What was to be changed has changed since it was read."""


class Away(TimeoutError):
    """No manager answers; whether the last request was carried out is not known. The text says what each said."""


class Managers:
    """hosts: addresses as DOCKER_HOST has them. token: shown to an engine proxy. timeout_s: for one answer.

    Raises ProviderError when docker-py is not installed.
    """

    def __init__(self, hosts: Sequence[str], token: str, timeout_s: float) -> None:
        try:
            import docker  # noqa: PLC0415  (an extra, and 40 MB)
            import docker.errors  # noqa: PLC0415
            import requests  # noqa: PLC0415
        except ImportError as error:
            raise ProviderError(
                f"machines.provider swarm needs docker-py ({error}): pip install 'infaas[swarm]'"
            ) from error
        self._docker = docker
        self._refused: type[Exception] = docker.errors.APIError
        self._failures = (docker.errors.DockerException, requests.RequestException, OSError, ValueError)
        self._hosts = tuple(hosts)
        self._token = token
        self._timeout = timeout_s
        self._client: Any = None  # of the host that answered last
        self._host = ""
        self._failed: dict[str, int] = {}  # by host: number of its last failure
        self._count = 0
        self._lock = asyncio.Lock()  # one request at a time: docker-py's session is one thread's
        self._away = False

    async def ask(self, what: Callable[[Any], T]) -> T:
        """What docker-py's client makes of it. Raises OutOfSequence, ProviderError where it is refused, Away."""
        async with self._lock:
            said: dict[str, str] = {}
            tried: set[str] = set()
            while (host := await self._next(tried)) is not None:
                if self._client is None:  # a connection that was kept may only have grown old
                    tried.add(host)
                try:
                    client, found = await asyncio.to_thread(self._ask, host, self._client, what)
                except asyncio.CancelledError:
                    self._leave(host)  # a thread may still use its client
                    raise
                except self._failures as error:
                    said[host] = self._judge(error)
                    client = self._leave(host)
                    if client is not None:
                        client.close()
                else:
                    self._client, self._host = client, host
                    self._tell(away=False)
                    return found
            told = "; ".join(f"{host}: {reason}" for host, reason in said.items())
            self._tell(away=True, told=told)
            raise Away(f"no manager answers: {told}")

    async def close(self) -> None:
        async with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    async def _next(self, tried: Collection[str]) -> str | None:
        """The host to ask: the one that answered last, else the one whose last failure is longest ago."""
        if self._client is not None:
            return self._host
        found = await asyncio.to_thread(_addresses, self._hosts)
        left = [host for host in found if host not in tried]
        return min(left, key=lambda host: self._failed.get(host, 0), default=None)

    def _leave(self, host: str) -> Any:
        """It is asked last from now on; returns its client, if there is one."""
        self._count += 1
        if len(self._failed) >= MOST:
            self._failed.clear()
        self._failed[host] = self._count
        client, self._client = self._client, None
        return client

    def _ask(self, host: str, client: Any, what: Callable[[Any], T]) -> tuple[Any, T]:
        """In a thread: the client, a new one where there is none, and what it says."""
        if client is not None:
            return client, what(client)
        client = self._docker.APIClient(base_url=host, version="auto", timeout=self._timeout)
        try:
            client.trust_env = False  # no proxy of the environment stands between us and a manager
            if self._token:
                client.headers["Authorization"] = f"Bearer {self._token}"
            return client, what(client)
        except BaseException:
            client.close()
            raise

    def _judge(self, error: Exception) -> str:
        """Why this host could not; raises what no other host would answer otherwise."""
        if not isinstance(error, self._refused):
            return str(error)[:300]
        status, text = getattr(error, "status_code", None), str(getattr(error, "explanation", "") or error)
        if _SEQUENCE in text:
            raise OutOfSequence from error
        if status not in _ELSEWHERE:
            raise ProviderError(f"the Docker API refuses with status {status}: {text[:300]}") from error
        return text[:300]

    def _tell(self, *, away: bool, told: str = "") -> None:
        """Once when they go and when one is back."""
        if away != self._away:
            self._away = away
            if away:
                log.warning("no manager of the Swarm answers: %s", told)
            else:
                log.info("a manager of the Swarm answers", extra={"host": self._host})


def _addresses(hosts: Sequence[str]) -> list[str]:
    """Each host, and of a name that stands for several (tasks.SERVICE in a Swarm) each of them."""
    return list(dict.fromkeys(one for host in hosts for one in _resolved(host)))


def _resolved(host: str) -> list[str]:
    scheme, _, rest = host.partition("://")
    try:
        parts = urlsplit(f"//{rest}")
        if scheme != "tcp" or not parts.hostname or parts.port is None:
            return [host]
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return [host]  # what is wrong with it, asking it will tell
    addresses = [str(address[4][0]) for address in found]
    return [f"tcp://{f'[{one}]' if ':' in one else one}:{parts.port}" for one in addresses]
