"""services/shell/http.py, as the engine proxy uses it: what a connection may do, over real sockets."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.shell import probe
from services.shell.http import HttpLimits, Reply, serve_pages, state_page
from tests.support.servers.docker_engine import NODE, Front, Said, fronted, stand_in
from tests.support.servers.nats import run
from tests.support.servers.processes import eventually, read_line, script

GET = b"GET /nodes HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /nodes/%s/update?version=14 HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n" % NODE.encode()
SPEC = json.dumps(
    {"Labels": {"infaas.worker": "cpu", "rack": "7"}, "Role": "manager", "Availability": "active"}
).encode()
SHORT = HttpLimits(head=2000, body=2000, head_s=0.3, body_s=0.3, reply_s=0.5, connections=4)
PATIENT = SHORT._replace(head_s=600.0, body_s=600.0, reply_s=600.0)  # however long the machine stands still


@asynccontextmanager
async def through(directory: Path, limits: HttpLimits = PATIENT, seen: int | None = None) -> AsyncIterator[Front]:
    """A proxy, which serves others afterwards. seen: so many requests reach the engine, but for that."""
    with stand_in(directory) as engine:
        async with fronted(engine.path, limits=limits) as front:
            yield front
            then = [reply.status for reply in await front.say(GET)]
            while limits is SHORT and then in ([], [408]):  # the machine stood still
                then = [reply.status for reply in await front.say(GET)]
            assert then == [200]
        assert engine.seen.pop()[1] == "/nodes"
        assert seen in (None, len(engine.seen))


def said(
    directory: Path, *pieces: bytes, pause: float = 0.0, seen: int = 0, limits: HttpLimits = PATIENT
) -> list[Said]:
    """What is replied to these bytes. seen: so many requests reach the engine."""

    async def main() -> list[Said]:
        async with through(directory, limits, seen) as front:
            return await front.say(*pieces, pause=pause)

    return run(main())


def test_one_request_a_connection(tmp_path: Path) -> None:
    (reply,) = said(tmp_path, GET + GET.replace(b"/nodes", b"/tasks"), seen=1)
    assert reply.status == 200
    assert reply.headers["connection"] == "close"
    assert json.loads(reply.body)[0]["ID"] == NODE


def test_a_request_in_small_pieces(tmp_path: Path) -> None:
    (reply,) = said(tmp_path, *(GET[i : i + 5] for i in range(0, len(GET), 5)), pause=0.001, seen=1)
    assert reply.status == 200


def test_who_sends_nothing_hears_nothing(tmp_path: Path) -> None:
    assert said(tmp_path, b"", limits=SHORT) == []


def test_a_body_in_chunks_and_one_that_waits_to_be_asked_for(tmp_path: Path) -> None:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (SPEC[:9], SPEC[9:])) + b"0\r\n\r\n"
    (reply,) = said(tmp_path, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, seen=2)
    assert reply.status == 200
    (tmp_path / "engine.sock").unlink()
    head = POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(SPEC)
    asked, reply = said(tmp_path, head, SPEC, pause=0.1, seen=2)
    assert (asked.status, reply.status) == (100, 200)


@pytest.mark.parametrize(
    "request_",
    [
        POST + b"Content-Length: 2001\r\n\r\n",
        POST + b"Content-Length: 999999999999\r\n\r\n",
        POST + b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"3e8\r\n%s\r\n" % (b"x" * 1000) * 3,
        POST + b"Transfer-Encoding: chunked\r\n\r\nffffff\r\n" + b"x" * 50_000,
    ],
    ids=["told", "told to be huge", "sent", "in chunks", "in one chunk"],
)
def test_a_large_body(request_: bytes, tmp_path: Path) -> None:
    (reply,) = said(tmp_path, request_)
    assert (reply.status, reply.message) == (413, "the body of a request may have 2000 bytes")


def test_slow_ones(tmp_path: Path) -> None:
    (reply,) = said(tmp_path, GET[:-2], limits=SHORT)
    assert (reply.status, reply.message) == (408, "the head of the request did not come in time")
    (tmp_path / "engine.sock").unlink()
    (reply,) = said(
        tmp_path, POST + b"Content-Length: %d\r\n\r\n" % len(SPEC), *(b"{", b" ", b" ", b" "), pause=0.1, limits=SHORT
    )
    assert (reply.status, reply.message) == (408, "the body of the request did not come in time")


BAD = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(150) + b"\r\n\r\n",
    "no host": b"GET /nodes HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /nodes HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a length that is none": POST + b"Content-Length: -1\r\n\r\n",
    "length and chunks": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "another coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a folded header": b"GET /nodes HTTP/1.1\r\nHost: h\r\n x: y\r\nA : b\r\n\r\n",
    "a space before the colon": b"GET /nodes HTTP/1.1\r\nHost : h\r\n\r\n",
    "a space in the path": b"GET /nodes x HTTP/1.1\r\nHost: h\r\n\r\n",
    "a NUL": b"GET /nodes\0 HTTP/1.1\r\nHost: h\r\n\r\n",
    "a letter that is none": b"GET /nodes\xff HTTP/1.1\r\nHost: h\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a long head": b"GET /nodes HTTP/1.1\r\nHost: h\r\nA: " + b"a" * 9000 + b"\r\n\r\n",
    "a long path": b"GET /" + b"n" * 9000,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_what_is_no_request_is_told_so(data: bytes, tmp_path: Path) -> None:
    (reply,) = said(tmp_path, data)
    assert 400 <= reply.status < 600
    assert reply.message


async def test_connections_above_the_limit_are_told_so(tmp_path: Path) -> None:
    async with through(tmp_path) as front:
        held = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(4)]
        try:
            (reply,) = await front.say(GET)
            assert reply.status == 503
        finally:
            for _, writer in held:
                writer.close()
                await writer.wait_closed()


async def test_who_leaves_early_or_does_not_read_does_not_stay(tmp_path: Path) -> None:
    async with through(tmp_path) as front:
        for data in (b"", b"GET /no", GET, POST + b"Content-Length: 100\r\n\r\n{"):
            _, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(data)
            await writer.drain()
            writer.transport.abort()


def test_it_stops_although_somebody_holds_on(tmp_path: Path) -> None:
    async def main() -> float:
        async with fronted(str(tmp_path / "none"), limits=PATIENT) as front:
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(b"GET")
            await asyncio.sleep(0.05)
            began = time.monotonic()
        assert await reader.read() == b""
        writer.close()
        return time.monotonic() - began

    assert run(main()) < 300.0  # not as long as its head may take


# -- The health check of containers: what it asks, what it says, and that it imports next to nothing.


def probed(*arguments: str, **environ: str) -> int:
    return probe.main(arguments, environ)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_it_asks_the_page_and_says_what_is_wrong(status: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> int:
        async def page(_: str) -> Reply:
            return state_page("up", ["a connection to NATS"] if status != 200 else [])

        server = await serve_pages("127.0.0.1", 0, {"/startz": page})
        try:
            return await asyncio.to_thread(probed, INFAAS_METRICS__PORT=str(server.port))
        finally:
            await server.close(0.0)

    assert run(main()) == code
    assert ("a connection to NATS" in capsys.readouterr().out) == (status != 200)


def test_nobody_there_is_not_well_and_without_a_port_there_is_nothing_to_ask(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # not listening
        port = held.getsockname()[1]
        assert probed("--port", str(port)) == 1
        assert f"no answer at port {port}" in capsys.readouterr().out
        assert probed("--listening", str(port)) == 1
        held.listen()
        assert probed("--listening", str(port)) == 0
    assert probed() == 0


def test_what_answers_in_another_language_is_not_well() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]

        async def main() -> int:
            asking = asyncio.create_task(asyncio.to_thread(probed, "--port", str(port)))
            connection, _ = await asyncio.to_thread(server.accept)
            with connection:
                await asyncio.to_thread(connection.recv, 4096)
                connection.sendall(b"-ERR 'Unknown Protocol Operation'\r\n")
            return await asking

        assert run(main()) == 1


def test_probes_refuse_wrong_words_and_load_nothing_heavy() -> None:
    assert probed("startz") == 2
    assert probed("--port") == 2
    assert probed("--port", "many") == 2
    code = "import sys, services.shell.probe; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "ssl", "http.client", "urllib.request", "msgspec", "nats", "logging"} & set(loaded)


def test_listening_is_read_from_the_kernels_table(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st\n"
        "   0: 00000000:2135 00000000:0000 0A 00000000:00000000\n"
        "   1: 0100007F:1F40 0100007F:9999 01 00000000:00000000\n"
    )
    assert probe.listens(8501, [str(table)])
    assert not probe.listens(8000, [str(table)])  # a connection, and nobody who takes others
    assert not probe.listens(8501, [str(tmp_path / "none")])


SERVES = """
import asyncio, sys
from services.shell.http import serve_pages, state_page

async def page(_):
    while len(sys.argv) > 1:  # its loop is held by computing
        pass
    return state_page("up", [])

async def main():
    server = await serve_pages("127.0.0.1", 0, {"/startz": page})
    print(server.port, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_who_is_stopped_for_good_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with script(SERVES) as process:
        port = read_line(process)
        assert probed(INFAAS_METRICS__PORT=port) == 0
        os.kill(process.pid, signal.SIGSTOP)
        assert eventually(lambda: probed(INFAAS_METRICS__PORT=port) == 1 and process.poll() is not None)
        assert process.wait() == -signal.SIGKILL
        assert "did not turn for 2 s (stopped by a signal): ended" in capsys.readouterr().out


@pytest.mark.slow
def test_who_computes_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with script(SERVES, "computes") as process:
        assert probed(INFAAS_METRICS__PORT=read_line(process)) == 1
        assert f"process {process.pid} is busy" in capsys.readouterr().out
        assert process.poll() is None
