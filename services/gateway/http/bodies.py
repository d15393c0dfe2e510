"""Bodies of requests and replies: JSON within limits, tensors that are not copied, compressed replies, and how both get through a connection."""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from bus.port import Buffer
from services.gateway.json_checks import check_json_size

SMALL = 32 * 2**10  # bytes up to which a reply's head and body are sent together
MIN_COMPRESSED = 1024  # bytes of a reply below which it is not compressed
COMPRESSION_LEVEL = 1  # higher levels hardly make tensors smaller
OFF_LOOP = 64 * 2**10  # bytes above which a thread compresses

_encode = msgspec.json.Encoder().encode


# -- Requests


class BodyBuffer:
    """A request's body as received: its pieces are joined once. (uvicorn's own buffer copies them twice.)"""

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


async def whole_body(request: Request) -> bytes:
    """The request's body. The limits in front (limits.py) deliver it in one piece, so nothing is copied here."""
    message = await request.receive()
    pieces: list[bytes] = []
    while True:
        if message["type"] != "http.request":
            raise ClientDisconnect
        piece: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return b"".join([*pieces, piece]) if pieces else piece
        pieces.append(piece)
        message = await request.receive()


async def json_body(request: Request, head_length: int | None = None) -> bytes:
    """The request's body, whose JSON is small enough to decode. Raises RequestFailed.

    head_length: bytes of JSON at the beginning of the body; None: all of it.
    """
    body = await whole_body(request)
    check_json_size(body, head_length)
    return body


# -- Replies


class JsonReply:
    """A reply whose body is the JSON of `content`."""

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.body = _encode(content)
        self.status = status
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body))]
        if self.headers:
            headers += [
                (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()
            ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


class BinaryReply:
    """A reply of several buffers, none of them copied. coding: "", gzip or deflate."""

    def __init__(self, pieces: Sequence[Buffer], headers: list[tuple[bytes, bytes]], *, coding: str = "") -> None:
        self.pieces = pieces
        self.headers = headers
        self.coding = coding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        pieces = self.pieces
        size = sum(map(len, pieces))
        headers = self.headers
        if self.coding and size >= MIN_COMPRESSED:
            packed = (
                _compress(pieces, self.coding) if size < OFF_LOOP else await _compress_in_thread(pieces, self.coding)
            )
            pieces, size = [packed], len(packed)
            headers = [*headers, (b"content-encoding", self.coding.encode()), (b"vary", b"accept-encoding")]
        elif len(pieces) > 1 and size <= SMALL:
            pieces = [b"".join(pieces)]
        headers = [*headers, (b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = len(pieces) - 1
        for number, piece in enumerate(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": number < last})


class _Connection(Protocol):
    """A connection as its replies see it. closing: nothing more is sent."""

    @property
    def closing(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    def close_after_reply(self) -> None: ...


class ReplyTransport:
    """The transport that a request's cycle writes to. The connection decides when and how to close.

    It keeps a reply's head until its body follows, so that a small reply is one packet and one system call.
    """

    __slots__ = ("_connection", "_head")

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._head = b""

    def write(self, data: bytes) -> None:
        head = self._head
        if head:
            self._head = b""
            if len(data) <= SMALL:
                self._connection.write(b"".join((head, data)))
                return
            self._connection.write(head)
        elif data[:9] == b"HTTP/1.1 " and data[9:12] != b"100" and data[-4:] == b"\r\n\r\n":
            self._head = data
            return
        self._connection.write(data)

    def flush(self) -> None:
        """The reply is complete or has failed: send a head without a body."""
        head, self._head = self._head, b""
        if head:
            self._connection.write(head)

    def close(self) -> None:
        self.flush()
        self._connection.close_after_reply()

    def is_closing(self) -> bool:
        return self._connection.closing


def one_coding(accepted: bytes) -> str:
    """The coding of the reply: that of the header Accept-Encoding, where it names exactly one.

    Clients that accept several get plain bytes, which are sent sooner.
    """
    coding = accepted.decode("latin-1").strip().lower()
    return coding if coding in ("gzip", "deflate") else ""


async def _compress_in_thread(pieces: Sequence[Buffer], coding: str) -> bytes:
    return await asyncio.to_thread(_compress, pieces, coding)


def _compress(pieces: Sequence[Buffer], coding: str) -> bytes:
    stream: Any = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    return b"".join([*map(stream.compress, pieces), stream.flush()])
