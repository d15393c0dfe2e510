"""services/shell/http.py, as the engine proxy uses it: what a connection may do, over real sockets."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.shell.http import HttpLimits
from tests.support.servers.docker_engine import NODE, Front, Said, fronted, stand_in
from tests.support.servers.nats import run

GET = b"GET /nodes HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /nodes/%s/update?version=14 HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n" % NODE.encode()
SPEC = json.dumps(
    {"Labels": {"infaas.worker": "cpu", "rack": "7"}, "Role": "manager", "Availability": "active"}
).encode()
SHORT = HttpLimits(head=2000, body=2000, head_s=0.3, body_s=0.3, reply_s=0.5, connections=4)
PATIENT = SHORT._replace(head_s=600.0, body_s=600.0, reply_s=600.0)  # however long the machine stands still


def through(
    directory: Path, work: Callable[[Front], Coroutine[Any, Any, None]], limits: HttpLimits = PATIENT
) -> list[str]:
    """Do this at a proxy, which serves others afterwards; returns what the engine saw but for that."""

    async def main(socket: str) -> None:
        async with fronted(socket, limits=limits) as front:
            await work(front)
            then = [reply.status for reply in await front.say(GET)]
            while limits is SHORT and then in ([], [408]):  # the machine stood still
                then = [reply.status for reply in await front.say(GET)]
            assert then == [200]

    with stand_in(directory) as engine:
        run(main(engine.path))
        assert engine.seen.pop()[1] == "/nodes"
        return [f"{method} {path}" for method, path, _ in engine.seen]


def said(
    directory: Path, *pieces: bytes, pause: float = 0.0, seen: int = 0, limits: HttpLimits = PATIENT
) -> list[Said]:
    """What is replied to these bytes. seen: so many requests reach the engine."""
    found: list[Said] = []

    async def work(front: Front) -> None:
        found.extend(await front.say(*pieces, pause=pause))

    assert len(through(directory, work, limits)) == seen
    return found


def test_one_request_a_connection(tmp_path: Path) -> None:
    (reply,) = said(tmp_path, GET + GET.replace(b"/nodes", b"/tasks"), seen=1)
    assert reply.status == 200
    assert reply.headers["connection"] == "close"
    assert json.loads(reply.body)[0]["ID"] == NODE


def test_a_request_in_small_pieces(tmp_path: Path) -> None:
    (reply,) = said(tmp_path, *(GET[i : i + 5] for i in range(0, len(GET), 5)), pause=0.001, seen=1)
    assert reply.status == 200


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


def test_who_sends_nothing_hears_nothing(tmp_path: Path) -> None:
    assert said(tmp_path, b"", limits=SHORT) == []


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


def test_connections_above_the_limit_are_told_so(tmp_path: Path) -> None:
    async def work(front: Front) -> None:
        held = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(4)]
        try:
            (reply,) = await front.say(GET)
            assert reply.status == 503
        finally:
            for _, writer in held:
                writer.close()
                await writer.wait_closed()

    through(tmp_path, work)


def test_who_leaves_early_or_does_not_read_does_not_stay(tmp_path: Path) -> None:
    async def work(front: Front) -> None:
        for data in (b"", b"GET /no", GET, POST + b"Content-Length: 100\r\n\r\n{"):
            _, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(data)
            await writer.drain()
            writer.transport.abort()

    through(tmp_path, work)


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
