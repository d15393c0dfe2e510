"""What recording an outcome costs: CPU microseconds a row, and rows a second, ways of writing compared in one run.

    python benches/recorder_ingest.py [--rows 200000]

Ways, each writing the same rows to an embedded PostgreSQL with full durability, 16 batches of 512 rows a transaction:
  copy       binary COPY without any uniqueness: the floor
  recorder   the recorder's own: batch ids, uids looked up under a lock, COPY
  staging    COPY into a temporary table, then INSERT ... SELECT ... ON CONFLICT DO NOTHING
Then the whole way: batches from a nats-server's stream through a recorder process into the database.
"""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import rig

from bus.codec import encode
from bus.messages.events import OutcomeEvent
from bus.natsbus import NatsBus
from bus.subjects import Subjects
from services.core.settings import BusSettings
from services.recorder.__main__ import streams
from services.recorder.events import EventMessage, EventWriter
from services.recorder.tables import TABLES
from services.shell.host.nats import EmbeddedNats
from services.shell.host.postgres import EmbeddedPostgres
from services.shell.store import Store, copy, prepare

BATCH = 512
FETCH = 16
TABLE = TABLES["outcome"]


def outcomes(count: int, seed: int) -> list[OutcomeEvent]:
    rng = random.Random(seed)
    began = time.time() - count / 20_000
    return [
        OutcomeEvent(
            time=began + i / 20_000, uid=rng.randbytes(16), id=f"q{i}", app="digits", outcome="late" if i % 50 == 0 else "ok",
            model="mlp", variant=f"mlp-v1-ort-fp32-t{1 + i % 2}-b64", worker="w0", hardware="cpu",
            latency_ms=rng.expovariate(0.3), slo_ms=50.0, accuracy=0.97, batch=rng.randint(1, 64), cost=rng.random() * 1e-8,
            version="1", policy="infaas",
        )
        for i in range(count)
    ]  # fmt: skip


def messages(rows: list[OutcomeEvent], name: str) -> list[EventMessage]:
    return [
        EventMessage("infaas.event.outcome", encode({"id": f"{name}-{at}", "rows": rows[at : at + BATCH]}))
        for at in range(0, len(rows), BATCH)
    ]


def cpu(pid: int) -> float:
    """CPU seconds so far of a process and its descendants."""
    return sum(seconds for _, seconds in rig.cpu(pid).values())


def decoded(group: list[EventMessage]) -> list[tuple[Any, ...]]:
    return TABLE.values([row for message in group for row in TABLE.decode(message.data).rows])


def write_copy(store: Store) -> Callable[[list[EventMessage]], None]:
    def write(group: list[EventMessage]) -> None:
        with store.transaction() as connection:
            copy(connection, "infaas.query_outcomes", TABLE.columns, TABLE.sent, decoded(group))

    return write


def write_staging(store: Store) -> Callable[[list[EventMessage]], None]:
    def write(group: list[EventMessage]) -> None:
        with store.transaction() as connection:
            connection.execute(
                "CREATE TEMP TABLE IF NOT EXISTS staged (LIKE infaas.query_outcomes) ON COMMIT DELETE ROWS"
            )
            copy(connection, "pg_temp.staged", TABLE.columns, TABLE.sent, decoded(group))
            connection.execute("INSERT INTO infaas.query_outcomes SELECT * FROM staged ON CONFLICT DO NOTHING")

    return write


def write_recorder(store: Store) -> Callable[[list[EventMessage]], None]:
    return EventWriter(store).write


def compare(server: EmbeddedPostgres, count: int) -> float:
    """Print CPU and wall time a row of each way; returns the recorder's CPU microseconds a row."""
    assert server.process is not None
    ours = 0.0
    print(f"{'way':10} {'client us':>10} {'server us':>10} {'CPU us/row':>11} {'rows/s':>9} {'of floor':>9}")
    floor = 0.0
    for number, (name, way) in enumerate(
        (("copy", write_copy), ("recorder", write_recorder), ("staging", write_staging))
    ):
        with closing(psycopg.connect(server.superuser_dsn, autocommit=True)) as administrator:
            administrator.execute("TRUNCATE infaas.query_outcomes, infaas_internal.batches")
            administrator.execute("CHECKPOINT")
        store = Store(server.superuser_dsn, "bench")
        write = way(store)
        sent = messages(outcomes(count, number), name)
        write(sent[:FETCH])
        pid = server.process.pid
        wall, client, remote = time.perf_counter(), time.process_time(), cpu(pid)
        for at in range(FETCH, len(sent), FETCH):
            write(sent[at : at + FETCH])
        rows = count - FETCH * BATCH
        spent_client = (time.process_time() - client) / rows * 1e6
        spent_server = (cpu(pid) - remote) / rows * 1e6
        wall = time.perf_counter() - wall
        total = spent_client + spent_server
        floor = floor or total
        if name == "recorder":
            ours = total
        print(
            f"{name:10} {spent_client:10.2f} {spent_server:10.2f} {total:11.2f} {rows / wall:9,.0f} {total / floor:9.2f}"
        )
        store.close()
    return ours


async def fill(nats: EmbeddedNats, sent: list[EventMessage]) -> None:
    bus = await NatsBus.connect(nats.url, name="bench")
    await bus.ensure_stream(streams(Subjects(), BusSettings())["outcomes"])
    for at, message in enumerate(sent):
        await bus.publish_durable(message.subject, message.data, f"stream-{at}")
    await bus.close()


def whole_way(server: EmbeddedPostgres, nats: EmbeddedNats, count: int) -> None:
    """Fill the stream, then let a recorder process empty it."""
    asyncio.run(fill(nats, messages(outcomes(count, 9), "stream")))
    assert server.process is not None
    assert nats.process is not None
    postgres, carrier = server.process.pid, nats.process.pid
    environ = {**os.environ, "INFAAS_BUS__URL": nats.url, "INFAAS_STORE__DSN": server.superuser_dsn}
    command = [sys.executable, "-m", "services.recorder"]
    with (
        closing(psycopg.connect(server.superuser_dsn, autocommit=True)) as administrator,
        subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as recorder,
    ):
        administrator.execute("TRUNCATE infaas.query_outcomes, infaas_internal.batches")

        def spent() -> tuple[int, float, list[float]]:
            """Rows written, the time, and CPU seconds of recorder, PostgreSQL and nats-server so far."""
            row = administrator.execute("SELECT count(*) FROM infaas_internal.batches").fetchone()
            assert row is not None
            seconds = [cpu(recorder.pid), cpu(postgres), cpu(carrier)]
            return row[0] * BATCH, time.perf_counter(), seconds

        try:
            while not (start := spent())[0]:  # its start-up is no part of the figures
                time.sleep(0.01)
            while (end := spent())[0] < count:
                time.sleep(0.01)
        finally:
            recorder.terminate()
    rows, took = end[0] - start[0], end[1] - start[1]
    parts = [(b - a) / rows * 1e6 for a, b in zip(start[2], end[2], strict=True)]
    print(
        f"whole way: {rows / took:,.0f} rows/s; CPU us/row: recorder {parts[0]:.2f} + PostgreSQL {parts[1]:.2f}"
        f" = {parts[0] + parts[1]:.2f}; nats-server {parts[2]:.2f}"
    )


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    count = parser.parse_args().rows // (BATCH * FETCH) * BATCH * FETCH
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        with EmbeddedPostgres(place) as server, EmbeddedNats(place) as nats:
            prepare(server.superuser_dsn, writer_password="w", reader_password="r")
            ours = compare(server, count)
            whole_way(server, nats, count)
    print(f"target: 12 us of CPU a row, 20,000 rows/s; recorder's writing takes {ours / 12:.2f} of it")


if __name__ == "__main__":
    main()
