"""The limits of a request: requests at a time, the size of its body, the time in which it must come, what compression may hide.

The application receives a body in one piece, inflated, at its first `receive`. A body that exceeds a limit raises RequestFailed there.
"""

import asyncio
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.core.settings import GatewaySettings
from services.gateway.errors import RequestFailed
from services.gateway.http.bodies import JsonReply

STEP = 256 * 2**10  # most bytes that one step of inflating yields
UNCHECKED_INFLATED = 4 * 2**20  # inflated bytes of a body before its ratio counts
RATIO = 100  # most inflated bytes for each compressed one (deflate itself reaches 1,032, tensors rarely more than 20)
MEMBERS = 64  # most members of a gzip body

CODINGS = ("gzip", "deflate")
BODY_BYTES_PER_S = 64 * 2**10  # so many bytes of a body give it one more second to come
HEALTH = "/v2/health/"  # answered however many requests there are
_LESS = "send less at a time (files by their URL), or have the operator raise gateway.max_body"
_CLOSE = {"Connection": "close"}


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


class LimitMiddleware:
    """ASGI middleware. buffered: bytes of bodies in memory. most_buffered: None: `max_buffered`."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, most_buffered: int | None = None) -> None:
        self._app = app
        self.settings = settings
        self.most_buffered = max_buffered(settings) if most_buffered is None else most_buffered
        self.running = 0
        self.buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self.running >= self.settings.in_flight and not scope["path"].startswith(HEALTH):
            busy = {"error": f"the gateway has {self.settings.in_flight} requests under way: try again later"}
            await JsonReply(busy, 503, {"Retry-After": "1"})(scope, receive, send)
            return
        body = _Body(self, scope, receive)
        self.running += 1
        try:
            await self._app(scope, body.receive, send)
        finally:
            self.running -= 1
            self.buffered -= body.buffered


class _Body:
    """One request's body as the application receives it."""

    __slots__ = ("_coding", "_declared", "_limits", "_receive", "_whole", "buffered")

    def __init__(self, limits: LimitMiddleware, scope: Scope, receive: Receive) -> None:
        self._limits = limits
        self._receive = receive
        self._whole = False
        self._coding = ""
        self._declared = 0
        self.buffered = 0
        for name, value in scope["headers"]:
            if name == b"content-length":
                self._declared = int(value)
            elif name == b"content-encoding":
                self._coding += ("," if self._coding else "") + value.decode("latin-1").strip().lower()
        if self._coding:
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-encoding"]

    async def receive(self) -> Message:
        """The whole body; later calls get the server's next messages. Raises RequestFailed."""
        if self._whole:
            return await self._receive()
        self._whole = True
        settings = self._limits.settings
        if self._declared > settings.max_body:
            raise _too_large(f"the body may have {settings.max_body} bytes, and is to have {self._declared}: {_LESS}")
        inflater = self._inflater()
        try:
            async with asyncio.timeout(settings.body_timeout_s) as limit:
                return await self._collect(inflater, limit)
        except TimeoutError as error:
            raise RequestFailed(408, "the body did not come in time", headers=_CLOSE) from error
        except InflatedTooLarge as error:
            raise _too_large(str(error)) from error
        except BadCoding as error:
            raise RequestFailed(400, str(error), headers=_CLOSE) from error

    def _inflater(self) -> Inflater | None:
        if self._coding in ("", "identity"):
            return None
        if self._coding not in CODINGS:
            raise RequestFailed(
                415, f"Content-Encoding may be {' or '.join(CODINGS)}", headers={"Accept-Encoding": ", ".join(CODINGS)}
            )
        return Inflater(self._coding, self._limits.settings.max_body)

    async def _collect(self, inflater: Inflater | None, limit: asyncio.Timeout) -> Message:
        whole = BytesIO()  # returns its bytes without a copy; joining a list of pieces would need them twice
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                return message  # the client has left
            piece: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(piece)
            if size > self._limits.settings.max_body:
                raise _too_large(f"the body may have {self._limits.settings.max_body} bytes: {_LESS}")
            if inflater is None:
                self._buffer(len(piece))
                if not more and size == len(piece):
                    return _request(piece)
                whole.write(piece)
            else:
                for count, part in enumerate(inflater.feed(piece), 1):
                    self._buffer(len(part))
                    whole.write(part)
                    if count % 4 == 0:
                        await asyncio.sleep(0)  # after each MiB, let other requests run
            if not more:
                break
            if when := limit.when():
                limit.reschedule(when + len(piece) / BODY_BYTES_PER_S)
        if inflater is not None:
            inflater.end()
        return _request(whole.getvalue())

    def _buffer(self, size: int) -> None:
        self.buffered += size
        self._limits.buffered += size
        if self._limits.buffered > self._limits.most_buffered:
            raise RequestFailed(
                None,
                "the gateway holds as many bytes of requests as it may: try again later",
                code="overloaded",
                headers={"Retry-After": "1", **_CLOSE},
            )


def _request(body: bytes) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": False}


def _too_large(message: str) -> RequestFailed:
    return RequestFailed(None, message, code="too_large", headers=_CLOSE)
