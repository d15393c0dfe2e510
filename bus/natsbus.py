"""The bus on a NATS server: core messages here, JetStream in `natsjet` and `natsconsumers`, buckets in `natsbuckets`."""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import secrets
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Self

from bus.memory import Broker, log_error
from bus.natsbehind import Behind
from bus.natsbuckets import NatsKeyValue, NatsObjectStore
from bus.natsclient import DirectClient, LostConnection, NatsError, NatsSubscription, UnexpectedEOF
from bus.natsconsumers import PullConsumer
from bus.natsjet import JetStream, Streams
from bus.port import (
    OTHER_LOOP,
    BadLogin,
    Buffer,
    BusClosed,
    BusError,
    Consumer,
    Delivery,
    DeliveryHandler,
    Forbidden,
    KeyValue,
    NoResponders,
    ObjectStore,
    RequestTimeout,
    Status,
    StreamSpec,
    Subscription,
)

MOST_PENDING = 64 * 2**20  # bytes that may wait while the server is away
RECONNECT_S = 0.25  # between attempts to reconnect, without end
PING_S = 5  # a server that does not answer two of these counts as gone
ANONYMOUS = "_INBOX"  # prefix of inboxes whose owner is not known
_DENIED = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)
_log = logging.getLogger("infaas.bus")

# Large bodies. glibc maps fresh pages for every allocation above 128 kB, and gives them back when it is freed. So each message of 600 kB
# costs 300 page faults: 1.7 ms of CPU for an echoed message, against 0.4 ms (benches/bus_core.py --bytes 600000 --window 8).
_TRIM_THRESHOLD = -1  # mallopt's parameter numbers, malloc.h
_MMAP_THRESHOLD = -3
LARGEST_BODY = 4 * 2**20  # bytes; allocations up to this size come from the heap
KEPT_FREE = 16 * 2**20  # bytes of freed memory that the process keeps; a process without large bodies keeps none


@cache
def keep_large_buffers() -> bool:
    """Tell malloc to reuse large blocks. Returns whether it does (only glibc can).

    MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ in the environment override this.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_BODY)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_FREE))


class NatsBus:
    """A connection to NATS, made by `connect`. Call its methods only in the event loop that connected."""

    def __init__(
        self, *, on_error: Callable[[Exception], None] | None = None, max_pending_bytes: int = MOST_PENDING
    ) -> None:
        self._report = on_error or log_error
        self._client = DirectClient(self._handler_failed, self._complained, max_pending_bytes)
        self._callbacks: list[Callable[[Status], None]] = []
        self._on_denied: list[Callable[[str], bool]] = []
        self._waiting: dict[str, tuple[asyncio.Future[Delivery], str]] = {}
        self._forbidden: set[str] = set()  # subjects to which the server refused a subscription
        self._inbox = ""
        self._count = 0
        self._up = asyncio.Event()
        self._refused = asyncio.Event()
        self._last_error: Exception | None = None
        self._jet = JetStream(self, self._clustered)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        max_pending_bytes: int = MOST_PENDING,
        timeout: float = 10.0,
        inbox_prefix: str = ANONYMOUS,
        on_error: Callable[[Exception], None] | None = None,
        **options: Any,
    ) -> Self:
        """Connect to `url` (nats://user:password@host:port, several separated by commas) within `timeout` seconds.

        Raises BusError when no server answers, or when it refuses the credentials. Once connected, it reconnects without end.
        max_pending_bytes: what may wait while the server is away. options: further options of nats-py's `connect`, such as nkeys_seed.
        """
        keep_large_buffers()
        bus = cls(on_error=on_error, max_pending_bytes=max_pending_bytes)
        await bus._connect(url, name, timeout, inbox_prefix, options)
        return bus

    async def _connect(self, url: str, name: str, timeout: float, inbox_prefix: str, options: dict[str, Any]) -> None:
        self._inbox_prefix = inbox_prefix
        work = asyncio.ensure_future(
            self._client.connect(
                servers=url.split(","),
                name=name,
                error_cb=self._nats_error,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                closed_cb=self._closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_S,
                connect_timeout=2,
                ping_interval=PING_S,
                pending_size=0,
                inbox_prefix=inbox_prefix,
                **options,
            )
        )
        refused = asyncio.ensure_future(self._refused.wait())
        try:
            await asyncio.wait({work, refused}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif self._refused.is_set():
                ours = "our nkey: is it in its configuration, or revoked?" if "nkeys_seed_str" in options else ""
                raise BadLogin(f"NATS at {_public(url)} refuses {ours or 'the user or password in its URL'}")
            else:
                if isinstance(self._last_error, ssl.SSLCertVerificationError):
                    why = self._last_error.verify_message
                    raise BadLogin(f"the certificate of NATS at {_public(url)} is not trusted here: {why}")
                raise BusError(f"no NATS server answers at {_public(url)}: {_short(self._last_error)}")
        except (NatsError, ValueError) as error:
            raise BusError(f"cannot connect to NATS at {_public(url)}: {error}") from error
        finally:
            refused.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
            if not self._client.is_connected:
                await self._client.end()
                await self._client.drop()
        self._inbox = f"{self.new_inbox()}."
        self._client.listen(f"{self._inbox}*", self._replied)
        self._behind = Behind(self._client.post, self._client.listen, self.new_inbox())
        self._callbacks.append(self._behind.changed)
        self._on_denied.append(self._behind.denied)
        self._up.set()

    def _clustered(self) -> bool:
        """Whether the server is one of several, or may become that."""
        return bool(self._client._server_info.get("cluster"))

    @property
    def max_payload(self) -> int:
        return self._client._max_payload

    # ---- core

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
        tail: Buffer | Sequence[Buffer] = b"",
    ) -> None:
        self._client.post(subject, data, reply, headers, tail)

    def publish_behind(self, subject: str, data: bytes) -> None:
        self._behind.publish(subject, data, not self._clustered())

    async def request(
        self, subject: str, data: Buffer, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Delivery:
        self._count += 1
        reply = f"{self._inbox}{self._count}"
        if (loop := asyncio.get_running_loop()) is not self._client._loop:
            raise BusError(OTHER_LOOP)
        answer: asyncio.Future[Delivery] = loop.create_future()
        self._waiting[reply] = answer, subject
        timer = None
        try:
            self._client.post(subject, data, reply, headers)
            timer = loop.call_later(timeout, _expire, answer, subject, timeout)
            delivery = await answer
        finally:
            if timer is not None:
                timer.cancel()
            del self._waiting[reply]
        if delivery.status == "503":
            raise NoResponders(f"nobody listens on {subject}")
        return delivery

    def _replied(self, delivery: Delivery) -> None:
        waiting = self._waiting.get(delivery.subject)
        if waiting is not None and not waiting[0].done():
            waiting[0].set_result(delivery)

    async def subscribe(self, subject: str, handler: DeliveryHandler, queue: str = "") -> Subscription:
        self._forbidden.discard(subject)  # rights may have changed since the last refusal
        subscription = NatsSubscription(self._client, self._client.listen(subject, handler, queue), self.flush)
        with contextlib.suppress(BusError):  # disconnected: it is replayed on reconnect
            await self.flush(2.0)
        if subject in self._forbidden:
            await subscription.drain()
            self._forbidden.discard(subject)
            raise Forbidden(f"NATS does not let us hear {subject}: it is not among the rights of our credentials")
        return subscription

    async def flush(self, timeout: float = 5.0) -> None:
        try:
            async with asyncio.timeout(timeout):
                while True:
                    await self._up.wait()
                    try:
                        await self._client.ping()
                    except LostConnection:
                        continue
                    return
        except TimeoutError:
            raise BusError(f"NATS did not confirm within {timeout} s that it has everything") from None

    def listen(self, subject: str, handler: DeliveryHandler) -> Callable[[], None]:
        """Subscribe without waiting. Returns a function that ends the subscription at once. For the parts of this bus."""
        sid = self._client.listen(subject, handler)

        def stop() -> None:
            self._client.ignore(sid)
            self._client.forget(sid)

        return stop

    def report(self, error: Exception) -> None:
        """Hand an error to the callback for errors."""
        self._report(error)

    def new_inbox(self) -> str:
        return f"{self._inbox_prefix}.{secrets.token_hex(11)}"

    # ---- streams and buckets

    async def publish_durable(self, subject: str, data: bytes, message_id: str, timeout: float = 5.0) -> None:
        await self._jet.publish(subject, data, {"Nats-Msg-Id": message_id}, timeout)

    async def ensure_stream(self, spec: StreamSpec) -> None:
        await self._jet.ensure_stream(spec)

    async def consumer(self, stream: str, name: str, subject: str = ">", *, ack_wait_s: float = 30.0) -> Consumer:
        """ack_wait_s: what was fetched and not acknowledged for so long is delivered again."""
        consumer = PullConsumer(self._jet, stream, name, subject, ack_wait_s)
        await consumer.open()
        return consumer

    async def key_value(
        self, bucket: str, *, max_age_s: float = 0.0, max_bytes: int = 0, create: bool = True
    ) -> KeyValue:
        store = NatsKeyValue(self._jet, bucket)
        await store.open(max_age_s=max_age_s, max_bytes=max_bytes, create=create)
        return store

    async def object_store(self, bucket: str, *, max_age_s: float = 0.0, create: bool = True) -> ObjectStore:
        store = NatsObjectStore(self._jet, bucket)
        await store.open(max_age_s=max_age_s, create=create)
        return store

    @property
    def streams(self) -> Streams:
        """How streams and buckets are made, and copied to several servers."""
        return self._jet.streams

    # ---- life

    def on_status(self, callback: Callable[[Status], None]) -> None:
        self._callbacks.append(callback)

    def on_denied(self, callback: Callable[[str], bool]) -> None:
        self._on_denied.append(callback)

    async def drain(self) -> None:
        if self._client.is_closed:
            return
        sids = list(self._client._subs)
        for sid in sids:
            self._client.ignore(sid)
        if self._up.is_set():
            with contextlib.suppress(BusError):
                await self.flush(2.0)  # everything that was on its way is handled now
        for sid in sids:
            self._client.forget(sid)
        with contextlib.suppress(BusError):
            await self.flush(2.0)  # and what the handlers published is sent
        await self.close()

    async def close(self) -> None:
        self._jet.close()
        await self._client.end()
        for answer, _ in self._waiting.values():
            if not answer.done():
                answer.set_exception(BusClosed("the connection to NATS was closed"))

    def _complained(self, error: Exception) -> None:
        """The server reported an error. A request or subscription that it refuses fails at once."""
        denied = _DENIED.search(str(error))
        heard = False
        if denied is not None:
            what, subject = denied[1].lower(), denied[2]
            if what == "subscription":
                self._forbidden.add(subject)
                heard = not subject.startswith(self._inbox_prefix)
            else:
                for callback in self._on_denied:
                    heard |= callback(subject)
            for answer, asked in self._waiting.values():
                if what == "publish" and asked == subject and not answer.done():
                    heard = True
                    answer.set_exception(
                        Forbidden(f"NATS does not let us publish on {subject}: it is not among our rights")
                    )
        if not heard:
            self._report(error)

    def _tell(self, status: Status) -> None:
        for callback in self._callbacks:
            try:
                callback(status)
            except Exception as error:
                self._report(error)

    async def _nats_error(self, error: Exception) -> None:
        self._last_error = error
        if "authorization violation" in str(error).lower():
            self._refused.set()
        elif not isinstance(error, OSError | UnexpectedEOF | TimeoutError):
            self._report(error)

    async def _disconnected(self) -> None:
        if self._up.is_set():
            self._up.clear()
            if not self._client.is_closed:
                self._tell("disconnected")
        self._client.lose_waiting()

    async def _reconnected(self) -> None:
        self._up.set()
        self._tell("reconnected")
        self._jet.reconnected()

    async def _closed(self) -> None:
        self._tell("closed")

    def _handler_failed(self, subject: str, error: Exception) -> None:
        error.add_note(f"while handling a message on {subject}")
        self._report(error)


class LocalFirstBus(NatsBus):
    """A connection to NATS. What this process says to a hearer of its own does not cross the server, where one hearer is enough.

    That is so of inboxes of its own, and of subjects that begin with one of `alone`. All else goes over NATS, and what others say comes from there.
    """

    def __init__(
        self,
        *,
        on_error: Callable[[Exception], None] | None = None,
        max_pending_bytes: int = MOST_PENDING,
    ) -> None:
        super().__init__(on_error=on_error, max_pending_bytes=max_pending_bytes)
        self.alone: tuple[str, ...] = ()
        self._broker = Broker()
        self._here = self._broker.connect(on_error=self._report)

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
        tail: Buffer | Sequence[Buffer] = b"",
    ) -> None:
        if self._broker.heard_by(subject):
            self._broker.max_payload = self.max_payload
            self._here.publish(subject, data, reply, headers, tail)
        else:
            super().publish(subject, data, reply, headers, tail)

    async def subscribe(self, subject: str, handler: DeliveryHandler, queue: str = "") -> Subscription:
        there = await super().subscribe(subject, handler, queue)
        if not subject.startswith((f"{self._inbox_prefix}.", *self.alone)):
            return there
        return _Twice(there, await self._here.subscribe(subject, handler, queue))

    async def drain(self) -> None:
        await self._here.drain()
        await super().drain()

    async def close(self) -> None:
        await self._here.close()
        await super().close()


class _Twice(NamedTuple):
    """A subscription at the server and in this process."""

    there: Subscription
    here: Subscription

    async def drain(self) -> None:
        for one in self:
            await one.drain()


def _expire(answer: "asyncio.Future[Delivery]", subject: str, timeout: float) -> None:
    if not answer.done():
        answer.set_exception(RequestTimeout(f"no answer on {subject} within {timeout} s"))


def _short(error: Exception | None) -> str:
    """Why no connection was made, in words."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    return str(error or "") or "timed out"


def _public(url: str) -> str:
    """The URL without user and password."""
    return ",".join(part.rpartition("@")[2].rpartition("//")[2] for part in url.split(","))
