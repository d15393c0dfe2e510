"""Compressed bodies, inflated in small steps within limits of size and ratio, so that a small body cannot become a large one. Pure."""

import asyncio
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.errors import RequestFailed
from services.gateway.http.bodies import JsonReply

STEP = 256 * 2**10  # bytes that one step makes at most
FREE = 4 * 2**20  # bytes that a body may become whatever its ratio
RATIO = 100  # beyond: times what was read of it (deflate itself goes to 1032, tensors rarely beyond 20)
MEMBERS = 64  # of a gzip file

CODINGS = ("gzip", "deflate")


class BadCoding(ValueError):
    """The data is not what its coding says."""


class TooMuch(ValueError):
    """The data becomes larger than it may."""


class Inflater:
    """One body. coding: of CODINGS. limit: bytes that it may become."""

    def __init__(self, coding: str, limit: int) -> None:
        self._gzip = coding == "gzip"
        self._limit = limit
        self._stream = zlib.decompressobj(31) if self._gzip else None
        self._members = 1
        self._taken = 0
        self._made = 0
        self._full = False  # the last step was full: more may lie inside

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What the next part of the compressed body becomes, in steps. Raises BadCoding, TooMuch."""
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
                raise TooMuch(f"the body becomes more than {self._limit} bytes")
            if self._made > FREE and self._made > RATIO * (self._taken - len(left)):
                raise TooMuch(f"the body becomes more than {RATIO} times its size")
            if piece:
                yield piece
            self._full = len(piece) == STEP and not stream.eof
            data = left

    def end(self) -> None:
        """The body is complete. Raises BadCoding where the compressed data is not."""
        if self._taken and (self._stream is None or not self._stream.eof):
            raise BadCoding("the compressed body ends early")

    def _next(self, data: bytes) -> "zlib._Decompress":
        stream = self._stream
        if stream is None:  # "deflate" is zlib's format, but some send the bare one: its first byte tells
            stream = self._stream = zlib.decompressobj(15 if data[0] & 0x0F == 8 else -15)
        elif stream.eof:
            self._members += 1
            if not self._gzip:
                raise BadCoding("something follows the compressed body")
            if self._members > MEMBERS:
                raise BadCoding(f"the body has more than {MEMBERS} parts")
            stream = self._stream = zlib.decompressobj(31)
        return stream


# -- What a request may cost: requests at a time, the size of its body, the time that takes, what compressed bodies
# become.

PACE = 64 * 2**10  # bytes of a body that earn it one more second
ALIVE = "/v2/health/"  # answered however many requests there are
_CLOSE = {"Connection": "close"}


class RequestLimits(NamedTuple):
    """Limits of requests. max_body: bytes, compressed and not. held: bytes of bodies in memory, of all requests."""

    max_body: int = 64 * 2**20
    body_timeout_s: float = 30.0
    in_flight: int = 1000
    held: int = 4 * 64 * 2**20


class LimitMiddleware:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, allowance: RequestLimits) -> None:
        self._app = app
        self.allowance = allowance
        self.running = 0
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self.running >= self.allowance.in_flight and not scope["path"].startswith(ALIVE):
            busy = {"error": f"the gateway has {self.allowance.in_flight} requests under way: try again later"}
            await JsonReply(busy, 503, {"Retry-After": "1"})(scope, receive, send)
            return
        body = _Body(self, scope, receive)
        self.running += 1
        try:
            await self._app(scope, body.receive, send)
        finally:
            self.running -= 1
            self.held -= body.held


class _Body:
    """One request's body as the application gets it."""

    __slots__ = ("_coding", "_declared", "_limits", "_receive", "_whole", "held")

    def __init__(self, limits: LimitMiddleware, scope: Scope, receive: Receive) -> None:
        self._limits = limits
        self._receive = receive
        self._whole = False
        self._coding = ""
        self._declared = 0
        self.held = 0
        for name, value in scope["headers"]:
            if name == b"content-length":
                self._declared = int(value)
            elif name == b"content-encoding":
                self._coding += ("," if self._coding else "") + value.decode("latin-1").strip().lower()
        if self._coding:
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-encoding"]

    async def receive(self) -> Message:
        """The whole body, then whatever the server has to tell. Raises RequestFailed."""
        if self._whole:
            return await self._receive()
        self._whole = True
        allowance = self._limits.allowance
        if self._declared > allowance.max_body:
            raise _too_large(f"the body may have {allowance.max_body} bytes, and is to have {self._declared}")
        inflater = self._inflater()
        try:
            async with asyncio.timeout(allowance.body_timeout_s) as limit:
                return await self._collect(inflater, limit)
        except TimeoutError as error:
            raise RequestFailed(408, "the body did not come in time", headers=_CLOSE) from error
        except TooMuch as error:
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
        return Inflater(self._coding, self._limits.allowance.max_body)

    async def _collect(self, inflater: Inflater | None, limit: asyncio.Timeout) -> Message:
        whole = BytesIO()  # gives out what it holds without a copy; a list of pieces would be there twice when joined
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                return message  # the client has left
            piece: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(piece)
            if size > self._limits.allowance.max_body:
                raise _too_large(f"the body may have {self._limits.allowance.max_body} bytes")
            if inflater is None:
                self._hold(len(piece))
                if not more and size == len(piece):
                    return _request(piece)
                whole.write(piece)
            else:
                for count, part in enumerate(inflater.feed(piece), 1):
                    self._hold(len(part))
                    whole.write(part)
                    if count % 4 == 0:
                        await asyncio.sleep(0)  # 1 MiB was made: others have their turn
            if not more:
                break
            if when := limit.when():
                limit.reschedule(when + len(piece) / PACE)
        if inflater is not None:
            inflater.end()
        return _request(whole.getvalue())

    def _hold(self, size: int) -> None:
        self.held += size
        self._limits.held += size
        if self._limits.held > self._limits.allowance.held:
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
