"""Requests and replies around large tensors: bodies as they came, replies in pieces, compression where it was asked for."""

import asyncio
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from bus.port import Buffer
from services.gateway.errors import RequestFailed
from services.gateway.http.protocol import SMALL

LEAST = 1024  # bytes of a reply below which it is not compressed
LEVEL = 1  # numbers hardly shrink more with more effort
OFF_LOOP = 64 * 2**10  # bytes above which compressing leaves the event loop


async def whole_body(request: Request) -> bytes:
    """The request's body. What is in front of us puts it together once, so mostly this is one message's bytes as they are."""
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
    """The request's body, of which so many bytes are JSON, or all: JSON that can be read without taking much more memory."""
    body = await whole_body(request)
    check_json_size(body, head_length)
    return body


def one_coding(accepted: bytes) -> str:
    """The coding that a reply is wanted in: where the client names exactly one. Others take everything, and are spared it."""
    coding = accepted.decode("latin-1").strip().lower()
    return coding if coding in ("gzip", "deflate") else ""


class BinaryReply:
    """A reply whose body comes in pieces, none of them copied. coding: "", gzip or deflate."""

    def __init__(
        self, pieces: Sequence[Buffer], headers: list[tuple[bytes, bytes]], *, status: int = 200, coding: str = ""
    ) -> None:
        self.pieces = pieces
        self.headers = headers
        self.status = status
        self.coding = coding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        pieces = self.pieces
        size = sum(map(len, pieces))
        headers = self.headers
        if self.coding and size >= LEAST:
            packed = _compress(pieces, self.coding) if size < OFF_LOOP else await _elsewhere(pieces, self.coding)
            pieces, size = [packed], len(packed)
            headers = [*headers, (b"content-encoding", self.coding.encode()), (b"vary", b"accept-encoding")]
        elif len(pieces) > 1 and size <= SMALL:
            pieces = [b"".join(pieces)]
        headers = [*headers, (b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        last = len(pieces) - 1
        for number, piece in enumerate(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": number < last})


async def _elsewhere(pieces: Sequence[Buffer], coding: str) -> bytes:
    return await asyncio.to_thread(_compress, pieces, coding)


def _compress(pieces: Sequence[Buffer], coding: str) -> bytes:
    stream: Any = zlib.compressobj(LEVEL, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    return b"".join([*map(stream.compress, pieces), stream.flush()])


# -- Replies in JSON, written by msgspec.

_encode = msgspec.json.Encoder().encode


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


# -- What JSON becomes in memory, told before it is read: `[],` takes three bytes as text, and sixty as an empty
# list.

FREE = 2**18  # bytes of text that are read whatever they become
MOST = 48 * 2**20  # bytes that the text may become
LIST, MAP, ITEM = 64, 240, 32  # bytes that each takes in CPython, about

_skip = msgspec.json.Decoder(msgspec.Raw).decode  # looks at all of it, and keeps nothing


def check_json_size(text: bytes, end: int | None = None) -> None:
    """Raises RequestFailed where the JSON in `text`, or in its first `end` bytes, would take too much memory: 413, or 400 where it is none.

    Counts the marks between items wherever they stand: texts with that many commas in them weigh less than it seems, but not
    much less.
    """
    end = len(text) if end is None else end
    if end <= FREE:
        return
    weight = LIST * text.count(b"[", 0, end)
    if weight <= MOST:
        weight += MAP * text.count(b"{", 0, end)
    if weight <= MOST:
        weight += ITEM * text.count(b",", 0, end)
    if weight > MOST:
        try:
            _skip(memoryview(text)[:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            raise RequestFailed(
                None, "the JSON is nested too deeply" if deep else f"this is no JSON: {error}"
            ) from error
        raise RequestFailed(
            None,
            f"as JSON this would take more than {MOST // 2**20} MiB of memory: send large tensors as binary data, or in parts",
            code="too_large",
        )


# -- Names that stand twice in one JSON object: readers differ in which one counts, so here neither does. Pure.

UNKNOWN = -1


class _Twice(ValueError):
    pass


def quotes(values: Mapping[str, Any]) -> int:
    """How many quotation marks an object of scalars has; UNKNOWN where it holds anything else."""
    count = 0
    for value in values.values():
        if isinstance(value, str):
            count += 4
        elif isinstance(value, int | float) or value is None:
            count += 2
        else:
            return UNKNOWN
    return count


def find_duplicate(text: bytes, expected: int) -> str:
    """A sentence about the first name that stands twice; "" when there is none.

    expected: quotation marks in the text if there is none, as far as that is known. Only a text that has another number of them,
    or escapes, is read a second time.
    """
    if expected >= 0 and text.count(b'"') == expected and b"\\" not in text:
        return ""
    try:
        json.loads(text, object_pairs_hook=_once)
    except _Twice as error:
        return f"the JSON has the name {str(error)[:80]!r} twice in one object"
    except (ValueError, RecursionError):
        return "the JSON cannot be read"
    return ""


def _once(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise _Twice(name)
        names.add(name)
