"""An ordered, gap-free reading of a stream's subjects that outlives reconnects and restarts of the server."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from bus.natsconsumer import Position
from bus.natsjet import NANO, JetStream
from bus.port import BusError, Delivery

BEAT_S = 5.0  # the server says so often that it is alive; three missed beats make the consumer anew
RETRY_S = 0.25
READ_ALL_S = 20.0


class OrderedReader:
    """Delivers each last message per subject, then each new one, in order; `on_synced` once when the first part is over.

    The consumer lives in the server's memory without acknowledgements. Whatever ends it (a reconnect, a gap in its sequence,
    silence), a new one continues behind the last message that arrived.
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
            "idle_heartbeat": int(BEAT_S * NANO),
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
        # Messages may have come before this answer; those count as delivered in it or not, `seen` knows.
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
                bus.publish(delivery.reply, b"")  # flow control: we have handled everything so far
            else:
                if "Nats-Consumer-Stalled" in headers:
                    bus.publish(headers["Nats-Consumer-Stalled"], b"")
                if int(headers.get("Nats-Last-Consumer", self._seen)) != self._seen:
                    self._renew()
            return
        position = Position(delivery.reply)
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
        """Make the consumer anew, as soon as the server lets us; what was under way belongs to a connection that is gone."""
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
        """Silence means that the consumer is gone, whatever the connection says."""
        loop = asyncio.get_running_loop()
        if self._stopped or self._jet.closed:
            return
        if loop.time() - self._alive > 3 * BEAT_S:
            self._renew()
        self._watchdog = loop.call_later(BEAT_S, self._check)


async def read_all(
    jet: JetStream,
    stream: str,
    subject: str,
    on_message: Callable[[Delivery, int], None],
    *,
    headers_only: bool = False,
) -> None:
    """Hand over the last message on each subject, once. Raises NotFound (no such stream), BusError (it takes too long)."""
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
