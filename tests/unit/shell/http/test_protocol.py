"""services/shell/http/protocol.py: the limits of a connection, over real sockets."""

import asyncio
import json
import socket
import time

import pytest

from services.core.settings import GatewaySettings
from services.shell.http.messages import HttpReply, HttpRequest
from services.shell.http.protocol import HttpConnection
from tests.support.clients.responders import until
from tests.support.gateways.web_application import Echo, Reply, read, served, shut
from tests.support.servers.nats import run

GET = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"


def post(body: bytes, path: bytes = b"/a") -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s" % (path, len(body), body)


def told(data: bytes, *, replies: int = 1, settings: GatewaySettings | None = None) -> list[Reply]:
    """What a server replies to these bytes; it serves others afterwards."""

    async def main() -> list[Reply]:
        async with served(settings=settings) as server:
            found = await server.say(data, replies=replies)
            while (then := [reply.status for reply in await server.say(GET)]) == [408]:
                pass  # the machine stood still for longer than these settings give a client
            assert then == [200]
            return found

    return run(main())


def test_requests_one_after_another_and_ahead_of_replies() -> None:
    found = told(GET + post(b"xyz") + GET.replace(b"/a", b"/slow") + post(b"z" * 200_000), replies=4)
    assert [reply.body for reply in found] == [
        b"GET /a 0 - h",
        b"POST /a 3 - h",
        b"GET /slow 0 - h",
        b"POST /a 200000 - h",
    ]


def test_chunks_are_a_body_up_to_a_limit_and_trailers_no_headers() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: Chunked\r\n\r\n"
    (reply,) = told(head + b"3;e=1\r\nabc\r\n2\r\nde\r\n0\r\nX-Told: trailer\r\nHost: other\r\n\r\n")
    assert reply.body == b"POST /a 5 - h"
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    (reply,) = told(head + b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n")
    assert reply.body == b"POST /a 10000 - h"


BAD = {
    "two lengths": (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
    "two equal lengths": (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "length and chunks": (
        b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunks and length": (
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        400,
    ),
    "coding before chunked": (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked twice": (
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "coding after chunked": (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, x\r\n\r\n0\r\n\r\n", 400),
    "a coding like chunked": (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "chunks in 1.0": (b"POST /a HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "negative length": (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
    "signed length": (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: +3\r\n\r\nabc", 400),
    "huge length": (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
    "chunk size with sign": (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n", 400),
    "chunk size too large": (
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        400,
    ),
    "bare newlines": (b"GET /a HTTP/1.1\nHost: h\n\n", 400),
    "space before colon": (b"GET /a HTTP/1.1\r\nHost : h\r\n\r\n", 400),
    "folded header": (b"GET /a HTTP/1.1\r\nHost: h\r\nX-Told: a\r\n b\r\n\r\n", 400),
    "NUL in a header": (b"GET /a HTTP/1.1\r\nHost: h\r\nX-Told: a\0b\r\n\r\n", 400),
    "NUL in the path": (b"GET /a\0b HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "no host": (b"GET /a HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /a HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n", 400),
    "raw bytes in the path": (b"GET /\xff\xfe HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /a\r\n\r\n", 400),
    "HTTP/2 without asking": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/1.9": (b"GET /a HTTP/1.9\r\nHost: h\r\n\r\n", 400),
    "TLS on a plain port": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), 400),
    "a method nobody knows": (b"BREW /a HTTP/1.1\r\nHost: h\r\n\r\n", 405),
    "CONNECT": (b"CONNECT h:443 HTTP/1.1\r\nHost: h\r\n\r\n", 405),
    "another scheme": (b"GET ftp://h/a HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "a URL with a user": (b"GET http://h@evil/a HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "long request line": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: h\r\n\r\n", 414),
    "long request line without end": (b"GET /" + b"a" * 300_000, 414),
    "long header": (b"GET /a HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 17_000 + b"\r\n\r\n", 431),
    "long header without end": (b"GET /a HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 3_000_000, 431),
    "many headers": (b"GET /a HTTP/1.1\r\nHost: h\r\n" + b"a: b\r\n" * 4000 + b"\r\n", 431),
    "long trailers": (
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 4000 + b"\r\n",
        431,
    ),
    "long extension of a chunk": (
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 900_000,
        431,
    ),
    "one byte a chunk": (
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 500_000 + b"0\r\n\r\n",
        413,
    ),
}


async def test_what_is_no_request_is_refused() -> None:
    async with served() as server:
        for name, (data, status) in BAD.items():
            (reply,) = await server.say(data)
            assert reply.status == status, name
            assert reply.headers["connection"] == "close", name
            assert json.loads(reply.body)["error"], name
            assert ("allow" in reply.headers) == (status == 405), name
            assert [reply.status for reply in await server.say(GET)] == [200], name


@pytest.mark.parametrize(("max_header", "status"), [(300, 431), (4096, 200)])
def test_a_head_may_be_as_long_as_the_settings_say(max_header: int, status: int) -> None:
    head = GET[:-2] + b"X: " + b"a" * 400 + b"\r\n\r\n"
    assert [reply.status for reply in told(head, settings=GatewaySettings(max_header=max_header))] == [status]


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        (b"http://other:81/b?c=/d", b"GET /b 0 - other:81"),
        (b"HTTP://other", b"GET / 0 - other"),
        (b"http://other?c", b"GET / 0 - other"),
    ],
)
def test_the_host_of_an_absolute_url_counts(url: bytes, seen: bytes) -> None:
    (reply,) = told(b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n" % url)
    assert reply.body == seen


def test_paths_and_last_requests_are_as_the_protocol_has_them() -> None:
    (reply,) = told(b"GET //other/b HTTP/1.1\r\nHost: h\r\n\r\n")
    assert reply.body == b"GET //other/b 0 - h"
    (reply,) = told(b"GET /a HTTP/1.0\r\n\r\n", replies=2)
    assert reply.body == b"GET /a 0 - -"
    found = told(b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" + post(b"x"), replies=3)
    assert [reply.body for reply in found] == [b"GET /a 0 - h"]


def test_faults_are_told_after_the_replies_before_them() -> None:
    found = told(GET.replace(b"/a", b"/slow") + GET + b"nonsense\r\n\r\n", replies=4)
    assert [reply.status for reply in found] == [200, 200, 400]
    assert found[0].body == b"GET /slow 0 - h"
    broken = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    found = told(GET.replace(b"/a", b"/slow") + GET + broken, replies=4)
    assert [reply.status for reply in found] == [200, 200, 400]


def test_few_requests_wait_and_other_protocols_and_unread_bodies_cost_no_reply() -> None:
    found = told(GET.replace(b"/a", b"/slow") + GET * 1000, replies=1001)
    assert {reply.status for reply in found[:-1]} == {200}
    assert found[-1].status == 400
    assert len(found) < 100
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAA\r\n"
    found = told(head + b"X-Told: 1\r\nContent-Length: 3\r\n\r\nabc" + GET, replies=2)
    assert [reply.body for reply in found] == [b"POST /a 3 1 h", b"GET /a 0 - h"]
    body = b"x" * 5_000_000
    assert [reply.body for reply in told(post(body, b"/unread"))] == [b"POST /unread 0 - h"]
    assert [reply.body for reply in told(post(body, b"/unread") + GET, replies=2)] == [b"POST /unread 0 - h"]


async def test_a_small_unread_body_leaves_the_connection_usable() -> None:
    async with served() as server:
        reader, writer = await server.connect()
        head, body = post(b"abc", b"/unread")[:-2], b"bc"
        writer.write(head)
        assert (await read(reader)) is not None
        writer.write(body + GET)
        reply = await read(reader)
        assert reply.body == b"GET /a 0 - h"
        await shut(writer)


QUICK = GatewaySettings(head_timeout_s=1.0, idle_timeout_s=1.5, connections=20)


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"", []),
        (b"\r\n\r\n", []),
        (b"G", [408]),
        (b"GET /a HTTP/1.1\r\nHost: h\r\n", [408]),
        (GET, [200]),
        (GET + b"GET", [200, 408]),
        (post(b"abc", b"/unread")[:-1], [200]),
    ],
    ids=["nothing", "empty lines", "a letter", "half a head", "idle", "half a second one", "half a body"],
)
def test_connections_do_not_wait_for_ever(sent: bytes, statuses: list[int]) -> None:
    found = told(sent, replies=3, settings=QUICK)
    assert [reply.status for reply in found] == statuses


async def test_a_head_in_drops_takes_no_longer_than_allowed() -> None:
    async with served(settings=QUICK) as server:
        reader, writer = await server.connect()
        began = time.monotonic()
        reply = asyncio.create_task(read(reader))
        for letter in (GET[:-4] + b"X: " + b"a" * 1000)[:200]:
            writer.write(bytes([letter]))
            await asyncio.sleep(0.02)
            if reply.done() or time.monotonic() > began + 3:
                break
        found = await reply
        assert found.status == 408
        await shut(writer)


async def test_silent_connections_make_room_for_those_that_ask() -> None:
    async with served(settings=GatewaySettings(connections=20)) as server:
        silent = [await server.connect() for _ in range(60)]
        for _, writer in silent[50:]:
            writer.write(b"GET /a HT")
        for _ in range(5):
            assert [reply.status for reply in await server.say(GET)] == [200]
        assert len(server.connections.all) <= 20
        for _, writer in silent:
            await shut(writer)


class Held(Echo):
    """Replies when it is let."""

    def __init__(self, settings: GatewaySettings | None = None) -> None:
        super().__init__(settings)
        self.let = asyncio.Event()

    async def tell(self, request: HttpRequest) -> HttpReply:
        if request.path == "/held":
            await self.let.wait()
        if request.path == "/large":
            return HttpReply([bytes(100_000_000)], b"")
        return await super().tell(request)


async def test_more_connections_than_allowed_are_told_so() -> None:
    settings = GatewaySettings(connections=5)
    app = Held(settings)
    async with served(app, settings) as server:
        held = [await server.connect() for _ in range(5)]
        for _, writer in held:
            writer.write(post(b"abc", b"/held"))
        await until(lambda: len(server.connections.tasks) == 5)
        (reply,) = await server.say(GET)
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        app.let.set()
        for reader, writer in held:
            assert (await read(reader)) is not None
            await shut(writer)
        assert [reply.status for reply in await server.say(GET)] == [200]


async def test_slow_bodies_make_room_take_no_place_and_end() -> None:
    settings = GatewaySettings(connections=20, in_flight=1)
    async with served(settings=settings) as server:
        slow = []
        for number in range(1, 41):
            slow.append(await server.connect())
            slow[-1][1].write(post(b"x" * 1000)[:-10])
            await until(lambda: len(server.connections.slow) == min(number, 20) and not server.connections.idle)  # noqa: B023
        for _ in range(5):
            assert [reply.status for reply in await server.say(GET)] == [200]
        assert server.connections.app.limits.running == 0
        first = await read(slow[0][0])
        assert first.status == 503
        slow[-1][1].write(b"x" * 10)
        last = await read(slow[-1][0])
        assert last.body == b"POST /a 1000 - h", "the newest are the last to give way"
        for _, writer in slow:
            await shut(writer)


async def test_a_client_that_does_not_read_is_closed() -> None:
    async with served(Held(QUICK), QUICK) as server:
        reader, writer = await server.connect()
        writer.write(GET.replace(b"/a", b"/large"))
        await until(lambda: bool(server.connections.all))
        await until(lambda: not server.connections.all and not server.connections.tasks)
        assert [reply.status for reply in await server.say(GET)] == [200]
        del reader
        await shut(writer)


async def test_a_client_that_leaves_early() -> None:
    async with served() as server:
        for cut in (b"GET", post(b"abc")[:-1], GET.replace(b"/a", b"/slow"), GET * 3, b"\xff\xff"):
            _, writer = await server.connect()
            writer.write(cut)
            await writer.drain()
            writer.transport.abort()
        assert [reply.status for reply in await server.say(GET)] == [200]
        await until(lambda: not server.connections.all)


async def test_a_client_that_has_gone_before_its_query_begins() -> None:
    """The request and the end of its connection may be read in one turn of the loop."""
    app = Echo()
    app._endpoints[0].query = True
    async with served(app) as server:
        for path in (b"/a", b"/slow"):
            connection = HttpConnection(server.connections)
            ours, theirs = socket.socketpair()
            await asyncio.get_running_loop().create_connection(lambda made=connection: made, sock=ours)
            connection.data_received(GET.replace(b"/a", path))
            connection.connection_lost(None)
            await until(lambda: not server.connections.tasks)
            connection.transport.abort()
            theirs.close()
        assert app.limits.running == 0
        assert [reply.status for reply in await server.say(GET)] == [200]


async def test_bytes_in_pieces_are_the_same_requests() -> None:
    stream = (
        GET
        + post(b"abcdef")
        + b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
        + GET
    )

    async with served() as server:
        for size in (1, 3, 7):
            reader, writer = await server.connect()
            for start in range(0, len(stream), size):
                writer.write(stream[start : start + size])
                await asyncio.sleep(0)
            found = [await read(reader) for _ in range(4)]
            assert [reply.body for reply in found if reply] == [
                b"GET /a 0 - h",
                b"POST /a 6 - h",
                b"POST /c 2 - h",
                b"GET /a 0 - h",
            ]
            await shut(writer)
