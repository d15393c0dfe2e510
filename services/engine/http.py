"""HTTP/1.1 towards clients, one request a connection: no request can hide behind another, and one clock covers all of it.

h11 reads and writes the messages; limits in bytes and time are kept here. What is refused here and by `answer` becomes a reply in
the engine's own form, {"message": …}, which its clients show.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple

import h11

from services.engine.policy import Denied

log = logging.getLogger(__name__)

_PIECE = 4 * 2**10
_LINGER_S = (
    1.0  # what a client still sends after a reply is read and dropped for so long: a reset would take the reply from it
)
_LINGER_BYTES = 2**20


class Bounds(NamedTuple):
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
    """What is answered. body: JSON, unless `type` says otherwise."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    type: str = "application/json"


def told(status: int, message: str) -> Reply:
    """A reply that says what is wrong, as the engine does."""
    return Reply(status, json.dumps({"message": message}).encode() + b"\n")


Answer = Callable[[Request], Awaitable[Reply]]
Refuse = Callable[[Denied, Request], Reply]


class Listener:
    """answer: makes the reply. refuse: makes it where the request is none that could be answered."""

    def __init__(self, answer: Answer, refuse: Refuse, bounds: Bounds | None = None) -> None:
        self._answer = answer
        self._refuse = refuse
        self._bounds = bounds or Bounds()
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def open(self, address: str, port: int) -> int:
        """Listen, and return the port. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, address, port, backlog=self._bounds.connections)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, grace: float) -> None:
        """Take no more connections, and end what does not end by itself."""
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
        if len(self._running) >= 2 * self._bounds.connections:
            writer.transport.abort()
            return
        self._running.add(task)
        writer.transport.set_write_buffer_limits(0)  # what is drained has left
        try:
            await _Exchange(self, reader, writer).run(busy=len(self._running) > self._bounds.connections)
            writer.close()
            await writer.wait_closed()
        except (OSError, asyncio.CancelledError):  # the client has left, or does not read; or this ends
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            self._running.discard(task)
            writer.transport.abort()


class _Exchange:
    """One connection: a request, its reply, the end."""

    def __init__(self, of: Listener, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answer, self._refuse, self._bounds = of._answer, of._refuse, of._bounds
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=self._bounds.head)
        self._seen = Request("", "", {}, b"", str((writer.get_extra_info("peername") or ("?",))[0]))
        self._came = 0

    async def run(self, *, busy: bool) -> None:
        """busy: there are as many connections as there may be."""
        try:
            self._admit(busy)
            await self._head()
            await self._body()
            reply = await self._answer(self._seen)
        except Denied as denied:
            if denied.status == HTTPStatus.REQUEST_TIMEOUT and not self._came:
                return  # it has sent nothing at all
            reply = self._refuse(denied, self._seen)
        except _Left:
            return
        async with asyncio.timeout(self._bounds.reply_s):
            await self._reply(reply)
            await self._linger()

    def _admit(self, busy: bool) -> None:
        if busy:
            raise Denied("the engine proxy has as many connections as it takes: try again later", 503)

    async def _head(self) -> None:
        event = await self._next(self._bounds.head_s, "the head of the request did not come in time")
        if not isinstance(event, h11.Request):
            raise _Left
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        method, target = event.method.decode("ascii"), event.target.decode("ascii", "replace")
        self._seen = self._seen._replace(method=method, target=target, headers=headers)
        if "upgrade" in headers or "upgrade" in headers.get("connection", "").lower():
            raise Denied("the engine proxy hands no connection over")
        if int(headers.get("content-length", "0")) > self._bounds.body:
            raise self._too_large()

    async def _body(self) -> None:
        body = bytearray()
        try:
            async with asyncio.timeout(self._bounds.body_s):
                while isinstance(event := await self._next(), h11.Data):
                    body += event.data
                    if len(body) > self._bounds.body:
                        raise self._too_large()
        except TimeoutError as error:
            raise Denied("the body of the request did not come in time", 408) from error
        if not isinstance(event, h11.EndOfMessage):
            raise _Left
        self._seen = self._seen._replace(body=bytes(body))

    def _too_large(self) -> Denied:
        return Denied(f"the body of a request may have {self._bounds.body} bytes", 413)

    async def _next(
        self, seconds: float | None = None, late: str = ""
    ) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next part of the request. Raises Denied, _Left."""
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
            raise Denied(f"this is no request of HTTP/1.1: {error}", error.error_status_hint) from error
        except TimeoutError as error:
            if seconds is None:
                raise
            raise Denied(late, 408) from error
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
