"""The recorder as a process, with a real NATS and a real PostgreSQL that come and go: every event in SQL, once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, closing
from pathlib import Path

import psycopg
import pytest

from bus.codec import decode, encode
from bus.messages.events import EVENTS, CostEvent, Event, OutcomeEvent
from bus.messages.scaling import AskForHistory, DemandHistory
from bus.natsbus import NatsBus
from bus.subjects import Subjects
from services.recorder.tables import TABLES
from services.shell.host.postgres import EmbeddedPostgres, role_dsn
from services.shell.runtime.outbox import Outbox
from services.shell.store import READER, WRITER, prepare
from tests.support.data.events import FOLDED, VARIANT, app_record, event, model_record, outcome, variant_record
from tests.support.data.rollups import shown, truth
from tests.support.servers.nats import NatsServer, run
from tests.support.servers.postgres import Database, database
from tests.support.servers.processes import environ, program

LONG = 120.0  # s; only ends a test that fails


def _recorder(
    nats_url: str, dsn: str, prefix: str, log: Path | None = None
) -> AbstractContextManager["subprocess.Popen[str]"]:
    settings = {"INFAAS_BUS__URL": nats_url, "INFAAS_STORE__DSN": dsn, "INFAAS_PREFIX": prefix}
    return program("services.recorder", errors=log, **settings)


@asynccontextmanager
async def _connected(nats_url: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats_url, name="test")
    try:
        yield bus
    finally:
        await bus.close()


async def _until(dsn: str, query: str, expected: object) -> None:
    """Wait until the query's first cell is this; fails with what it was instead."""
    found: object = None
    for _ in range(int(LONG / 0.1)):
        try:
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                row = await (await connection.execute(query.encode())).fetchone()
                found = row[0] if row else None
        except psycopg.OperationalError as error:
            found = error
        if found == expected:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"{query}: {found!r} instead of {expected!r}")


class _Sender:
    """Records outcomes through the outbox that every actor has; done once the stream has all of them."""

    def __init__(self, bus: NatsBus, prefix: str, source: str = "test") -> None:
        self.sent = 0
        self.stored = 0
        self._all = asyncio.Event()
        self._outbox = Outbox(bus, Subjects(prefix), source, self._recorded)
        self._outbox.start()

    def _recorded(self, through: int) -> None:
        self.stored = through
        self._all.set()

    def add(self, row: Event) -> None:
        self._outbox.add(row)
        self.sent += 1

    async def send(self, count: int, pause: float = 0.0) -> None:
        for _ in range(count):
            self.add(outcome(id=str(self.sent)))
            if pause:
                await asyncio.sleep(pause)

    async def more_stored(self) -> None:
        before = self.stored
        async with asyncio.timeout(LONG):
            while self.stored == before:
                self._all.clear()
                await self._all.wait()

    async def all_stored(self) -> None:
        async with asyncio.timeout(LONG):
            while self.stored < self.sent:
                self._all.clear()
                await self._all.wait()
        await self._outbox.close(1.0)


COUNT = "SELECT count(*) FROM infaas.query_outcomes"
EACH_ONCE = "SELECT count(*) = count(DISTINCT uid) AND count(*) = count(DISTINCT id) FROM infaas.query_outcomes"


async def _pending(bus: NatsBus, stream: str) -> int:
    reply = await bus.request(f"$JS.API.STREAM.INFO.{stream}", b"", 60.0)
    return int(json.loads(reply.data)["state"]["messages"])


async def test_every_kind_of_event_is_in_sql_and_done_with(
    nats_url: str, prefix: str, database_dsn: str, reader_dsn: str
) -> None:
    async with _connected(nats_url) as bus:
        with _recorder(nats_url, database_dsn, prefix) as process:
            sender = _Sender(bus, prefix)
            for kind in EVENTS:
                if kind is not OutcomeEvent:
                    sender.add(event(kind))
            await sender.send(3)
            await sender.all_stored()
            await bus.publish_durable(f"{prefix}.event.outcome", b"\xc1 nonsense", "nonsense")
            await _until(reader_dsn, COUNT, 3)
            for table in TABLES.values():
                name = "infaas.drift_events" if table.kind == "drift" else table.name or FOLDED[table.kind]
                await _until(reader_dsn, f"SELECT count(*) > 0 FROM {name}", True)
            await _until(reader_dsn, "SELECT count(*) FROM infaas.rejected_events", 1)
            question = encode(AskForHistory(app="digits"))
            reply = await bus.request(Subjects(prefix).recorder("demand"), question, LONG)
            assert sum(decode(DemandHistory, reply.data).items) == 3.0
            for _ in range(int(LONG / 0.1)):
                if await _pending(bus, Subjects(prefix).outcome_stream) == 0:
                    break
                await asyncio.sleep(0.1)
            else:
                pytest.fail("outcomes stay in the stream although they are in the database")
            assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10


async def test_the_catalogue_is_mirrored_and_kept_up_to_date(
    nats_url: str, prefix: str, database_dsn: str, reader_dsn: str
) -> None:
    async with _connected(nats_url) as bus:
        bucket = await bus.key_value(Subjects(prefix).catalog_bucket)
        for key, record in (
            (f"variant.{VARIANT}", variant_record()),
            ("model.mlp.1", model_record()),
            ("app.digits", app_record()),
        ):
            await bucket.put(key, encode(record))
        with _recorder(nats_url, database_dsn, prefix):
            await _until(reader_dsn, "SELECT variant FROM infaas.variants WHERE app = 'digits'", VARIANT)
            await _until(reader_dsn, "SELECT price_per_hour > 0 FROM infaas.prices WHERE hardware = 'cpu'", True)
            await bucket.put("app.digits", encode(app_record(latency_ms=7.0)))
            await _until(reader_dsn, "SELECT latency_ms FROM infaas.apps", 7.0)
        await bucket.delete(f"variant.{VARIANT}")  # while the recorder is away
        with _recorder(nats_url, database_dsn, prefix):
            await _until(reader_dsn, "SELECT count(*) FROM infaas.variants", 0)
            await _until(reader_dsn, "SELECT count(*) FROM infaas.apps", 1)


async def test_a_recorder_that_is_killed_and_started_again_loses_and_doubles_nothing(
    nats_url: str, prefix: str, database_dsn: str, reader_dsn: str
) -> None:
    async with _connected(nats_url) as bus:
        sender = _Sender(bus, prefix)
        for _ in range(4):
            with _recorder(nats_url, database_dsn, prefix) as process:
                await sender.send(200, pause=0.005)
                process.kill()
        with _recorder(nats_url, database_dsn, prefix):
            await sender.all_stored()
            await _until(reader_dsn, COUNT, sender.sent)
        await _until(reader_dsn, EACH_ONCE, True)


async def test_two_recorders_share_the_work_and_double_nothing(
    nats_url: str, prefix: str, database_dsn: str, reader_dsn: str
) -> None:
    async with _connected(nats_url) as bus:
        sender = _Sender(bus, prefix)
        with _recorder(nats_url, database_dsn, prefix), _recorder(nats_url, database_dsn, prefix):
            await sender.send(3000, pause=0.0005)
            await sender.all_stored()
            await _until(reader_dsn, COUNT, sender.sent)
            await _until(reader_dsn, EACH_ONCE, True)


@pytest.fixture
def own_postgres(tmp_path: Path, postgres: EmbeddedPostgres) -> Iterator[EmbeddedPostgres]:
    """A server that a test may stop, start and kill; `postgres` first says whether one runs here at all."""
    server = EmbeddedPostgres(tmp_path / "own")
    server.start()
    prepare(server.superuser_dsn, writer_password="w", reader_password="r")
    yield server
    server.stop()


def test_a_database_that_goes_away_costs_no_event(
    nats_url: str, prefix: str, own_postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    """Stopped cleanly, then killed, in the middle of the traffic; and away when the recorder starts."""
    server = own_postgres
    writer, reader = role_dsn(server.superuser_dsn, WRITER, "w"), role_dsn(server.superuser_dsn, READER, "r")

    async def body() -> None:
        async with _connected(nats_url) as bus:
            sender = _Sender(bus, prefix)
            server.stop()
            with _recorder(nats_url, writer, prefix, tmp_path / "recorder.log") as process:
                await sender.send(100, pause=0.002)
                server.start()
                await _until(reader, COUNT, 100)
                sending = asyncio.create_task(sender.send(1000, pause=0.003))
                await asyncio.sleep(0.5)
                server.stop()
                await asyncio.sleep(1.0)
                server.start()
                await asyncio.sleep(0.5)
                assert server.process is not None
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()
                server.stop()
                server.start()
                await sending
                await sender.all_stored()
                await _until(reader, COUNT, sender.sent)
                await _until(reader, EACH_ONCE, True)
                assert process.poll() is None

    run(body())
    log = (tmp_path / "recorder.log").read_text()
    assert "password" not in log.replace("password authentication", "")


async def test_a_nats_that_restarts_costs_no_event(
    prefix: str, database_dsn: str, reader_dsn: str, tmp_path: Path
) -> None:
    server = NatsServer(tmp_path / "own")
    server.start()
    try:
        async with _connected(server.url) as bus:
            sender = _Sender(bus, prefix)
            with _recorder(server.url, database_dsn, prefix) as process:
                for kill in (False, True):
                    sending = asyncio.create_task(sender.send(500, pause=0.003))
                    await sender.more_stored()
                    server.stop(kill=kill)
                    server.start()
                    await sending
                await sender.all_stored()
                await _until(reader_dsn, COUNT, sender.sent)
                await _until(reader_dsn, EACH_ONCE, True)
                assert process.poll() is None
    finally:
        server.stop()


def test_a_minute_without_it_loses_and_doubles_nothing(
    nats_url: str, prefix: str, own_postgres: EmbeddedPostgres, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    """The database, NATS, and the recorder, each of a system of its own at the same time: traffic before, meanwhile and afterwards; then every
    outcome and cost is there once, in the views over rollups, too.
    """
    own_nats, owner = NatsServer(tmp_path / "nats"), own_postgres.superuser_dsn
    own_nats.start()

    async def send(sender: _Sender) -> None:
        old = time.time() - 300  # far enough back for the watermark to move
        sender.add(outcome(id="old", time=old))
        sender.add(event(CostEvent, time=old))
        for _ in range(1400):
            await sender.send(1)
            sender.add(event(CostEvent))
            await asyncio.sleep(0.06)

    async def without(away: str, url: str, dsns: Database) -> None:
        async with _connected(url) as bus:
            sender = _Sender(bus, f"{prefix}-{away}")
            with ExitStack() as running:
                process = running.enter_context(_recorder(url, dsns.writer, f"{prefix}-{away}"))
                sending = asyncio.create_task(send(sender))
                await asyncio.sleep(5.0)
                match away:
                    case "database":
                        await asyncio.to_thread(own_postgres.stop)
                    case "nats":
                        await asyncio.to_thread(own_nats.stop)
                    case _:
                        process.kill()
                await asyncio.sleep(60.0)
                match away:
                    case "database":
                        await asyncio.to_thread(own_postgres.start)
                    case "nats":
                        await asyncio.to_thread(own_nats.start)
                    case _:
                        running.enter_context(_recorder(url, dsns.writer, f"{prefix}-{away}"))
                await sending
                await sender.all_stored()
                await _until(dsns.owner, COUNT, sender.sent // 2)
                await _until(dsns.owner, EACH_ONCE, True)
                await _until(dsns.owner, "SELECT count(*) FROM infaas.cost_events", sender.sent // 2)
                await _until(dsns.owner, "SELECT min(upto) > '-infinity' FROM infaas_internal.watermarks", True)
                await _until(dsns.owner, "SELECT count(*) FROM infaas_internal.slo_minutes WHERE stale", 0)
            with closing(psycopg.connect(dsns.owner)) as connection:
                assert shown(connection) == truth(connection)

    async def all_three(first: Database, second: Database) -> None:
        own = Database(owner, role_dsn(owner, WRITER, "w"), role_dsn(owner, READER, "r"))
        async with asyncio.TaskGroup() as group:
            group.create_task(without("database", nats_url, own))
            group.create_task(without("nats", own_nats.url, first))
            group.create_task(without("recorder", nats_url, second))

    try:
        with database(postgres) as first, database(postgres) as second:
            run(all_three(first, second))
    finally:
        own_nats.stop()


async def test_a_nats_that_lost_its_disk_gets_its_streams_back(
    prefix: str, database_dsn: str, reader_dsn: str, tmp_path: Path
) -> None:
    """The recorder makes sure of its streams again; what is sent afterwards arrives."""
    server = NatsServer(tmp_path / "first")
    server.start()
    with _recorder(server.url, database_dsn, prefix) as process:
        try:
            async with _connected(server.url) as bus:
                sender = _Sender(bus, prefix)
                await sender.send(10)
                await sender.all_stored()
                await _until(reader_dsn, COUNT, 10)
            server.stop()
            server = NatsServer(tmp_path / "second", server.port)
            server.start()
            async with _connected(server.url) as bus:
                sender = _Sender(bus, prefix, "another")
                await sender.send(10)
                await sender.all_stored()
                await _until(reader_dsn, COUNT, 20)
            assert process.poll() is None
        finally:
            server.stop()


def test_a_recorder_without_a_database_says_what_is_missing(nats_url: str, prefix: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "services.recorder"],
        env=environ(INFAAS_BUS__URL=nats_url, INFAAS_PREFIX=prefix),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "INFAAS_STORE__DSN" in done.stderr
