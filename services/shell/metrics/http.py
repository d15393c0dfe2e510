"""A very small HTTP server and client for pages that are made when asked for: GET and HEAD, one request a connection."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

log = logging.getLogger(__name__)

PATIENCE = 5.0  # s for a request to come in and its page to go out
LONGEST = 8192  # bytes of a request's head
_WORDS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}
_WORDS[503] = "Service Unavailable"


class Page(NamedTuple):
    """What is answered."""

    status: int
    body: str
    type: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[str], Awaitable[Page]]]  # path to what makes it; takes the request's Accept header


async def listen(host: str, port: int, pages: Pages) -> asyncio.Server:
    """Serve these pages; raises OSError when the port cannot be had."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(PATIENCE):
                head = await reader.readuntil(b"\r\n\r\n")
                method, page = await _answer(head, pages)
                body = page.body.encode()
                lines = [
                    f"HTTP/1.1 {page.status} {_WORDS[page.status]}",
                    f"Content-Type: {page.type}",
                    f"Content-Length: {len(body)}",
                    "Cache-Control: no-store",
                    "Connection: close",
                ]
                writer.write("\r\n".join([*lines, "\r\n"]).encode() + (b"" if method == "HEAD" else body))
                await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    return await asyncio.start_server(serve, host, port, limit=LONGEST)


async def _answer(head: bytes, pages: Pages) -> tuple[str, Page]:
    first, *headers = head.split(b"\r\n")
    try:
        method, target, _ = first.decode("ascii").split(" ")
    except ValueError:
        return "", Page(400, "this is no HTTP request\n")
    make = pages.get(target.partition("?")[0])
    if make is None:
        return method, Page(404, f"there are: {' '.join(pages)}\n")
    if method not in ("GET", "HEAD"):
        return method, Page(405, "GET and HEAD only\n")
    fields = [line.decode("latin-1").partition(":") for line in headers]
    accept = ",".join(value for name, _, value in fields if name.lower() == "accept")
    try:
        return method, await make(accept)
    except Exception:
        log.exception("cannot make the page %s", target)
        return method, Page(500, "this page cannot be made; the log says why\n")


async def fetch(host: str, port: int, path: str, timeout: float) -> Page:
    """GET a page of ours; raises OSError (TimeoutError is one) when nobody answers in time."""
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(host, port, limit=2**24)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                body = (await reader.read()).decode()
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                raise ConnectionError(f"the reply on port {port} broke off") from error
        finally:
            writer.close()
    return Page(int(head.split(" ", 2)[1]), body)
