"""Reading a JetStream stream: durable consumers that fetch by pull requests, and ordered readers that get everything in order."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
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
    """Pull requests to one consumer. Messages go into `arrived`, even if they come late."""

    def __init__(self, jet: JetStream, stream: str, name: str) -> None:
        self._bus = jet.bus
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        self._inbox = jet.bus.new_inbox()
        self._count = 0
        self._reply = ""
        self._wanted = 0
        self._ended: asyncio.Future[str] | None = None
        self.arrived: deque[Delivery] = deque()
        self._ignore = jet.bus.listen(f"{self._inbox}.*", self._take)
        self._unfollow = jet.follow(lambda: self._end("lost"))

    def stop(self) -> None:
        self._ignore()
        self._unfollow()

    def _take(self, delivery: Delivery) -> None:
        if delivery.status:  # these come on the request's own inbox, messages on their subject in the stream
            if delivery.status != "100" and delivery.subject == self._reply:
                self._end(delivery.status)
        elif delivery.reply:
            self.arrived.append(delivery)
            self._wanted -= 1
            if self._wanted <= 0:
                self._end("")

    def _end(self, status: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(status)

    async def pull(self, most: int, wait: float) -> str:
        """Ask for `most` messages. Returns "" when so many came, else the status that ended it.

        "404": there is none, "408": time is up, "503": no such consumer now, "lost": the connection was made anew.
        wait 0: only what is there already.
        """
        self._wanted = most
        self._count += 1
        self._reply = f"{self._inbox}.{self._count}"
        self._ended = asyncio.get_running_loop().create_future()
        body = {"batch": most, "expires": int(wait * NANO)} if wait > 0 else {"batch": most, "no_wait": True}
        self._bus.publish(self._next, msgspec.json.encode(body), reply=self._reply)
        try:
            async with asyncio.timeout(wait + 1.0):
                return await self._ended
        except TimeoutError:
            return "408"  # the request or its end got lost, with the connection


class PullConsumer:
    """A durable consumer with explicit acknowledgement. All that open the same name share its messages."""

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
            arrived = self._puller.arrived
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
        status = await self._pull(puller, most - len(puller.arrived), 0.0)
        while not puller.arrived:
            if status not in ("", "404", "408", "lost"):  # the consumer is away: the server restarts, or lost it
                await asyncio.sleep(0.2)
                await self._reopen()
            # No longer than this fetch lasts: what comes later belongs to the next fetch.
            status = await self._pull(puller, 1, max(end - loop.time(), 0.001))
            if puller.arrived and most > 1:
                await self._pull(puller, most - 1, 0.0)

    async def _pull(self, puller: Puller, most: int, wait: float) -> str:
        try:
            return await puller.pull(most, wait)
        except BusClosed:
            raise
        except BusError:
            return "503"

    async def _reopen(self) -> None:
        try:
            await self.open()
        except BusClosed:
            raise
        except BusError as error:
            _log.debug("consumer %s of %s: %s", self._config["name"], self._stream, error)


HEARTBEAT_S = 5.0  # of the server; after three missed heartbeats the reader makes a new consumer
RETRY_S = 0.25
READ_ALL_S = 20.0


class OrderedReader:
    """Delivers the last message of each subject, then each new one, in order and without gaps. Calls `on_synced` once after the first part.

    The consumer lives in the server's memory, without acknowledgements. When it ends (a reconnect, a gap in its sequence, silence), a new
    one continues behind the last message that arrived.
    """

    def __init__(
        self,
        jet: JetStream,
        stream: str,
        subject: str,
        on_message: Callable[[Delivery, int], None],
        on_synced: Callable[[], None],
        *,
        headers_only: bool = False,
    ) -> None:
        self._jet = jet
        self._stream = stream
        self._subject = subject
        self._on_message = on_message
        self._on_synced = on_synced
        self._headers_only = headers_only
        self._last = 0  # stream sequence
        self._seen = 0  # consumer sequence
        self._synced = False
        self._stopped = False
        self._name = ""
        self._ignore: Callable[[], None] = _nothing
        self._unfollow: Callable[[], None] = _nothing
        self._alive = 0.0
        self._making: asyncio.Task[None] | None = None
        self._renewed = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Raises NotFound when there is no such stream."""
        await self._make()
        self._unfollow = self._jet.follow(self._renew)
        self._check()

    async def drain(self) -> None:
        """End it."""
        self._stopped = True
        self._ignore()
        self._unfollow()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait({self._making})
        with contextlib.suppress(BusError):
            await self._jet.call(f"CONSUMER.DELETE.{self._stream}.{self._name}", timeout=1.0)

    async def _make(self) -> None:
        self._ignore()
        bus = self._jet.bus
        inbox = bus.new_inbox()
        self._name = inbox.rsplit(".", 1)[1]
        config: dict[str, Any] = {
            "name": self._name,
            "deliver_subject": inbox,
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "filter_subject": self._subject,
            "flow_control": True,
            "idle_heartbeat": int(HEARTBEAT_S * NANO),
            "inactive_threshold": int(30 * NANO),
            "headers_only": self._headers_only,
        }
        if self._last:
            state = (await self._jet.stream_info(self._stream))["state"]
            if state["last_seq"] < self._last:  # another stream under the same name: begin again
                self._last = 0
        if self._last:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self._last + 1}
        else:
            config["deliver_policy"] = "last_per_subject"
        self._seen = 0
        self._alive = asyncio.get_running_loop().time()
        self._ignore = bus.listen(inbox, self._take)
        info = await self._jet.create_consumer(self._stream, config)
        if self._stopped:
            self._ignore()
        # Messages may have come before this answer, which may or may not count them. `_seen` does.
        if info["num_pending"] == 0 and self._seen == 0 and info["delivered"]["consumer_seq"] == 0:
            self._sync()

    def _take(self, delivery: Delivery) -> None:
        if self._stopped:
            return
        self._alive = asyncio.get_running_loop().time()
        bus = self._jet.bus
        if delivery.status:
            headers = delivery.headers or {}
            if delivery.status != "100":
                self._renew()
            elif delivery.reply:
                bus.publish(delivery.reply, b"")  # flow control: everything so far is handled
            else:
                if "Nats-Consumer-Stalled" in headers:
                    bus.publish(headers["Nats-Consumer-Stalled"], b"")
                if int(headers.get("Nats-Last-Consumer", self._seen)) != self._seen:
                    self._renew()
            return
        position = StreamPosition(delivery.reply)
        if position.consumer != self._seen + 1:
            self._renew()
            return
        self._seen = position.consumer
        self._last = position.stream
        try:
            self._on_message(delivery, position.stream)
        finally:
            if position.pending == 0:
                self._sync()

    def _sync(self) -> None:
        if not self._synced:
            self._synced = True
            try:
                self._on_synced()
            except Exception as error:
                self._jet.bus.report(error)

    def _renew(self) -> None:
        """Make a new consumer, as soon as the server allows it. What was under way belongs to a connection that is gone."""
        if self._stopped or self._jet.closed:
            return
        self._ignore()
        if self._making is not None:
            self._making.cancel()
        self._making = asyncio.get_running_loop().create_task(self._make_until_done())

    async def _make_until_done(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._renewed < 1.0:
            await asyncio.sleep(RETRY_S)
        while not self._stopped and not self._jet.closed:
            self._renewed = loop.time()
            try:
                await self._make()
            except BusError:
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _check(self) -> None:
        """Make a new consumer after silence: then it is gone, whatever the state of the connection."""
        loop = asyncio.get_running_loop()
        if self._stopped or self._jet.closed:
            return
        if loop.time() - self._alive > 3 * HEARTBEAT_S:
            self._renew()
        self._watchdog = loop.call_later(HEARTBEAT_S, self._check)


async def read_all(
    jet: JetStream,
    stream: str,
    subject: str,
    on_message: Callable[[Delivery, int], None],
    *,
    headers_only: bool = False,
) -> None:
    """Pass on the last message of each subject, once. Raises NotFound (no such stream), BusError (it takes too long)."""
    done = asyncio.Event()
    reader = OrderedReader(jet, stream, subject, on_message, done.set, headers_only=headers_only)
    await reader.start()
    try:
        async with asyncio.timeout(READ_ALL_S):
            await done.wait()
    except TimeoutError:
        raise BusError(f"reading {subject} of {stream} took more than {READ_ALL_S} s") from None
    finally:
        await reader.drain()


def _nothing() -> None:
    pass
