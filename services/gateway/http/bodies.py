"""Bodies of requests and replies: JSON within limits, tensors that are not copied, compressed replies."""

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

MIN_COMPRESSED = 1024  # bytes of a reply below which it is not compressed
COMPRESSION_LEVEL = 1  # higher levels hardly make tensors smaller
OFF_LOOP = 64 * 2**10  # bytes above which a thread compresses
UNCHECKED_JSON = 2**18  # bytes of JSON that are decoded without an estimate of their memory
MAX_JSON_MEMORY = 48 * 2**20  # bytes of memory that decoded JSON may take, about
LIST, MAP, ITEM = 64, 240, 32  # bytes that each takes in CPython, about
UNKNOWN = -1

_encode = msgspec.json.Encoder().encode
_skip = msgspec.json.Decoder(msgspec.Raw).decode  # checks the whole text and keeps nothing


# -- Requests


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


def check_json_size(text: bytes, end: int | None = None) -> None:
    """Refuse JSON that would take too much memory: `[],` has three bytes as text, and sixty as an empty list.

    end: bytes of `text` that are JSON; None: all. The estimate counts brackets and commas, inside of strings too: it may be too
    high for such strings, but not by much. Raises RequestFailed: 413, or 400 where the text is not JSON.
    """
    end = len(text) if end is None else end
    if end <= UNCHECKED_JSON:
        return
    memory = LIST * text.count(b"[", 0, end)
    if memory <= MAX_JSON_MEMORY:
        memory += MAP * text.count(b"{", 0, end)
    if memory <= MAX_JSON_MEMORY:
        memory += ITEM * text.count(b",", 0, end)
    if memory > MAX_JSON_MEMORY:
        try:
            _skip(memoryview(text)[:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            raise RequestFailed(
                None, "the JSON is nested too deeply" if deep else f"the body is not JSON: {error}"
            ) from error
        raise RequestFailed(
            None,
            f"as JSON this would take more than {MAX_JSON_MEMORY // 2**20} MiB of memory: send large tensors as binary data, or in parts",
            code="too_large",
        )


class _Duplicate(ValueError):
    pass


def quotes(values: Mapping[str, Any]) -> int:
    """The number of quotation marks in the JSON of an object of scalars; UNKNOWN where it holds anything else."""
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
    """A sentence about the first name that occurs twice in one JSON object; "" when there is none.

    Readers differ in which of two values counts, so such requests are refused. expected: the number of quotation marks of a text
    without duplicates, or UNKNOWN. Only a text with another number of them, or with escapes, is parsed a second time.
    """
    if expected >= 0 and text.count(b'"') == expected and b"\\" not in text:
        return ""
    try:
        json.loads(text, object_pairs_hook=_distinct)
    except _Duplicate as error:
        return f"the JSON has the name {str(error)[:80]!r} twice in one object"
    except (ValueError, RecursionError):
        return "the JSON cannot be read"
    return ""


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise _Duplicate(name)
        names.add(name)


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
        if self.coding and size >= MIN_COMPRESSED:
            packed = (
                _compress(pieces, self.coding) if size < OFF_LOOP else await _compress_in_thread(pieces, self.coding)
            )
            pieces, size = [packed], len(packed)
            headers = [*headers, (b"content-encoding", self.coding.encode()), (b"vary", b"accept-encoding")]
        elif len(pieces) > 1 and size <= SMALL:
            pieces = [b"".join(pieces)]
        headers = [*headers, (b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        last = len(pieces) - 1
        for number, piece in enumerate(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": number < last})


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
