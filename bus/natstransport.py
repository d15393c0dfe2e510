"""nats-py's TCP transport, with the received bytes handed on as they come."""

import asyncio
from collections.abc import Callable
from typing import Any

from nats.aio.transport import TcpTransport

READ_SIZE = 256 * 1024
CLOSE_S = 1.0  # a peer that takes longer to take our last bytes is dropped


class LostConnection(OSError):
    """The connection went away while something was waiting on it."""


class _Reader(asyncio.StreamReader):
    """A stream reader that can hand its bytes on as they come, instead of keeping them for `read`."""

    _sink: Callable[[bytes], None] | None = None

    def divert(self, sink: Callable[[bytes], None]) -> None:
        waiting = bytes(self._buffer)  # type: ignore[attr-defined]
        self._buffer.clear()  # type: ignore[attr-defined]
        self._sink = sink
        if waiting:
            sink(waiting)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        if self._sink is None:
            super().feed_data(data)
        else:
            self._sink(data)


class DirectTransport(TcpTransport):  # type: ignore[misc]
    """nats-py's TCP transport with our reader; it never waits long for a peer that does not read."""

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: float) -> None:
        loop = asyncio.get_running_loop()
        reader = _Reader(limit=max(buffer_size, READ_SIZE), loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        async with asyncio.timeout(connect_timeout):
            transport, _ = await loop.create_connection(lambda: protocol, uri.hostname, uri.port)
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = asyncio.StreamWriter(transport, protocol, reader, loop)

    async def connect_tls(self, uri: Any, ssl_context: Any, buffer_size: int, connect_timeout: float) -> None:
        loop = asyncio.get_running_loop()
        reader = _Reader(limit=max(buffer_size, READ_SIZE), loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        protocol._over_ssl = True  # type: ignore[attr-defined]  # over TLS there is no half-closed connection to keep
        host = uri if isinstance(uri, str) else uri.hostname
        async with asyncio.timeout(connect_timeout):
            transport = await loop.start_tls(self._io_writer.transport, protocol, ssl_context, server_hostname=host)
        if transport is None:
            raise LostConnection("the connection to NATS was lost while TLS was set up")
        self._io_reader = reader
        self._io_writer = asyncio.StreamWriter(transport, protocol, reader, loop)

    @property
    def backlog(self) -> int:
        """Bytes that the socket has not taken yet."""
        return int(self._io_writer.transport.get_write_buffer_size())

    def divert(self, sink: Callable[[bytes], None]) -> None:
        """From now on received bytes go to `sink`."""
        if isinstance(self._io_reader, _Reader):
            self._io_reader.divert(sink)

    def abort(self) -> None:
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    async def wait_closed(self) -> None:
        if self._io_writer is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._io_writer.wait_closed()
        except TimeoutError:
            self.abort()
        except OSError:
            pass  # it is closed, whatever it died of
