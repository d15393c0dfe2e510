"""The metrics and health of a whole system at one address: one page for all its processes.

Under `infaas up` every service process has a port of its own. When this is asked, it asks them, and those of workers that were added to the system.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from msgspec.structs import replace

from services.core.hosts import in_url, reachable
from services.core.metric import MetricFamily, counter, gauge
from services.core.settings import MetricsSettings
from services.shell.host.process import ServerError
from services.shell.host.supervise import Supervisor
from services.shell.host.watch import LOOK, Missing, SystemPart, missing
from services.shell.http.messages import HttpReply, JsonReply
from services.shell.http.pages import HttpAnswer, Pages, fetch, serve_pages, state_page
from services.shell.http.server import HttpServer
from services.shell.metrics.counts import process_families

NEAR = 200  # ports after the first one that processes may get
GRACE = 0.2  # s that a page under way has when the system stops
PATIENCE = 1.5  # s that a process has to answer
PAGE = "INFAAS_SYSTEM_PAGE"  # the variable that tells a gateway where its system's page of readiness is
WORKERS, JOINED = (
    "workers",
    "metrics.json",
)  # below the data directory, for each worker; where one that was added says its ports
RECENT = 0.25  # s for which an answer of that page is good for those who ask next


def show_pages(place: Path, ports: Mapping[str, int]) -> None:
    """Say where the processes of a worker that was added to the system show their metrics; none: it stops. place: the worker's directory."""
    if ports:
        (place / JOINED).write_text(json.dumps({"pid": os.getpid(), "ports": ports}))
    else:
        (place / JOINED).unlink(missing_ok=True)


def _joined(data_dir: Path | None) -> dict[str, int]:
    """The ports of workers that were added, and run."""
    found: dict[str, int] = {}
    for file in [] if data_dir is None else data_dir.glob(f"{WORKERS}/*/{JOINED}"):
        with suppress(OSError, ValueError):
            said = json.loads(file.read_text())
            os.kill(said["pid"], 0)
            found |= said["ports"]
    return found


@dataclass(eq=False)
class SystemMetrics:
    """port: of the page, claimed already; 0 if metrics are switched off. take: claims a port if it is free; take_any: claims a free one.

    data_dir: the system's, where workers that are added say their ports.
    """

    settings: MetricsSettings
    port: int
    supervisor: Supervisor
    take: Callable[[int], bool]
    take_any: Callable[[], int]
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        self.started = False  # everything that belongs to the system has been started
        self._ports: dict[str, int] = {}
        self._free: list[int] = []
        self._server: HttpServer | None = None
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
            if self.take(self._next - 1):
                return self._next - 1
        return self.take_any()

    def remove(self, names: Iterable[str]) -> None:
        """These processes have ended: others may get their ports."""
        self._free += [self._ports.pop(name) for name in names if name in self._ports]

    @property
    def page(self) -> str:
        """Where processes of this machine read whether the system is ready; "" where metrics are switched off."""
        return f"http://{in_url(reachable(self.settings.host))}:{self.port}/readyz" if self.port else ""

    async def open(self) -> str | None:
        """Listen; returns the page's URL, None where metrics are switched off."""
        if not self.port:
            return None
        host = self.settings.host
        pages: Pages = {
            "/metrics": self.metrics,
            "/healthz": lambda _: self.health(),
            "/readyz": lambda _: self.readiness(),
            "/startz": lambda _: self.startup(),
        }
        try:
            self._server = await serve_pages(host, self.port, pages)
        except OSError as error:
            raise ServerError(f"cannot show metrics on {error}") from error
        return f"http://{in_url(host)}:{self.port}/metrics"

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close(GRACE)

    # -- pages

    async def metrics(self, accept: str = "") -> HttpReply:
        joined = _joined(self.data_dir)
        found, lacking = await asyncio.gather(self._ask("/metrics", joined), self.missing())
        heard = {name: page.text for name, page in found.items() if page is not None and page.status == 200}
        return await asyncio.to_thread(
            _system_page, list(self._families(heard, lacking, joined)), heard, self.settings.series, accept
        )

    def _families(self, heard: Iterable[str], lacking: list[Missing], joined: Iterable[str]) -> Iterable[MetricFamily]:
        ready = gauge("infaas_ready", "1 while nothing is missing: what /readyz says.")
        ready.add(int(not lacking))
        up = gauge("infaas_part_up", "1 while a process of the system runs and, if it has metrics, shows them.")
        restarts = counter("infaas_part_restarts_total", "How often a process of the system was started again.")
        hangs = counter(
            "infaas_part_hangs_total", "How often a process of the system was ended because it did not turn."
        )
        for part in self.supervisor.parts:
            name = part.name
            well = part.running and not part.silent_s and (name in heard or name not in self._ports)
            up.add(int(well), part=name)
            restarts.add(self.supervisor.restarts[name], part=name)
            hangs.add(self.supervisor.hangs[name], part=name)
        for name in joined:
            up.add(int(name in heard), part=name)
        return (ready, up, restarts, hangs, *process_families())

    async def health(self) -> HttpReply:
        found = await self._ask("/healthz")
        silent = [name for name, page in found.items() if page is None or page.status != 200]
        return state_page("healthy", [f"{name}: does not answer" for name in silent])

    async def missing(self) -> list[Missing]:
        """What the system lacks now: by what its processes say, and by what the supervisor sees of them afterwards."""
        pages = await self._ask("/readyz")
        parts = {name: SystemPart(name=name) for name in pages} | {part.name: part for part in self.supervisor.parts}
        said = [replace(part, says=_words(pages[name]) if name in pages else ()) for name, part in parts.items()]
        return missing(said, started=self.started)

    async def readiness(self) -> HttpReply:
        """serves: whether nothing is missing that queries need."""
        found = await self.missing()
        says = {
            "ready": not found,
            "serves": not any(one.serves for one in found),
            "missing": [one.what for one in found],
        }
        return JsonReply(says, 503 if found else 200)

    async def startup(self) -> HttpReply:
        """200 once all processes have come up, and as long as they are up."""
        found = await self._ask("/startz")
        missing = [] if found or self.started else ["the system: it is starting"]
        missing += [f"{name}: is not up" for name, page in found.items() if page is None or page.status != 200]
        return state_page("up", missing)

    async def _ask(self, path: str, joined: Mapping[str, int] | None = None) -> dict[str, HttpAnswer | None]:
        """What each process answers, and each of those that joined; None: nothing. Nobody waits for one that the supervisor finds silent."""

        async def ask(port: int) -> HttpAnswer | None:
            try:
                return await fetch(reachable(self.settings.host), port, path, PATIENCE)
            except (OSError, ValueError):
                return None

        asked = {name: asyncio.create_task(ask(port)) for name, port in (self._ports | dict(joined or {})).items()}
        try:
            while under_way := [task for name, task in asked.items() if not task.done() and name not in self._silent()]:
                await asyncio.wait(under_way, timeout=LOOK, return_when=asyncio.FIRST_COMPLETED)
            return {name: task.result() if task.done() else None for name, task in asked.items()}
        finally:
            for task in asked.values():
                task.cancel()

    def _silent(self) -> set[str]:
        return {part.name for part in self.supervisor.parts if part.silent_s}


class SystemPage:
    """The page of readiness, for a gateway of the system: its doors say the same. Callers at the same time share an answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._where = parts.hostname or "", parts.port or 0, parts.path
        self._asking: asyncio.Task[list[Missing] | None] | None = None
        self._asked_at = 0.0

    async def missing(self) -> list[Missing] | None:
        """What the system lacks; None: nobody answers there."""
        now = asyncio.get_running_loop().time()
        if self._asking is None or (self._asking.done() and now - self._asked_at > RECENT):
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> list[Missing] | None:
        try:
            found = json.loads((await fetch(*self._where, 2 * PATIENCE)).body)
            # What stands in brackets is for operators: addresses, and what servers say.
            words = [str(word).partition(" (")[0] for word in found["missing"]]
            return [Missing(word, serves=not found["serves"]) for word in words]
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _words(page: HttpAnswer | None) -> tuple[str, ...] | None:
    """What a process's page says that it lacks; None: there is no answer."""
    if page is None:
        return None
    return () if page.status == 200 else tuple(json.loads(page.body).get("missing", ()))


def _system_page(families: list[MetricFamily], pages: dict[str, str], most: int, accept: str) -> HttpReply:
    """Called in a thread: importing prometheus_client and reading large pages take a while."""
    from services.shell.metrics.exposition import system_page  # noqa: PLC0415

    return system_page(families, pages, most, accept)
