"""The metrics and health of a whole system at one address: one page for all its processes.

Under `infaas up` every service process has a port of its own. When this is asked, it asks them.
"""

import asyncio
import json
from collections.abc import Callable, Iterable

from services.core.metric import MetricFamily
from services.core.settings import MetricsSettings
from services.shell.host.process import ServerError
from services.shell.host.supervise import Supervisor
from services.shell.http import HttpListener, Pages, Reply, fetch, serve_pages, state_page
from services.shell.metrics import process

PORT = 9100
OFFSET = 10  # from --port-base; contract, section 1
NEAR = 200  # ports after the first one that processes may get
GRACE = 0.2  # s that a page under way has when the system stops
PATIENCE = 1.5  # s that a process has to answer


class SystemMetrics:
    """take: claims a port if it is free; take_any: claims a free one. `port` is 0 if metrics are switched off."""

    def __init__(
        self,
        settings: MetricsSettings,
        base: int | None,
        recorded: int | None,
        supervisor: Supervisor,
        take: Callable[[int], bool],
        take_any: Callable[[], int],
    ) -> None:
        self.started = False  # everything that belongs to the system has been started
        self._settings = settings
        self._supervisor = supervisor
        self._take, self._take_any = take, take_any
        self._ports: dict[str, int] = {}
        self._free: list[int] = []
        self._server: HttpListener | None = None
        wanted = [settings.port or PORT, *([recorded] if recorded else [])] if base is None else [base + OFFSET]
        self.port = 0
        if settings.enabled:
            self.port = next((port for port in wanted if port <= 65535 and take(port)), 0) or take_any()
        self._next = self.port + 1

    def port_for(self, name: str) -> int:
        """The port of a process of ours, the same each time it is started; 0 where metrics are switched off."""
        if not self.port:
            return 0
        port = self._ports.get(name)
        if port is None:
            port = self._ports[name] = self._free.pop() if self._free else self._claim()
        return port

    def _claim(self) -> int:
        while self._next <= min(65535, self.port + NEAR):
            self._next += 1
            if self._take(self._next - 1):
                return self._next - 1
        return self._take_any()

    def remove(self, names: Iterable[str]) -> None:
        """These processes have ended: others may get their ports."""
        self._free += [self._ports.pop(name) for name in names if name in self._ports]

    async def open(self) -> str | None:
        """Listen; returns the page's URL, None where metrics are switched off."""
        if not self.port:
            return None
        host = self._settings.host
        pages: Pages = {
            "/metrics": self.metrics,
            "/healthz": lambda _: self.health(),
            "/readyz": lambda _: self.readiness(),
            "/startz": lambda _: self.startup(),
        }
        try:
            self._server = await serve_pages(host, self.port, pages)
        except OSError as error:
            raise ServerError(f"cannot show metrics on {host} port {self.port} (metrics.host): {error}") from error
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}/metrics"

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close(GRACE)

    # -- pages

    async def metrics(self, accept: str = "") -> Reply:
        found = await self._ask("/metrics")
        heard = {name: page.text for name, page in found.items() if page is not None and page.status == 200}
        return await asyncio.to_thread(_system_page, list(self._families(heard)), heard, self._settings.series, accept)

    def _families(self, heard: Iterable[str]) -> Iterable[MetricFamily]:
        running = self._supervisor.pids
        up = MetricFamily(
            "infaas_part_up", "gauge", "1 while a process of the system runs and, if it has metrics, shows them."
        )
        restarts = MetricFamily(
            "infaas_part_restarts_total", "counter", "How often a process of the system was started again."
        )
        for name, count in self._supervisor.restarts.items():
            up.add(int(name in running and (name in heard or name not in self._ports)), part=name)
            restarts.add(count, part=name)
        return (up, restarts, *process.families())

    async def health(self) -> Reply:
        found = await self._ask("/healthz")
        silent = [name for name, page in found.items() if page is None or page.status != 200]
        return state_page("healthy", [f"{name}: does not answer" for name in silent])

    async def readiness(self) -> Reply:
        missing = [] if self.started else ["the system: it is starting or stopping"]
        running = self._supervisor.pids
        missing += [f"{name}: does not run" for name in self._supervisor.restarts if name not in running]
        for name, page in (await self._ask("/readyz")).items():
            if page is None:
                missing.append(f"{name}: does not answer")
            elif page.status != 200:
                missing += [f"{name}: {word}" for word in json.loads(page.body).get("missing", ())]
        return state_page("ready", missing)

    async def startup(self) -> Reply:
        """200 once all processes have come up, and as long as they are up."""
        found = await self._ask("/startz")
        missing = [] if found or self.started else ["the system: it is starting"]
        missing += [f"{name}: is not up" for name, page in found.items() if page is None or page.status != 200]
        return state_page("up", missing)

    async def _ask(self, path: str) -> dict[str, Reply | None]:
        async def ask(port: int) -> Reply | None:
            try:
                return await fetch(_reachable(self._settings.host), port, path, PATIENCE)
            except (OSError, ValueError):
                return None

        ports = dict(self._ports)
        pages = await asyncio.gather(*(ask(port) for port in ports.values()))
        return dict(zip(ports, pages, strict=True))


def _system_page(families: list[MetricFamily], pages: dict[str, str], most: int, accept: str) -> Reply:
    """Called in a thread: importing prometheus_client and reading large pages take a while."""
    from services.shell.metrics.exposition import system_page  # noqa: PLC0415

    return system_page(families, pages, most, accept)


def _reachable(host: str) -> str:
    """The address at which this machine reaches what listens there."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
