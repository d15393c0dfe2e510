"""The limits of a request: requests at a time, the size of its body, the time in which it must come, what compression may hide.

A request takes a place once its body is there: those that are still to come keep nobody out.
"""

import asyncio
import zlib
from collections.abc import Iterator
from io import BytesIO

from services.core.settings import GatewaySettings
from services.gateway.errors import RequestFailed
from services.gateway.http.messages import HttpRequest

STEP = 256 * 2**10  # most bytes that one step of inflating yields
UNCHECKED_INFLATED = 4 * 2**20  # inflated bytes of a body before its ratio counts
RATIO = 100  # most inflated bytes for each compressed one (deflate itself reaches 1,032, tensors rarely more than 20)
MEMBERS = 64  # most members of a gzip body

CODINGS = ("gzip", "deflate")
BODY_BYTES_PER_S = 64 * 2**10  # so many bytes of a body give it one more second to come
FIRST_S, LEAST_BYTES_PER_S = 10.0, 1024  # and a body must come at this rate, from this time on
HEALTH = "/v2/health/"  # answered however many requests there are
_LESS = "send less at a time (files by their URL), or have the operator raise gateway.max_body"
CLOSE = {"Connection": "close"}


class BadCoding(ValueError):
    """The body is not valid in its Content-Encoding; the text says why."""


class InflatedTooLarge(ValueError):
    """The body would become larger than a limit; the text names it."""


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
        """The inflated bytes of the next compressed ones, in steps. Raises BadCoding, InflatedTooLarge."""
        self._taken += len(data)
        while data or self._full:
            stream = self._next(data)
            try:
                piece = stream.decompress(data, STEP)
            except zlib.error as error:
                raise BadCoding(f"the body is not {'gzip' if self._gzip else 'deflate'}: {error}") from error
            self._made += len(piece)
            left = stream.unused_data if stream.eof else stream.unconsumed_tail
            if self._made > self._limit:
                raise InflatedTooLarge(f"the body becomes more than {self._limit} bytes")
            if self._made > UNCHECKED_INFLATED and self._made > RATIO * (self._taken - len(left)):
                raise InflatedTooLarge(f"the body becomes more than {RATIO} times its size")
            if piece:
                yield piece
            self._full = len(piece) == STEP and not stream.eof
            data = left

    def end(self) -> None:
        """The body is complete. Raises BadCoding where its compressed data is not."""
        if self._taken and (self._stream is None or not self._stream.eof):
            raise BadCoding("the compressed body ends early")

    def _next(self, data: bytes) -> "zlib._Decompress":
        stream = self._stream
        if stream is None:
            # "deflate" means zlib's format, but some clients send raw deflate: the first byte says which.
            stream = self._stream = zlib.decompressobj(15 if data[0] & 0x0F == 8 else -15)
        elif stream.eof:
            self._members += 1
            if not self._gzip:
                raise BadCoding("something follows the compressed body")
            if self._members > MEMBERS:
                raise BadCoding(f"the body has more than {MEMBERS} parts")
            stream = self._stream = zlib.decompressobj(31)
        return stream


def max_buffered(settings: GatewaySettings) -> int:
    """Bytes of request bodies that may be in memory at a time, of all requests together."""
    return max(4 * settings.max_body, 256 * 2**20)


class RequestLimits:
    """What all requests of a server share. running: those that have a place. buffered: bytes of bodies in memory. most_buffered: None: `max_buffered`."""

    def __init__(self, settings: GatewaySettings, most_buffered: int | None = None) -> None:
        self.settings = settings
        self.most_buffered = max_buffered(settings) if most_buffered is None else most_buffered
        self.running = 0
        self.buffered = 0

    def check(self, request: HttpRequest) -> None:
        """Check what a head says of the body behind it. Raises RequestFailed."""
        headers = request.headers
        declared = int(headers.get(b"content-length", b"0"))
        if declared > self.settings.max_body:
            raise _too_large(f"the body may have {self.settings.max_body} bytes, and is to have {declared}: {_LESS}")
        if (declared or b"transfer-encoding" in headers) and coding_of(request) not in ("", *CODINGS):
            raise RequestFailed(
                415, f"Content-Encoding may be {' or '.join(CODINGS)}", headers={"Accept-Encoding": ", ".join(CODINGS)}
            )

    def receive(self, request: HttpRequest, piece: bytes) -> None:
        """The next bytes of a body. Raises RequestFailed."""
        request.add(piece)
        if request.size > self.settings.max_body:
            raise _too_large(f"the body may have {self.settings.max_body} bytes: {_LESS}")
        self._hold(request, len(piece))

    def due(self, request: HttpRequest) -> float:
        """Seconds from its head on in which more of a body must have come."""
        size = request.size
        return min(FIRST_S + size / LEAST_BYTES_PER_S, self.settings.body_timeout_s + size / BODY_BYTES_PER_S)

    def admit(self, request: HttpRequest) -> None:
        """A request has come whole: it gets a place. Raises RequestFailed."""
        if self.running >= self.settings.in_flight and not request.path.startswith(HEALTH):
            text = f"the gateway has {self.settings.in_flight} requests under way: try again later"
            raise RequestFailed(503, text, code="overloaded", headers={"Retry-After": "1"})
        self.running += 1
        request.placed = True

    def release(self, request: HttpRequest) -> None:
        """The request has its reply, or needs none."""
        self.running -= request.placed
        self.buffered -= request.held
        request.placed, request.held = False, 0
        request.forget()

    async def inflate(self, request: HttpRequest) -> None:
        """Put the body in place of its compressed form. Raises RequestFailed."""
        inflater = Inflater(coding_of(request), self.settings.max_body)
        whole = BytesIO()  # returns its bytes without a copy
        try:
            for count, part in enumerate(inflater.feed(request.body), 1):
                self._hold(request, len(part))
                whole.write(part)
                if count % 4 == 0:
                    await asyncio.sleep(0)  # after each MiB, let other requests run
            inflater.end()
        except InflatedTooLarge as error:
            raise _too_large(str(error)) from error
        except BadCoding as error:
            raise RequestFailed(400, str(error), headers=CLOSE) from error
        request.body = whole.getvalue()

    def _hold(self, request: HttpRequest, size: int) -> None:
        request.held += size
        self.buffered += size
        if self.buffered > self.most_buffered:
            raise RequestFailed(
                None,
                "the gateway holds as many bytes of requests as it may: try again later",
                code="overloaded",
                headers={"Retry-After": "1", **CLOSE},
            )


def coding_of(request: HttpRequest) -> str:
    """How a request's body is compressed; empty: it is not."""
    coding = (request.header(b"content-encoding") or "").strip().lower()
    return "" if coding == "identity" else coding


def _too_large(message: str) -> RequestFailed:
    return RequestFailed(None, message, code="too_large", headers=CLOSE)
