"""Requests and replies around large tensors: bodies as they came, replies in pieces, compression where it was asked for."""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from bus.port import Buffer
from services.gateway.http.parts import SMALL
from services.gateway.http.weight import weigh

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
    weigh(body, head_length)
    return body


def one_coding(accepted: bytes) -> str:
    """The coding that a reply is wanted in: where the client names exactly one. Others take everything, and are spared it."""
    coding = accepted.decode("latin-1").strip().lower()
    return coding if coding in ("gzip", "deflate") else ""


class Pieces:
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
