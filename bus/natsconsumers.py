"""Reading a JetStream stream: durable consumers that fetch by pull requests, and ordered readers that get everything in order."""

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bus.natsjet import NANO, JetStream, Requests
from bus.port import BusClosed, BusError, Delivery, Stored

LEAST_WAIT_S = 0.02  # for what is there already
_log = logging.getLogger("infaas.bus")


class StreamPosition:
    """The position of a consumed message, by its acknowledgement subject.

    stream, consumer: sequence numbers. deliveries: how often it was delivered. pending: how many messages are behind it.
    """

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
        self.deliveries = StreamPosition(delivery.reply).deliveries

    async def ack(self) -> None:
        self._bus.publish(self._reply, b"+ACK")

    async def nak(self, delay: float) -> None:
        self._bus.publish(self._reply, b"-NAK " + msgspec.json.encode({"delay": int(delay * NANO)}))

    async def extend(self) -> None:
        self._bus.publish(self._reply, b"+WPI")


class Puller:
    """Pull requests to one consumer. `on_message` gets each message, even one that comes late."""

    def __init__(self, jet: JetStream, stream: str, name: str, on_message: Callable[[Delivery], None]) -> None:
        self._jet = jet
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        self._on_message = on_message
        self._inbox = jet.bus.new_inbox()
        self._count = 0
        self._reply = ""
        self._wanted = 0
        self._ended: asyncio.Future[str] | None = None
        self._ignore = jet.bus.listen(f"{self._inbox}.*", self._take)
        jet.on_reconnect.add(self._lost)

    def stop(self) -> None:
        self._ignore()
        self._jet.on_reconnect.discard(self._lost)

    def _lost(self) -> None:
        self.end("lost")

    def _take(self, delivery: Delivery) -> None:
        if delivery.status:  # these come on the request's own inbox, messages on their subject in the stream
            if delivery.status != "100" and delivery.subject == self._reply:
                self.end(delivery.status)
        elif delivery.reply:
            self._wanted -= 1
            try:
                self._on_message(delivery)
            finally:
                if self._wanted <= 0:
                    self.end("")

    def end(self, status: str) -> None:
        """End the request that is under way."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(status)

    async def pull(self, most: int, wait: float) -> str:
        """Ask for `most` messages. Returns "" when so many came, else the status that ended it.

        "404": there is none, "408": time is up, "503": no such consumer now, "lost": the connection was made anew, or closed.
        wait 0: only what is there already.
        """
        if self._jet.closed:
            raise BusClosed("the connection to NATS is closed")
        self._wanted = most
        self._count += 1
        self._reply = f"{self._inbox}.{self._count}"
        self._ended = asyncio.get_running_loop().create_future()
        body = {"batch": most, "expires": int(wait * NANO)} if wait > 0 else {"batch": most, "no_wait": True}
        try:
            self._jet.bus.publish(self._next, msgspec.json.encode(body), reply=self._reply)
            async with asyncio.timeout(wait + 1.0):
                return await self._ended
        except TimeoutError:
            return "408"  # the request or its end got lost, with the connection
        except BusClosed:
            raise
        except BusError:  # too much waits to be sent
            return "503"


class PullConsumer:
    """A durable consumer with explicit acknowledgement. All that open the same name share its messages.

    Not nats-py's: a fetch under way when the server restarts gets nothing until its time is up (30 s of 30), and raises.
    """

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
        self._arrived: deque[Delivery] = deque()
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        await self._jet.create_consumer(self._stream, self._config)

    async def fetch(self, most: int, timeout: float) -> list[Stored]:
        async with self._lock:
            if self._puller is None:
                self._puller = Puller(self._jet, self._stream, self._config["name"], self._arrived.append)
            arrived = self._arrived
            if len(arrived) < most:
                timeout = max(timeout, LEAST_WAIT_S)
                try:
                    async with asyncio.timeout(timeout):
                        await self._wait(self._puller, most, asyncio.get_running_loop().time() + timeout)
                except TimeoutError:
                    pass
            bus = self._jet.bus
            return [NatsStored(bus, arrived.popleft()) for _ in range(min(most, len(arrived)))]

    async def _wait(self, puller: Puller, most: int, end: float) -> None:
        """Wait until something has arrived: first ask for what is there, then for the next message and what came with it."""
        loop = asyncio.get_running_loop()
        status = await puller.pull(most - len(self._arrived), 0.0)
        while not self._arrived:
            if status not in ("", "404", "408", "lost"):  # the consumer is away: the server restarts, or lost it
                await asyncio.sleep(0.2)
                await self._reopen()
            # No longer than this fetch lasts: what comes later belongs to the next fetch.
            status = await puller.pull(1, max(end - loop.time(), 0.001))
            if self._arrived and most > 1:
                await puller.pull(most - 1, 0.0)

    async def _reopen(self) -> None:
        try:
            await self.open()
        except BusClosed:
            raise
        except BusError as error:
            _log.debug("consumer %s of %s: %s", self._config["name"], self._stream, error)


# Messages of one pull request. The server keeps the buffers of as many messages as it ever had under way at once, and each becomes as large as
# the largest message, a chunk of a file: with 256 they take 33 MB.
ROUND = 32
WAIT_S = 5.0  # of one pull request: so long it goes unnoticed that a consumer went away with its server
RETRY_S = 0.25
SILENT_S = 20.0  # after which the next message of what is to be read does not come any more
_INACTIVE_S = 30.0


async def passing_consumer(jet: JetStream, stream: str, subject: str, config: dict[str, Any]) -> tuple[str, int]:
    """Make a consumer in the server's memory, without acknowledgements. Returns its name, and how many messages wait for it."""
    name = secrets.token_hex(11)
    whole = {
        "name": name,
        "ack_policy": "none",
        "max_deliver": 1,
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": int(_INACTIVE_S * NANO),
        "filter_subject": subject,
    }
    info = await jet.create_consumer(stream, whole | config)
    return name, int(info["num_pending"])


async def drop_consumer(jet: JetStream, stream: str, name: str) -> None:
    """Delete a consumer, if the server hears it: it would go by itself."""
    with contextlib.suppress(BusError):
        await jet.call(f"CONSUMER.DELETE.{stream}.{name}", timeout=1.0)


@dataclass(slots=True, eq=False)
class OrderedReader:
    """Delivers the last message of each subject, then each new one, in order and without gaps. Calls `on_synced` once after the first part.

    When its consumer ends (a reconnect, a gap in its sequence, a restart), a new one continues behind the last message that
    arrived. Not nats-py's: after a restart its watch is silent for 20 s, and for ever where the stream was made anew.
    """

    jet: JetStream
    stream: str
    subject: str
    on_message: Callable[[Delivery, int], None]
    on_synced: Callable[[], None]
    headers_only: bool = False
    _last: int = 0  # stream sequence
    _seen: int = 0  # consumer sequence
    _synced: bool = False
    _name: str = ""
    _puller: Puller = field(init=False, repr=False)
    _reading: asyncio.Task[None] = field(init=False, repr=False)

    async def start(self) -> None:
        """Raises NotFound when there is no such stream."""
        await self._make()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def drain(self) -> None:
        """End it, even before its task has begun, as where there was nothing to read."""
        self._reading.cancel()
        await asyncio.wait({self._reading})
        self._puller.stop()
        del (
            self._reading,
            self._puller,
        )  # they know this reader: it and what it has read would stay until the collector comes
        await drop_consumer(self.jet, self.stream, self._name)

    async def _make(self) -> None:
        config: dict[str, Any] = {"headers_only": self.headers_only, "deliver_policy": "last_per_subject"}
        if self._last:
            state = (await self.jet.stream_info(self.stream))["state"]
            if state["last_seq"] < self._last:  # another stream under the same name: begin again
                self._last = 0
        if self._last:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self._last + 1}
        self._seen = 0
        self._name, waiting = await passing_consumer(self.jet, self.stream, self.subject, config)
        if waiting == 0:
            self._sync()
        self._puller = Puller(self.jet, self.stream, self._name, self._take)

    async def _read(self) -> None:
        with contextlib.suppress(BusClosed):
            while True:
                status = await self._puller.pull(ROUND, WAIT_S)
                # Where nothing came of what there was to come, it has been deleted meanwhile, perhaps.
                if status and (status != "408" or not self._synced):
                    await self._begin_again(status)

    async def _begin_again(self, status: str) -> None:
        self._puller.stop()
        while True:
            if status != "lost":
                await asyncio.sleep(RETRY_S)
            try:
                await self._make()
            except BusClosed:
                raise
            except BusError:
                status = ""
            else:
                return

    def _take(self, delivery: Delivery) -> None:
        position = StreamPosition(delivery.reply)
        if position.consumer != self._seen + 1:
            self._puller.end("gap")
            return
        self._seen = position.consumer
        self._last = position.stream
        try:
            self.on_message(delivery, position.stream)
        finally:
            if position.pending == 0:
                self._sync()

    def _sync(self) -> None:
        if not self._synced:
            self._synced = True
            try:
                self.on_synced()
            except Exception as error:
                self.jet.bus.report(error)


async def read_all(
    jet: JetStream,
    stream: str,
    subject: str,
    on_message: Callable[[Delivery, int], None],
    *,
    headers_only: bool = False,
) -> None:
    """Pass on the last message of each subject, once. Raises NotFound (no such stream), BusError (nothing comes any more)."""
    done = asyncio.Event()
    reader = OrderedReader(jet, stream, subject, on_message, done.set, headers_only=headers_only)
    await reader.start()
    try:
        while not done.is_set():
            seen = reader._last
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENT_S):
                    await done.wait()
            if not done.is_set() and reader._last == seen:
                raise BusError(f"reading {subject} of {stream}: nothing came for {SILENT_S} s")
    finally:
        await reader.drain()
