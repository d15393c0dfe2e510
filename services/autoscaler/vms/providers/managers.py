"""The Docker API of a Swarm's managers, by docker-py: of several hosts one is asked, and when it fails the next."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from services.autoscaler.vms.providers.base import ProviderError

log = logging.getLogger(__name__)

T = TypeVar("T")
_SEQUENCE = "update out of sequence"  # HTTP 500, by its text alone
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
        self._current = 0  # the host that answered last
        self._client: Any = None
        self._lock = asyncio.Lock()  # one request at a time: docker-py's session is one thread's
        self._away = False

    async def ask(self, what: Callable[[Any], T]) -> T:
        """What docker-py's client makes of it. Raises OutOfSequence, ProviderError where it is refused, Away."""
        async with self._lock:
            said: dict[str, str] = {}
            for _ in range(max(2, len(self._hosts))):  # a single name may stand for several managers
                host = self._hosts[self._current]
                try:
                    found = await asyncio.to_thread(self._ask, host, what)
                except asyncio.CancelledError:
                    self._client = None  # a thread still uses it
                    raise
                except self._failures as error:
                    said[host] = self._judge(error)
                    self._drop()
                    self._current = (self._current + 1) % len(self._hosts)
                else:
                    self._tell(away=False)
                    return found
            told = "; ".join(f"{host}: {reason}" for host, reason in said.items())
            self._tell(away=True, told=told)
            raise Away(f"no manager answers: {told}")

    async def close(self) -> None:
        async with self._lock:
            self._drop()

    def _ask(self, host: str, what: Callable[[Any], T]) -> T:
        if self._client is None:
            client = self._docker.APIClient(base_url=host, version="auto", timeout=self._timeout)
            client.trust_env = False  # no proxy of the environment stands between us and a manager
            if self._token:
                client.headers["Authorization"] = f"Bearer {self._token}"
            self._client = client
        return what(self._client)

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
                log.info("a manager of the Swarm answers", extra={"host": self._hosts[self._current]})

    def _drop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
