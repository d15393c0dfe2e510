"""Pages of a process, served to GET and HEAD; and a client for them and for the engine, of one request a connection."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import httptools
from msgspec.structs import replace

from services.core.settings import GatewaySettings
from services.shell.http.handler import HttpHandler
from services.shell.http.messages import Endpoint, HttpProblem, HttpReply, HttpRequest, JsonReply, TextReply
from services.shell.http.server import HttpServer

log = logging.getLogger(__name__)

# a head of 16 KiB and a body of 64 KiB, in 5 s each
LIMITS = GatewaySettings(
    max_body=64 * 2**10, head_timeout_s=5.0, body_timeout_s=5.0, idle_timeout_s=10.0, connections=64
)
Pages = Mapping[str, Callable[[str], Awaitable[HttpReply]]]  # path to what makes it; takes the request's Accept header
NO_STORE = b"cache-control: no-store\r\n"
_PIECE = 64 * 2**10
MOST = 64 * 2**20  # bytes of an answer


class _Pages(HttpHandler):
    def __init__(self, pages: Pages) -> None:
        super().__init__(LIMITS)
        self._pages = pages

    def check(self, request: HttpRequest) -> None:
        request.stays, request.more = False, NO_STORE
        make = self._pages.get(request.path)
        if make is None:
            raise HttpProblem(f"there are: {' '.join(self._pages)}", 404)
        if request.method not in ("GET", "HEAD"):
            raise HttpProblem("GET and HEAD only", 405)
        request.endpoint = Endpoint(lambda request: make(request.header(b"accept") or ""))

    def failed(self, request: HttpRequest, error: Exception) -> HttpReply:
        if not isinstance(error, HttpProblem):
            log.error("cannot make the page %s", request.path, exc_info=error)
            error = HttpProblem("this page cannot be made; the log says why", 500)
        return TextReply(f"{error}\n", error.status)


async def serve_pages(host: str, port: int, pages: Pages) -> HttpServer:
    """Serve these pages; returns what to close. Raises OSError when the port cannot be had."""
    server = HttpServer(_Pages(pages), replace(LIMITS, address=host, port=port), of="metrics")
    await server.open()
    return server


def state_page(what: str, missing: list[str]) -> HttpReply:
    """Whether a process is `what` (200), or what it lacks for that (503), as JSON."""
    return JsonReply({what: not missing, "missing": missing}, 503 if missing else 200)


# -- the client


class BadAnswer(ConnectionError):
    """An answer that cannot be used; the text says why."""


class HttpAnswer:
    """What was answered. headers: names in lower case; several of a name: the last."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.whole = False
        self._parser = httptools.HttpResponseParser(self)

    @property
    def text(self) -> str:
        """The body, read as UTF-8."""
        return self.body.decode()

    async def read(self, reader: asyncio.StreamReader, *, head: bool) -> None:
        """head: no body follows. Raises BadAnswer, OSError."""
        came = 0
        try:
            while not self.whole and not (head and self.status):
                data = await reader.read(_PIECE)
                if not data:
                    if self.status and not {"content-length", "transfer-encoding"} & set(self.headers):
                        return  # the end of the connection is that of the body
                    raise BadAnswer("the answer broke off")
                came += len(data)
                if came > MOST:
                    raise BadAnswer(f"the answer has more than {MOST} bytes")
                self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BadAnswer(f"the answer cannot be read: {error}") from error

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole = self.status > 0


async def ask(
    opening: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    method: str,
    target: str,
    host: str,
    body: bytes = b"",
) -> HttpAnswer:
    """One request on a connection of its own. body: JSON. Raises BadAnswer, OSError."""
    reader, writer = await opening
    try:
        said = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: infaas\r\nConnection: close\r\n{said}\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        answer = HttpAnswer()
        await answer.read(reader, head=method == "HEAD")
        return answer
    finally:
        writer.close()


async def fetch(host: str, port: int, path: str, timeout: float) -> HttpAnswer:
    """GET a page of ours; raises OSError (TimeoutError is one) when nobody answers in time."""
    async with asyncio.timeout(timeout):
        return await ask(asyncio.open_connection(host, port), "GET", path, f"{host}:{port}")
