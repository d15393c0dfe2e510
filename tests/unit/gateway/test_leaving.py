"""A gateway that is stopped answers the requests under way, closes idle connections, and listens no longer. And clients that leave."""

import asyncio
import http.client
import json
import logging
import os
import socket
import threading
from typing import Any

import pytest

from services.core.settings import GatewaySettings
from services.shell.http.server import LISTENING, HttpServer, listen
from tests.support.gateways.echo_gateway import echoing
from tests.support.gateways.web_application import Echo, read, shut
from tests.support.servers.processes import eventually, fetched

BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]})


def test_what_is_under_way_is_answered_and_idle_connections_are_closed() -> None:
    found: list[tuple[int, Any]] = []
    with echoing() as stage:
        stage.hold()
        stage.grace = 60.0
        idle = http.client.HTTPConnection("127.0.0.1", stage.port, timeout=60)
        idle.request("GET", "/v2")
        assert idle.getresponse().read()

        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", stage.port, timeout=60)
            connection.request("POST", "/v2/models/fixed/infer", BODY)
            reply = connection.getresponse()
            found.append((reply.status, json.loads(reply.read())))
            connection.close()

        asking = threading.Thread(target=ask)
        asking.start()
        assert eventually(lambda: bool(stage.heard))
        stage.stop()
        assert idle.sock.recv(1) == b""
        idle.close()
        assert not found
        stage.release()
        asking.join(60)
        assert [status for status, _ in found] == [200]
        assert found[0][1]["outputs"][0]["data"] == [1, 2, 3]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", stage.port), 5)


@pytest.mark.parametrize("path", ["/v2/models/fixed/infer", "/fixed/predict", "/classify?model_name=fixed"])
@pytest.mark.parametrize("ahead", [b"", b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_whose_client_leaves_is_waited_for_no_longer(path: str, ahead: bytes, caplog: pytest.LogCaptureFixture) -> None:
    body = {"/fixed/predict": '{"input": [1, 2, 3]}', "/classify?model_name=fixed": "[1, 2, 3]"}.get(
        path, BODY
    ).encode()
    with echoing() as stage:
        service: Any = stage.runtimes[0].edge._service  # type: ignore[union-attr]
        stage.delay = 60.0
        with socket.create_connection(("127.0.0.1", stage.port), 60) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head + body + ahead)
            assert eventually(lambda: len(service.client._exchange) == 1)
        assert eventually(lambda: len(service.client._exchange) == 0)
        assert eventually(lambda: service.counts.running["http"] == 0)
        assert [status for (_, status) in service.counts.requests] == ["499"]
        stage.delay = 0.0
        assert fetched(f"http://{stage.url}{path}", body)[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}.*gateway\.port"):
            listen("127.0.0.1", port, reuse=False)
        with pytest.raises(OSError, match="gateway"):  # the other one has to agree
            listen("127.0.0.1", port, reuse=True)
    with listen("127.0.0.1", 0, reuse=True) as one, listen("127.0.0.1", one.getsockname()[1], reuse=True) as two:
        assert one.getsockname() == two.getsockname()


async def test_a_server_with_a_successor_breaks_no_connection_and_refuses_none() -> None:
    """Both accept on one socket, which another process keeps: here, this one."""
    request = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"

    async def opened(shared: socket.socket) -> HttpServer:
        os.environ[LISTENING] = str(os.dup(shared.fileno()))
        server = HttpServer(Echo(), GatewaySettings(port=shared.getsockname()[1]))
        await server.open()
        assert LISTENING not in os.environ
        return server

    with listen("127.0.0.1", 0, reuse=False) as shared:
        where = shared.getsockname()
        old = await opened(shared)
        reader, writer = await asyncio.open_connection(*where)
        writer.write(request)
        assert (first := await read(reader)) is not None
        assert first.headers.get("connection") != "close"
        new = await opened(shared)
        retiring = asyncio.create_task(old.retire(120.0))
        await asyncio.sleep(0)  # it begins
        for _ in range(20):
            other, its = await asyncio.open_connection(*where)
            its.write(request)
            assert (reply := await read(other)) is not None
            assert (reply.status, reply.headers.get("connection")) == (200, None), "the successor keeps them"
            await shut(its)
        assert not retiring.done(), "its client may be about to send"
        writer.write(request)
        assert (last := await read(reader)) is not None
        assert (last.status, last.headers.get("connection")) == (200, "close")
        assert await reader.read() == b""
        await retiring
        await shut(writer)
        await old.close(1.0)
        await new.close(1.0)
        other, its = await asyncio.open_connection(*where)  # while nobody is there it waits
        third = await opened(shared)
        its.write(request)
        assert (reply := await read(other)) is not None
        assert reply.status == 200
        await shut(its)
        await third.close(1.0)


async def test_a_connection_on_which_nothing_comes_is_closed_in_the_end() -> None:
    server = HttpServer(Echo(), GatewaySettings(port=0))
    await server.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    assert await read(reader) is not None
    await server.retire(0.05)
    await server.close(1.0)
    assert await reader.read() == b""
    await shut(writer)
