"""A small application behind the gateway's HTTP server, in the test's own loop, and clients that send exactly these bytes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from msgspec.structs import replace

from services.core.settings import GatewaySettings
from services.gateway.http.access import AccessControl
from services.gateway.http.app import Dialect, HttpApplication, plain
from services.shell.http.handler import HttpHandler
from services.shell.http.messages import HttpReply, HttpRequest, HttpRoute
from services.shell.http.server import HttpServer

PATIENCE_S = 60.0  # only ends a test that fails


class Echo(HttpApplication):
    """Tells what came to any path: method, path, size of the body, the headers x-told and host. /unread has a limit of no bytes."""

    def __init__(self, settings: GatewaySettings | None = None) -> None:
        chosen = settings or GatewaySettings()
        super().__init__([Dialect("echo", [HttpRoute("/", self.tell)], plain)], chosen, AccessControl(chosen))

    def begin(self, request: HttpRequest) -> HttpReply | None:
        request.endpoint = self._endpoints[0]
        if request.path == "/unread":
            return told(request)
        return None

    async def tell(self, request: HttpRequest) -> HttpReply:
        if request.path == "/slow":
            await asyncio.sleep(0.2)
        return told(request)


def told(request: HttpRequest) -> HttpReply:
    """What an `Echo` replies."""
    text = f"{request.method} {request.path} {request.size} {request.header(b'x-told') or '-'} {request.header(b'host') or '-'}"
    return HttpReply([text.encode()], b"connection: close\r\n" if request.path == "/close" else b"")


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        """What the engine proxy says."""
        return str(json.loads(self.body)["message"])


class RawClients:
    """Clients of a port of 127.0.0.1, on a new connection for each `say`."""

    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, data: bytes, *, replies: int = 1, done: float = PATIENCE_S) -> list[Reply]:
        """Send it, and read so many replies, or as many as come before the connection is closed or silent for `done` s."""
        reader, writer = await self.connect()
        found: list[Reply] = []
        try:
            writer.write(data)
            head = data.startswith(b"HEAD ")
            while len(found) < replies and (reply := await asyncio.wait_for(read(reader, head=head), done)) is not None:
                found.append(reply)
        except TimeoutError:
            pass
        finally:
            await shut(writer)
        return found


class Served(RawClients):
    """A server on a port of its own."""

    def __init__(self, server: HttpServer) -> None:
        self.server, self.port, self.connections = server, server.port, server.connections


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
async def served(app: HttpHandler | None = None, settings: GatewaySettings | None = None) -> AsyncIterator[Served]:
    """`app` served within the limits of `settings`; its own are those that it was made with."""
    chosen = replace(settings or GatewaySettings(), port=0)
    server = HttpServer(app or Echo(chosen), chosen)
    await server.open()
    try:
        yield Served(server)
    finally:
        for connection in list(server.connections.all):
            connection.transport.abort()
        await server.close(1.0)
