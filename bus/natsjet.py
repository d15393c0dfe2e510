"""JetStream over core requests: its JSON API, durable publishing, streams and pull consumers.

API: https://docs.nats.io/reference/reference-protocols/nats_api_reference. Error codes: the server's errors.json.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from bus.port import BusError, Delivery, NoResponders, NotFound, RequestTimeout, Stored, StreamSpec

NANO = 1_000_000_000
API_S = 5.0
DUPLICATE_WINDOW_S = 600.0  # a message id is remembered so long; beyond it the reader has to know ids itself

NO_CONSUMER = 10014
NO_MESSAGE = 10037
STREAM_EXISTS = 10058  # with another configuration
NO_STREAM = 10059
WRONG_SEQUENCE = (10071, 10164)


class JetError(BusError):
    """JetStream said no. code: the server's own error code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Requests(Protocol):
    """What JetStream needs of a bus."""

    def publish(self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> None: ...
    async def request(
        self, subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Delivery: ...
    def new_inbox(self) -> str: ...
    def listen(self, subject: str, handler: Callable[[Delivery], None]) -> Callable[[], None]:
        """Subscribe at once; returns what ends it at once."""


class JetStream:
    """The JetStream of one connection."""

    def __init__(self, bus: Requests) -> None:
        self.bus = bus
        self.closed = False
        self._on_reconnect: set[Callable[[], None]] = set()

    # ---- life: push consumers have to be made again after a reconnect

    def close(self) -> None:
        self.closed = True
        self._on_reconnect.clear()

    def reconnected(self) -> None:
        for callback in list(self._on_reconnect):
            callback()

    def follow(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after every reconnect; returns what ends that."""
        self._on_reconnect.add(callback)
        return lambda: self._on_reconnect.discard(callback)

    # ---- requests

    async def call(self, verb: str, body: Any = None, timeout: float = API_S) -> dict[str, Any]:
        """One API request. Raises NotFound (stream, consumer or message), JetError, BusError."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            reply = await self.bus.request(f"$JS.API.{verb}", data, timeout)
        except NoResponders:
            raise BusError("this NATS server has no JetStream, or it is not ready yet") from None
        return _result(reply.data)

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, timeout: float = API_S
    ) -> int:
        """Publish and wait until a stream has it; returns its sequence number there."""
        try:
            reply = await self.bus.request(subject, data, timeout, headers)
        except NoResponders:
            raise BusError(f"no stream keeps {subject}") from None
        return int(_result(reply.data)["seq"])

    async def last_message(self, stream: str, subject: str) -> tuple[int, bytes, str]:
        """Sequence, body and raw headers of the last message on `subject`. Raises NotFound."""
        answer = await self.call(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
        message = msgspec.convert(answer["message"], _Message)
        return message.seq, message.data, message.hdrs.decode("utf-8", "replace")

    # ---- streams

    async def stream_info(self, stream: str) -> dict[str, Any]:
        return await self.call(f"STREAM.INFO.{stream}")

    async def create_stream(self, config: dict[str, Any], update: tuple[str, ...] = ()) -> None:
        """Make sure the stream exists; where it does with another configuration, the keys in `update` are brought in line."""
        name = config["name"]
        try:
            await self.call(f"STREAM.CREATE.{name}", config)
        except JetError as error:
            if error.code != STREAM_EXISTS:
                raise
            present = (await self.stream_info(name))["config"]
            if any(present.get(key) != config.get(key) for key in update):
                await self.call(f"STREAM.UPDATE.{name}", present | {key: config[key] for key in update})

    async def ensure_stream(self, spec: StreamSpec) -> None:
        window = min(DUPLICATE_WINDOW_S, spec.max_age_s) if spec.max_age_s else DUPLICATE_WINDOW_S
        config = {
            "name": spec.name,
            "subjects": list(spec.subjects),
            "retention": "workqueue" if spec.retention == "work" else "limits",
            "max_bytes": spec.max_bytes,
            "max_age": int(spec.max_age_s * NANO),
            "discard": "new" if spec.full == "refuse" else "old",
            "storage": "memory" if spec.memory else "file",
            "num_replicas": 1,
            "max_consumers": -1,
            "max_msgs": -1,
            "duplicate_window": int(window * NANO),
            "allow_direct": True,
        }
        changeable = ("subjects", "max_bytes", "max_age", "discard", "duplicate_window", "retention", "storage")
        await self.create_stream(config, changeable)

    async def create_consumer(self, stream: str, config: dict[str, Any]) -> dict[str, Any]:
        """Create a consumer, or confirm that it is there; returns its info."""
        verb = f"CONSUMER.CREATE.{stream}.{config['name']}"
        if config.get("filter_subject"):
            verb = f"{verb}.{config['filter_subject']}"
        return await self.call(verb, {"stream_name": stream, "config": config})


class _Message(msgspec.Struct):
    seq: int
    data: bytes = b""  # base64 in JSON
    hdrs: bytes = b""


def _result(data: bytes) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        raise BusError("JetStream's answer is not understood") from None
    error = answer.get("error")
    if error:
        code = int(error.get("err_code", 0))
        text = str(error.get("description", "unknown error"))
        if code in (NO_CONSUMER, NO_MESSAGE, NO_STREAM):
            raise NotFound(text)
        raise JetError(f"JetStream: {text}", code)
    return answer


class Position:
    """Where a consumed message stands, as its acknowledgement subject tells."""

    __slots__ = ("consumer", "deliveries", "pending", "stream")

    def __init__(self, reply: str) -> None:
        # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>, since 2.? also with
        # <domain>.<account> in front of the stream and a token behind
        tokens = reply.split(".")
        at = 4 if len(tokens) == 9 else 6
        self.deliveries = int(tokens[at])
        self.stream = int(tokens[at + 1])
        self.consumer = int(tokens[at + 2])
        self.pending = int(tokens[at + 4])


class NatsStored:
    """One message fetched from a stream."""

    def __init__(self, bus: Requests, delivery: Delivery) -> None:
        self._bus = bus
        self._reply = delivery.reply
        self.subject = delivery.subject
        self.data = delivery.data
        self.message_id = (delivery.headers or {}).get("Nats-Msg-Id", "")
        self.deliveries = Position(delivery.reply).deliveries

    async def ack(self) -> None:
        self._bus.publish(self._reply, b"+ACK")

    async def nak(self, delay: float) -> None:
        self._bus.publish(self._reply, b"-NAK " + msgspec.json.encode({"delay": int(delay * NANO)}))


class Puller:
    """Pull requests to one consumer: what came goes to `take`, which may be called until the subscription ends."""

    def __init__(self, jet: JetStream, stream: str, name: str) -> None:
        self._bus = jet.bus
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        self._inbox = jet.bus.new_inbox()
        self.arrived: deque[Delivery] = deque()
        self._wake: asyncio.Future[str] | None = None
        self._wanted = 0
        self._ignore = jet.bus.listen(self._inbox, self._take)
        self._unfollow = jet.follow(lambda: self._end("lost"))

    def stop(self) -> None:
        self._ignore()
        self._unfollow()

    def _take(self, delivery: Delivery) -> None:
        if delivery.status:
            if delivery.status != "100":
                self._end(delivery.status)
        elif delivery.reply:
            self.arrived.append(delivery)
            self._wanted -= 1
            if self._wanted <= 0:
                self._end("")

    def _end(self, status: str) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(status)

    async def pull(self, most: int, wait: float) -> str:
        """Ask for `most` messages. Returns "" when so many came, else the status that ended it.

        "404": there is none, "408": time is up, "503": no such consumer now, "lost": the connection was made anew.

        wait 0: only what is there already.
        """
        self._wanted = most
        self._wake = asyncio.get_running_loop().create_future()
        body: dict[str, Any] = {"batch": most}
        if wait > 0:
            body["expires"] = int(wait * NANO)
        else:
            body["no_wait"] = True
        self._bus.publish(self._next, msgspec.json.encode(body), reply=self._inbox)
        try:
            async with asyncio.timeout(wait + 1.0 if wait > 0 else 2.0):
                return await self._wake
        except TimeoutError:
            return "408"  # the request or its end got lost, with the connection
        finally:
            self._wake = None


class PullConsumer:
    """A durable consumer with explicit acknowledgement; everyone who opens the same name shares its messages."""

    def __init__(self, jet: JetStream, stream: str, name: str, subject: str, ack_wait_s: float) -> None:
        self._jet = jet
        self._stream = stream
        self._config: dict[str, Any] = {
            "name": name,
            "durable_name": name,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(ack_wait_s * NANO),
            "max_deliver": -1,
            "max_ack_pending": 10_000,
        }
        if subject != ">":
            self._config["filter_subject"] = subject
        self._puller: Puller | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        await self._jet.create_consumer(self._stream, self._config)

    async def fetch(self, most: int, timeout: float) -> list[Stored]:
        async with self._lock:
            if self._puller is None:
                self._puller = Puller(self._jet, self._stream, self._config["name"])
            puller = self._puller
            loop = asyncio.get_running_loop()
            end = loop.time() + timeout
            status = await self._pull(puller, most, 0.0)
            while not puller.arrived:
                left = end - loop.time()
                if left <= 0.001:
                    return []
                if status not in ("", "404", "408", "lost"):  # the consumer is away: the server restarts, or lost it
                    await asyncio.sleep(min(0.2, left))
                    await self._reopen()
                status = await self._pull(puller, 1, min(left, 30.0))
                if puller.arrived and most > 1:
                    await self._pull(puller, most - 1, 0.0)
            bus = self._jet.bus
            batch: list[Stored] = []
            while puller.arrived and len(batch) < most:
                batch.append(NatsStored(bus, puller.arrived.popleft()))
            return batch

    async def _pull(self, puller: Puller, most: int, wait: float) -> str:
        try:
            return await puller.pull(most, wait)
        except BusError:
            if self._jet.closed:
                raise
            return "503"

    async def _reopen(self) -> None:
        try:
            await self.open()
        except (RequestTimeout, NotFound, JetError, BusError):
            if self._jet.closed:
                raise
