"""The recorder's edge: fetches from the streams, writes to the database in a thread, acknowledges what is committed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import psycopg

from bus.messages.scaling import DemandHistory
from bus.port import Bus, BusError, Consumer, Stored, StreamSpec
from services.recorder.actor import MOST, Ingest, Ingested, KeepFiles, Maintain, ReadDemand, Tidy, WriteCatalog
from services.recorder.catalog import CatalogWriter
from services.recorder.edge_copies import FileCopies
from services.recorder.events import EventMessage, EventWriter, Maintenance, demand_history
from services.shell.store import Store, StoreError, one_line

log = logging.getLogger(__name__)

R = TypeVar("R")

NAME = "recorder"
WAIT = 1.0  # s that a fetch waits for the first message; also what a stop may have to wait for
# s that one transaction, and one piece of maintenance, may take: far more than on a busy machine
WRITES, MAINTAINS = 60.0, 600.0
CHECK = 5.0  # s without a message, after which the edge makes sure that the stream is there


class RecorderEdge:
    """Carries out `Ingest`, `WriteCatalog`, `KeepFiles`, `Tidy`, `Maintain` and `ReadDemand`.

    streams: by the names that `Ingest` uses. Messages that were fetched and could not be written are kept and written first next time. They
    are not acknowledged before that, so the stream keeps them, too. The database does one thing at a time.
    """

    def __init__(
        self, bus: Bus, store: Store, streams: Mapping[str, StreamSpec], catalog: CatalogWriter, files: FileCopies
    ) -> None:
        self._bus = bus
        self._store = store
        self._events = EventWriter(store)
        self._maintenance = Maintenance(store)
        self._catalog = catalog
        self._files = files
        self._streams = streams
        self._consumers: dict[str, Consumer] = {}
        self._check_at: dict[str, float] = {}
        self._unwritten: dict[str, list[Stored]] = {}
        self._writing = asyncio.Lock()
        self._commands: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Ingest: self._ingest,
            WriteCatalog: self._write_catalog,
            KeepFiles: self._keep_files,
            Tidy: self._tidy,
            Maintain: self._maintain,
            ReadDemand: self._read_demand,
        }

    async def perform(self, command: Any) -> Any:
        return await self._commands[type(command)](command)

    async def _ingest(self, command: Ingest) -> Ingested:
        stream = command.stream
        messages = self._unwritten.get(stream)
        if not messages:
            messages = await self._fetch(stream)
        if not messages:
            return Ingested(0)
        self._unwritten[stream] = messages
        bodies = [EventMessage(message.subject, message.data) for message in messages]
        differing = await self._in_database(self._events.write, bodies)
        self._unwritten[stream] = []
        for message in messages:
            try:
                await message.ack()
            except BusError as error:  # it is delivered again, and skipped then
                log.warning("could not acknowledge: %s", error)
        return Ingested(len(messages), differing)

    async def _fetch(self, stream: str) -> list[Stored]:
        now = asyncio.get_running_loop().time()
        if now >= self._check_at.get(stream, 0.0):
            spec = self._streams[stream]
            await self._bus.ensure_stream(spec)
            consumer = await self._bus.consumer(spec.name, NAME)
            self._consumers.setdefault(stream, consumer)
        # A NATS server that lost its disk comes back without the streams. Messages that come prove that the stream is there.
        messages = await self._consumers[stream].fetch(MOST, WAIT)
        if messages or stream not in self._check_at or now >= self._check_at[stream]:
            self._check_at[stream] = now + CHECK
        return messages

    async def _write_catalog(self, command: WriteCatalog) -> None:
        others = dict(command.changes)
        catalogue = {entry[1]: others.pop(entry) for entry in command.changes if entry[0] == "catalog"}
        await self._in_database(self._catalog.write, catalogue, command.present, others)

    async def _keep_files(self, command: KeepFiles) -> int:
        try:
            return await self._files.keep(command.check)
        except psycopg.Error as error:
            raise StoreError(f"the database is away or not ready: {one_line(error)}") from None

    async def _tidy(self, _: Tidy) -> None:
        await self._in_database(self._events.tidy)

    async def _maintain(self, _: Maintain) -> bool:
        return await self._in_database(self._maintenance.maintain, limit=MAINTAINS)

    async def _read_demand(self, command: ReadDemand) -> DemandHistory:
        return await self._in_database(demand_history, self._store, command.app)

    async def _in_database(self, work: Callable[..., R], *arguments: Any, limit: float = WRITES) -> R:
        """Work in a thread, one thing at a time, for `limit` s; raises StoreError, in one line, when the database is not able now."""
        async with self._writing:
            working = asyncio.create_task(asyncio.to_thread(work, *arguments))
            late = True
            try:
                _, waiting = await asyncio.wait([working], timeout=limit)
                late = bool(waiting)
            finally:  # also where nobody waits any more: the next one must not meet this one on the connection
                if late:
                    self._store.cut()
                    await asyncio.wait([working])
            try:
                return working.result()
            except psycopg.Error as error:
                why = f"no answer within {limit:g} s" if late else one_line(error)
                raise StoreError(f"the database is away or not ready: {why}") from None


# -- readiness

CONNECT = 2  # s, the least that libpq takes
PROBE_TIMEOUT = 0.9  # s, less than the readiness page waits


class DatabaseProbe:
    """Whether the database answers, asked by `SELECT 1` on a connection of its own; concurrent callers share one answer."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: psycopg.Connection[Any] | None = None
        self._asking: asyncio.Task[str] | None = None

    async def missing(self) -> str:
        """What is missing, in words; empty when the database answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(asyncio.to_thread(self._ask))
        try:
            return await asyncio.wait_for(asyncio.shield(self._asking), PROBE_TIMEOUT)
        except TimeoutError:
            return f"the database (no answer within {PROBE_TIMEOUT:g} s)"

    def _ask(self) -> str:
        try:
            if self._connection is None:
                self._connection = psycopg.connect(
                    self._dsn, autocommit=True, connect_timeout=CONNECT, application_name="infaas readyz"
                )
            self._connection.execute("SELECT 1")
        except psycopg.Error as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            return f"the database ({one_line(error)})"
        return ""
