"""The Docker API of a Swarm's managers, by docker-py: of several hosts one is asked, and when it fails the next."""

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from services.autoscaler.vms.providers.base import ProviderError

log = logging.getLogger(__name__)

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
