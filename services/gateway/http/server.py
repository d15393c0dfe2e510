"""The HTTP server: uvicorn in the service's own event loop, its socket, and the gateway's TLS."""

import asyncio
import logging
import resource
import socket
import ssl
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from services.core.settings import GatewaySettings
from services.gateway.http.protocol import protocol_class
from services.gateway.http.shedding import Shedding
from services.shell.http import inherited_socket, listen

BACKLOG = 2048  # connections that wait to be accepted
TLS_SHUTDOWN_S = 2.0  # for a client to agree that a TLS connection ends
SPARE_FILES = 1024  # open files beside connections: gRPC's, NATS, models that are fetched


class EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handlers and logging: the process has its own. handshake_s: longest TLS handshake."""

    def __init__(self, config: uvicorn.Config, handshake_s: float = 60.0) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s

    async def run_in_loop(self, sockets: list[socket.socket]) -> None:
        await self._serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, with a limit to the time of a TLS handshake."""
        loop = asyncio.get_running_loop()
        config = self.config
        await self.lifespan.startup()

        def connection() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        limits: dict[str, Any] = (
            {"ssl_handshake_timeout": self._handshake_s, "ssl_shutdown_timeout": TLS_SHUTDOWN_S} if config.ssl else {}
        )
        self.servers = [
            await loop.create_server(connection, sock=one, ssl=config.ssl, backlog=config.backlog, **limits)
            for one in sockets or ()
        ]
        self.started = True


class HttpServer:
    """The gateway's server for HTTP. Raises BadTls; `open` raises OSError where it cannot listen."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, shedding: Shedding | None = None) -> None:
        self._config = config(app, settings, shedding)
        self._settings = settings
        self._server: EmbeddedServer | None = None
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        settings = self._settings
        allow_files(settings.connections + SPARE_FILES)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        server = self._server = EmbeddedServer(self._config, settings.head_timeout_s)
        listening = inherited_socket() or listen(settings.address, settings.port, reuse=settings.reuse_port)
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

    async def retire(self, grace: float) -> None:
        """A successor accepts connections from now on: each of ours is closed after one more reply, or when nothing came within `grace` seconds."""
        if (server := self._server) is None:
            return
        for one in server.servers:
            one.close()
        self._config.http_protocol_class.retiring = True  # type: ignore[attr-defined]
        end = time.monotonic() + grace
        while server.server_state.connections and time.monotonic() < end:  # noqa: ASYNC110  (once in a process's life)
            await asyncio.sleep(0.01)


def config(app: ASGIApp, settings: GatewaySettings, shedding: Shedding | None = None) -> uvicorn.Config:
    """The configuration of uvicorn. Raises BadTls."""
    tls = tls_context(settings.tls_certificate, settings.tls_key)
    return uvicorn.Config(
        app,
        ssl_context_factory=None if tls is None else lambda *_: tls,
        http=protocol_class(settings, shedding),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
    )


def allow_files(count: int) -> None:
    """Raise the process's limit of open files to `count`, as far as its hard limit allows: many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        count = min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


# -- TLS


class BadTls(Exception):
    """A certificate or key cannot be used; the text names the setting."""


def tls_context(certificate: str, key: str) -> ssl.SSLContext | None:
    """TLS 1.2 and newer with this certificate chain and key (paths of PEM files); None where neither is set. Raises BadTls."""
    if not certificate and not key:
        return None
    for path, setting, kind in (
        (certificate, "gateway.tls_certificate", "CERTIFICATE"),
        (key, "gateway.tls_key", "PRIVATE KEY"),
    ):
        if not path:
            raise BadTls(f"{setting} must name a PEM file: a certificate and its key belong together")
        try:
            with open(path, "rb") as file:
                text = file.read(2**20)
        except OSError as error:
            raise BadTls(f"{setting}: cannot read {path}: {error.strerror}") from error
        if b"-----BEGIN " not in text:
            raise BadTls(f"{setting}: {path} is not a PEM file")
        if f"{kind}-----".encode() not in text:
            raise BadTls(f"{setting}: there is no {kind.lower()} in {path}")
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.minimum_version = ssl.TLSVersion.TLSv1_2
    found.set_alpn_protocols(["http/1.1"])
    found.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        found.load_cert_chain(certificate, key, password=_no_password)
    except _Locked as error:
        raise BadTls(f"gateway.tls_key: {key} is encrypted: it must be a key without a password") from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadTls(f"gateway.tls_key: {key} is not the key of {certificate}") from error
        raise BadTls(f"gateway.tls_certificate, gateway.tls_key: {error.reason or error}") from error
    return found


class _Locked(Exception):
    """The key has a password."""


def _no_password() -> str:
    raise _Locked
