"""Asks the engine over its unix socket: one connection a request, no redirects, limits in bytes and time."""

import asyncio
from typing import NamedTuple

import h11

_PIECE = 64 * 2**10
MOST = 64 * 2**20  # bytes of an answer


class EngineAway(Exception):
    """The engine does not answer, or not as it should. The text says what happened."""


class EngineReply(NamedTuple):
    """An answer of the engine. headers: names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class EngineClient:
    """socket: path of the engine's socket. patience_s: for a whole answer."""

    def __init__(self, socket: str, patience_s: float = 10.0) -> None:
        self._socket = socket
        self._patience = patience_s

    async def ask(self, method: str, target: str, body: bytes = b"") -> EngineReply:
        """One request. body: JSON. Raises EngineAway."""
        try:
            async with asyncio.timeout(self._patience):
                return await self._ask(method, target, body)
        except TimeoutError as error:
            raise EngineAway(f"the engine did not answer within {self._patience:g} s") from error
        except h11.RemoteProtocolError as error:
            raise EngineAway(f"the engine's answer cannot be read: {error}") from error
        except OSError as error:
            raise EngineAway(f"the engine cannot be reached at {self._socket}: {error.strerror or error}") from error

    async def _ask(self, method: str, target: str, body: bytes) -> EngineReply:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            http = h11.Connection(h11.CLIENT)
            headers = [("Host", "docker"), ("User-Agent", "infaas-engine-proxy"), ("Connection", "close")]
            if body:
                headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            writer.write(http.send(h11.Request(method=method, target=target, headers=headers)) or b"")
            if body:
                writer.write(http.send(h11.Data(data=body)) or b"")
            writer.write(http.send(h11.EndOfMessage()) or b"")
            await writer.drain()
            return await _read(http, reader)
        finally:
            writer.close()


async def _read(http: h11.Connection, reader: asyncio.StreamReader) -> EngineReply:
    status, headers, body = 0, {}, bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(_PIECE))
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MOST:
                raise EngineAway(f"the engine's answer has more than {MOST} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return EngineReply(status, headers, bytes(body))
        elif not isinstance(event, h11.InformationalResponse):
            raise EngineAway("the engine closed the connection without an answer")
