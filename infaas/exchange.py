"""Requests and their replies over one subscription. A request is sent again until a reply comes. One timer serves all requests.

This is the hot path of client and load generator: a request costs one dictionary entry and one publish, but no task and no timer of its
own. Sending a query again is safe: each query has a `retry_key`, what is sent again is marked as such, and the system answers and charges it once.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bus.codec import encode
from bus.messages.public import RESENT
from bus.port import OTHER_LOOP, Buffer, Bus, BusError, Delivery, PayloadTooLarge, Subscription
from bus.subjects import Subjects
from infaas.errors import BadInput, InfaasError, NotConnected, Timeout, denied
from infaas.queries import KEY_BYTES

FIRST_SILENCE = 1.5  # s without a reply after which a request is sent again; doubles each time
FIRST_PAUSE = 0.05  # s before the next try if no service listens; doubles each time up to LONGEST_PAUSE
LONGEST_PAUSE = 1.0
SWEEP = 0.02  # s between checks for requests that are due
SWEEP_SHARE = 5e-6  # s more for each waiting request, so that the checks take at most about 2 % of a core

Settle = Callable[[bytes | InfaasError], None]


@dataclass(slots=True, eq=False)
class Waiting:
    """One request in flight. silence: seconds between two sendings. due: time of the next sending, or of the timeout. lost: a service may have taken it, and
    nothing came.
    """

    subject: str
    body: bytes
    reply: str
    settle: Settle
    expires: float
    silence: float
    due: float
    began: float
    headers: Mapping[str, str] | None = None
    tail: Sequence[Buffer] = ()
    pause: float = FIRST_PAUSE
    lost: bool = False
    sent: int = 1
    undelivered: bool = False


class Exchange:
    """Sends requests on `bus` and gives each its first reply. Later replies are ignored. subjects: of the system whose queries are taken back when nobody
    waits for them any more; their bodies end in the key, or the first piece of them does.
    """

    def __init__(self, bus: Bus, subjects: Subjects | None = None, *, silence: float = FIRST_SILENCE) -> None:
        self._query, self._cancel = ("", "") if subjects is None else (subjects.query(""), subjects.cancel(""))
        self.resent = 0
        self._silence = silence
        self._bus = bus
        self._publish = bus.publish
        self._base = bus.new_inbox() + "."
        self._skip = len(self._base)
        self._waiting: dict[str, Waiting] = {}
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._subscription: Subscription | None = None
        self._closed = False

    async def open(self) -> None:
        """Subscribe to the replies. Call it once, before the first request."""
        self._loop = asyncio.get_running_loop()
        self._subscription = await self._bus.subscribe(self._base + "*", self._received)
        self._bus.on_status(self._status)
        self._bus.on_denied(self._denied)

    async def stop(self) -> None:
        """Fail all requests in flight and unsubscribe. The bus stays open."""
        self.close()
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.drain()

    def close(self) -> None:
        """Fail all requests in flight with NotConnected."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            self._take_back(one)
            one.settle(NotConnected("the connection was closed before the reply came"))

    def __len__(self) -> int:
        """The number of requests in flight."""
        return len(self._waiting)

    def send(
        self,
        subject: str,
        body: bytes,
        timeout: float,
        settle: Settle,
        *,
        headers: Mapping[str, str] | None = None,
        tail: Sequence[Buffer] = (),
    ) -> str:
        """Send a request, and again while no reply comes. `settle` gets the reply's bytes or an error, once, on the event loop.

        Returns a token for `forget`. tail: the rest of the body, in pieces that are not copied. Raises NotConnected, BadInput.
        """
        if self._closed:
            raise NotConnected("this client is closed")
        self._count += 1
        token = str(self._count)
        reply = self._base + token
        try:
            self._publish(subject, body, reply, headers, tail)
        except PayloadTooLarge as error:
            raise BadInput(f"{len(body):,} bytes are more than the bus takes: {error}") from error
        except BusError as error:
            raise NotConnected(str(error)) from error
        now = time.monotonic()
        end, due = now + timeout, now + min(self._silence, timeout)
        self._waiting[token] = Waiting(subject, body, reply, settle, end, self._silence, due, now, headers, tail)
        if self._timer is None:
            self._timer = self._loop.call_later(SWEEP, self._sweep)
        return token

    async def ask(
        self,
        subject: str,
        body: bytes,
        timeout: float,
        *,
        headers: Mapping[str, str] | None = None,
        tail: Sequence[Buffer] = (),
    ) -> bytes:
        """Send a request and wait for its reply. Raises Timeout, NotConnected, BadInput."""
        self.check_loop()
        future: asyncio.Future[bytes] = self._loop.create_future()

        def settle(reply: bytes | InfaasError) -> None:
            if future.done():
                return
            if isinstance(reply, InfaasError):
                future.set_exception(reply)
            else:
                future.set_result(reply)

        token = self.send(subject, body, timeout, settle, headers=headers, tail=tail)
        try:
            return await future
        except asyncio.CancelledError:
            self.forget(token)
            raise

    def check_loop(self) -> None:
        """Raises NotConnected in another event loop than that of `open`."""
        if self._subscription is not None and asyncio.get_running_loop() is not self._loop:
            raise NotConnected(OTHER_LOOP)

    def forget(self, token: str) -> None:
        """Ignore the reply to this request. A query that has not begun is not computed."""
        one = self._waiting.pop(token, None)
        if one is not None:
            self._take_back(one)

    def _take_back(self, one: Waiting) -> None:
        """Nobody waits for this request any more. What the system says to that is ignored, too."""
        if not self._query or not one.subject.startswith(self._query):
            return
        body = encode({"retry_key": one.body[-KEY_BYTES:]})
        with suppress(BusError):  # then it is served, as without this
            self._publish(self._cancel + one.subject[len(self._query) :], body, one.reply)

    # -- events

    def _received(self, delivery: Delivery) -> None:
        token = delivery.subject[self._skip :]
        if delivery.status:
            one = self._waiting.get(token)
            if one is not None:
                one.undelivered = True
                one.due = min(time.monotonic() + one.pause, one.expires)
                one.pause = min(2 * one.pause, LONGEST_PAUSE)
            return
        one = self._waiting.pop(token, None)
        if one is not None:
            one.settle(delivery.data)

    def _status(self, status: str) -> None:
        if status == "closed" and not self._closed:
            self.close()

    def _denied(self, subject: str) -> bool:
        tokens = [token for token, one in self._waiting.items() if one.subject == subject]
        for token in tokens:
            self._waiting.pop(token).settle(denied(subject))
        return bool(tokens)

    def _sweep(self) -> None:
        now = time.monotonic()
        try:
            for token in [token for token, one in self._waiting.items() if one.due <= now]:
                self._due(token, now)
        finally:
            # `settle` may have sent new requests, or closed the exchange.
            self._timer = None
            if self._waiting and not self._closed:
                self._timer = self._loop.call_later(SWEEP + SWEEP_SHARE * len(self._waiting), self._sweep)

    def _due(self, token: str, now: float) -> None:
        one = self._waiting.get(token)
        if one is None:
            return
        if one.expires <= now:
            self.forget(token)
            one.settle(_too_late(one))
        else:
            self._again(one, now)

    def _again(self, one: Waiting, now: float) -> None:
        if one.undelivered:
            one.undelivered = False  # no service took it: `silence` counts from this sending
        else:
            one.silence *= 2
            one.lost = True
        headers = one.headers
        if one.lost:  # who has it, or has answered it, is asked first
            headers = {**(headers or {}), RESENT: str(round(1000.0 * (now - one.began)))}
        one.due = min(now + one.silence, one.expires)
        one.sent += 1
        self.resent += 1
        try:
            self._publish(one.subject, one.body, one.reply, headers, one.tail)
        except PayloadTooLarge:
            one.due = one.expires  # after a reconnect, the new server takes less; more tries would not help
        except BusError:
            one.due = min(now + LONGEST_PAUSE, one.expires)  # the bus reconnects, and its buffer is full


def _too_late(one: Waiting) -> Timeout:
    if one.undelivered:
        return Timeout(f"no service listens on {one.subject} (tried {one.sent} times): is a dispatcher running?")
    times = "once" if one.sent == 1 else f"{one.sent} times"
    return Timeout(f"no reply on {one.subject} in time, sent {times}")
