"""/healthz and /readyz of real processes say what is so when they are asked: NATS and PostgreSQL come and go."""

import asyncio
import json
import os
import signal
from pathlib import Path

import psycopg
import pytest

from services.shell.host.postgres import EmbeddedPostgres, role_dsn
from services.shell.host.process import ServerError
from services.shell.http.pages import fetch
from services.shell.store import WRITER, prepare
from tests.support.clients.responders import until
from tests.support.servers.nats import NatsServer, free_port, run
from tests.support.servers.processes import eventually, program

HOST = "127.0.0.1"
SLOW = 60.0  # s; only ends a test that fails. What bounds an answer is the service's own patience, 1 s


def pause(pid: int) -> None:
    """Stop the process, and wait until all of its threads have stopped: until then it may still answer."""

    def stopped() -> bool:
        states = [task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(state in "Tt" for state in states)

    os.kill(pid, signal.SIGSTOP)
    assert eventually(stopped, SLOW)


async def asked(port: int, path: str = "/readyz") -> tuple[int, str]:
    page = await fetch(HOST, port, path, SLOW)
    return page.status, page.text


async def ready(port: int) -> bool:
    try:
        return (await asked(port))[0] == 200
    except OSError:
        return False


def readyz_backends(postgres: EmbeddedPostgres) -> list[int]:
    """The server's processes that answer questions about readiness."""
    with psycopg.connect(postgres.superuser_dsn) as connection:
        rows = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'infaas readyz'"
        ).fetchall()
    return [pid for (pid,) in rows]


def test_readiness_is_true_at_every_moment(tmp_path: Path) -> None:
    """The first answer after each change must be right already: nothing is remembered that could be out of date."""
    nats, postgres = NatsServer(tmp_path / "nats"), EmbeddedPostgres(tmp_path / "postgres")
    try:
        postgres.start()
        nats.start()
    except ServerError as error:
        postgres.stop()
        pytest.skip(str(error))
    prepare(postgres.superuser_dsn, writer_password="w", reader_password="r")
    port = free_port()
    settings = {
        "INFAAS_BUS__URL": nats.url,
        "INFAAS_STORE__DSN": role_dsn(postgres.superuser_dsn, WRITER, "w"),
        "INFAAS_METRICS__PORT": str(port),
    }

    async def main(pid: int) -> None:
        await until(lambda: ready(port), SLOW)

        pause(nats.pid)  # it hangs: the connection is there, and nobody answers on it
        status, body = await asked(port)
        assert status == 503, body
        assert "NATS" in body
        assert await asked(port, "/healthz") == (200, "ok\n")
        os.kill(nats.pid, signal.SIGCONT)
        await until(lambda: ready(port), SLOW)

        nats.stop()
        status, body = await asked(port)
        assert status == 503
        assert any(part.startswith("a connection to NATS") for part in json.loads(body)["missing"]), body
        nats.start()
        await until(lambda: ready(port), SLOW)

        backends = readyz_backends(postgres)
        for backend in backends:
            pause(backend)
        assert backends
        status, body = await asked(port)
        assert status == 503
        assert "the database (no answer within 0.9 s)" in json.loads(body)["missing"]
        for backend in backends:
            os.kill(backend, signal.SIGCONT)
        await until(lambda: ready(port), SLOW)

        await asyncio.to_thread(postgres.stop)
        status, body = await asked(port)
        assert status == 503
        assert "the database" in body
        await asyncio.to_thread(postgres.start)
        await until(lambda: ready(port), SLOW)

        pause(pid)
        with pytest.raises(TimeoutError):
            await fetch(HOST, port, "/healthz", 1.0)
        os.kill(pid, signal.SIGCONT)
        assert await asked(port, "/healthz") == (200, "ok\n")

    try:
        with program("infaas.cli.run", "registrar", "recorder", **settings) as process:
            try:
                run(main(process.pid))
            finally:
                process.send_signal(signal.SIGCONT)
    finally:
        nats.stop()
        postgres.stop()
