"""Requests, replies and refusals of HTTP, as the connections hand them to what answers."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from io import BytesIO
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import httptools
import msgspec

from bus.port import Buffer

MIN_COMPRESSED = 1024  # bytes of a reply below which it is not compressed
COMPRESSION_LEVEL = 1  # higher levels hardly make tensors smaller
OFF_LOOP = 64 * 2**10  # bytes above which a thread compresses

_encode = msgspec.json.Encoder().encode


class HttpProblem(Exception):
    """A request that is refused. message: a sentence for the client. status: HTTP's. code: a word for programs. headers: of the reply."""

    def __init__(
        self, message: str, status: int = 400, code: str = "bad_request", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code
        self.headers = dict(headers or {})


# -- Requests


class Endpoint(NamedTuple):
    """What answers a request that has come whole. query: nobody but its client waits for the answer."""

    call: Callable[["HttpRequest"], Awaitable["HttpReply"]]
    query: bool = False


class HttpRoute(NamedTuple):
    """What answers at a path, in which {name} stands for one step. HEAD goes with GET."""

    path: str
    endpoint: Callable[["HttpRequest"], Awaitable["HttpReply"]]
    methods: Sequence[str] = ("GET",)


class HttpRequest:
    """A request whose head has come, and in the end its body.

    target: path and query, as they came. path: decoded. headers: names in lower case; the values of a name that comes several times are joined by commas. body: all of it,
    inflated. size: bytes of it as received. stays: its connection serves more requests. began: when its head had come (time.perf_counter).
    complete: when its last byte may have come (Unix seconds). endpoint, params: of its route. foreign: a page of another origin sent it.
    peer: the connection's transport.
    more: header lines of its reply. only: the app that its token is for; "": any. reply: the refusal that needs no body. left: its client has left. held: bytes in memory for it. placed: it
    has one of the places for requests.
    """

    __slots__ = (
        "_pieces", "began", "body", "complete", "endpoint", "expects", "foreign", "headers", "held", "left", "method", "more", "only", "params",
        "path", "peer", "placed", "query", "raw_path", "reply", "secure", "size", "stays", "target", "version", "whole",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: dict[bytes, bytes],
        *,
        version: str = "1.1",
        stays: bool = True,
        secure: bool = False,
        began: float = 0.0,
        peer: Any = None,
    ) -> None:
        """Raises ValueError where the target is not ASCII."""
        self.method, self.headers, self.version, self.stays, self.secure = method, headers, version, stays, secure
        self.target, self.peer = target, peer
        self.raw_path, _, self.query = target.partition(b"#")[0].partition(b"?")
        path = self.raw_path.decode("ascii")
        self.path = unquote(path) if "%" in path else path
        self.began, self.complete = began, 0.0
        self.endpoint: Any = None
        self.params: Mapping[str, str] = {}
        self.foreign = self.left = self.whole = self.placed = False
        self.expects = headers.get(b"expect", b"").lower() == b"100-continue"
        self.more = self.body = b""
        self.only = ""
        self.size = self.held = 0
        self.reply: HttpReply | None = None
        self._pieces: BytesIO | None = None

    def header(self, name: bytes) -> str | None:
        """The value of a header, by its name in lower case."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def client(self) -> str:
        """The address that sent it."""
        return str((self.peer.get_extra_info("peername") or ("?",))[0])

    @property
    def query_params(self) -> dict[str, str]:
        """What stands behind the path; of a name that comes twice the last."""
        return dict(parse_qsl(self.query.decode("latin-1"), keep_blank_values=True))

    def add(self, piece: bytes) -> None:
        """The next part of the body. A body in one part is never copied, any other once."""
        self.size += len(piece)
        if self._pieces is None:
            if not self.body:
                self.body = piece
                return
            self._pieces = BytesIO()  # returns its bytes without a copy
            self._pieces.write(self.body)
        self._pieces.write(piece)

    def end(self) -> None:
        """All of the body has come."""
        self.whole = True
        if self._pieces is not None:
            self.body, self._pieces = self._pieces.getvalue(), None

    def forget(self) -> None:
        """Nobody needs the body."""
        self.body, self._pieces = b"", None


def fault_of(error: httptools.HttpParserError, data: bytes) -> tuple[int, str]:
    """Status and text for an error of the parser. data: the received bytes where they begin with the request in question, else empty."""
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        method = data.lstrip(b"\r\n").split(b" ", 1)[0]
        if method.isalpha() and method.isupper() and len(method) <= 32:
            return 405, "no path takes this method"
    return 400, "this is not a request of HTTP/1.1"


# -- Replies


_STATUS = {one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode() for one in HTTPStatus}
JSON = b"content-type: application/json\r\n"


class HttpReply:
    """A reply of several buffers, none of them copied. lines: of its head, each with its end. coding: "", gzip or deflate."""

    __slots__ = ("coding", "lines", "pieces", "size", "status")

    def __init__(self, pieces: Sequence[Buffer], lines: bytes, status: int = 200, coding: str = "") -> None:
        self.pieces, self.lines, self.status, self.coding = pieces, lines, status, coding
        self.size = sum(map(len, pieces))

    @property
    def text(self) -> str:
        """Its body, read as UTF-8."""
        return b"".join(self.pieces).decode()

    def head(self, more: bytes = b"") -> bytes:
        """Its bytes before the body. more: further lines."""
        return b"%s%scontent-length: %d\r\n%s\r\n" % (_STATUS[self.status], self.lines, self.size, more)

    async def packed(self) -> "HttpReply":
        """The reply in its coding, where that makes it smaller."""
        if not self.coding or self.size < MIN_COMPRESSED:
            return self
        work = self.pieces, self.coding
        data = _compress(*work) if self.size < OFF_LOOP else await asyncio.to_thread(_compress, *work)
        lines = b"%scontent-encoding: %s\r\nvary: accept-encoding\r\n" % (self.lines, self.coding.encode())
        return HttpReply([data], lines, self.status)


class JsonReply(HttpReply):
    """A reply whose body is the JSON of `content`."""

    __slots__ = ()

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in (headers or {}).items())
        super().__init__([_encode(content)], JSON + lines.encode("latin-1") if lines else JSON, status)


class TextReply(HttpReply):
    """A reply of plain text."""

    __slots__ = ()

    def __init__(self, text: str, status: int = 200) -> None:
        super().__init__([text.encode()], b"content-type: text/plain; charset=utf-8\r\n", status)


def one_coding(accepted: bytes) -> str:
    """The coding of the reply: that of the header Accept-Encoding, where it names exactly one.

    Clients that accept several get plain bytes, which are sent sooner.
    """
    coding = accepted.decode("latin-1").strip().lower()
    return coding if coding in ("gzip", "deflate") else ""


def _compress(pieces: Sequence[Buffer], coding: str) -> bytes:
    stream: Any = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    return b"".join([*map(stream.compress, pieces), stream.flush()])
