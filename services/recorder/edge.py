"""The recorder's edge: fetches from the streams, writes to the database in a thread, acknowledges what is committed."""

import asyncio
import hashlib
import logging
import os
import sys
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

import msgspec
import psycopg
from msgspec import Struct

from bus.port import Bus, BusError, Consumer, Stored, StreamSpec
from services.recorder.actor import (
    COUNTED,
    DAY_S,
    MOST,
    CompareDay,
    Count,
    Ingest,
    Ingested,
    KeepFiles,
    Maintain,
    ReadDemand,
    Tidy,
    WriteCatalog,
)
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
    """Carries out `Ingest`, `WriteCatalog`, `KeepFiles`, `Count`, `CompareDay`, `Tidy`, `Maintain` and `ReadDemand`.

    streams: by the names that `Ingest` uses. Messages that were fetched and could not be written are kept and written first next time. They
    are not acknowledged before that, so the stream keeps them, too. The database does one thing at a time, and beside it one of files and count.
    """

    def __init__(
        self,
        bus: Bus,
        store: Store,
        streams: Mapping[str, StreamSpec],
        catalog: CatalogWriter,
        files: FileCopies,
        counter: "Counter",
    ) -> None:
        self._bus = bus
        self._store = store
        self._events = EventWriter(store)
        self._maintenance = Maintenance(store)
        self._catalog = catalog
        self._files = files
        self._counter = counter
        self._beside = asyncio.Lock()
        self._streams = streams
        self._consumers: dict[str, Consumer] = {}
        self._check_at: dict[str, float] = {}
        self._unwritten: dict[str, list[Stored]] = {}
        self._writing = asyncio.Lock()
        self._commands: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Ingest: self._ingest,
            WriteCatalog: self._write_catalog,
            KeepFiles: lambda command: self._do_beside(self._files.keep, command.check),
            Count: lambda command: self._do_beside(self._counter.count, command.hours),
            CompareDay: lambda command: self._compare(command.began),
            Tidy: lambda _: self._in_database(self._events.tidy),
            Maintain: lambda _: self._in_database(self._maintenance.maintain, limit=MAINTAINS),
            ReadDemand: lambda command: self._in_database(demand_history, self._store, command.app),
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
        unread, self._events.unread = self._events.unread, set()
        self._unwritten[stream] = []
        for message in messages:
            try:
                await message.ack()
            except BusError as error:  # it is delivered again, and skipped then
                log.warning("could not acknowledge: %s", error)
        return Ingested(len(messages), differing, frozenset(unread))

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

    async def _compare(self, began: float) -> None:
        """What was begun says so until it has ended: so one of several recorders computes it, once, and another where that one did not end it."""
        if await self._in_database(_begin, self._store, began):
            rate, said = await best_of(self._store.dsn, began, began + DAY_S)
            await self._in_database(_tell, self._store, began, said, rate)

    async def _do_beside(self, work: Callable[[Any], Awaitable[R]], of: Any) -> R:
        try:
            async with self._beside:
                return await work(of)
        except psycopg.Error as error:
            raise StoreError(f"the database is away or not ready: {one_line(error)}") from None

    async def _in_database(self, work: Callable[..., R], *arguments: Any, limit: float = WRITES, **named: Any) -> R:
        """Work in a thread, one thing at a time, for `limit` s; raises StoreError, in one line, when the database is not able now."""
        async with self._writing:
            working = asyncio.create_task(asyncio.to_thread(work, *arguments, **named))
            late = True
            try:
                _, waiting = await asyncio.wait([working], timeout=limit)
                late = bool(waiting)
            finally:  # also where nobody waits any more: the next one must not meet this one on the connection
                if late:
                    self._store.cut()
                    await asyncio.wait([working])
                    working.exception()  # seen: where nobody waits any more, asyncio would log it with its traceback
            try:
                return working.result()
            except psycopg.Error as error:
                why = f"no answer within {limit:g} s" if late else one_line(error)
                raise StoreError(f"the database is away or not ready: {why}") from None


# -- what was possible on a day

BEST_S = 900.0  # s that it may take, at the lowest priority
NOT_COMPUTED = "not computed: "
BEGUN = f"{NOT_COMPUTED}not ended since "
_AGAIN = """UPDATE infaas.shadow_events SET reason = %(begun)s || now()::text WHERE policy = 'oracle' AND time = to_timestamp(%(began)s)
AND CASE WHEN starts_with(reason, %(begun)s) THEN substr(reason, length(%(begun)s) + 1)::timestamptz < now() - interval '20 min' END"""
_FIRST = """INSERT INTO infaas.shadow_events (time, policy, scaler, action, count, reason, cost_rate, apps_cost_rate)
SELECT to_timestamp(%(began)s), 'oracle', 'oracle', 'sample', 0, %(begun)s || now()::text, 0, 0
WHERE NOT EXISTS (SELECT FROM infaas.shadow_events WHERE policy = 'oracle' AND time = to_timestamp(%(began)s))
AND EXISTS (SELECT FROM infaas.query_outcomes WHERE time >= to_timestamp(%(began)s) AND time < to_timestamp(%(ended)s))"""
_THEN = """UPDATE infaas.shadow_events SET reason = %(said)s, cost_rate = %(rate)s
WHERE policy = 'oracle' AND time = to_timestamp(%(began)s)"""


def _begin(store: Store, began: float) -> bool:
    """Whether the day is to be computed: it has queries and no row, or one that nobody can be about to end."""
    told = {"began": began, "ended": began + DAY_S, "begun": BEGUN}
    with store.transaction() as connection:
        return any(connection.execute(query, told).rowcount for query in (_AGAIN, _FIRST))


def _tell(store: Store, began: float, said: str, rate: float) -> None:
    with store.transaction() as connection:
        connection.execute(_THEN, {"began": began, "said": said, "rate": rate})


async def best_of(dsn: str, began: float, ended: float) -> tuple[float, str]:
    """What one who knew the load of this time (Unix seconds) would have paid, US$ per hour, and how what was paid compares, in words.

    0 where it is not known: the words say why. It reads as `infaas replay --oracle` does, in a process whose memory has a limit. Raises StoreError.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.simulation.oracle", str(began), str(ended)),
        env={**os.environ, "INFAAS_STORE__DSN": dsn, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        said, _ = await asyncio.wait_for(child.communicate(), BEST_S)
        rate, words = msgspec.json.decode(said, type=tuple[float, str])
    except TimeoutError:
        return 0.0, f"{NOT_COMPUTED}it takes more than {BEST_S:g} s"
    except msgspec.DecodeError:
        if child.returncode == os.EX_TEMPFAIL:
            raise StoreError("the database was away while a day was compared with the best possible") from None
        return 0.0, f"{NOT_COMPUTED}the process ended with {child.returncode}: it may need more memory than it gets"
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return rate, words if rate else NOT_COMPUTED + words


# -- what is in no row

COUNTER = "counter"  # its place in the stream of events
LATE = 600.0  # s after which what is in no row is missing
AT_ONCE, FEW = 500, 50  # messages of a fetch; so few, and the stream is read, but for those that come meanwhile
MOST_FOUND = 10_000  # batches of one count
# The batches of a sender have numbers without a gap over all kinds of events (services/shell/runtime/outbox.py): of two streams, one of which
# forgets what is done with, these tell what was sent. A batch of which rows were refused is in pieces: ID/0, ID/1, ID/0/0.
_HOLES = r"""SELECT source, number FROM (
  SELECT substring(id, '^(.+)-[0-9]{1,15}(?:/[0-9/]*)?$') AS source, substring(id, '-([0-9]{1,15})(?:/[0-9/]*)?$')::bigint AS number
  FROM infaas_internal.batches WHERE recorded > now() - %s * interval '1 hour' AND recorded < now() - %s * interval '1 s') seen
WHERE number > 1 AND NOT EXISTS (SELECT FROM infaas_internal.batches WHERE id = source || '-' || number - 1)"""
_SOURCES = """SELECT source, split_part(substr(id, length(source) + 2), '/', 1)
FROM unnest(%s::text[]) AS asked (source) JOIN infaas_internal.batches ON starts_with(id, source || '-')
WHERE recorded > now() - interval '6 days'"""  # younger than what `tidy` forgets, in any order
_ABSENT = """SELECT sent.id FROM unnest(%s::text[], %s::bytea[]) AS sent (id, digest)
WHERE NOT EXISTS (SELECT FROM infaas_internal.batches known WHERE known.id = sent.id)
AND NOT EXISTS (SELECT FROM infaas_internal.batches known WHERE known.id IN (sent.id || '/0', sent.id || '/1'))
AND NOT EXISTS (SELECT FROM infaas_internal.rejected WHERE rejected.digest = sent.digest)"""
_REFUSED = "SELECT body FROM infaas_internal.rejected WHERE subject <> ALL (%s) AND time > now() - interval '8 days'"
# Rows before the watermark are in the rollups as well. Where TimescaleDB aggregates these hours, it follows the rows, and there is none.
_GONE = """SELECT hour, counted - coalesce(kept, 0) FROM (
  SELECT hour, sum(queries)::bigint AS counted FROM infaas_internal.query_hours, infaas_internal.watermarks
  WHERE hour >= date_bin('1 hour', now() - %s * interval '1 hour', '2000-01-03 00:00:00+00') AND source = 'query_outcomes' AND hour >= floor
  GROUP BY hour) hours LEFT JOIN (
  SELECT date_bin('1 hour', time, '2000-01-03 00:00:00+00') AS hour, count(*) AS kept FROM infaas.query_outcomes
  WHERE time >= date_bin('1 hour', now() - %s * interval '1 hour', '2000-01-03 00:00:00+00') AND parent IS NULL
  AND time < (SELECT upto FROM infaas_internal.watermarks WHERE source = 'query_outcomes') GROUP BY 1) rows USING (hour)
WHERE counted > coalesce(kept, 0)"""
_FOUND = """INSERT INTO infaas_internal.rejected AS known (digest, subject, reason, body) VALUES (sha256(convert_to(%s, 'UTF8')), %s, %s, %s)
ON CONFLICT (digest) DO UPDATE SET time = now(), reason = excluded.reason, body = excluded.body WHERE known.body <> excluded.body"""
_OF_THE_DAY = """SELECT subject, sum(convert_from(body, 'UTF8')::bigint)::bigint FROM infaas_internal.rejected
WHERE subject = ANY (%s) AND time > now() - interval '1 day' GROUP BY 1"""


class _Named(Struct):
    id: str


class Counter:
    """Compares what was sent with what is in the database. What is missing is told in `infaas.rejected_events`, once. Not for several at once.

    late: s that a message may be in the stream, and a batch behind the next one of its sender, before it is missing.
    """

    def __init__(self, bus: Bus, stream: str, store: Store, late: float = LATE) -> None:
        self._bus = bus
        self._stream = stream
        self._store = store
        self._late = late

    async def count(self, hours: float) -> dict[str, int]:
        """Result: as of `Count`. Raises BusError, psycopg.Error."""
        consumer = await self._bus.consumer(self._stream, COUNTER, ack_wait_s=self._late)
        more = True
        while more:
            messages = await consumer.fetch(AT_ONCE, WAIT)
            for message in await asyncio.to_thread(self._looked_up, messages):
                await message.ack()
            more = len(messages) > FEW
        return await asyncio.to_thread(self._count, hours)

    def _looked_up(self, messages: Sequence[Stored]) -> list[Stored]:
        """The messages of which it is known whether they are in a row. The others come again when they are late."""
        digests = [hashlib.sha256(message.subject.encode() + b"\0" + message.data).digest() for message in messages]
        with self._store.transaction() as connection:
            found = connection.execute(_ABSENT, ([message.message_id for message in messages], digests))
            absent = {row[0] for row in found} - {""}
            late = [m.message_id for m in messages if m.deliveries > 1 and m.message_id in absent]
            self._tell_batches(connection, late)
        return [message for message in messages if message.deliveries > 1 or message.message_id not in absent]

    def _count(self, hours: float) -> dict[str, int]:
        with self._store.transaction() as connection:
            behind: dict[str, list[int]] = {}
            for source, number in connection.execute(_HOLES, (hours, self._late)):
                behind.setdefault(source, []).append(number)
            if behind:
                known: dict[str, set[int]] = {source: set() for source in behind}
                for source, digits in connection.execute(_SOURCES, (list(behind),)):
                    if digits.isdecimal():
                        known[source].add(int(digits))
                self._tell_batches(connection, islice(_holes(behind, known), MOST_FOUND))
            for hour, count in connection.execute(_GONE, (hours, hours)).fetchall():
                at = f"{hour:%Y-%m-%d %H:%M%z}"
                self._tell(connection, "outcomes", {at: (count, f"{count} outcomes of the hour from {at} on are gone")})
            found = dict(connection.execute(_OF_THE_DAY, (list(COUNTED),)).fetchall())
        return {what: found.get(what, 0) for what in COUNTED}

    def _tell_batches(self, connection: psycopg.Connection[Any], batches: Iterable[str]) -> None:
        missing = dict.fromkeys(batches)
        if missing:
            for (body,) in connection.execute(_REFUSED, (list(COUNTED),)):
                with suppress(msgspec.DecodeError):
                    missing.pop(msgspec.msgpack.decode(body, type=_Named).id.partition("/")[0], None)
        found = {batch: (1, f"the batch {batch} of events was sent and is in no row") for batch in missing}
        self._tell(connection, "batches", found)

    def _tell(self, connection: psycopg.Connection[Any], what: str, found: Mapping[str, tuple[int, str]]) -> None:
        for key, (count, reason) in found.items():
            if connection.execute(_FOUND, (f"{what} {key}", what, reason, str(count).encode())).rowcount:
                log.error("rows are missing: %s", reason)


def _holes(behind: Mapping[str, Sequence[int]], known: Mapping[str, Set[int]]) -> Iterator[str]:
    """The batches between these, which lack the one before, and those that are known before them. A sender's first ones may be forgotten."""
    for source, numbers in behind.items():
        before = sorted(known[source])
        for number in numbers:
            if at := bisect_left(before, number):
                yield from (f"{source}-{missing}" for missing in range(before[at - 1] + 1, number))


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
