"""The HTTP server in the service's own event loop: its socket, and TLS."""

import asyncio
import os
import resource
import socket
import ssl
import time

from services.core.settings import GatewaySettings
from services.shell.http.handler import HttpHandler
from services.shell.http.protocol import HttpConnection, HttpConnections

BACKLOG = 2048  # connections that wait to be accepted
TLS_SHUTDOWN_S = 2.0  # for a client to agree that a TLS connection ends
ABORT_S = 1.0  # for what was under way, and has no time left, to end
SPARE_FILES = 1024  # open files beside connections: gRPC's, NATS, models that are fetched


class HttpServer:
    """A server at the address of `settings`. Raises BadTls; `open` raises OSError where it cannot listen. port: once it is open.

    of: whose setting the port is; the gateway may inherit its socket.
    """

    def __init__(self, app: HttpHandler, settings: GatewaySettings, of: str = "gateway") -> None:
        self._settings, self._of = settings, of
        self._tls = tls_context(settings.tls_certificate, settings.tls_key)
        self._server: asyncio.Server | None = None
        self.connections = HttpConnections(app, secure=self._tls is not None)
        self.port = 0

    async def open(self) -> None:
        settings = self._settings
        allow_files(settings.connections + SPARE_FILES)
        listening = inherited_socket() if self._of == "gateway" else None
        listening = listening or listen(settings.address, settings.port, reuse=settings.reuse_port, of=self._of)
        self.port = listening.getsockname()[1]
        secure = self._tls is not None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: HttpConnection(self.connections),
            sock=listening,
            ssl=self._tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=settings.head_timeout_s if secure else None,
            ssl_shutdown_timeout=TLS_SHUTDOWN_S if secure else None,
        )

    async def close(self, grace: float) -> None:
        if self._server is None:
            return
        self._server.close()
        shared = self.connections
        for one in list(shared.all):
            one.finish()
        await self._emptied(grace)
        for task in shared.tasks:
            task.cancel()
        for one in list(shared.all):
            one.transport.abort()
        await self._emptied(ABORT_S)

    async def retire(self, grace: float) -> None:
        """A successor accepts connections from now on: each of ours is closed after one more reply, or when nothing came within `grace` seconds."""
        if self._server is not None:
            self._server.close()
            self.connections.retiring = True
            await self._emptied(grace)

    async def _emptied(self, grace: float) -> None:
        """Wait until no connection is open; so many seconds at most."""
        end = time.monotonic() + grace
        while (self.connections.all or self.connections.tasks) and time.monotonic() < end:  # noqa: ASYNC110  (once in a process's life)
            await asyncio.sleep(0.01)


def allow_files(count: int) -> None:
    """Raise the process's limit of open files to `count`, as far as its hard limit allows: many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        count = min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


# -- a server's socket, which outlives the process that accepts its connections

LISTENING = "INFAAS_LISTENING_FD"  # the variable that tells a process which socket it inherits


def listen(address: str, port: int, *, reuse: bool = False, of: str = "gateway") -> socket.socket:
    """A socket bound to the address. reuse: other processes may bind to it, too. of: whose setting the port is. Raises OSError."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(where)
    except OSError as error:
        found.close()
        raise OSError(f"{address}:{port}: {error.strerror}; set {of}.port to another one") from error
    found.setblocking(False)
    return found


def inherited_socket() -> socket.socket | None:
    """The socket that this process was started with, the first time it is asked for."""
    found = os.environ.pop(LISTENING, "")
    if not found:
        return None
    os.set_inheritable(int(found), False)
    return socket.socket(fileno=int(found))


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
