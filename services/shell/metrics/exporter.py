"""One process's HTTP server: /metrics, /healthz (it lives and its loop turns), /readyz (it can do its work), /startz (it has come up).

Readiness is checked when somebody asks, so it is never out of date: NATS is pinged, edges try what they need.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib import import_module

from bus.port import Bus, BusError
from services.core.metric import MetricFamily, gauge
from services.core.settings import MetricsSettings
from services.shell.http.messages import HttpReply, JsonReply, TextReply
from services.shell.http.pages import Pages, serve_pages, state_page
from services.shell.http.server import HttpServer
from services.shell.metrics.counts import EventTotals, process_families
from services.shell.runtime.runtime import Runtime, unix_now

log = logging.getLogger(__name__)

ANSWER = 1.0  # s that NATS and edges have to answer
AGAIN = 0.2  # s until a port that was busy is tried again
GRACE = 0.2  # s that a page under way has when the process stops
UNREADY = 20.0  # s of running after which what is still missing counts as another process's fault


class Exporter:
    """It is opened before there is a bus; `attach` says what runs. With settings.port 0 it opens nothing and counts nothing."""

    def __init__(self, name: str, settings: MetricsSettings) -> None:
        self._name = name
        self._settings = settings
        self._bus: Bus | None = None
        self._runtimes: Sequence[Runtime] = ()
        self._running = False
        self._lost = False
        self._since = 0.0  # when it began to run
        self._up = False
        self._server: HttpServer | None = None
        self._opening: asyncio.Task[None] | None = None
        self._page: Callable[[Iterable[MetricFamily], int, str], HttpReply] | None = None
        self.totals = EventTotals(asyncio.get_running_loop().time, settings.series) if self.on else None

    @property
    def on(self) -> bool:
        return self._settings.enabled and self._settings.port > 0

    async def open(self, *, succeeds: bool = False) -> None:
        """Listen. A busy port is tried again later: a service without metrics is better than none. succeeds: the process before it has the port."""
        if self.on and (error := await self._listen()):
            log.log(logging.INFO if succeeds else logging.WARNING, "no metrics yet: cannot listen on %s", error)
            self._opening = asyncio.create_task(self._open_later())

    async def _open_later(self) -> None:
        while True:
            await asyncio.sleep(AGAIN)
            if not await self._listen():
                return

    async def _listen(self) -> str:
        """Returns why that is not possible, or nothing."""
        host, port = self._settings.host, self._settings.port
        pages: Pages = {
            "/metrics": self.metrics,
            "/healthz": lambda _: self.health(),
            "/readyz": lambda _: self.readiness(),
            "/startz": lambda _: self.startup(),
        }
        try:
            self._server = await serve_pages(host, port, pages)
        except OSError as error:
            return str(error) or repr(error)
        return ""

    def attach(self, bus: Bus, runtimes: Sequence[Runtime]) -> None:
        """Show these runtimes, which will run on this bus. Call it before they start."""
        self._bus, self._runtimes = bus, runtimes
        if self.totals is not None:
            bus.on_status(self._status)
            for runtime in runtimes:
                runtime.sealed, runtime.seen = self.totals.fold, self.totals.changed

    def running(self, running: bool) -> None:
        """Say that all runtimes have been started (True), or are being stopped (False)."""
        self._running = running
        if running:
            self._since = asyncio.get_running_loop().time()

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        server, self._server = self._server, None
        if server is not None:
            await server.close(GRACE)

    def _status(self, status: str) -> None:
        self._lost = status in ("disconnected", "closed")

    # -- pages

    async def metrics(self, accept: str = "") -> HttpReply:
        if self._page is None:
            # prometheus_client takes a while to import: in a thread, and only when somebody asks.
            made = await asyncio.to_thread(import_module, "services.shell.metrics.exposition")
            self._page = made.page
        ready = gauge("infaas_ready", "1 while nothing is missing: what /readyz says.")
        ready.add(int(not await self.missing()))
        return self._page((ready, *self.families()), self._settings.series, accept)

    def families(self) -> Iterable[MetricFamily]:
        """Everything that this process shows."""
        connected = int(self._bus is not None and not self._lost)
        yield gauge("infaas_process_info", "The services in this process.").add(1, service=self._name)
        yield gauge("infaas_bus_connected", "1 while there is a connection to NATS.").add(connected)
        yield from process_families()
        if self.totals is not None:
            yield from self.totals.families()
        for runtime in self._runtimes:
            yield from runtime.families()

    async def health(self) -> HttpReply:
        return TextReply("ok\n")

    async def readiness(self) -> HttpReply:
        return state_page("ready", await self.missing())

    async def startup(self) -> HttpReply:
        """200 from the first readiness on, whatever fails later. Rolling updates wait for it, and health checks ask it.

        A process that runs and lacks something for UNREADY s counts as up, too. What it lacks may be a monitor or a worker that is not
        started yet: starting this process again would not help.
        """
        if self._up:
            return TextReply("up\n")
        missing = await self.missing()
        late = self._since > 0 and asyncio.get_running_loop().time() - self._since >= UNREADY
        self._up = not missing or late
        return JsonReply({"up": self._up, "missing": missing}, 200 if self._up else 503)

    async def missing(self) -> list[str]:
        """What this process lacks to do its work, in words."""
        if self._bus is None or self._lost:
            return ["a connection to NATS"]
        if not self._running:
            return ["its services: they are starting or stopping"]
        asking: list[Awaitable[str]] = [_pinged(self._bus)]
        asking += [_within(runtime.reachable) for runtime in self._runtimes if runtime.reachable is not None]
        words = await asyncio.gather(*asking)
        now = unix_now()
        found = [(runtime.name, runtime.missing(now)) for runtime in self._runtimes]
        return [word for word in words if word] + [f"{name}: {word}" for name, word in found if word]


async def _pinged(bus: Bus) -> str:
    try:
        await bus.flush(ANSWER)
    except BusError as error:
        return f"a connection to NATS ({error})"
    return ""


async def _within(look: Callable[[], Awaitable[str]]) -> str:
    try:
        async with asyncio.timeout(ANSWER):
            return await look()
    except TimeoutError:
        return "an answer from outside in time"
