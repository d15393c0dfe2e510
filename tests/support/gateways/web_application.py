"""A small application behind the gateway's HTTP server, in the test's own loop, and clients that send exactly these bytes."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from services.core.settings import GatewaySettings
from services.gateway.http.protocol import LimitedHttpProtocol, protocol_class
from services.gateway.http.server import EmbeddedServer
from tests.support.clients.responders import until

PATIENCE_S = 60.0  # only ends a test that fails


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Tells what came: method, path, size of the body, and the header x-told if there is one."""
    size, more = 0, True
    while more and scope["path"] != "/unread":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(0.2)
    told = dict(scope["headers"]).get(b"x-told", b"-").decode("latin-1")
    host = dict(scope["headers"]).get(b"host", b"-").decode("latin-1")
    text = f"{scope['method']} {scope['path']} {size} {told} {host}".encode()
    headers = [(b"content-length", b"%d" % len(text))]
    if scope["path"] == "/close":
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Served:
    """A server on a port of its own."""

    def __init__(self, server: uvicorn.Server, port: int) -> None:
        self.server, self.port = server, port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, data: bytes, *, replies: int = 1) -> list[Reply]:
        """Send it on a new connection, and read so many replies, or as many as come before it is closed."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            found = []
            while len(found) < replies and (reply := await read(reader)) is not None:
                found.append(reply)
            return found
        finally:
            await shut(writer)


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        pass


async def read(reader: asyncio.StreamReader, *, head: bool = False) -> Reply | None:
    """The next reply, or None when the connection was closed without one. head: to a request by HEAD."""
    try:
        lines = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *fields = lines.decode("latin-1").split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in fields)}
    status = int(first.split(" ")[1])
    if "content-length" not in headers or head:
        return Reply(status, headers, b"")
    body = await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), PATIENCE_S)
    return Reply(status, headers, body)


@asynccontextmanager
async def served(
    app: ASGIApp = echo,
    settings: GatewaySettings | None = None,
    *,
    protocol: type[LimitedHttpProtocol] | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """`app` served within the limits of `settings`."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.setblocking(False)
        config = uvicorn.Config(
            app,
            http=protocol or protocol_class(settings or GatewaySettings()),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            **options,
        )
        server = EmbeddedServer(config, (settings or GatewaySettings()).head_timeout_s)
        task = asyncio.get_running_loop().create_task(server.run_in_loop([listening]))
        await until(lambda: server.started)
        try:
            yield Served(server, listening.getsockname()[1])
        finally:
            server.should_exit = True
            for connection in list(server.server_state.connections):
                assert isinstance(connection, LimitedHttpProtocol)
                connection.transport.abort()
            await task
