"""What recording an outcome costs: `python benches/recorder_ingest.py [--rows 200000]`. CPU microseconds a row, and rows a second.

Batches go from a nats-server's stream, which is full from the beginning, through a recorder process into an embedded PostgreSQL with full durability.
"""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psycopg
import rig

from bus.codec import encode
from bus.messages.events import OutcomeEvent
from bus.natsbus import NatsBus
from bus.subjects import Subjects
from services.core.settings import BusSettings
from services.recorder.__main__ import streams
from services.recorder.events import EventMessage
from services.shell.host.nats import EmbeddedNats
from services.shell.host.postgres import EmbeddedPostgres
from services.shell.store import prepare

BATCH = 512


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
        f" = {parts[0] + parts[1]:.2f}; nats-server {parts[2]:.2f}; wanted: 20,000 rows/s, 12 us"
    )


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    count = parser.parse_args().rows // BATCH * BATCH
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        with EmbeddedPostgres(place) as server, EmbeddedNats(place) as nats:
            prepare(server.superuser_dsn, writer_password="w", reader_password="r")
            whole_way(server, nats, count)


if __name__ == "__main__":
    main()
