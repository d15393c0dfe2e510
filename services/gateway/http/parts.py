"""Small parts of a connection: its limits, its last words, a body in pieces, what a request sees of the transport."""

from http import HTTPStatus
from typing import NamedTuple, Protocol

import httptools
import msgspec

ASKING = "infaas.asking"  # in a request's scope: the task that waits for the answer to a query, and for nothing else
LEFT = "infaas.left"  # there, too: the client has left, so that task was cancelled
METHODS = "DELETE, GET, HEAD, OPTIONS, POST, PUT"


class Bounds(NamedTuple):
    """Limits of every connection. Sizes in bytes, times in seconds."""

    max_header: int = 16 * 2**10
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    connections: int = 1000


class Line(Protocol):
    """A connection, for Gate."""

    @property
    def closing(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    def close_after_reply(self) -> None: ...


SMALL = 32 * 2**10  # bytes up to which a reply's head and body leave in one piece


class Gate:
    """What a request's cycle has in place of the transport: when and how to close is the connection's business.

    A reply's head waits for what follows it, so that a small reply is one packet and one call of the kernel.
    """

    __slots__ = ("_head", "_line")

    def __init__(self, line: Line) -> None:
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


class Pieces:
    """A body as it comes: kept in pieces, and put together once (uvicorn's own is copied twice)."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def __iadd__(self, piece: bytes) -> "Pieces":
        self._pieces.append(piece)
        self._size += len(piece)
        return self

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


def named(error: httptools.HttpParserError, data: bytes) -> tuple[int, str]:
    """Status and words for what the parser did not take. data: what came, where it began with the request in question."""
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        method = data.lstrip(b"\r\n").split(b" ", 1)[0]
        if method.isalpha() and method.isupper() and len(method) <= 32:
            return 405, "no path takes this method"
    return 400, "this is no request of HTTP/1.1"


def last_words(status: int, message: str, more: str = "") -> bytes:
    """A whole reply, after which the connection is closed. more: header lines."""
    body = msgspec.json.encode({"error": message})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        more += f"Allow: {METHODS}\r\n"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
