"""The HTTP server: uvicorn inside the service's own event loop, without its signal handlers."""

import asyncio
import logging
import socket

import uvicorn
from starlette.types import ASGIApp

from services.gateway.http.parts import Bounds
from services.gateway.http.protocol import bounded
from services.gateway.http.tls import context
from services.shell.sections import GatewaySettings

BACKLOG = 2048


class _Quiet(uvicorn.Server):
    """uvicorn as a part of a process that has its own signals and its own logging."""

    async def run_in_loop(self, sockets: list[socket.socket]) -> None:
        await self._serve(sockets)


class HttpServer:
    """`open` listens; what is wrong with the address raises OSError there. Raises BadTls."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._config = config(app, settings)
        self._settings = settings
        self._server: _Quiet | None = None
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        settings = self._settings
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        server = self._server = _Quiet(self._config)
        listening = listen(settings.address, settings.port, reuse=settings.reuse_port)
        self._running = asyncio.get_running_loop().create_task(server.run_in_loop([listening]))
        while not server.started:
            if self._running.done():
                self._running.result()
                raise OSError("the HTTP server ended at once")
            await asyncio.sleep(0.005)

    async def close(self, grace: float) -> None:
        server, running = self._server, self._running
        if server is None or running is None:
            return
        server.config.timeout_graceful_shutdown = max(1, int(grace))
        server.should_exit = True
        await asyncio.wait([running])


def config(app: ASGIApp, settings: GatewaySettings) -> uvicorn.Config:
    """The configuration of uvicorn. Raises BadTls."""
    bounds = Bounds(
        max_header=settings.max_header,
        head_timeout_s=settings.head_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
        connections=settings.connections,
    )
    tls = context(settings.tls_certificate, settings.tls_key)
    return uvicorn.Config(
        app,
        ssl_context_factory=None if tls is None else lambda *_: tls,
        http=bounded(bounds),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
    )


def listen(address: str, port: int, *, reuse: bool) -> socket.socket:
    """A socket bound to the address. reuse: other gateways may bind to it, too. Raises OSError."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(where)
    except OSError as error:
        found.close()
        raise OSError(f"{address}:{port}: {error.strerror}; gateway.port may name another one") from error
    found.setblocking(False)
    return found
