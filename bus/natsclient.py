"""nats-py's client with a direct path for messages: no Msg object, queue, task or coroutine for each message.

nats-py connects, authenticates, sets up TLS, discovers servers, reconnects, and replays subscriptions. Here, bytes go from the
transport straight into `natsparser`, and from there into plain handlers. Publishing appends to nats-py's buffer of pending commands, which
is written once in each turn of the event loop. An echoed message costs 4.4 µs of CPU so, and 11.7 µs with nats-py's own reading and
writing (benches/bus_core.py, beside other work); a whole query costs 45 µs.

Overridden or used beyond nats-py's public interface (pinned to nats-py 2.16; tests/contract/test_bus_nats.py fails when one of these
changes): `_connect_to_server`, `_read_loop`, `_send_ping`, `_process_err`, `_pending`, `_pending_data_size`, `_pongs`, `_subs`, `_status`,
`_process_info`, `_process_op_err`, `_ps`.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from msgspec import Struct

# nats-py loads aiohttp for WebSockets, where that is installed: 8 MB and 0.15 s in every process. So we do when such a server is named.
if not_loaded := "aiohttp" not in sys.modules:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
from nats import errors
from nats.aio import transport as nats_transport
from nats.aio.client import Client
from nats.aio.subscription import Subscription

if not_loaded:
    del sys.modules["aiohttp"]

from bus.natsparser import Parser, ProtocolViolation, write_headers
from bus.port import Buffer, BusClosed, BusError, DeliveryHandler, PayloadTooLarge, in_pieces
from bus.subjects import check_pattern, check_subject

NatsError, UnexpectedEOF = errors.Error, errors.UnexpectedEOF  # for modules that must not load nats-py before this one
READ_SIZE = 256 * 1024
CLOSE_S = 1.0  # a peer that takes longer to take our last bytes is dropped


class LostConnection(OSError):
    """The connection went away while something was waiting on it."""


class DirectTransport(nats_transport.TcpTransport):  # type: ignore[misc]
    """nats-py's TCP transport, which can pass bytes on as they come. It never waits long for a peer that does not read."""

    async def connect_tls(self, uri: Any, ssl_context: Any, buffer_size: int, connect_timeout: float) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        if self._io_writer.transport is None:
            raise LostConnection("the connection to NATS was lost while TLS was set up")
        self._io_writer._protocol._over_ssl = True  # over TLS there is no half-closed connection to keep

    @property
    def backlog(self) -> int:
        """Bytes that the socket has not taken yet."""
        return int(self._io_writer.transport.get_write_buffer_size())

    def divert(self, sink: Callable[[bytes], None]) -> None:
        """From now on received bytes go to `sink`, not into the stream reader."""
        waiting = bytes(self._io_reader._buffer)
        self._io_reader._buffer.clear()
        self._io_reader.feed_data = sink
        if waiting:
            sink(waiting)

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
            pass  # it is closed, for whatever reason


WRITE_AT = 64 * 1024  # pending bytes that are written at once, without waiting for the end of the turn
BACKLOG = 1024 * 1024  # while more bytes than this wait in the socket, new ones stay in the bounded buffer


class DirectClient(Client):  # type: ignore[misc]
    """A NATS connection whose subscriptions call plain functions.

    on_fault(subject, error): a handler raised. on_trouble(error): the server complained (a permission, a protocol error).
    """

    _pending: list[Buffer]
    _pending_data_size: int
    _max_payload: int

    def __init__(
        self, on_fault: Callable[[str, Exception], None], on_trouble: Callable[[Exception], None], most_pending: int
    ) -> None:
        super().__init__()
        self._handlers: dict[str, DeliveryHandler] = {}
        self._on_trouble = on_trouble
        self._most_pending = most_pending
        self._kicked = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._ps = Parser(self._handlers, on_fault, self._pong_back, self._ponged, self._informed, self._complained)

    # ---- receiving

    async def _connect_to_server(self, s: Any) -> None:
        if s.uri.scheme not in ("nats", "tls"):
            with contextlib.suppress(ImportError):  # nats-py says so
                nats_transport.aiohttp, nats_transport.multidict = map(import_module, ("aiohttp", "multidict"))
            await super()._connect_to_server(s)
            return
        s.last_attempt = time.monotonic()
        await self.drop()  # what is left of the attempt before
        transport = DirectTransport()
        await transport.connect(s.uri, READ_SIZE, self.options["connect_timeout"])
        self._transport = transport

    async def _read_loop(self) -> None:
        transport = self._transport
        try:
            if isinstance(transport, DirectTransport):
                transport.divert(self._feed)
            while True:
                data = await transport.read(READ_SIZE)
                if not data:
                    raise LostConnection("the NATS server closed the connection")
                self._feed(data)
        except OSError as error:
            await self._process_op_err(error)

    def _feed(self, data: bytes) -> None:
        try:
            self._ps.feed(data)
        except ProtocolViolation as error:
            self._ps.reset()
            self._on_trouble(error)
            self._spawn(self._process_op_err(error))

    def _pong_back(self) -> None:
        self._append(b"PONG\r\n")

    def _ponged(self) -> None:
        self._pings_outstanding = 0
        if self._pongs:
            waiting = self._pongs.pop(0)
            if not waiting.done():
                waiting.set_result(True)

    def _informed(self, info: dict[str, Any]) -> None:
        self._max_payload = info.get("max_payload", self._max_payload)
        self._spawn(self._process_info(info))

    def _complained(self, text: str) -> None:
        """-ERR. nats-py closes for good on most of these. A service must reconnect instead."""
        error = BusError(f"NATS: {text}")
        self._on_trouble(error)
        if "permissions violation" not in text.lower() and "invalid subject" not in text.lower():
            self._spawn(self._process_op_err(error))

    def _connect_command(self) -> bytes:
        """Refuse a server without TLS if TLS is set up, before any credentials are sent: it may not be ours."""
        if self.options.get("tls") is not None and not self._server_info.get("tls_required"):
            raise errors.Error("this server speaks no TLS, although a certificate authority is configured for it")
        command: bytes = super()._connect_command()
        return command

    async def _process_err(self, err_msg: str) -> None:
        self._complained(err_msg)

    def lose_waiting(self) -> None:
        """Fail everything that waits for a PONG of a connection that is gone."""
        for waiting in self._pongs:
            if not waiting.done():
                waiting.set_exception(LostConnection("the connection to NATS was lost"))
                waiting.exception()  # nobody waits for the PONG of a keep-alive
        self._pongs.clear()

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- subscribing

    def listen(self, subject: str, handler: DeliveryHandler, queue: str = "") -> int:
        """Subscribe; returns the subscription's id. It is replayed after every reconnect."""
        check_pattern(subject)
        if queue:
            check_subject(queue)
        self._usable()
        self._sid += 1
        sid: int = self._sid
        self._handlers[str(sid)] = handler
        self._subs[sid] = Subscription(self, sid, subject, queue=queue)
        self._append(f"SUB {subject} {queue} {sid}\r\n".encode())
        return sid

    def ignore(self, sid: int) -> None:
        """Ask the server for nothing more. What is on its way is still handled, until `forget`."""
        if self._subs.pop(sid, None) is not None and not self.is_closed:
            self._append(f"UNSUB {sid}\r\n".encode())

    def forget(self, sid: int) -> None:
        self._handlers.pop(str(sid), None)

    # ---- publishing

    def post(
        self,
        subject: str,
        data: Buffer,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
        tail: Buffer | Sequence[Buffer] = b"",
    ) -> None:
        """Publish without waiting. Raises PayloadTooLarge, BusClosed, BusError (a bad subject; the buffer is full)."""
        check_subject(subject)
        size = len(data)
        pieces: Sequence[Buffer] = ()
        if tail:
            pieces = in_pieces(tail)
            size += sum(map(len, pieces))
        if headers is None:
            if reply:
                check_subject(reply)
                head = f"PUB {subject} {reply} {size}\r\n".encode()
            else:
                head = f"PUB {subject} {size}\r\n".encode()
        else:
            if reply:
                check_subject(reply)
            block = write_headers(headers)
            size += len(block)
            head = f"HPUB {subject} {reply} {len(block)} {size}\r\n".encode() + block
        if size > self._max_payload:
            raise PayloadTooLarge(f"{size} bytes for {subject}; the server takes {self._max_payload}")
        if self._status != Client.CONNECTED:
            self._usable()
        waiting = self._pending_data_size + size + len(head)
        if waiting > self._most_pending:
            raise BusError(
                f"{self._pending_data_size} bytes wait to be sent to NATS already; it does not keep up, or is away"
            )
        pending = self._pending
        pending.append(head)
        pending.append(data)
        if pieces:
            pending.extend(pieces)
        pending.append(b"\r\n")
        self._pending_data_size = waiting + 2
        if waiting > WRITE_AT:
            self._write_out()
        elif not self._kicked:
            self._kicked = True
            self._loop.call_soon(self._write_out)

    def _append(self, command: bytes) -> None:
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self._kicked:
            self._kicked = True
            self._loop.call_soon(self._write_out)

    def _write_out(self) -> None:
        """Write what is pending to the socket. While disconnected, or while the socket is behind, it stays where it is."""
        self._kicked = False
        pending = self._pending
        if not pending or not self.is_connected or self._transport is None:
            return
        transport = self._transport
        if isinstance(transport, DirectTransport) and transport.backlog > BACKLOG:
            self._kicked = True
            self._loop.call_later(0.001, self._write_out)
            return
        size = self._pending_data_size
        self._pending = []
        self._pending_data_size = 0
        if size > 4096 * len(pending):
            transport.writelines(pending)  # copies large bodies no further time
        else:
            transport.write(b"".join(pending))

    async def _send_ping(self, future: "asyncio.Future[Any] | None" = None) -> None:
        """Send PING behind everything published before (nats-py sends it ahead), so that its PONG means that all has arrived."""
        self._pongs.append(self._loop.create_future() if future is None else future)
        self._append(b"PING\r\n")
        self._write_out()

    def ping(self) -> "asyncio.Future[Any]":
        """A future that is done once the server has read everything published so far. It fails with LostConnection."""
        self._usable()
        future = self._loop.create_future()
        self._pongs.append(future)
        self._append(b"PING\r\n")
        return future

    async def end(self) -> None:
        """Send what is pending if the server takes it within CLOSE_S, then close for good."""
        if self.is_closed or self._flush_queue is None:  # never connected: nothing to close
            return
        transport = self._transport
        if isinstance(transport, DirectTransport) and self.is_connected:
            until = self._loop.time() + CLOSE_S
            self._write_out()
            while (self._pending or transport.backlog) and self.is_connected and self._loop.time() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            if self._pending or transport.backlog:
                transport.abort()
        self._pending = []
        self._pending_data_size = 0
        await self.close()

    async def drop(self) -> None:
        """Close the connection at once, in whatever state it is."""
        transport = self._transport
        if isinstance(transport, DirectTransport):
            transport.abort()
            await asyncio.sleep(0)  # it is closed in the next turn

    def _usable(self) -> None:
        if self.is_closed:
            raise BusClosed("the connection to NATS is closed")


class NatsSubscription(Struct, eq=False):
    """One subscription on the server."""

    client: DirectClient
    sid: int
    flush: Callable[[float], Awaitable[None]]

    async def drain(self) -> None:
        self.client.ignore(self.sid)
        with contextlib.suppress(BusError):  # disconnected: nothing can be on its way
            await self.flush(2.0)
        self.client.forget(self.sid)
