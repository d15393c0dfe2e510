"""One HTTP/1.1 connection, on the parser httptools.

A request is handed on when it has come whole. Each part is here because a test or a bench needs it. Limited are, with the tests of
tests/unit/shell/http/test_protocol.py and the abuse of tests/live/test_gateway_abuse.py:

- the bytes of a request line (414) and of a head (431), and the time that a head takes (408; a connection that sends nothing is closed);
- the time that a body takes (408), the chunks that are far too small (413), the bytes of chunk extensions and trailers (431);
- the number of connections (503): those without a request make room for new ones, then those whose body is longest on its way;
- the requests sent ahead of their replies (400), and the time for which a reply waits for a client that does not read.

Trailers never become headers. The error of one request is never sent in the place of another's reply. A reply that ends a connection
early is not lost to a reset: the connection reads and drops what still comes for a moment. An offer to change protocols (Upgrade: h2c,
as Java's client makes) is passed over, as RFC 9110, 7.8 allows. A query whose client leaves is cancelled. One that the gateway could not pass on in
time is refused before it starts (services/gateway/http/app.py).
"""

import asyncio
import time
from collections import deque
from math import inf
from typing import Any

import httptools
from msgspec import Struct

from services.shell.http.handler import CLOSE, HttpHandler
from services.shell.http.messages import HttpProblem, HttpReply, HttpRequest, fault_of
from services.shell.runtime.runtime import unix_now

MAX_AHEAD = 64  # requests that wait for the replies of those before them, on one connection
FREE_CHUNKS = 16_384  # chunks of a body that may have any size; with more chunks, their mean size must be CHUNK_BYTES
CHUNK_BYTES = 64
REFUSED = 64  # connections above the limit that get a reply (503); more are closed without one
LINGER_S = 2.0  # after the last reply, read and drop what the client still sends: for so long
LINGER_BYTES = 16 * 2**20  # and so much
UNREAD_BYTES = 2**20  # of a body after its reply, before the connection is closed instead of used again
SMALL = 32 * 2**10  # bytes up to which a reply's head and body are joined
CLOCK_S = 0.002  # by which a timer may come early

_IDLE, _HEAD, _BODY, _OFFER = range(4)  # where the parser is: between messages, in one, in one that offers an upgrade
_HOP = (b"upgrade", b"http2-settings", b"connection")
_CLOSE = b"connection: close\r\n"
_LAST = {405: {"Allow": "DELETE, GET, HEAD, OPTIONS, POST, PUT"}, 503: {"Retry-After": "1"}}  # headers of a last reply


class HttpConnections(Struct, eq=False):
    """What the connections of a server share. idle: those without a request, slow: those whose body is coming; longest first; they make room for new ones.

    tasks: of requests under way. retiring: another process has the next connections: each reply is its connection's last.
    """

    app: HttpHandler
    secure: bool = False
    all: "set[HttpConnection]" = set()
    idle: "dict[HttpConnection, None]" = {}
    slow: "dict[HttpConnection, None]" = {}
    tasks: set[asyncio.Task[None]] = set()
    retiring: bool = False

    def make_room(self) -> bool:
        """Close a connection that nobody waits for; whether there was one."""
        for others in (self.idle, self.slow):
            for other in others:
                self.all.discard(other)
                other.finish("too many connections: the body did not come soon enough")
                return True
        return False


class HttpConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, shared: HttpConnections) -> None:
        self._shared = shared
        self._app = shared.app
        self._limits = shared.app.settings
        self._loop = asyncio.get_running_loop()
        self._parser = self._new_parser()
        self.transport: Any = None
        self._state = _IDLE
        self._began = 0  # messages begun
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0  # of an incomplete head, as received
        self._named_bytes = 0  # of a head, as the parser reports them
        self._chunks = 0
        self._around = 0  # bytes of a body beside its chunks: sizes, extensions, trailers
        self._dropped = 0
        self._request: HttpRequest | None = None  # the newest one
        self._ahead: deque[HttpRequest] = deque()  # those without their reply, in the order of their replies
        self._task: asyncio.Task[None] | None = None  # works on the first of them
        self._body_began = 0.0  # when the wait for its body began
        self._fault: tuple[int, str] | None = None  # an error found by a callback of the parser
        self._owed: tuple[int, str] | None = None  # an error to send after the replies to the requests before it
        self._ending = False
        self._reads = True  # what the client sends
        self._paused = False  # the client does not read
        self._due = inf  # when this connection has waited too long
        self._fires = inf  # when its timer looks whether it has
        self._timer: asyncio.TimerHandle | None = None

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # -- the connection's life

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        shared, most = self._shared, self._limits.connections
        shared.all.add(self)
        if len(shared.all) > most and not shared.make_room():
            if len(shared.all) > most + REFUSED:
                transport.abort()
            else:
                self._end(503, "too many connections")
            return
        shared.idle[self] = None
        self._within(self._limits.head_timeout_s)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._shared.all.discard(self)
        self._leave()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            request = self._ahead.popleft()
            request.left = True
            if request.endpoint.query:  # nobody else waits for it
                self._loop.call_soon(self._task.cancel)  # once it has begun: else it would not even end
        self._drop()

    def _leave(self) -> None:
        self._shared.idle.pop(self, None)
        self._shared.slow.pop(self, None)

    def _drop(self) -> None:
        """The requests that nobody works on get no reply."""
        for request in self._ahead:
            self._app.limits.release(request)
        self._ahead.clear()

    def finish(self, told: str = "") -> None:
        """Close, after the reply to the request under way. told: to who waits for the reply to one whose body is coming."""
        self._leave()
        if self._task is not None:
            self._ahead[0].stays = False
        elif self._ahead and told:
            self._end(503, told)
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
            return
        state, began, request = self._state, self._began, self._request
        size = 0 if request is None else request.size
        if self._app.turns is not None:
            self._app.turns.read(self._loop)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over(data[offer.args[0] :])
            return
        except httptools.HttpParserError as error:
            first = state == _IDLE and self._began - began <= 1 and not self._ahead
            self._wrong(*(self._fault or fault_of(error, data if first else b"")))
        else:
            if self._state == _HEAD and (began == self._began or (state == _IDLE and began + 1 == self._began)):
                # The parser keeps parts of an incomplete line, without a limit of its own.
                self._head_bytes += len(data)
                if self._head_bytes > self._limits.max_header:
                    self._wrong(*self._large_head())
            elif request is not None and state == self._state == _BODY and began == self._began:
                self._around += len(data) - (request.size - size)
                if self._around > self._limits.max_header + 16 * self._chunks:
                    self._wrong(431, "there is too much beside the body: extensions of chunks, or trailers")
        if self._task is None:
            self._serve(fresh=True)
            if self._state == _BODY and self._dropped > UNREAD_BYTES:
                self._linger()

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        self._state = _HEAD
        self._began += 1
        self._url, self._headers, self._request = b"", {}, None
        self._head_bytes = self._named_bytes = self._chunks = self._around = self._dropped = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.max_header // 2:
            self._stop(*self._large_head())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._named_bytes += len(name) + len(value) + 4
        if self._named_bytes > self._limits.max_header:
            self._stop(*self._large_head())
        if self._state != _HEAD:
            return  # a trailer: the gateway uses none
        name = name.lower()
        headers = self._headers
        if name in headers:
            if name == b"host":
                self._stop(400, "a request must have one header Host")
            value = b"%s, %s" % (headers[name], value)
        headers[name] = value

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        self._check_head(version)
        if parser.should_upgrade():
            self._state = _OFFER
            return
        if len(self._ahead) >= MAX_AHEAD:
            self._stop(400, "too many requests were sent ahead of the replies to those before them")
        self._state = _BODY
        self._shared.idle.pop(self, None)
        if not self._paused:
            self._due = inf
        request = self._request = HttpRequest(
            parser.get_method().decode("ascii"),
            self._url,
            headers,
            version=version,
            stays=version != "1.0" and parser.should_keep_alive(),
            secure=self._shared.secure,
            began=time.perf_counter(),
            peer=self.transport,
        )
        request.reply = self._app.begin(request)
        self._ahead.append(request)

    def _check_head(self, version: str) -> None:
        """Check what the parser lets pass. Raises ValueError."""
        if version not in ("1.1", "1.0"):
            self._stop(400, "this server speaks HTTP/1.1 and HTTP/1.0")
        if self._app.strict and (self._parser.should_upgrade() or not self._url.startswith(b"/")):
            self._stop(403, "a request asks for a path, and no connection is handed over")
        headers = self._headers
        if b"host" not in headers and version == "1.1":
            self._stop(400, "a request must have one header Host")
        if b"transfer-encoding" in headers and (
            headers[b"transfer-encoding"].lower() != b"chunked" or version == "1.0"
        ):
            self._stop(400, "the only transfer coding is chunked, in HTTP/1.1")
        if self._parser.get_method() == b"CONNECT":
            self._stop(405, "this server is not a proxy")
        if not self._url.startswith((b"/", b"*")):
            self._absolute()

    def _absolute(self) -> None:
        """A URL in place of a path: its host replaces the header's (RFC 9112, 3.2.2)."""
        scheme, _, rest = self._url.partition(b"://")
        host = rest.split(b"/", 1)[0].split(b"?", 1)[0]
        if scheme.lower() not in (b"http", b"https") or not host or b"@" in host:
            self._stop(400, "the request's target is neither a path nor an HTTP URL")
        self._headers[b"host"] = host
        self._url = rest[len(host) :]
        if not self._url.startswith(b"/"):
            self._url = b"/" + self._url

    def on_body(self, body: bytes) -> None:
        request = self._request
        if request is None or self._state != _BODY:
            return
        self._chunks += 1
        if self._chunks > FREE_CHUNKS and self._chunks * CHUNK_BYTES > request.size:
            self._stop(413, "the body comes in too many chunks: send larger ones")
        if request.reply is None:
            request.reply = self._app.receive(request, body)
        else:
            request.size += len(body)
            self._dropped += len(body)

    def on_message_complete(self) -> None:
        if self._state == _OFFER:
            return
        self._state = _IDLE
        request = self._request
        assert request is not None
        request.end()
        turns = self._app.turns
        request.complete = unix_now() - (0.0 if turns is None else turns.waited())

    # -- replies

    def _serve(self, *, fresh: bool = False) -> None:
        """Go on with the request whose reply is next. fresh: it was read in this turn."""
        ahead = self._ahead
        while ahead and not self._paused and not self._ending and not self.transport.is_closing():
            request = ahead[0]
            reply = request.reply
            if reply is None and not request.whole:
                self._await_body(request)
                return
            if reply is None and (reply := self._app.refusal(request, fresh=fresh)) is None:
                self._start(request)
                return
            assert reply is not None
            ahead.popleft()
            self._app.ended(request, reply)
            self._reply(request, reply)
        if self._ending or self.transport.is_closing():
            return
        if ahead:  # until the client reads
            self._read(on=False)
            return
        if self._owed is not None:
            self._end(*self._owed)
            return
        self._read()
        self._await_next()

    def _read(self, *, on: bool = True) -> None:
        if on != self._reads and not self.transport.is_closing():
            self._reads = on
            self.transport.resume_reading() if on else self.transport.pause_reading()

    def _start(self, request: HttpRequest) -> None:
        if self._app.turns is not None:
            self._app.turns.admitted += 1
        self._due = inf
        self._shared.slow.pop(self, None)
        task = self._task = self._loop.create_task(self._work(request))
        self._shared.tasks.add(task)

    async def _work(self, request: HttpRequest) -> None:
        task, reply = self._task, None
        assert task is not None
        try:
            reply = await self._app.answer(request)
        except asyncio.CancelledError:
            if not request.left:
                raise
            task.uncancel()
        finally:
            self._task = None
            self._shared.tasks.discard(task)
            self._app.ended(request, None if request.left else reply)
            if not request.left:
                self._ahead.popleft()
        if reply is not None and not request.left and not self.transport.is_closing():
            self._reply(request, reply)
            self._serve()

    def _reply(self, request: HttpRequest, reply: HttpReply) -> None:
        """Send it. It may be the connection's last."""
        request.reply = reply
        closes = _CLOSE in reply.lines
        stays = request.stays and not closes and not self._shared.retiring
        head = reply.head(request.more if stays or closes else request.more + _CLOSE)
        if request.method == "HEAD":
            self.transport.write(head)
        elif reply.size <= SMALL:
            self.transport.write(b"".join((head, *reply.pieces)))
        else:
            self.transport.writelines([head, *reply.pieces])
        if stays:
            return
        if not request.whole:
            self._linger()
            return
        self._leave()
        self._drop()
        self.transport.close()
        self._within(self._limits.idle_timeout_s)  # the client may never read the reply

    def _await_body(self, request: HttpRequest) -> None:
        """Only this connection waits for the rest of it."""
        if self not in self._shared.slow:
            self._shared.slow[self] = None
            self._read()
            self._body_began = self._loop.time()
            if request.expects and not request.size:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._within(self._body_began + self._app.limits.due(request) - self._loop.time())

    def _await_next(self) -> None:
        """All replies are sent."""
        shared = self._shared
        shared.slow.pop(self, None)
        if self._state == _IDLE:
            if self not in shared.idle:
                shared.idle[self] = None
                self._within(self._limits.idle_timeout_s)
            return
        if self._state == _HEAD:
            shared.idle.setdefault(self)
        if self._due == inf or self._due - self._loop.time() > self._limits.head_timeout_s:
            self._within(self._limits.head_timeout_s)

    def _wrong(self, status: int, message: str) -> None:
        """The client sent an invalid request: send the error after the replies to the requests before it, and close."""
        request = self._request
        if self._state == _BODY and request is not None:
            if not self._ahead or self._ahead[-1] is not request:
                self._linger()  # it has its reply
                return
            self._app.limits.release(self._ahead.pop())
        self._state = _IDLE
        self._owed = (status, message)
        self._read(on=False)

    def _end(self, status: int, message: str) -> None:
        """Send a last reply and close."""
        if not self.transport.is_closing():
            method = self._parser.get_method().decode("ascii") if self._url else ""
            seen = HttpRequest(method, b"", self._headers, peer=self.transport)
            seen.target = self._url
            reply = self._app.failed(seen, HttpProblem(message, status, headers=_LAST.get(status)))
            self.transport.write(reply.head(_CLOSE) + b"".join(reply.pieces))
        self._linger()

    def _linger(self) -> None:
        """Close, but read on for a moment: a reset would take the reply from a client that is still sending."""
        if self._ending or self.transport.is_closing():
            return
        self._ending = True
        self._dropped = 0
        self._leave()
        self._drop()
        self._read()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._within(LINGER_S)

    # -- time

    def _within(self, seconds: float) -> None:
        """From now on, the connection has so much time for what it waits for. One timer serves many waits."""
        self._due = self._loop.time() + seconds
        if self._due < self._fires:
            if self._timer is not None:
                self._timer.cancel()
            self._fires = self._due
            self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer, self._fires = None, inf
        left = self._due - self._loop.time()
        if left <= CLOCK_S:
            self._too_late()
        elif left != inf:
            self._within(left)

    def _too_late(self) -> None:
        if self._paused or self._ending or self.transport.is_closing():
            self.transport.abort()
        elif self._ahead:
            late = HttpProblem("the body did not come in time", 408, headers=CLOSE)
            self._ahead[0].reply = self._app.failed(self._ahead[0], late)
            self._serve()
        elif self._state == _HEAD:
            self._end(408, f"the head of a request did not come within {self._limits.head_timeout_s:g} s")
        else:
            self._leave()
            self.transport.close()  # the client has sent nothing: it might take a reply for that of its next request
            self._within(self._limits.idle_timeout_s)

    def pause_writing(self) -> None:
        self._paused = True
        if not self._ending and not self.transport.is_closing():
            self._within(self._limits.idle_timeout_s)

    def resume_writing(self) -> None:
        self._paused = False
        if not self._ending and not self.transport.is_closing():
            self._due = inf
            self._shared.idle.pop(self, None)
            if self._task is None:
                self._serve()

    # -- errors

    def _stop(self, status: int, message: str) -> None:
        """Stop the parser. Always raises."""
        self._fault = (status, message)
        raise ValueError(message)

    def _large_head(self) -> tuple[int, str]:
        if len(self._url) > self._limits.max_header // 2:
            return 414, f"the request line may have {self._limits.max_header // 2} bytes"
        return 431, f"the head of a request may have {self._limits.max_header} bytes"

    def _pass_over(self, rest: bytes) -> None:
        """Parse the request that offered another protocol again, without the offer: the first parser has stopped at its head."""
        kept = [b"%s: %s\r\n" % pair for pair in self._headers.items() if pair[0] not in _HOP]
        closing = _CLOSE if b"close" in self._headers.get(b"connection", b"").lower() else b""
        version = self._parser.get_http_version().encode("ascii")
        head = b"%s %s HTTP/%s\r\n%s%s\r\n" % (self._parser.get_method(), self._url, version, b"".join(kept), closing)
        self._parser = self._new_parser()
        self._state = _IDLE
        self.data_received(head + rest)
