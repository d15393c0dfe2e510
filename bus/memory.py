"""A bus within one process. It has the semantics of NATS, without a server or a socket: `infaas.serve` runs on it.

Connections share one `Broker`. Messages published in one turn of the event loop are delivered in a later turn, in order.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bus.memorystores import MemoryConsumer, MemoryKeyValue, MemoryObjectStore, MemoryStream
from bus.port import (
    Buffer,
    BusClosed,
    BusError,
    Consumer,
    Delivery,
    DeliveryHandler,
    KeyValue,
    NoResponders,
    NotFound,
    ObjectStore,
    PayloadTooLarge,
    RequestTimeout,
    Status,
    StreamSpec,
    Subscription,
    in_pieces,
)
from bus.subjects import check_headers, check_pattern, check_subject, matches

MOST_A_TURN = 1024  # messages, until others on the loop have theirs
MOST_KNOWN = 4096  # beginnings of subjects whose hearers are known
_log = logging.getLogger("infaas.bus")


class _Published(NamedTuple):
    """A published message that is not yet delivered. If `flushed` is set, it is a marker: all messages before it have been delivered."""

    sender: "MemoryBus"
    delivery: Delivery
    flushed: "asyncio.Future[None] | None" = None


class Broker:
    """The replacement of the server. It routes messages, and keeps streams and buckets. max_payload: bytes."""

    def __init__(self, max_payload: int = 8 * 2**20) -> None:
        self.max_payload = max_payload
        self.streams: dict[str, MemoryStream] = {}
        self.buckets: dict[str, MemoryKeyValue] = {}
        self.objects: dict[str, MemoryObjectStore] = {}
        self._exact: dict[str, list[MemorySubscription]] = {}  # those without a wildcard, by subject
        self._wild: dict[str, list[MemorySubscription]] = {}  # the others, by what is before their first wildcard
        # of these, by all of a subject but its last token
        self._known: dict[str, tuple[list[MemorySubscription], bool]] = {}
        self._queue: deque[_Published] = deque()
        self._turns: dict[tuple[str, str], int] = {}
        self._scheduled = False

    def connect(self, name: str = "", *, on_error: Callable[[Exception], None] | None = None) -> "MemoryBus":
        """A new connection."""
        return MemoryBus(self, name, on_error=on_error)

    def add(self, subscription: "MemorySubscription") -> None:
        self._known.clear()
        self._of(subscription).setdefault(subscription.head, []).append(subscription)

    def remove(self, subscription: "MemorySubscription") -> None:
        """It hears nothing from now on. May be called twice."""
        self._known.clear()
        where = self._of(subscription)
        if left := [one for one in where.pop(subscription.head, ()) if one is not subscription]:
            where[subscription.head] = left

    def _of(self, subscription: "MemorySubscription") -> "dict[str, list[MemorySubscription]]":
        return self._wild if subscription.rest else self._exact

    def heard_by(self, subject: str) -> "Sequence[MemorySubscription]":
        """The subscriptions that this subject matches."""
        head = subject[: subject.rfind(".") + 1]
        wild, sure = self._known.get(head) or self._find(head)
        if not sure:
            wild = [one for one in wild if matches(one.pattern, subject)]
        exact = self._exact.get(subject)
        return wild if exact is None else [*exact, *wild] if wild else exact

    def _find(self, head: str) -> "tuple[list[MemorySubscription], bool]":
        """Those with wildcards that subjects with this head and one more token may match, and whether they all do."""
        found, end = list(self._wild.get(head, ())), len(head) - 1
        sure = all(one.rest in "*>" for one in found)
        while end > 0:
            end = head.rfind(".", 0, end)
            above = self._wild.get(head[: end + 1], ())
            sure = sure and all(one.rest == ">" for one in above)
            found += above
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        self._known[head] = found, sure
        return found, sure

    def send(self, message: _Published) -> None:
        self._queue.append(message)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        try:
            for _ in range(MOST_A_TURN):  # also what handlers say meanwhile
                if not self._queue:
                    break
                message = self._queue.popleft()
                if message.flushed is None:
                    self._route(message)
                elif not message.flushed.done():
                    message.flushed.set_result(None)
        finally:
            self._scheduled = bool(self._queue)
            if self._scheduled:
                asyncio.get_running_loop().call_soon(self._turn)

    def _route(self, message: _Published) -> None:
        delivery = message.delivery
        found = self.heard_by(delivery.subject)
        if len(found) == 1:  # most often
            found[0].take(delivery)
        else:
            self._share(found, delivery)
        heard = bool(found)
        for stream in self.streams.values():
            if stream.takes(delivery.subject):
                heard = True
                try:
                    stream.add(delivery.subject, delivery.data)
                except BusError as error:
                    message.sender.report(error)
        if not heard and delivery.reply:
            nobody = Delivery(delivery.reply, b"", status="503")
            for subscription in self.heard_by(delivery.reply):
                if subscription.owner is message.sender:
                    subscription.take(nobody)

    def _share(self, found: "Sequence[MemorySubscription]", delivery: Delivery) -> None:
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        for subscription in found:
            if subscription.queue:
                groups.setdefault((subscription.pattern, subscription.queue), []).append(subscription)
            else:
                subscription.take(delivery)
        for group, members in groups.items():
            turn = self._turns[group] = self._turns.get(group, -1) + 1
            members[turn % len(members)].take(delivery)


class MemorySubscription:
    """One subscription of one connection. head: what is before the first wildcard of its pattern; rest: that and what follows."""

    def __init__(self, owner: "MemoryBus", pattern: str, handler: DeliveryHandler, queue: str) -> None:
        self.owner = owner
        self.pattern = pattern
        self.queue = queue
        self._handler = handler
        wild = min((pattern.find(one) for one in "*>" if one in pattern), default=len(pattern))
        self.head, self.rest = pattern[:wild], pattern[wild:]

    def take(self, delivery: Delivery) -> None:
        try:
            self._handler(delivery)
        except Exception as error:
            error.add_note(f"while handling a message on {delivery.subject}")
            self.owner.report(error)

    async def drain(self) -> None:
        await self.owner.flush()
        self.owner.forget(self)


class MemoryBus:
    """One connection to a `Broker`. Without a given broker, it has its own."""

    def __init__(
        self, broker: Broker | None = None, name: str = "", *, on_error: Callable[[Exception], None] | None = None
    ) -> None:
        self.name = name
        self._broker = broker or Broker()
        self._report = on_error or log_error
        self._inbox = f"{self.new_inbox()}."
        self._waiting: dict[str, asyncio.Future[Delivery]] = {}
        self._callbacks: list[Callable[[Status], None]] = []
        self._count = 0
        self._closed = False
        self._open: set[MemorySubscription] = set()
        self._listen(f"{self._inbox}*", self._replied)

    def report(self, error: Exception) -> None:
        self._report(error)

    def forget(self, subscription: MemorySubscription) -> None:
        self._open.discard(subscription)
        self._broker.remove(subscription)

    def _listen(self, pattern: str, handler: DeliveryHandler, queue: str = "") -> MemorySubscription:
        subscription = MemorySubscription(self, pattern, handler, queue)
        self._open.add(subscription)
        self._broker.add(subscription)
        return subscription

    # ---- core

    @property
    def max_payload(self) -> int:
        return self._broker.max_payload

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
        tail: Buffer | Sequence[Buffer] = b"",
    ) -> None:
        self._usable()
        if tail or type(data) is not bytes:
            data = b"".join((data, *in_pieces(tail)))
        check_subject(subject)
        if reply:
            check_subject(reply)
        if headers:
            check_headers(headers)
        if len(data) > self.max_payload:
            raise PayloadTooLarge(f"{len(data)} bytes for {subject}; the bus takes {self.max_payload}")
        self._broker.send(_Published(self, Delivery(subject, data, reply, dict(headers) if headers else None)))

    def publish_behind(self, subject: str, data: bytes) -> None:
        self.publish(subject, data)

    async def request(
        self, subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Delivery:
        self._count += 1
        reply = f"{self._inbox}{self._count}"
        answer: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = answer
        try:
            self.publish(subject, data, reply, headers)
            async with asyncio.timeout(timeout):
                delivery = await answer
        except TimeoutError:
            raise RequestTimeout(f"no answer on {subject} within {timeout} s") from None
        finally:
            del self._waiting[reply]
        if delivery.status == "503":
            raise NoResponders(f"nobody listens on {subject}")
        return delivery

    def _replied(self, delivery: Delivery) -> None:
        answer = self._waiting.get(delivery.subject)
        if answer is not None and not answer.done():
            answer.set_result(delivery)

    async def subscribe(self, subject: str, handler: DeliveryHandler, queue: str = "") -> Subscription:
        self._usable()
        check_pattern(subject)
        if queue:
            check_subject(queue)
        return self._listen(subject, handler, queue)

    async def flush(self, timeout: float = 5.0) -> None:
        self._usable()
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._broker.send(_Published(self, Delivery("", b""), flushed))
        async with asyncio.timeout(timeout):
            await flushed

    def new_inbox(self) -> str:
        return f"_INBOX.{secrets.token_hex(11)}"

    # ---- streams and buckets

    async def publish_durable(self, subject: str, data: bytes, message_id: str, timeout: float = 5.0) -> None:
        self._usable()
        check_subject(subject)
        if len(data) > self.max_payload:
            raise PayloadTooLarge(f"{len(data)} bytes for {subject}; the bus takes {self.max_payload}")
        await self.flush(timeout)  # messages published before come first
        stream = next((stream for stream in self._broker.streams.values() if stream.takes(subject)), None)
        if stream is None:
            raise BusError(f"no stream keeps {subject}")
        stream.add(subject, bytes(data), message_id)

    async def ensure_stream(self, spec: StreamSpec) -> None:
        self._usable()
        stream = self._broker.streams.get(spec.name)
        if stream is None:
            self._broker.streams[spec.name] = MemoryStream(spec)
        else:
            stream.spec = spec

    async def consumer(self, stream: str, name: str, subject: str = ">", *, ack_wait_s: float = 30.0) -> Consumer:
        """ack_wait_s: a fetched message is delivered again if it is not acknowledged within this time."""
        self._usable()
        kept = self._broker.streams.get(stream)
        if kept is None:
            raise NotFound(f"no stream {stream}")
        if name not in kept.consumers:
            kept.consumers[name] = MemoryConsumer(kept, subject, ack_wait_s)
        return kept.consumers[name]

    async def key_value(
        self, bucket: str, *, max_age_s: float = 0.0, max_bytes: int = 0, create: bool = True
    ) -> KeyValue:
        del max_age_s, max_bytes  # nobody fills it beyond its process' memory
        self._usable()
        if bucket not in self._broker.buckets:
            if not create:
                raise NotFound(f"no bucket {bucket}")
            self._broker.buckets[bucket] = MemoryKeyValue(self._report)
        return self._broker.buckets[bucket]

    async def object_store(self, bucket: str, *, max_age_s: float = 0.0, create: bool = True) -> ObjectStore:
        self._usable()
        if bucket not in self._broker.objects:
            if not create:
                raise NotFound(f"no bucket {bucket}")
            self._broker.objects[bucket] = MemoryObjectStore(max_age_s)
        return self._broker.objects[bucket]

    # ---- life

    def on_denied(self, callback: Callable[[str], bool]) -> None:
        """Does nothing, since all subjects are allowed within one process."""

    def on_status(self, callback: Callable[[Status], None]) -> None:
        self._callbacks.append(callback)

    async def drain(self) -> None:
        if self._closed:
            return
        await self.flush()  # handles messages that were already published
        self._end_subscriptions()
        await self.flush()  # sends messages that the handlers published
        await self.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_subscriptions()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(BusClosed("the connection was closed"))
        for callback in self._callbacks:
            try:
                callback("closed")
            except Exception as error:
                self._report(error)

    def _end_subscriptions(self) -> None:
        for subscription in list(self._open):
            self.forget(subscription)

    def _usable(self) -> None:
        if self._closed:
            raise BusClosed("this connection to the bus is closed")


def log_error(error: Exception) -> None:
    """What a bus does with an error of a handler unless it is told another way."""
    _log.error("bus: %s", error, exc_info=error)
