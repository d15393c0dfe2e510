"""The provider `swarm`: a label of a node starts the worker service's task there, and its removal ends the task."""

import asyncio
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from bus.messages.scaling import StartMachine, StopMachine
from services.autoscaler.vms.commands import Inventory, ProviderTraits
from services.autoscaler.vms.providers import swarmnodes
from services.autoscaler.vms.providers.base import ProviderError
from services.autoscaler.vms.providers.command import Hook
from services.autoscaler.vms.providers.swarmnodes import SwarmNode
from services.core.settings import SwarmSettings, listed, words

log = logging.getLogger(__name__)

EMPTY_S = 12.0  # s for which an order waits for a worker to end. The next order of the same waits again
POLL_S = 0.5
ATTEMPTS = 12  # to change a node that others change at the same time
PAUSE_S = 0.02  # after the first attempt; doubles with each, up to 32 times


class Swarm:
    """Workers are nodes of a Docker Swarm. settings.hosts: at least one. Raises ProviderError if docker-py is missing."""

    def __init__(self, settings: SwarmSettings) -> None:
        self.traits = ProviderTraits(has_inventory=True, confirm_stops=True, dry_run=settings.dry_run)
        self._managers = Managers(listed(settings.hosts), settings.token, settings.timeout_s)
        add, remove = words(settings.add), words(settings.remove)
        self._hook = Hook(add, remove, settings.command_s) if add else None
        # by machine, for as long as one is used
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unusable: set[str] = set()

    async def inventory(self) -> Inventory:
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
        """Label the node. If it is to be bought and does not exist yet, have it made; a later start labels it."""
        async with self._alone(order.worker):
            if order.bought and not await self._is_up(order.worker):
                if self._hook is None:
                    raise ProviderError(f"no command makes {order.worker}: machines.swarm.add is empty")
                if self.traits.dry_run:
                    log.info("dry run: `add` would be run", extra={"kind": order.kind, "worker": order.worker})
                    return
                await self._hook.add(order.kind, order.worker)
                if not await self._is_up(order.worker):
                    return
            await self._change(order.worker, lambda one: _started(one, order))

    # -- out

    async def stop(self, order: StopMachine) -> None:
        """Remove the label, wait until the worker has ended, and have the machine removed if it was bought."""
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
            if self.traits.dry_run:
                if bought and self._hook is not None:
                    log.info("dry run: `remove` would be run", extra={"kind": kind, "worker": name})
                return
            await self._emptied(name)
            if bought and self._hook is not None:
                await self._hook.remove(kind, name)

    async def _emptied(self, name: str) -> None:
        """Return once the Swarm shows no worker's task on a node of this name that is up. Raises TimeoutError."""
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
        """Give the node of this name, or of this id, these labels. It is tried again if others change the node meanwhile.

        Nothing is written if it has them already. Raises ProviderError, TimeoutError.
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
            if self.traits.dry_run:
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
        """A lock: one order at a time for a machine."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def close(self) -> None:
        """End commands that run, and close connections."""
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
    """The labels that change: name to value; None: removed."""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return {name: after.get(name) for name in names}


T = TypeVar("T")
_SEQUENCE = "update out of sequence"  # of an HTTP 500, which only its text tells apart
MOST = 100  # hosts whose failures are remembered, since addresses of tasks change
# this manager cannot answer, another may: it has no leader, is none any more, or has no engine
_TRY_NEXT = (500, 502, 503, 504)


class OutOfSequence(Exception):
    """The object has changed since it was read."""


class NoManager(TimeoutError):
    """No manager answers. Whether the last request was carried out is unknown. The text says why each failed."""


class _Request:
    """A request in a thread, while it is entered. client: whom it asks. Who waits for it may give it up: then the client is closed once nobody uses it."""

    def __init__(self) -> None:
        self.client: Any = None
        self._lock = threading.Lock()
        self._ended = self._given_up = False

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            unused = self._ended
        if unused:
            self._close()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._ended = True
            unused = self._given_up
        if unused:
            self._close()

    def _close(self) -> None:
        if self.client is not None:
            self.client.close()


class Managers:
    """The Docker API of a Swarm's managers: one of the hosts is asked, and if it fails the next.

    hosts: addresses as DOCKER_HOST has them. token: for an engine proxy. timeout_s: for one answer.

    Raises ProviderError when docker-py is not installed.
    """

    def __init__(self, hosts: Sequence[str], token: str, timeout_s: float) -> None:
        try:
            import docker  # noqa: PLC0415  (an extra, and 40 MB)
            import docker.errors  # noqa: PLC0415
            import docker.transport.unixconn  # noqa: PLC0415
            import requests  # noqa: PLC0415
        except ImportError as error:
            raise ProviderError(
                f"machines.provider swarm needs docker-py ({error}): pip install 'infaas[swarm]'"
            ) from error
        docker.transport.unixconn.UnixHTTPConnection.connect = _connect
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
        self._lock = asyncio.Lock()  # one request at a time: a session of docker-py is for one thread
        self._away = False

    async def ask(self, what: Callable[[Any], T]) -> T:
        """What docker-py's client answers. Raises OutOfSequence, ProviderError if the request is refused, NoManager."""
        async with self._lock:
            failures: dict[str, str] = {}
            tried: set[str] = set()
            while (host := await self._next(tried)) is not None:
                if self._client is None:  # a kept connection may merely have expired, so its host may be tried again
                    tried.add(host)
                request = _Request()
                try:
                    client, found = await asyncio.to_thread(self._ask, request, host, self._client, what)
                except asyncio.CancelledError:
                    self._leave(host)
                    request.give_up()
                    raise
                except self._failures as error:
                    failures[host] = self._judge(error)
                    client = self._leave(host)
                    if client is not None:
                        client.close()
                else:
                    self._client, self._host = client, host
                    self._log(away=False)
                    return found
            reasons = "; ".join(f"{host}: {reason}" for host, reason in failures.items())
            self._log(away=True, reasons=reasons)
            raise NoManager(f"no manager answers: {reasons}")

    async def close(self) -> None:
        async with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    async def _next(self, tried: Collection[str]) -> str | None:
        """The host to ask: the one that answered last, else the one that has not failed for longest."""
        if self._client is not None:
            return self._host
        found = await asyncio.to_thread(_addresses, self._hosts)
        left = [host for host in found if host not in tried]
        return min(left, key=lambda host: self._failed.get(host, 0), default=None)

    def _leave(self, host: str) -> Any:
        """This host is asked last from now on. Returns its client, if it has one."""
        self._count += 1
        if len(self._failed) >= MOST:
            self._failed.clear()
        self._failed[host] = self._count
        client, self._client = self._client, None
        return client

    def _ask(self, request: "_Request", host: str, client: Any, what: Callable[[Any], T]) -> tuple[Any, T]:
        """In a thread: the client, made if there is none, and its answer."""
        with request:
            if client is not None:
                request.client = client
                return client, what(client)
            request.client = client = self._made(host)
            try:
                return client, what(client)
            except BaseException:
                client.close()
                raise

    def _made(self, host: str) -> Any:
        """A client of this host. One that does not answer leaves no connection open."""
        kind = self._docker.APIClient
        client = kind.__new__(kind)
        try:
            client.__init__(base_url=host, version="auto", timeout=self._timeout)
        except BaseException:
            client.close()
            raise
        client.trust_env = False  # managers are reached without the environment's proxies
        if self._token:
            client.headers["Authorization"] = f"Bearer {self._token}"
        return client

    def _judge(self, error: Exception) -> str:
        """Why this host failed. Raises the error if any other host would answer the same."""
        if not isinstance(error, self._refused):
            return str(error)[:300]
        status, text = getattr(error, "status_code", None), str(getattr(error, "explanation", "") or error)
        if _SEQUENCE in text:
            raise OutOfSequence from error
        if status not in _TRY_NEXT:
            raise ProviderError(f"the Docker API refuses with status {status}: {text[:300]}") from error
        return text[:300]

    def _log(self, *, away: bool, reasons: str = "") -> None:
        """Log once when no manager answers any more, and once when one answers again."""
        if away != self._away:
            self._away = away
            if away:
                log.warning("no manager of the Swarm answers: %s", reasons)
            else:
                log.info("a manager of the Swarm answers", extra={"host": self._host})


def _connect(connection: Any) -> None:
    """As docker-py connects to an engine's socket; but where nobody listens it leaves its own one open, until its memory is collected."""
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        ours.settimeout(connection.timeout)
        ours.connect(connection.unix_socket)
    except BaseException:
        ours.close()
        raise
    connection.sock = ours


def _addresses(hosts: Sequence[str]) -> list[str]:
    """All addresses of all hosts. A name may have several (tasks.SERVICE in a Swarm)."""
    return list(dict.fromkeys(one for host in hosts for one in _resolved(host)))


def _resolved(host: str) -> list[str]:
    scheme, _, rest = host.partition("://")
    try:
        parts = urlsplit(f"//{rest}")
        if scheme != "tcp" or not parts.hostname or parts.port is None:
            return [host]
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return [host]  # asking it will show what is wrong with it
    addresses = [str(address[4][0]) for address in found]
    return [f"tcp://{f'[{one}]' if ':' in one else one}:{parts.port}" for one in addresses]
