"""One HTTP/1.1 connection: uvicorn's protocol with the limits that it lacks.

Each part is here because a test or a bench needs it. Limited are, with the tests of tests/unit/gateway/http/test_protocol.py and the
abuse of tests/live/test_gateway_abuse.py:

- the bytes of a request line (414) and of a head (431), and the time that a head takes (408; a connection that sends nothing is closed);
- the number of connections (503): those without a request make room for new ones;
- the requests sent ahead of their replies (400), the chunks that are far too small (413), the bytes of chunk extensions and trailers
  (431), and the time for which a reply waits for a client that does not read.

Trailers never become headers. The error of one request is never sent in the place of another's reply. A reply that ends a connection
early is not lost to a reset: the connection reads and drops what still comes for a moment. An offer to change protocols (Upgrade: h2c,
as Java's client makes) is passed over, as RFC 9110, 7.8 allows. A query whose client leaves is cancelled. One that the gateway could not pass on in
time is refused before it starts (shedding.py).

For speed (benches/gateway.py): a small reply is one packet (ReplyTransport), and a body is joined once (BodyBuffer).
"""

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.core.settings import GatewaySettings
from services.gateway.http.bodies import BodyBuffer, ReplyTransport
from services.gateway.http.shedding import Shedding
from services.shell.runtime.runtime import unix_now

QUERY_TASK = (
    "infaas.query_task"  # in a request's scope: the task that waits for the answer to a query, and for nothing else
)
CLIENT_LEFT = "infaas.client_left"  # in a request's scope: the client has left, so that task was cancelled
COMPLETE = "infaas.complete"  # in a request's scope: when its last byte may have come, Unix seconds
METHODS = "DELETE, GET, HEAD, OPTIONS, POST, PUT"
MAX_AHEAD = 64  # requests that wait for the replies of those before them, on one connection
FREE_CHUNKS = 16_384  # chunks of a body that may have any size; with more chunks, their mean size must be CHUNK_BYTES
CHUNK_BYTES = 64
REFUSED = 64  # connections above the limit that get a reply (503); more are closed without one
LINGER_S = 2.0  # after the last reply, read and drop what the client still sends: for so long
LINGER_BYTES = 16 * 2**20  # and so much
UNREAD_BYTES = 2**20  # of a body after its reply, before the connection is closed instead of used again

_IDLE, _HEAD, _BODY, _OFFER = range(4)  # where the parser is: between messages, in one, in one that offers an upgrade
_CHECKED = frozenset({b"host", b"expect", b"transfer-encoding"})
_HOP = (b"upgrade", b"http2-settings", b"connection")


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol within `limits`. waiting: connections without a request, longest first; they make room for new ones.

    shedding: refuses what could not be passed on in time; None: nothing is.
    """

    limits = GatewaySettings()
    shedding: Shedding | None = None
    retiring = False  # another process has the next connections: each reply is its connection's last
    waiting: dict["LimitedHttpProtocol", None]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.timeout_keep_alive = self.limits.idle_timeout_s  # type: ignore[assignment]
        self._state = _IDLE
        self._began = 0  # messages begun
        self._head_bytes = 0  # of an incomplete head, as received
        self._hosts = 0  # Host headers of the request
        self._named_bytes = 0  # of a head, as the parser reports them
        self._chunks = 0
        self._body_bytes = 0
        self._around = 0  # bytes of a body beside its chunks: sizes, extensions, trailers
        self._dropped = 0
        self._active: RequestResponseCycle | None = None  # the request whose reply is next
        self._ending = False
        self._fault: tuple[int, str] | None = None  # an error found by a callback of the parser
        self._owed: tuple[int, str] | None = None  # an error to send after the replies to the requests before it
        self._limit: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._gate = ReplyTransport(self)
        self._parsing = False
        self._held: ASGI3Application | None = None  # for `_active`, which has not started: it may yet come whole

    # -- the connection's life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections and not self._make_room():
            if len(self.connections) > self.limits.connections + REFUSED:
                self.transport.abort()
            else:
                self._end(503, "too many connections", "Retry-After: 1\r\n")
            return
        self.waiting[self] = None
        self._limit = self.loop.call_later(self.limits.head_timeout_s, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        self.pipeline.clear()
        self._stop_limit()
        self._unset_keepalive_if_required()
        if self._stalled is not None:
            self._stalled.cancel()
        if self._active is not None and not self._active.response_complete:
            self._left(self._active)
        super().connection_lost(exc)

    def _left(self, cycle: RequestResponseCycle) -> None:
        """The client of this request has left: cancel the query that only it waits for."""
        cycle.disconnected = True
        cycle.message_event.set()
        scope: dict[str, Any] = cycle.scope  # type: ignore[assignment]
        if (query_task := scope.get(QUERY_TASK)) is not None:
            scope[CLIENT_LEFT] = True
            query_task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        state, began, body = self._state, self._began, self._body_bytes
        try:
            self._parse(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over(data[offer.args[0] :])
            return
        except httptools.HttpParserError as error:
            first = state == _IDLE and self._began - began <= 1 and not self._busy()
            self._refuse(*(self._fault or fault_of(error, data if first else b"")))
            return
        if self._state == _HEAD and (began == self._began or (state == _IDLE and began + 1 == self._began)):
            # The parser keeps parts of an incomplete line, without a limit of its own.
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_header:
                self._refuse(*self._large_head())
                return
        elif state == self._state == _BODY and began == self._began:
            self._around += len(data) - (self._body_bytes - body)
            if self._around > self.limits.max_header + 16 * self._chunks:
                self._refuse(431, "there is too much beside the body: extensions of chunks, or trailers")
                return
        if (self._state != _IDLE or self._began == began) and not self._busy():
            self._unfinished(len(data))

    def _parse(self, data: bytes) -> None:
        """A request that comes whole in these bytes may be refused before it starts. Raises what the parser raises."""
        if self.shedding is None:
            self.parser.feed_data(data)
            return
        self.shedding.turns.read(self.loop)
        self._parsing = True
        try:
            self.parser.feed_data(data)
        finally:
            self._parsing = False
            self._start_held()

    def _unfinished(self, size: int) -> None:
        """A message is incomplete, and only this connection waits for the rest of it."""
        if self._limit is None:
            self._limit = self.loop.call_later(self.limits.head_timeout_s, self._too_slow)
        if self._state == _BODY:
            self._dropped += size
            if self._dropped > UNREAD_BYTES:
                self._linger()

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._state = _HEAD
        self._began += 1
        self._hosts = 0
        self._head_bytes = self._named_bytes = self._chunks = self._body_bytes = self._around = self._dropped = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_header // 2:
            self._wrong(*self._large_head())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._named_bytes += len(name) + len(value) + 4
        if self._named_bytes > self.limits.max_header:
            self._wrong(*self._large_head())
        if self._state != _HEAD:
            return  # a trailer: the gateway uses none
        name = name.lower()
        if name in _CHECKED:
            if name == b"host":
                self._hosts += 1
            elif name == b"expect":
                self.expect_100_continue = value.lower() == b"100-continue"
            elif value.lower() != b"chunked" or self.parser.get_http_version() != "1.1":
                self._wrong(400, "the only transfer coding is chunked, in HTTP/1.1")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._check_head()
        self._stop_limit()
        self.waiting.pop(self, None)
        if self.parser.should_upgrade():
            self._state = _OFFER
            return
        if len(self.pipeline) >= MAX_AHEAD:
            self._wrong(400, "too many requests were sent ahead of the replies to those before them")
        self._state = _BODY
        super().on_headers_complete()
        if self.retiring:
            self.cycle.keep_alive = False
        self.cycle.body = BodyBuffer()  # type: ignore[assignment]
        self.cycle.transport = self._gate  # type: ignore[assignment]

    def _check_head(self) -> None:
        """Check what the parser lets pass. Raises ValueError."""
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._wrong(400, "this server speaks HTTP/1.1 and HTTP/1.0")
        if self._hosts > 1 or (self._hosts == 0 and version == "1.1"):
            self._wrong(400, "a request must have one header Host")
        if self.parser.get_method() == b"CONNECT":
            self._wrong(405, "this server is not a proxy")
        if not self.url.startswith((b"/", b"*")):
            self._absolute()

    def _absolute(self) -> None:
        """A URL in place of a path: its host replaces the header's (RFC 9112, 3.2.2)."""
        scheme, _, rest = self.url.partition(b"://")
        host = rest.split(b"/", 1)[0].split(b"?", 1)[0]
        if scheme.lower() not in (b"http", b"https") or not host or b"@" in host:
            self._wrong(400, "the request's target is neither a path nor an HTTP URL")
        self.headers[:] = [(b"host", host), *(pair for pair in self.headers if pair[0] != b"host")]
        self.url = rest[len(host) :]
        if not self.url.startswith(b"/"):
            self.url = b"/" + self.url

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        self._chunks += 1
        self._body_bytes += len(body)
        if self._chunks > FREE_CHUNKS and self._chunks * CHUNK_BYTES > self._body_bytes:
            self._wrong(413, "the body comes in too many chunks: send larger ones")
        if cycle.response_complete or self._state != _BODY:
            return
        pieces: Any = cycle.body
        if pieces.__class__ is not BodyBuffer:  # uvicorn sets a bytearray once the application has received
            pieces = cycle.body = BodyBuffer()  # type: ignore[assignment]
        pieces += body
        if len(pieces) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active, self._held = cycle, app
        if not self._parsing:
            self._start_held()

    def _start_held(self) -> None:
        app, self._held = self._held, None
        if app is None or self._active is None or self.transport.is_closing():
            return
        if self.shedding is not None:
            self.shedding.turns.admitted += 1
        super()._start_asgi_task(self._active, app)

    def _refuse_or_start(self, shedding: Shedding) -> None:
        """The request has come whole."""
        cycle = self.cycle
        reply = None
        if not self.flow.write_paused:
            reply = shedding.refusal(cycle.scope, cycle.body, stays=cycle.keep_alive)  # type: ignore[arg-type]
        if reply is None:
            self._start_held()
            return
        self._held = None
        cycle.response_started = cycle.response_complete = True
        self.write(reply)
        if not cycle.keep_alive:
            self.close_after_reply()
        self.on_response_complete()

    def on_message_complete(self) -> None:
        if self._state == _OFFER:
            return
        self._state = _IDLE
        scope: dict[str, Any] = self.cycle.scope  # type: ignore[assignment]
        scope[COMPLETE] = unix_now() - (0.0 if self.shedding is None else self.shedding.turns.waited())
        if self.cycle.response_complete:
            self._stop_limit()
            self.cycle.more_body = False
            if not self._ending and not self.transport.is_closing():
                self._await_next()
        else:
            super().on_message_complete()
            if self._held is not None and self.shedding is not None:
                self._refuse_or_start(self.shedding)

    # -- replies

    def on_response_complete(self) -> None:
        self._gate.flush()
        if self._ending:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self.transport.is_closing() or self._busy():
            return
        if self._owed is not None:
            self._end(*self._owed)
            return
        if self._state != _IDLE:  # the rest of its body, or a part of the next head
            self._unset_keepalive_if_required()
            self._unfinished(0)
        if self._state != _BODY:
            self.waiting[self] = None

    def _await_next(self) -> None:
        """The rest of a body came after its reply: wait for the next request."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self.waiting[self] = None

    def _busy(self) -> bool:
        return bool(self.pipeline) or (self._active is not None and not self._active.response_complete)

    def _refuse(self, status: int, message: str) -> None:
        """The client sent an invalid request: send the error after the replies to the requests before it, and close."""
        if self._state != _BODY or not self._busy():
            self._owe(status, message) if self._busy() else self._end(status, message)
        elif self.cycle is not self._active:
            self.pipeline.popleft()  # the newest request: it is never run
            self._owe(status, message)
        else:
            started = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._linger() if started else self._end(status, message)

    def _owe(self, status: int, message: str) -> None:
        self._owed = (status, message)
        self._state = _IDLE
        self.flow.pause_reading()

    def _end(self, status: int, message: str, more: str = "") -> None:
        """Send a last reply and close."""
        if not self.transport.is_closing():
            self.transport.write(final_reply(status, message, more))
        self._linger()

    def _linger(self) -> None:
        """Close, but read on for a moment: a reset would take the reply from a client that is still sending."""
        if self._ending or self.transport.is_closing():
            return
        self._ending = True
        self._dropped = 0
        self.waiting.pop(self, None)
        self._stop_limit()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._limit = self.loop.call_later(LINGER_S, self.transport.abort)

    def write(self, data: bytes) -> None:
        """Send a part of a reply."""
        if not self._ending:
            self.transport.write(data)

    @property
    def closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._ending or self.transport.is_closing()

    def close_after_reply(self) -> None:
        """Close, as the application or the client wants, after the present reply."""
        if self._state == _BODY and self.cycle is not None and self.cycle.more_body:
            self._linger()
            return
        self.waiting.pop(self, None)
        self.transport.close()
        self._stop_limit()
        # The client may never read the reply.
        self._limit = self.loop.call_later(self.limits.idle_timeout_s, self.transport.abort)

    # -- time and room

    def timeout_keep_alive_handler(self) -> None:
        self.close_after_reply()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.limits.idle_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _too_slow(self) -> None:
        self._limit = None
        if self._ending or self.transport.is_closing():
            return
        if self._state == _HEAD:
            self._end(408, f"the head of a request did not come within {self.limits.head_timeout_s:g} s")
        else:
            self.transport.close()  # the client has sent nothing: it might take a reply for that of its next request

    def _make_room(self) -> bool:
        """Close the connection that has been longest without a request; whether there was one."""
        for other in self.waiting:
            self.waiting.pop(other)
            self.connections.discard(other)
            other.transport.close()
            return True
        return False

    def _stop_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    # -- errors

    def _wrong(self, status: int, message: str) -> None:
        """Stop the parser. Always raises."""
        self._fault = (status, message)
        raise ValueError(message)

    def _large_head(self) -> tuple[int, str]:
        if len(self.url) > self.limits.max_header // 2:
            return 414, f"the request line may have {self.limits.max_header // 2} bytes"
        return 431, f"the head of a request may have {self.limits.max_header} bytes"

    def _pass_over(self, rest: bytes) -> None:
        """Parse the request that offered another protocol again, without the offer: the first parser has stopped at its head."""
        kept = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] not in _HOP]
        offered = b",".join(value for name, value in self.headers if name == b"connection").lower()
        closing = b"connection: close\r\n" if b"close" in offered else b""
        version = self.parser.get_http_version().encode("ascii")
        head = b"%s %s HTTP/%s\r\n%s%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(kept), closing)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._state = _IDLE
        self.data_received(head + rest)


def protocol_class(settings: GatewaySettings, shedding: Shedding | None = None) -> type[LimitedHttpProtocol]:
    """The class of protocol for one server (uvicorn's setting `http`)."""
    return type("BoundedProtocol", (LimitedHttpProtocol,), {"limits": settings, "shedding": shedding, "waiting": {}})


def fault_of(error: httptools.HttpParserError, data: bytes) -> tuple[int, str]:
    """Status and text for an error of the parser. data: the received bytes where they begin with the request in question, else empty."""
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        method = data.lstrip(b"\r\n").split(b" ", 1)[0]
        if method.isalpha() and method.isupper() and len(method) <= 32:
            return 405, "no path takes this method"
    return 400, "this is not a request of HTTP/1.1"


def final_reply(status: int, message: str, more: str = "") -> bytes:
    """The bytes of an error reply that ends the connection. more: header lines."""
    body = msgspec.json.encode({"error": message})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        more += f"Allow: {METHODS}\r\n"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
