"""The exchange with a remote engine: four kinds of request to one model's URL, over HTTP, or through a relay to a process that may use the network.

The URL's host is one that the operator names. A redirect is an error, environment variables name no proxy, and nothing is sent but the
request: no cookies, no credentials.
"""

import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotResolved
from contextlib import contextmanager, suppress
from functools import cache
from http.client import HTTPConnection, HTTPException
from multiprocessing.connection import Connection
from re import compile as pattern
from select import select
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

from bus.codec import BadMessage, decode, encode
from services.core.hosts import BadHttpUrl, HttpUrl, allowed_hosts, http_url
from services.executor.backends.base import Cancelled, LoadFailed, RunFailed

CONNECT_S = 1.5  # from a host's name to an open connection; less than a cancelled run may take to end
LEAST_S = 0.1  # for each step of it, also where this machine has stood still meanwhile
SILENCE_S = 30.0  # without a byte from the engine
MOST_REPLY = 2**28  # bytes
HEAD = "Inference-Header-Content-Length"  # bytes of JSON before raw tensors
_TARGET = pattern(r"(?P<root>(?:/[\w.~@:+-]+)*/v2)/models/[\w.~@:+-]+(?:/versions/[\w.~@:+-]+)?/?")

Request = Literal["server", "model", "config", "infer"]


class EngineUrl(NamedTuple):
    """A model on an engine. root, model: the paths of the server and of the model."""

    http: HttpUrl
    root: str
    model: str

    @property
    def place(self) -> str:
        """Its host, for people."""
        return self.http.place

    def path(self, what: Request) -> str:
        """The path of a request."""
        if what == "server":
            return self.root
        return self.model if what == "model" else f"{self.model}/{what}"


def engine_url(text: str) -> EngineUrl:
    """The URL of a model, `http://host:port/v2/models/NAME`, perhaps with `/versions/V`. Raises LoadFailed."""
    try:
        found = http_url(text)
    except BadHttpUrl as error:
        raise LoadFailed(f"url: {error}") from error
    match = _TARGET.fullmatch(found.target)
    if match is None or not {".", ".."}.isdisjoint(found.target.split("/")):
        raise LoadFailed("url: must be the URL of a model, as http://host:port/v2/models/NAME, without a query")
    return EngineUrl(found, match["root"], found.target.removesuffix("/"))


def check_host(url: EngineUrl, hosts: str) -> None:
    """Check that the operator names this URL's host. hosts: the entries of the setting, with spaces between them. Raises LoadFailed."""
    host, port = url.http.host, url.http.port
    if not any(one.name == host and one.port in (None, port) for one in allowed_hosts(tuple(hosts.split()))):
        raise LoadFailed(
            f"url: {url.place} is no host that the operator names for engines; have the operator add {host} or {host}:{port}"
            " to executor.remote_hosts"
        )


class RemoteReply(Struct, frozen=True):
    """A reply. status: of HTTP; 0: there was none, and the body says why. head: bytes of JSON in front of raw tensors."""

    status: int
    body: bytes
    head: int | None = None


class RemoteEngine(Protocol):
    """Where requests to an engine go. One thread calls at a time."""

    def call(self, what: Request, body: bytes = b"", head: int | None = None) -> RemoteReply:
        """One request. The reply has any status but those of redirects. Raises RunFailed, Cancelled."""

    def cancel(self) -> None:
        """Called by another thread: end the present call at once."""

    def close(self) -> None:
        """Close the connection. The next call opens another one."""


class HttpEngine(Struct, eq=False):
    """A `RemoteEngine` with one connection, which is kept between calls."""

    url: EngineUrl
    tls: ssl.SSLContext | None = None
    _connection: "_EngineConnection | None" = None
    _cancelled: bool = False

    def call(self, what: Request, body: bytes = b"", head: int | None = None) -> RemoteReply:
        self._cancelled = False
        place = self.url.place
        try:
            with self._ending_on_error():
                return self._call(what, body, head)
        except TimeoutError as error:
            raise self._failed(f"the engine at {place} does not answer") from error
        except (OSError, HTTPException, ValueError) as error:
            raise self._failed(f"the engine at {place} cannot be used: {_words(error)}") from error

    def cancel(self) -> None:
        self._cancelled = True
        connection = self._connection
        if connection is not None:
            connection.cut()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end()

    # -- inside

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()  # what is left of a reply must not be taken for the next one
            raise

    def _failed(self, why: str) -> RunFailed:
        return Cancelled(f"the engine at {self.url.place} took too long") if self._cancelled else RunFailed(why)

    def _call(self, what: Request, body: bytes, head: int | None) -> RemoteReply:
        kept = self._connection
        if kept is not None and kept.idle:
            try:
                return self._exchange(kept, what, body, head)
            except (
                ConnectionError,
                HTTPException,
            ):  # the engine has closed it, which one may only notice while writing
                if kept.answered or self._cancelled:
                    raise
        self.close()
        connection = self._connection = _EngineConnection(self.url.http, self.tls)
        return self._exchange(connection, what, body, head)

    def _exchange(self, connection: "_EngineConnection", what: Request, body: bytes, head: int | None) -> RemoteReply:
        headers = {"Accept-Encoding": "identity", "User-Agent": "infaas"}
        if what == "infer":
            headers["Content-Type"] = "application/json" if head is None else "application/octet-stream"
            if head is not None:
                headers[HEAD] = str(head)
        connection.answered = False
        connection.request("POST" if what == "infer" else "GET", self.url.path(what), body or None, headers)
        if self._cancelled:
            raise HTTPException("it was cancelled")
        with connection.getresponse() as response:
            connection.answered = True
            if 300 <= response.status < 400:
                raise HTTPException("it redirects to another URL, and redirects are not followed; register that URL")
            if response.getheader("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
                raise HTTPException("it sends a coding that was not asked for")
            if response.length is not None and response.length > MOST_REPLY:
                raise HTTPException(f"its reply has more than {MOST_REPLY >> 20} MB")
            data = response.read(MOST_REPLY + 1)
            if len(data) > MOST_REPLY or response.length:
                raise HTTPException(
                    "its reply ends too early" if response.length else f"its reply has more than {MOST_REPLY >> 20} MB"
                )
            if self._cancelled:
                raise HTTPException("it was cancelled")  # a reply without a length looks complete when it is cut off
            length = response.getheader(HEAD)
            return RemoteReply(response.status, data, None if length is None else int(length))


class _EngineConnection(HTTPConnection):
    """One connection. answered: the present request has a reply, or a part of one."""

    def __init__(self, url: HttpUrl, tls: ssl.SSLContext | None) -> None:
        super().__init__(url.host, url.port)
        self.answered = False
        self._secure = url.scheme == "https"
        self._tls = tls
        self._socket: socket.socket | None = None
        if self._secure:
            self.default_port = 443

    @property
    def idle(self) -> bool:
        """Whether it is open, and the engine has sent nothing that nobody asked for: the end, most often."""
        return self.sock is not None and not select([self.sock], [], [], 0)[0]

    def connect(self) -> None:
        ends = time.monotonic() + CONNECT_S
        self.sock = self._socket = _connected(self.host, self.port, ends)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._secure:
            context = self._tls or _trusted()
            secured = context.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock = self._socket = secured
            secured.settimeout(max(LEAST_S, ends - time.monotonic()))
            secured.do_handshake()
        self.sock.settimeout(SILENCE_S)

    def cut(self) -> None:
        """End what another thread does with it. (After `getresponse`, `sock` may be the response's alone.)"""
        if self._socket is not None:
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def end(self) -> None:
        self.close()
        if self._socket is not None:
            self._socket.close()


def _connected(host: str, port: int, ends: float) -> socket.socket:
    """A connection to the first address of a host that takes one. Raises OSError, TimeoutError."""
    failure: OSError | None = None
    for address in _resolved(host, port, ends):
        try:
            return socket.create_connection((address, port), timeout=max(LEAST_S, ends - time.monotonic()))
        except OSError as error:
            failure = error
    raise failure or OSError("its name has no address")


def _resolved(host: str, port: int, ends: float) -> list[str]:
    """A resolver may take longer than a run may take to end. Then its thread is left behind."""
    found: Future[list[str]] = _resolvers().submit(_addresses, host, port)
    try:
        return found.result(max(LEAST_S, ends - time.monotonic()))
    except NotResolved:
        found.cancel()
        raise OSError("its name is not resolved in time") from None


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@cache
def _resolvers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=8, thread_name_prefix="resolve")


@cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower() if not isinstance(error, ssl.SSLError) else str(error.strerror)
    return " ".join(str(error).split())[:200] or type(error).__name__


# -- a relay: the sandbox has no network, and asks its helper, which talks to this one model and no other


class RelayRequest(Struct, frozen=True):
    """A call of the sandbox."""

    what: Request
    body: bytes = b""
    head: int | None = None


class RelayedEngine:
    """A `RemoteEngine` at the other end of an inherited socket, where `relay` runs."""

    def __init__(self, fd: int) -> None:
        self._connection = _inherited(fd)

    def call(self, what: Request, body: bytes = b"", head: int | None = None) -> RemoteReply:
        try:
            self._connection.send_bytes(encode(RelayRequest(what, body, head)))
            reply = decode(RemoteReply, self._connection.recv_bytes())
        except (EOFError, OSError, BadMessage) as error:
            raise RunFailed("the relay to the engine has ended") from error
        if not reply.status:
            raise RunFailed(reply.body.decode(errors="replace"))
        return reply

    def cancel(self) -> None:
        return

    def close(self) -> None:
        return


@cache
def _inherited(fd: int) -> Connection:
    """One for all engines of the process, since it closes the descriptor."""
    return Connection(fd)


def relay(connection: Connection, engine: RemoteEngine) -> None:
    """Answer what comes through this connection until it is closed. What cannot be read ends it, too."""
    with suppress(EOFError, OSError, BadMessage):
        while True:
            asked = decode(RelayRequest, connection.recv_bytes(MOST_REPLY))
            try:
                reply = engine.call(asked.what, asked.body, asked.head)
            except RunFailed as error:
                reply = RemoteReply(0, str(error).encode())
            connection.send_bytes(encode(reply))
