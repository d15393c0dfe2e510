"""services/shell/http/handler.py and services/gateway/http/checks.py behind the real server: bodies, time, hosts, origins, tokens; and compressed bodies."""

import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.settings import GatewaySettings
from services.gateway.errors import RequestFailed
from services.gateway.http.access import AccessControl, Right
from services.gateway.http.app import Dialect, HttpApplication
from services.gateway.http.checks import right_of
from services.shell.http.handler import (
    MEMBERS,
    RATIO,
    STEP,
    UNCHECKED_INFLATED,
    Inflater,
    RequestLimits,
)
from services.shell.http.messages import HttpProblem, HttpReply, HttpRequest, HttpRoute, JsonReply, TextReply
from tests.support.clients.responders import until
from tests.support.gateways.web_application import Reply, Served, read, served, shut


async def size(request: HttpRequest) -> HttpReply:
    return TextReply(f"{len(request.body)}")


async def unread(request: HttpRequest) -> HttpReply:
    del request
    return TextReply("unread")


async def broken(request: HttpRequest) -> HttpReply:
    raise RuntimeError("an inner matter")


def form(failure: RequestFailed) -> JsonReply:
    return JsonReply({"error": failure.message, "cause": failure.code}, failure.status, failure.headers)


ROUTES = [
    HttpRoute("/v2/models/{model}/infer", size, methods=["POST"]),
    HttpRoute("/v2/health/live", unread),
    HttpRoute("/admin/add_app", size, methods=["POST"]),
    HttpRoute("/list", unread),
    HttpRoute("/change_params", unread),
    HttpRoute("/broken", broken),
]
INFER = "/v2/models/a/infer"


@asynccontextmanager
async def with_app(**settings: object) -> AsyncIterator[Served]:
    chosen = GatewaySettings(**settings)  # type: ignore[arg-type]
    async with served(application(chosen), chosen) as server:
        yield server


def application(settings: GatewaySettings) -> HttpApplication:
    return HttpApplication([Dialect("test", ROUTES, form)], settings, AccessControl(settings))


def request(path: str, body: bytes = b"", method: str = "POST", host: str = "localhost", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body


async def ask(server: Served, *args: object, **more: str) -> Reply:
    (reply,) = await server.say(request(*args, **more))  # type: ignore[arg-type]
    return reply


async def test_bodies_are_limited_in_size() -> None:
    async with with_app(max_body=10_000) as server:
        assert (await ask(server, INFER, b"x" * 10_000)).body == b"10000"
        reply = await ask(server, INFER, b"x" * 10_001)
        assert reply.status == 413
        assert reply.headers["connection"] == "close"
        assert json.loads(reply.body)["cause"] == "too_large"
        assert "10001: send less at a time" in json.loads(reply.body)["error"]
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        chunk = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
        assert [one.status for one in await server.say(head + chunk * 2 + b"0\r\n\r\n")] == [200]
        assert [one.status for one in await server.say(head + chunk * 3 + b"0\r\n\r\n")] == [413]
        assert [one.status for one in await server.say(head + chunk * 3000)] == [413]


async def test_bodies_too_large_or_too_slow_end() -> None:
    async with with_app(max_body=10_000) as server:
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 99999\r\n\r\n"
        assert [one.status for one in await server.say(head.encode(), replies=2)] == [413]
    async with with_app(body_timeout_s=0.2) as server:
        assert [one.status for one in await server.say(request(INFER, b"abc")[:-1])] == [408]
        assert (await ask(server, INFER, b"abc")).status == 200


async def test_a_client_that_asks_before_it_sends() -> None:
    async with with_app() as server:
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
        reader, writer = await server.connect()
        writer.write(head.encode())
        first = await read(reader)
        assert first.status == 100
        writer.write(b"abc")
        second = await read(reader)
        assert second.body == b"3"
        await shut(writer)


async def test_compressed_bodies() -> None:
    async with with_app(max_body=10_000) as server:
        data = bytes(range(256)) * 30
        for coding, packed in (("gzip", gzip.compress(data)), ("deflate", zlib.compress(data)), ("Identity", data)):
            assert (await ask(server, INFER, packed, Content_Encoding=coding)).body == b"7680"
        for coding, packed, status in (
            ("gzip", gzip.compress(data * 2), 413),
            ("gzip", data, 400),
            ("gzip", gzip.compress(data)[:-1], 400),
            ("br", data, 415),
            ("gzip, gzip", gzip.compress(gzip.compress(data)), 415),
        ):
            reply = await ask(server, INFER, packed, Content_Encoding=coding)
            assert reply.status == status, (coding, reply)
        assert reply.headers["accept-encoding"] == "gzip, deflate"
        assert (await ask(server, "/list", method="GET", Content_Encoding="br")).status == 200


async def test_requests_at_a_time_are_limited() -> None:
    settings = GatewaySettings(in_flight=2)
    app = application(settings)
    async with served(app, settings) as server:
        coming = [await server.connect() for _ in range(5)]
        for _, writer in coming:
            writer.write(request(INFER, b"abc")[:-1])
        await until(lambda: len(server.connections.slow) == 5)
        assert (await ask(server, INFER, b"abc")).status == 200, "what is to come takes no place"
        app.limits.running = 2
        reply = await ask(server, INFER, b"abc")
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        assert [one.status for one in await server.say(request("/v2/health/live", method="GET"))] == [200]
        app.limits.running = 0
        for reader, writer in coming:
            writer.write(b"c")
            assert (await read(reader)) is not None
            await shut(writer)
        assert app.limits.running == 0


async def test_bytes_held_at_a_time_are_limited() -> None:
    settings = GatewaySettings()
    app = application(settings)
    app.limits.most_buffered = 2000
    async with served(app, settings) as server:
        reader, writer = await server.connect()
        writer.write(request(INFER, b"x" * 1501)[:-1])
        await until(lambda: app.limits.buffered == 1500)
        assert (await ask(server, INFER, b"x" * 400)).status == 200
        assert (await ask(server, INFER, b"x" * 600)).status == 503
        writer.write(b"x")
        assert (await read(reader)) is not None
        await until(lambda: app.limits.buffered == 0 and app.limits.running == 0)
        await shut(writer)
        assert (await ask(server, INFER, b"x" * 1000)).status == 200


async def test_whoever_leaves_early_is_not_waited_for() -> None:
    settings = GatewaySettings()
    app = application(settings)
    async with served(app, settings) as server:
        _, writer = await server.connect()
        writer.write(request(INFER, b"x" * 1000)[:-1])
        await until(lambda: app.limits.buffered == 999)
        writer.transport.abort()
        await until(lambda: app.limits.running == 0 and app.limits.buffered == 0)


def test_a_body_must_come_at_a_rate() -> None:
    limits = RequestLimits(GatewaySettings(body_timeout_s=30.0), "")
    coming = HttpRequest("POST", b"/a", {})
    for size, due in ((0, 10.0), (10 * 1024, 20.0), (20 * 1024, 30.0), (64 * 2**20, 1054.0)):
        coming.size = size
        assert limits.due(coming) == pytest.approx(due, abs=1.0)


async def test_an_inner_fault_tells_nothing_and_management_can_be_off() -> None:
    async with with_app() as server:
        reply = await ask(server, "/broken", method="GET")
        assert reply.status == 500
        assert b"inner" not in reply.body
    async with with_app(admin=False) as server:
        assert (await ask(server, "/admin/add_app")).status == 403
        assert (await ask(server, INFER)).status == 200


async def test_methods_and_paths() -> None:
    async with with_app() as server:
        reply = await ask(server, INFER, method="DELETE")
        assert reply.status == 405
        assert reply.headers["allow"] == "POST"
        assert (await ask(server, "/nothing", method="GET")).status == 404
        for path in ("/v2/%2e%2e/list", "/v2/../list", "/v2/models/a%00/infer", "/v2/models/a%2fb/infer", "//list"):
            assert (await ask(server, path)).status == 400, path


async def test_hosts_and_origins() -> None:
    async with with_app(hosts="models.example.org") as server:
        for host in ("localhost:1", "127.0.0.1", "[::1]:8000", "models.example.org"):
            assert (await ask(server, INFER, host=host)).status == 200, host
        for host in ("evil.example", "localhost.evil.example", "", "a b"):
            assert (await ask(server, INFER, host=host)).status == 421, host
            assert (await ask(server, "/list", method="GET", host=host)).status == 421, host
        (reply,) = await server.say(b"GET http://evil.example/list HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reply.status == 421
        (reply,) = await server.say(b"GET /list HTTP/1.0\r\n\r\n")
        assert reply.status == 200
        assert (await ask(server, INFER, Origin="http://evil.example")).status == 403
        assert (await ask(server, INFER, Origin="null")).status == 403
        assert (await ask(server, INFER, Sec_Fetch_Site="cross-site")).status == 403
        assert (await ask(server, INFER, Origin="http://localhost")).status == 200
        assert (await ask(server, "/list", method="GET", Origin="http://evil.example")).status == 200
        reply = await ask(server, "/change_params", method="GET", Sec_Fetch_Site="cross-site")
        assert reply.status == 403, "it changes something, although by GET"
        reply = await ask(server, INFER, method="OPTIONS", Origin="http://evil.example")
        assert reply.status == 405
        assert not any(name.startswith("access-control") for name in reply.headers)


async def test_pages_that_may_ask() -> None:
    async with with_app(cors_origins="https://page.example") as server:
        page = "https://page.example"
        preflight = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
        reply = await ask(server, INFER, method="OPTIONS", Origin=page, **preflight)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == page
        reply = await ask(server, INFER, method="OPTIONS", Origin="https://evil.example", **preflight)
        assert reply.status == 400
        reply = await ask(server, INFER, Origin=page)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == page
        assert (await ask(server, INFER, Origin="https://evil.example")).status == 403
        assert (await ask(server, "/admin/add_app", Origin=page)).status == 403, "without an operator's token"


async def test_tokens() -> None:
    async with with_app(tokens="u", operator_tokens="o", cors_origins="https://page.example") as server:
        for token, asking, managing in ((None, 401, 401), ("guess", 401, 401), ("u", 200, 403), ("o", 200, 200)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            reply = await ask(server, INFER, **headers)
            assert reply.status == asking
            assert ("www-authenticate" in reply.headers) == (asking == 401)
            assert (await ask(server, "/admin/add_app", **headers)).status == managing
            assert (await ask(server, "/v2/health/live", method="GET", **headers)).status == 200
        page = {"Authorization": "Bearer o", "Origin": "https://page.example"}
        assert (await ask(server, "/admin/add_app", **page)).status == 200


def test_what_is_not_known_to_be_harmless_is_for_operators() -> None:
    asking = [
        ("GET", "/v2"),
        ("GET", "/v2/models/{model}/stats"),
        ("POST", "/v2/models/{model}/versions/{version}/infer"),
        ("POST", "/{app}/predict"),
        ("POST", "/{app}/update"),
        ("POST", "/classify"),
        ("GET", "/list"),
        ("GET", "/openapi.json"),
    ]
    managing = [
        ("POST", "/register"),
        ("POST", "/admin/predict"),
        ("POST", "/admin/get_model"),
        ("GET", "/admin/ping"),
        ("POST", "/v2/repository/models/{model}/load"),
        ("DELETE", "/v2/models/{model}"),
        ("GET", "/change_params"),
        ("POST", "/anything/else"),
        ("PUT", "/{app}/predict"),
    ]
    assert {right_of(path, method) for method, path in asking} == {Right.QUERY}
    assert {right_of(path, method) for method, path in managing} == {Right.OPERATE}
    assert right_of("/v2/health/ready", "GET") is Right.NONE


# -- compressed bodies

LIMIT = 8 * 2**20


def inflate(coding: str, *parts: bytes, limit: int = LIMIT) -> bytes:
    inflater = Inflater(coding, limit)
    pieces = [piece for part in parts for piece in inflater.feed(part)]
    inflater.end()
    assert all(len(piece) <= STEP for piece in pieces)
    return b"".join(pieces)


def bare(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def bomb(size: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    zeros = bytes(2**20)
    return b"".join(packer.compress(zeros) for _ in range(size // len(zeros))) + packer.flush()


@given(st.binary(max_size=3000), st.integers(1, 500), st.integers(1, 300))
def test_what_was_compressed_comes_back(data: bytes, times: int, size: int) -> None:
    data = (data * times)[: 2 * STEP + 77]
    for coding, packed in (("gzip", gzip.compress(data)), ("deflate", zlib.compress(data)), ("deflate", bare(data))):
        assert inflate(coding, packed) == data
        assert inflate(coding, *(packed[at : at + size] for at in range(0, len(packed), size))) == data


def test_a_gzip_file_may_have_several_members_or_none_and_nothing_behind() -> None:
    assert inflate("gzip", gzip.compress(b"ab") + gzip.compress(b"") + gzip.compress(b"c")) == b"abc"
    with pytest.raises(HttpProblem, match="parts"):
        inflate("gzip", gzip.compress(b"") * (MEMBERS + 1))
    assert inflate("gzip", b"") == b""
    for coding, data in (("gzip", gzip.compress(b"abc")), ("deflate", zlib.compress(b"abc"))):
        with pytest.raises(HttpProblem):
            inflate(coding, data + b"more")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "data",
    [b"x", b"not compressed", gzip.compress(b"abc")[:-5], zlib.compress(b"abc" * 99)[:-5], b"\x1f\x8b\x08" + bytes(99)],
    ids=["a letter", "text", "half a gzip", "half a zlib", "a bad head"],
)
def test_broken_data_is_told(coding: str, data: bytes) -> None:
    with pytest.raises(HttpProblem):
        inflate(coding, data)


def test_bombs_stop_early_and_high_ratios_are_fine_while_small() -> None:
    inflater, packed = Inflater("gzip", 2**40), bomb(16 * 2**20)
    made = 0
    with pytest.raises(HttpProblem, match="times its size"):
        for piece in inflater.feed(packed):
            made += len(piece)
    assert made <= UNCHECKED_INFLATED
    assert inflate("gzip", gzip.compress(bytes(UNCHECKED_INFLATED))) == bytes(UNCHECKED_INFLATED)


def test_the_size_is_limited_whatever_the_ratio() -> None:
    data = random.Random(1).randbytes(2**20 + 5)
    packed = zlib.compress(data, 1)
    assert len(data) < RATIO * len(packed)
    assert inflate("deflate", packed, limit=len(data)) == data
    with pytest.raises(HttpProblem, match="more than"):
        inflate("deflate", packed, limit=len(data) - 1)


@given(st.binary(max_size=200))
def test_nothing_else_is_raised(data: bytes) -> None:
    for coding in ("gzip", "deflate"):
        for start in (b"", b"\x1f\x8b\x08\x00" + bytes(6), b"\x78\x9c"):
            try:
                inflate(coding, start + data)
            except HttpProblem:
                pass
