"""Small parts of a connection: its limits, its last words, a body in pieces, what a request sees of the transport."""

import asyncio
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import httptools
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

QUERY_TASK = (
    "infaas.asking"  # in a request's scope: the task that waits for the answer to a query, and for nothing else
)
CLIENT_LEFT = "infaas.left"  # there, too: the client has left, so that task was cancelled
METHODS = "DELETE, GET, HEAD, OPTIONS, POST, PUT"


class ConnectionLimits(NamedTuple):
    """Limits of every connection. Sizes in bytes, times in seconds."""

    max_header: int = 16 * 2**10
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    connections: int = 1000


class ConnectionWriter(Protocol):
    """A connection, for ReplyTransport."""

    @property
    def closing(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    def close_after_reply(self) -> None: ...


SMALL = 32 * 2**10  # bytes up to which a reply's head and body leave in one piece


class ReplyTransport:
    """What a request's cycle has in place of the transport: when and how to close is the connection's business.

    A reply's head waits for what follows it, so that a small reply is one packet and one call of the kernel.
    """

    __slots__ = ("_head", "_line")

    def __init__(self, line: ConnectionWriter) -> None:
        self._line = line
        self._head = b""

    def write(self, data: bytes) -> None:
        head = self._head
        if head:
            self._head = b""
            if len(data) <= SMALL:
                self._line.write(b"".join((head, data)))
                return
            self._line.write(head)
        elif data[:9] == b"HTTP/1.1 " and data[9:12] != b"100" and data[-4:] == b"\r\n\r\n":
            self._head = data
            return
        self._line.write(data)

    def flush(self) -> None:
        """Nothing follows: the reply is complete, or comes to no good end."""
        head, self._head = self._head, b""
        if head:
            self._line.write(head)

    def close(self) -> None:
        self.flush()
        self._line.close_after_reply()

    def is_closing(self) -> bool:
        return self._line.closing


class BodyBuffer:
    """A body as it comes: kept in pieces, and put together once (uvicorn's own is copied twice)."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def __iadd__(self, piece: bytes) -> "BodyBuffer":
        self._pieces.append(piece)
        self._size += len(piece)
        return self

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


def fault_of(error: httptools.HttpParserError, data: bytes) -> tuple[int, str]:
    """Status and words for what the parser did not take. data: what came, where it began with the request in question."""
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        method = data.lstrip(b"\r\n").split(b" ", 1)[0]
        if method.isalpha() and method.isupper() and len(method) <= 32:
            return 405, "no path takes this method"
    return 400, "this is no request of HTTP/1.1"


def final_reply(status: int, message: str, more: str = "") -> bytes:
    """A whole reply, after which the connection is closed. more: header lines."""
    body = msgspec.json.encode({"error": message})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        more += f"Allow: {METHODS}\r\n"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


# -- One HTTP/1.1 connection, with the limits that uvicorn's own protocol does not have.

MAX_AHEAD = 64  # requests that wait for the replies of those before them, on one connection
FREE_CHUNKS = 16_384  # chunks a body may have however small they are; beyond, their mean must be CHUNK_BYTES
CHUNK_BYTES = 64
TOLD = 64  # connections above the limit that are told so; more are closed without a word
LINGER_S = 2.0  # what a client still sends after the last reply is read and dropped for so long
LINGER_BYTES = 16 * 2**20
UNREAD_BYTES = 2**20  # of a body that nobody wanted, before the connection is closed instead of used again

_IDLE, _HEAD, _BODY, _OFFER = range(4)  # where the parser is: between messages, in one, in one that offers an upgrade
_LOOKED_AT = frozenset({b"host", b"expect", b"transfer-encoding"})
_HOP = (b"upgrade", b"http2-settings", b"connection")


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol within `bounds`. `waiting`: connections without a request, longest first; they make room for new ones."""

    bounds = ConnectionLimits()
    waiting: dict["LimitedHttpProtocol", None]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.timeout_keep_alive = self.bounds.idle_timeout_s  # type: ignore[assignment]
        self._state = _IDLE
        self._began = 0  # messages begun
        self._head_bytes = 0  # of a head that is not complete, as it came
        self._hosts = 0  # headers that name one
        self._named_bytes = 0  # of a head, as the parser told of it
        self._chunks = 0
        self._body_bytes = 0
        self._around = 0  # bytes around a body's chunks: sizes, extensions, trailers
        self._dropped = 0
        self._active: RequestResponseCycle | None = None  # the request that has its turn
        self._ending = False
        self._fault: tuple[int, str] | None = None  # what a callback found wrong
        self._owed: tuple[int, str] | None = None  # told once the requests before it have their replies
        self._limit: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._gate = ReplyTransport(self)

    # The connection's life.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections and not self._make_room():
            if len(self.connections) > self.bounds.connections + TOLD:
                self.transport.abort()
            else:
                self._end(503, "too many connections", "Retry-After: 1\r\n")
            return
        self.waiting[self] = None
        self._limit = self.loop.call_later(self.bounds.head_timeout_s, self._too_slow)

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
        """The client of this request will hear no reply: whoever only asks for it need not wait for the answer."""
        cycle.disconnected = True
        cycle.message_event.set()
        scope: dict[str, Any] = cycle.scope  # type: ignore[assignment]
        if (asking := scope.get(QUERY_TASK)) is not None:
            scope[CLIENT_LEFT] = True
            asking.cancel()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        state, began, body = self._state, self._began, self._body_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over(data[offer.args[0] :])
            return
        except httptools.HttpParserError as error:
            first = state == _IDLE and self._began - began <= 1 and not self._busy()
            self._refuse(*(self._fault or fault_of(error, data if first else b"")))
            return
        if self._state == _HEAD and (began == self._began or (state == _IDLE and began + 1 == self._began)):
            # Parts of a line that is not complete are with the parser, which has no limit of its own.
            self._head_bytes += len(data)
            if self._head_bytes > self.bounds.max_header:
                self._refuse(*self._large_head())
                return
        elif state == self._state == _BODY and began == self._began:
            self._around += len(data) - (self._body_bytes - body)
            if self._around > self.bounds.max_header + 16 * self._chunks:
                self._refuse(431, "there is too much beside the body: extensions of chunks, or trailers")
                return
        if (self._state != _IDLE or self._began == began) and not self._busy():
            self._unfinished(len(data))

    def _unfinished(self, size: int) -> None:
        """A message is not complete and nobody waits for the rest of it but this connection."""
        if self._limit is None:
            self._limit = self.loop.call_later(self.bounds.head_timeout_s, self._too_slow)
        if self._state == _BODY:
            self._dropped += size
            if self._dropped > UNREAD_BYTES:
                self._linger()

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._state = _HEAD
        self._began += 1
        self._hosts = 0
        self._head_bytes = self._named_bytes = self._chunks = self._body_bytes = self._around = self._dropped = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.bounds.max_header // 2:
            self._wrong(*self._large_head())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._named_bytes += len(name) + len(value) + 4
        if self._named_bytes > self.bounds.max_header:
            self._wrong(*self._large_head())
        if self._state != _HEAD:
            return  # a trailer: anybody may send one, nobody here has asked for any
        name = name.lower()
        if name in _LOOKED_AT:
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
        self.cycle.body = BodyBuffer()  # type: ignore[assignment]
        self.cycle.transport = self._gate  # type: ignore[assignment]

    def _check_head(self) -> None:
        """What the parser lets pass. Raises."""
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._wrong(400, "this speaks HTTP/1.1 and HTTP/1.0")
        if self._hosts > 1 or (self._hosts == 0 and version == "1.1"):
            self._wrong(400, "a request names one host")
        if self.parser.get_method() == b"CONNECT":
            self._wrong(405, "this is no proxy")
        if not self.url.startswith((b"/", b"*")):
            self._absolute()

    def _absolute(self) -> None:
        """A URL in place of a path: its host counts, not the header's (RFC 9112, 3.2.2)."""
        scheme, _, rest = self.url.partition(b"://")
        host = rest.split(b"/", 1)[0].split(b"?", 1)[0]
        if scheme.lower() not in (b"http", b"https") or not host or b"@" in host:
            self._wrong(400, "this is neither a path nor a URL of HTTP")
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
        if (
            pieces.__class__ is not BodyBuffer
        ):  # uvicorn puts a bytearray there once the application has taken what came
            pieces = cycle.body = BodyBuffer()  # type: ignore[assignment]
        pieces += body
        if len(pieces) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        if self._state == _OFFER:
            return
        self._state = _IDLE
        if self.cycle.response_complete:
            self._stop_limit()
            self.cycle.more_body = False
            if not self._ending and not self.transport.is_closing():
                self._await_next()
        else:
            super().on_message_complete()

    # Replies.

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
        """The rest of a body came after its reply: the next request may come."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self.waiting[self] = None

    def _busy(self) -> bool:
        return bool(self.pipeline) or (self._active is not None and not self._active.response_complete)

    def _refuse(self, status: int, message: str) -> None:
        """What comes is no request: tell so after the replies to those before it, and close."""
        if self._state != _BODY or not self._busy():
            self._owe(status, message) if self._busy() else self._end(status, message)
        elif self.cycle is not self._active:
            self.pipeline.popleft()  # the newest; its turn never comes
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
        """The last words on this connection."""
        if not self.transport.is_closing():
            self.transport.write(final_reply(status, message, more))
        self._linger()

    def _linger(self) -> None:
        """Close, but not at once: a reset would take the reply from the client that is still sending."""
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
        """A part of a reply."""
        if not self._ending:
            self.transport.write(data)

    @property
    def closing(self) -> bool:
        """Whether nothing more is sent on it."""
        return self._ending or self.transport.is_closing()

    def close_after_reply(self) -> None:
        """The application or the client wants the connection to end with this reply."""
        if self._state == _BODY and self.cycle is not None and self.cycle.more_body:
            self._linger()
            return
        self.waiting.pop(self, None)
        self.transport.close()
        self._stop_limit()
        self._limit = self.loop.call_later(self.bounds.idle_timeout_s, self.transport.abort)  # it may never read it

    # Time and room.

    def timeout_keep_alive_handler(self) -> None:
        self.close_after_reply()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.bounds.idle_timeout_s, self.transport.abort)

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
            self._end(408, f"the head of a request did not come within {self.bounds.head_timeout_s:g} s")
        else:
            self.transport.close()  # it has sent nothing at all: no reply, which a client might take for its next request's

    def _make_room(self) -> bool:
        """Close the connection that waits longest without a request."""
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

    # Faults.

    def _wrong(self, status: int, message: str) -> None:
        """Stop the parser. Always raises."""
        self._fault = (status, message)
        raise ValueError(message)

    def _large_head(self) -> tuple[int, str]:
        if len(self.url) > self.bounds.max_header // 2:
            return 414, f"the request line may have {self.bounds.max_header // 2} bytes"
        return 431, f"the head of a request may have {self.bounds.max_header} bytes"

    def _pass_over(self, rest: bytes) -> None:
        """The request that offered another protocol, again and without the offer; its parser has given up at the head."""
        kept = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] not in _HOP]
        offered = b",".join(value for name, value in self.headers if name == b"connection").lower()
        closing = b"connection: close\r\n" if b"close" in offered else b""
        version = self.parser.get_http_version().encode("ascii")
        head = b"%s %s HTTP/%s\r\n%s%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(kept), closing)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._state = _IDLE
        self.data_received(head + rest)


def protocol_class(bounds: ConnectionLimits) -> type[LimitedHttpProtocol]:
    """The class of protocol for one server (uvicorn's setting `http`)."""
    return type("BoundedProtocol", (LimitedHttpProtocol,), {"bounds": bounds, "waiting": {}})
