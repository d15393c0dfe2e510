"""A small HTTP/1.1 server for the pages of a process and for the engine proxy, and a client for pages of our own.

One request a connection: no request can hide behind another, and one clock covers all of it. h11 reads and writes the messages; limits
in bytes, seconds and connections are kept here. What is refused becomes a reply, too.

The gateway has a server of its own, for many requests a connection. Every service process has this one: h11 takes 9 ms of CPU at the
start of each and 0.2 MB.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple

import h11

log = logging.getLogger(__name__)

_PIECE = 4 * 2**10
_LINGER_S = (
    1.0  # s in which what a client still sends after a reply is read and dropped: a reset would discard the reply
)
_LINGER_BYTES = 2**20
_PLAIN = "text/plain; charset=utf-8"


class HttpProblem(Exception):
    """A request that is refused. The text says why, to the client and to the log. status: of HTTP."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class HttpLimits(NamedTuple):
    """Limits of every connection: bytes, seconds, and how many there may be."""

    head: int = 16 * 2**10
    body: int = 64 * 2**10
    head_s: float = 5.0
    body_s: float = 5.0
    reply_s: float = 10.0
    connections: int = 64


class Request(NamedTuple):
    """A request. headers: names in lower case; several of a name: the last. client: the address that sent it."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    client: str


class Reply(NamedTuple):
    """What is answered."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    type: str = "application/json"

    @property
    def text(self) -> str:
        """The body, read as UTF-8."""
        return self.body.decode()


Answer = Callable[[Request], Awaitable[Reply]]
Refuse = Callable[[HttpProblem, Request], Reply]
Pages = Mapping[str, Callable[[str], Awaitable[Reply]]]  # path to what makes it; takes the request's Accept header


class HttpListener:
    """answer: makes the reply, or raises HttpProblem. refuse: makes the reply to a request that cannot be answered. port: once open."""

    def __init__(self, answer: Answer, refuse: Refuse, limits: HttpLimits | None = None) -> None:
        self._answer = answer
        self._refuse = refuse
        self._limits = limits or HttpLimits()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def open(self, address: str, port: int) -> None:
        """Listen; port 0: at any that is free. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, address, port, backlog=self._limits.connections)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self, grace: float) -> None:
        """Take no more connections. Those that have not ended after `grace` s are ended."""
        if self._server is not None:
            self._server.close()
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._running) >= 2 * self._limits.connections:
            writer.transport.abort()
            return
        self._running.add(task)
        writer.transport.set_write_buffer_limits(0)  # so that `drain` waits until everything is sent
        try:
            await _Exchange(self, reader, writer).run(busy=len(self._running) > self._limits.connections)
            writer.close()
            await writer.wait_closed()
        except (OSError, asyncio.CancelledError):  # the client has left or does not read, or the server ends
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            self._running.discard(task)
            writer.transport.abort()


class _Exchange:
    """One connection: a request, its reply, the end."""

    def __init__(self, of: HttpListener, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answer, self._refuse, self._limits = of._answer, of._refuse, of._limits
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.head)
        self._seen = Request("", "", {}, b"", str((writer.get_extra_info("peername") or ("?",))[0]))
        self._came = 0

    async def run(self, *, busy: bool) -> None:
        """busy: there are as many connections as there may be, so this one is refused."""
        try:
            self._admit(busy)
            await self._head()
            await self._body()
            reply = await self._answer(self._seen)
        except HttpProblem as problem:
            if problem.status == HTTPStatus.REQUEST_TIMEOUT and not self._came:
                return  # it has sent nothing: no reply, which it might take for its next request's
            reply = self._refuse(problem, self._seen)
        except _Left:
            return
        async with asyncio.timeout(self._limits.reply_s):
            await self._reply(reply)
            await self._linger()

    def _admit(self, busy: bool) -> None:
        if busy:
            raise HttpProblem("there are as many connections as this server takes: try again later", 503)

    async def _head(self) -> None:
        event = await self._next(self._limits.head_s, "the head of the request did not come in time")
        if not isinstance(event, h11.Request):
            raise _Left
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        method, target = event.method.decode("ascii"), event.target.decode("ascii", "replace")
        self._seen = self._seen._replace(method=method, target=target, headers=headers)
        if int(headers.get("content-length", "0")) > self._limits.body:
            raise self._too_large()

    async def _body(self) -> None:
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                while isinstance(event := await self._next(), h11.Data):
                    body += event.data
                    if len(body) > self._limits.body:
                        raise self._too_large()
        except TimeoutError as error:
            raise HttpProblem("the body of the request did not come in time", 408) from error
        if not isinstance(event, h11.EndOfMessage):
            raise _Left
        self._seen = self._seen._replace(body=bytes(body))

    def _too_large(self) -> HttpProblem:
        return HttpProblem(f"the body of a request may have {self._limits.body} bytes", 413)

    async def _next(
        self, seconds: float | None = None, late: str = ""
    ) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next part of the request. Raises HttpProblem, _Left."""
        data = b"?"
        try:
            async with asyncio.timeout(seconds):
                while (event := self._http.next_event()) is h11.NEED_DATA:
                    if self._http.they_are_waiting_for_100_continue:
                        self._send(h11.InformationalResponse(status_code=100, headers=[]))
                    data = await self._reader.read(_PIECE)
                    self._came += len(data)
                    self._http.receive_data(data)
        except h11.RemoteProtocolError as error:
            if not data:
                raise _Left from error
            raise HttpProblem(f"this is no request of HTTP/1.1: {error}", error.error_status_hint) from error
        except TimeoutError as error:
            if seconds is None:
                raise
            raise HttpProblem(late, 408) from error
        return event

    def _send(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")

    async def _reply(self, reply: Reply) -> None:
        headers = [
            ("Content-Type", reply.type),
            ("Content-Length", str(len(reply.body))),
            ("Cache-Control", "no-store"),
            ("Connection", "close"),
            *reply.headers,
        ]
        self._send(
            h11.Response(status_code=reply.status, headers=headers, reason=HTTPStatus(reply.status).phrase.encode())
        )
        if self._seen.method != "HEAD":
            self._send(h11.Data(data=reply.body))
        self._send(h11.EndOfMessage())
        await self._writer.drain()

    async def _linger(self) -> None:
        """Let the client read the reply, although it may still be sending."""
        if self._http.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            return
        with suppress(TimeoutError, OSError):
            self._writer.write_eof()
            async with asyncio.timeout(_LINGER_S):
                dropped = 0
                while dropped < _LINGER_BYTES and (data := await self._reader.read(_PIECE)):
                    dropped += len(data)


class _Left(Exception):
    """The client has closed the connection, and nobody waits for a reply."""


# ---- pages


async def serve_pages(host: str, port: int, pages: Pages) -> HttpListener:
    """Serve these pages to GET and HEAD; returns what to close. Raises OSError when the port cannot be had."""

    async def answer(request: Request) -> Reply:
        path = request.target.partition("?")[0]
        make = pages.get(path)
        if make is None:
            raise HttpProblem(f"there are: {' '.join(pages)}", 404)
        if request.method not in ("GET", "HEAD"):
            raise HttpProblem("GET and HEAD only", 405)
        try:
            return await make(request.headers.get("accept", ""))
        except Exception as error:
            log.exception("cannot make the page %s", path)
            raise HttpProblem("this page cannot be made; the log says why", 500) from error

    def refuse(problem: HttpProblem, _: Request) -> Reply:
        return plain(problem.status, f"{problem}\n")

    listener = HttpListener(answer, refuse)
    await listener.open(host, port)
    return listener


def plain(status: int, text: str) -> Reply:
    """A page of plain text."""
    return Reply(status, text.encode(), type=_PLAIN)


def state_page(what: str, missing: list[str]) -> Reply:
    """Whether a process is `what` (200), or what it lacks for that (503), as JSON."""
    body = json.dumps({what: not missing, "missing": missing}) + "\n"
    return Reply(503 if missing else 200, body.encode())


async def fetch(host: str, port: int, path: str, timeout: float) -> Reply:
    """GET a page of ours; raises OSError (TimeoutError is one) when nobody answers in time."""
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(host, port, limit=2**24)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                body = await reader.read()
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                raise ConnectionError(f"the reply on port {port} broke off") from error
        finally:
            writer.close()
    return Reply(int(head.split(" ", 2)[1]), body)


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
