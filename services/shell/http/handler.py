"""What answers the requests of a server, within limits: requests at a time, the size of a body and its time, what compression may hide.

A request takes a place once its body is there: those that are still to come keep nobody out.

How long a request may have waited in its socket is measured (`Turns`).
"""

import asyncio
import time
import zlib
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterator
from io import BytesIO

from services.core.settings import GatewaySettings
from services.shell.http.messages import HttpProblem, HttpReply, HttpRequest

STEP = 256 * 2**10  # most bytes that one step of inflating yields
UNCHECKED_INFLATED = 4 * 2**20  # inflated bytes of a body before its ratio counts
RATIO = 100  # most inflated bytes for each compressed one (deflate itself reaches 1,032, tensors rarely more than 20)
MEMBERS = 64  # most members of a gzip body

CODINGS = ("gzip", "deflate")
BODY_BYTES_PER_S = 64 * 2**10  # so many bytes of a body give it one more second to come
FIRST_S, LEAST_BYTES_PER_S = 10.0, 1024  # and a body must come at this rate, from this time on
HEALTH = "/v2/health/"  # answered however many requests there are
CLOSE = {"Connection": "close"}


class Inflater:
    """Inflates one body in small steps. coding: one of CODINGS. limit: most bytes of the inflated body."""

    def __init__(self, coding: str, limit: int) -> None:
        self._gzip = coding == "gzip"
        self._limit = limit
        self._stream = zlib.decompressobj(31) if self._gzip else None
        self._members = 1
        self._taken = 0
        self._made = 0
        self._full = False  # the last step was full: zlib may have more to yield

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The inflated bytes of the next compressed ones, in steps. Raises HttpProblem."""
        self._taken += len(data)
        while data or self._full:
            stream = self._next(data)
            try:
                piece = stream.decompress(data, STEP)
            except zlib.error as error:
                raise _bad_coding(f"the body is not {'gzip' if self._gzip else 'deflate'}: {error}") from error
            self._made += len(piece)
            left = stream.unused_data if stream.eof else stream.unconsumed_tail
            if self._made > self._limit:
                raise _too_large(f"the body becomes more than {self._limit} bytes")
            if self._made > UNCHECKED_INFLATED and self._made > RATIO * (self._taken - len(left)):
                raise _too_large(f"the body becomes more than {RATIO} times its size")
            if piece:
                yield piece
            self._full = len(piece) == STEP and not stream.eof
            data = left

    def end(self) -> None:
        """The body is complete. Raises HttpProblem where its compressed data is not."""
        if self._taken and (self._stream is None or not self._stream.eof):
            raise _bad_coding("the compressed body ends early")

    def _next(self, data: bytes) -> "zlib._Decompress":
        stream = self._stream
        if stream is None:
            # "deflate" means zlib's format, but some clients send raw deflate: the first byte says which.
            stream = self._stream = zlib.decompressobj(15 if data[0] & 0x0F == 8 else -15)
        elif stream.eof:
            self._members += 1
            if not self._gzip:
                raise _bad_coding("something follows the compressed body")
            if self._members > MEMBERS:
                raise _bad_coding(f"the body has more than {MEMBERS} parts")
            stream = self._stream = zlib.decompressobj(31)
        return stream


def max_buffered(settings: GatewaySettings) -> int:
    """Bytes of request bodies that may be in memory at a time, of all requests together."""
    return max(4 * settings.max_body, 256 * 2**20)


class RequestLimits:
    """What all requests of a server share. running: those that have a place. buffered: bytes of bodies in memory.

    less: what the sender of too large a body can do.
    """

    def __init__(self, settings: GatewaySettings, less: str) -> None:
        self.settings = settings
        self._less = less
        self.most_buffered = max_buffered(settings)
        self.running = 0
        self.buffered = 0

    def check(self, request: HttpRequest) -> None:
        """Check what a head says of the body behind it. Raises HttpProblem."""
        headers = request.headers
        declared = int(headers.get(b"content-length", b"0"))
        if declared > self.settings.max_body:
            raise _too_large(
                f"the body may have {self.settings.max_body} bytes, and is to have {declared}: {self._less}"
            )
        if (declared or b"transfer-encoding" in headers) and coding_of(request) not in ("", *CODINGS):
            raise HttpProblem(
                f"Content-Encoding may be {' or '.join(CODINGS)}", 415, headers={"Accept-Encoding": ", ".join(CODINGS)}
            )

    def receive(self, request: HttpRequest, piece: bytes) -> None:
        """The next bytes of a body. Raises HttpProblem."""
        request.add(piece)
        if request.size > self.settings.max_body:
            raise _too_large(f"the body may have {self.settings.max_body} bytes: {self._less}")
        self._hold(request, len(piece))

    def due(self, request: HttpRequest) -> float:
        """Seconds from its head on in which more of a body must have come."""
        size = request.size
        return min(FIRST_S + size / LEAST_BYTES_PER_S, self.settings.body_timeout_s + size / BODY_BYTES_PER_S)

    def admit(self, request: HttpRequest) -> None:
        """A request has come whole: it gets a place. Raises HttpProblem."""
        if self.running >= self.settings.in_flight and not request.path.startswith(HEALTH):
            text = f"the gateway has {self.settings.in_flight} requests under way: try again later"
            raise HttpProblem(text, 503, "overloaded", {"Retry-After": "1"})
        self.running += 1
        request.placed = True

    def release(self, request: HttpRequest) -> None:
        """The request has its reply, or needs none."""
        self.running -= request.placed
        self.buffered -= request.held
        request.placed, request.held = False, 0
        request.forget()

    async def inflate(self, request: HttpRequest) -> None:
        """Put the body in place of its compressed form. Raises HttpProblem."""
        inflater = Inflater(coding_of(request), self.settings.max_body)
        whole = BytesIO()  # returns its bytes without a copy
        for count, part in enumerate(inflater.feed(request.body), 1):
            self._hold(request, len(part))
            whole.write(part)
            if count % 4 == 0:
                await asyncio.sleep(0)  # after each MiB, let other requests run
        inflater.end()
        request.body = whole.getvalue()

    def _hold(self, request: HttpRequest, size: int) -> None:
        request.held += size
        self.buffered += size
        if self.buffered > self.most_buffered:
            raise HttpProblem(
                "the gateway holds as many bytes of requests as it may: try again later",
                503,
                "overloaded",
                {"Retry-After": "1", **CLOSE},
            )


def coding_of(request: HttpRequest) -> str:
    """How a request's body is compressed; empty: it is not."""
    coding = (request.header(b"content-encoding") or "").strip().lower()
    return "" if coding == "identity" else coding


def _bad_coding(message: str) -> HttpProblem:
    return HttpProblem(message, headers=CLOSE)


def _too_large(message: str) -> HttpProblem:
    return HttpProblem(message, 413, "too_large", CLOSE)


SHORT_S = 0.005  # of a turn, and of a way, that is no reason to refuse anything
SEVERAL = 8  # requests from which on a turn is measured: fewer are no burden, or another's large body is
TYPICAL_S = 0.0005  # of a request, until a turn is measured: the first flood of a gateway is not admitted as a whole
TURNS = 5  # so many of the last ones say what a request takes: their median, since now and then a process stands still


class Turns:
    """How long a request needs to get through the loop, measured from turn to turn. clock: seconds.

    In a turn, uvloop first reads each socket that has something, then runs what that made ready. A callback put there by the first read runs before
    the tasks of the requests: it marks the end of the reads. Put there again, it marks those of the next turn, and the loop does not wait in between.
    What is read in a turn came after the reads of the turn before had begun: it would have been read then.

    admitted, refused: requests of this turn.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.admitted = self.refused = 0
        self._began: float | None = None  # when this turn's reads began; None: there were none yet
        self._before: float | None = None  # when those of the turn before began; None: the loop may have waited since
        self._ran: float | None = None  # when what that turn had made ready began to run
        self._running = 0  # requests admitted in it, where they are what it ran
        self._marked = False  # the mark is put
        self._each = deque((TYPICAL_S,), TURNS)  # s that the last turns ran, by the requests admitted in them
        self._takes = TYPICAL_S  # s that a request takes

    def read(self, loop: AbstractEventLoop) -> None:
        """A socket has something."""
        if self._began is None:
            self._began = self._clock()
            if not self._marked:
                self._marked = True
                loop.call_soon(self._mark, loop)

    def waited(self) -> float:
        """Seconds for which a request that is read now may have been in its socket; 0 where the loop may have waited for it."""
        since = self._before
        if since is None:
            if self.admitted < SEVERAL or self._began is None:
                return 0.0
            since = self._began
        return self._clock() - since

    def way(self) -> float:
        """The same, and what those take that were admitted before it in this turn: it waits for them now, and its answer for theirs."""
        return self.waited() + 2.0 * self._takes * self.admitted

    def _mark(self, loop: AbstractEventLoop) -> None:
        """The reads of a turn are over."""
        now = self._clock()
        began = now if self._began is None else self._began
        ran = 0.0 if self._ran is None else began - self._ran
        if self._running:
            self._each.append(ran / self._running)
            self._takes = sorted(self._each)[len(self._each) // 2]
        several = self.admitted >= SEVERAL or self.refused
        if several or ran > SHORT_S:
            self._before, self._ran = began, now
            self._running = self.admitted if several else 0
            loop.call_soon(self._mark, loop)
        else:
            self._before = self._ran = None
            self._running = 0
            self._marked = False
        self._began, self.admitted, self.refused = None, 0, 0


class HttpHandler:
    """What a server's connections ask: here what all have in common. `check` and `failed` are each one's own.

    turns: of the loop, where they are measured. strict: only paths may be asked for, and nobody may offer another protocol.
    """

    turns: Turns | None = None
    strict = False

    def __init__(self, settings: GatewaySettings, less: str = "send less") -> None:
        self.settings = settings
        self.limits = RequestLimits(settings, less)

    def check(self, request: HttpRequest) -> HttpReply | None:
        """Set the endpoint of a request by its head. Returns the reply that needs no more of it. Raises its refusal."""
        raise NotImplementedError

    def failed(self, request: HttpRequest, error: Exception) -> HttpReply:
        """The reply to a request that ends with this error; it has no endpoint where its head is wrong."""
        raise NotImplementedError

    def begin(self, request: HttpRequest) -> HttpReply | None:
        """Look at a head. The reply, if the request gets one whatever its body is."""
        try:
            if (reply := self.check(request)) is None:
                self.limits.check(request)
        except Exception as error:
            return self.failed(request, error)
        return reply

    def receive(self, request: HttpRequest, piece: bytes) -> HttpReply | None:
        """The next bytes of a body. The refusal, if they are too many."""
        try:
            self.limits.receive(request, piece)
        except HttpProblem as error:
            return self.failed(request, error)
        return None

    def refusal(self, request: HttpRequest, *, fresh: bool) -> HttpReply | None:  # noqa: ARG002
        """Of a request that has come whole; None: it got a place. fresh: it was read in this turn, and nothing of its connection is before it."""
        try:
            self.limits.admit(request)
        except HttpProblem as error:
            return self.failed(request, error)
        return None

    async def answer(self, request: HttpRequest) -> HttpReply:
        """The reply to a request that has a place."""
        try:
            if b"content-encoding" in request.headers and coding_of(request):
                await self.limits.inflate(request)
            reply: HttpReply = await request.endpoint.call(request)
            return await reply.packed() if reply.coding else reply
        except Exception as error:
            return self.failed(request, error)

    def ended(self, request: HttpRequest, reply: HttpReply | None) -> None:  # noqa: ARG002
        """A request has its reply, or its client has left before (None)."""
        self.limits.release(request)
