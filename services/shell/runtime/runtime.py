"""Drives one actor on asyncio: inlets, timers, edge, events, faults, drain. The production driver of `services.core.actor`.

Failures: An undecodable body is refused if it has a reply subject; inlets with `malformed` hand it to the actor. An exception in
`handle` is logged, its sender gets a refusal, and the actor goes on. Repeated faults stop the actor and start a new one after a pause;
its state comes back from heartbeats and watches. If restarts do not help, the process ends, and the supervisor starts it again.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bus.codec import DECODE_ERRORS, decode, decoder, encode, explain, in_two
from bus.messages.events import Event
from bus.messages.flow import Execute
from bus.messages.public import Error, Refusal
from bus.port import Bus, BusError, Delivery, KeyValueEntry, PayloadTooLarge, Subscription
from bus.rights import ReplyCheck, from_stream
from bus.subjects import Subjects
from services.core.actor import (
    Actor,
    After,
    Cancel,
    Changed,
    Do,
    Done,
    Edge,
    Envelope,
    Failed,
    Halt,
    Inlet,
    Malformed,
    Publish,
    PublishBehind,
    Record,
    Recorded,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Undelivered,
    Will,
)
from services.core.metric import Insight, MetricFamily
from services.core.trace import Span
from services.shell.host.running import Kept
from services.shell.metrics.counts import ActorCounts
from services.shell.runtime.outbox import Outbox
from services.shell.runtime.telemetry import about

log = logging.getLogger(__name__)

FAULTS = 5  # handler exceptions within FAULT_WINDOW seconds that restart the actor
FAULT_WINDOW = 10.0
RESTARTS = 5  # restarts within RESTART_WINDOW seconds that end the process
RESTART_WINDOW = 60.0
EMPTY = b"\x80"  # a request without a body asks for the defaults: an empty map
LARGE = 32 * 1024  # bytes of a forwarded body above which it is not copied once more
GRACE = 5.0
PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)
LOOK = 0.01  # s between looks at an actor that catches up, or finishes

_monotonic = time.monotonic
_anchor: float


def _start_clock() -> None:
    global _anchor  # noqa: PLW0603  (each query reads it several times)
    _anchor = time.time() - time.monotonic()


_start_clock()
os.register_at_fork(after_in_child=_start_clock)  # a service is a copy of a process that may have run for days


def unix_now() -> float:
    """Unix seconds that never go back within this process: the wall time at the start plus the monotonic clock since then."""
    return _anchor + _monotonic()


class ActorFailed(Exception):
    """An actor kept failing after restarts."""


@dataclass(eq=False)
class Runtime:
    """One actor's life. make builds a fresh actor: at the start and after repeated faults.

    insight: what is shown of the actor. reachable: what of the edge's needs is missing, in words; "" for nothing.
    """

    name: str
    make: Callable[[], Actor]
    bus: Bus
    subjects: Subjects
    edge: Edge | None = None
    clock: Callable[[], float] = unix_now
    insight: Insight | None = None
    reachable: Callable[[], Awaitable[str]] | None = None

    def __post_init__(self) -> None:
        self.grace = GRACE  # s that it may take to stop
        self.sealed: Callable[[str, Sequence[Any]], None] | None = None  # gets the events as they leave, in batches
        self.seen: Callable[[Changed], None] | None = None  # gets what changes in the buckets that it watches
        self.kept: Kept | None = None  # outlives the process
        self.spans: Callable[[Span], None] | None = None  # gets the spans of traced queries
        self.counts = ActorCounts()
        self.faults: deque[float] = deque(maxlen=FAULTS)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._callers = ReplyCheck(self.subjects, self.bus.new_inbox())
        self._inline = getattr(self.edge, "inline", None)
        self._loop = asyncio.get_running_loop()
        self._source = f"{self.name}-{int(unix_now() * 1e6):x}"
        self._restarts: deque[float] = deque(maxlen=RESTARTS)
        self._generation = 0
        self._open: list[Subscription] = []
        self._shared: list[Subscription] = []  # of these, those of queue groups
        self._timers: dict[Any, asyncio.Handle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._mailbox: deque[Envelope] = deque()
        self._wills: dict[Any, int] = {}  # numbers of what is kept, by key
        self._unsynced = 0  # what it waits for before it speaks the wills of a dead one
        self._busy = False
        self._live = False
        self._perform: dict[type, Callable[[Any], None]] = {
            Publish: self._publish,
            PublishBehind: self._publish_behind,
            After: self._after,
            Cancel: self._cancel,
            Do: self._do,
            Record: self._record,
            Will: self._keep_will,
            Halt: self._halt,
            Span: self._span,
        }

    # -- life

    async def start(self, catch_up: tuple[float, float] | None = None) -> None:
        """Build the actor and let messages in. catch_up: the least and most s before it shares what its queue groups get, in which it must have
        what it needs.
        """
        self._generation += 1
        self._outbox = Outbox(
            self.bus, self.subjects, f"{self._source}-{self._generation}", self._recorded, self.sealed, self.kept
        )
        self._outbox.start()
        self._actor = self.make()
        self._handle = self._actor.handle
        self._live = self._busy = True  # what comes in meanwhile waits behind Started
        self._unsynced = len(self._actor.watches) + 1  # and its start
        try:
            for watch in self._actor.watches:
                bucket = await self.bus.key_value(watch.bucket)
                self._open.append(await bucket.watch(self._watcher(watch.bucket)))
            for inlet in self._actor.inlets:
                if not (catch_up and inlet.queue):
                    await self._listen(inlet)
        finally:
            self._busy = False
        # Only now, so that no reply to the actor's first messages is lost.
        self._deliver(Envelope(self.clock(), Started()))
        self._speak_wills()
        if catch_up:
            began, (least, most) = self._loop.time(), catch_up
            while (passed := self._loop.time() - began) < most and (passed < least or self.missing(self.clock())):  # noqa: ASYNC110
                await asyncio.sleep(LOOK)
            for inlet in self._actor.inlets:
                if inlet.queue:
                    await self._listen(inlet)

    async def _listen(self, inlet: Inlet) -> None:
        opened = await self.bus.subscribe(inlet.subject, self._handler(inlet), inlet.queue)
        self._open.append(opened)
        if inlet.queue:
            self._shared.append(opened)

    def inherit(self, kept: Kept) -> None:
        """Send the events that the process before this one has left, and say what it wanted said if it was killed. It has ended."""
        self._outbox.inherit(kept)
        self._speak(kept)

    async def stop(self, grace: float = 5.0, *, succeeded: bool = False) -> None:
        """Take nothing new, let the actor and its commands finish, send what is left. succeeded: another process takes what is new from now on."""
        if not self._live:
            return
        if succeeded:
            await self._finish(grace)
        await self._close_inlets()
        self._deliver(Envelope(self.clock(), Stopping(grace, succeeded)))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        self._live = False
        await self._drop_timers_and_tasks()
        self._leave_wills(spoken=True)
        await self._outbox.close(grace)
        if (ended := getattr(self.edge, "ended", None)) is not None:  # what would go on in a process that does
            await ended()

    async def _finish(self, grace: float) -> None:
        """Leave the queue groups, and end what was taken, for at most `grace` seconds."""
        for subscription in self._shared:
            with suppress(BusError):
                await subscription.drain()
            self._open.remove(subscription)
        self._shared.clear()
        under_way, end = getattr(self.insight, "under_way", None), self._loop.time() + grace
        while self._live and under_way is not None and under_way(self._actor) and self._loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(LOOK)

    async def _close_inlets(self) -> None:
        self._shared.clear()
        for subscription in self._open:
            try:
                await subscription.drain()
            except BusError as error:
                log.warning("could not drain an inlet of %s: %s", self.name, error)
        self._open.clear()

    async def _drop_timers_and_tasks(self) -> None:
        left = self._tasks - {asyncio.current_task()}  # a restart must not end itself
        for each in list[Any]([*self._timers.values(), *left]):
            each.cancel()
        self._timers.clear()
        if left:
            await asyncio.wait(left, timeout=1.0)

    async def _restart(self, reason: str) -> None:
        now = self.clock()
        self._restarts.append(now)
        self.counts.restarts += 1
        if len(self._restarts) == RESTARTS and now - self._restarts[0] < RESTART_WINDOW:
            if not self.failed.done():
                self.failed.set_exception(ActorFailed(f"{self.name} keeps failing: {reason}"))
            return
        await self._drop_timers_and_tasks()
        await self._close_inlets()
        self._leave_wills(spoken=False)
        await self._outbox.close(1.0)
        await asyncio.sleep(PAUSES[min(len(self._restarts), len(PAUSES)) - 1])
        self.faults.clear()
        await self.start()
        log.warning("%s was started again", self.name)

    # -- messages in

    def _handler(self, inlet: Inlet) -> Callable[[Delivery], None]:
        decode: Callable[[bytes], Any] = bytes if inlet.message is bytes else decoder(inlet.message)
        clock = self.clock
        taken = self.counts.taken.setdefault(inlet.message.__name__, [0])
        guarded, may_answer = self._callers.applies_to(inlet.subject), self._callers.may_answer

        def on_delivery(delivery: Delivery) -> None:
            subject, data, reply, headers, status = delivery
            if status:
                self._deliver(Envelope(clock(), Undelivered(subject), subject))
                return
            if reply or headers:
                foreign = guarded and reply and not may_answer(inlet.subject, subject, reply)
                if foreign or ((headers or reply[0] == "$") and from_stream(reply, headers)):
                    self.counts.forged += 1
                    return
            taken[0] += 1
            try:
                message = decode(data or EMPTY)
            except DECODE_ERRORS as error:
                self.counts.undecodable += 1
                if not inlet.malformed:
                    self._refuse_undecodable(delivery, error)
                    return
                message = Malformed(explain(error))
            self._deliver(Envelope(clock(), message, subject, reply, data, headers))

        return on_delivery

    def _watcher(self, bucket: str) -> Callable[[KeyValueEntry | None], None]:
        def on_entry(entry: KeyValueEntry | None) -> None:
            message = Synced(bucket) if entry is None else Changed(bucket, entry.key, entry.value)
            if self.seen is not None and isinstance(message, Changed):
                self.seen(message)
            self._deliver(Envelope(self.clock(), message))
            if entry is None:
                self._speak_wills()

        return on_entry

    def _recorded(self, through: int) -> None:
        self._deliver(Envelope(self.clock(), Recorded(through)))

    def _refuse_undecodable(self, delivery: Delivery, error: Exception) -> None:
        if delivery.reply:
            refusal = Refusal(error=Error(code="bad_request", message=explain(error)))
            self.bus.publish(delivery.reply, encode(refusal))

    def _deliver(self, envelope: Envelope) -> None:
        """Hand one message to the actor; what arrives meanwhile (inline results) waits its turn."""
        if not self._live:
            return
        if self._busy:
            self._mailbox.append(envelope)
            return
        self._busy = True
        try:
            self._turn(envelope)
            while self._mailbox:
                self._turn(self._mailbox.popleft())
        finally:
            self._busy = False

    def _turn(self, envelope: Envelope) -> None:
        try:
            effects = self._handle(envelope)
            if effects:
                perform = self._perform
                for effect in effects:
                    perform[type(effect)](effect)
        except Exception as error:
            self._fault(envelope, error)
        if self._outbox.unkept:
            self._outbox.keep()

    def _fault(self, envelope: Envelope, error: Exception) -> None:
        log.error(
            "%s could not handle %s",
            self.name,
            type(envelope.message).__name__,
            exc_info=error,
            extra={"subject": envelope.subject, **about(envelope.message)},
        )
        if envelope.reply:
            refusal = Refusal(error=Error(code="internal", message="the service failed on this message; it was logged"))
            self.bus.publish(envelope.reply, encode(refusal))
        now = self.clock()
        self.counts.faults += 1
        self.faults.append(now)
        if len(self.faults) == FAULTS and now - self.faults[0] < FAULT_WINDOW:
            self._halt(Halt(f"{FAULTS} faults within {FAULT_WINDOW:g} s, the last: {error!r}"))

    # -- effects out

    def _publish(self, effect: Publish) -> None:
        message = effect.message
        tail: bytes | memoryview = b""
        if type(message) is bytes:
            body = message
        elif type(message) is Execute and len(message.body) > LARGE:
            body, tail = in_two(message)
        else:
            body = encode(message)
        try:
            self.bus.publish(effect.subject, body, effect.reply, effect.headers, tail)
        except PayloadTooLarge:
            log.error(
                "a message is larger than the bus takes",
                extra={"subject": effect.subject, "bytes": len(body) + len(tail), **about(message)},
            )
        except BusError as error:
            log.warning("a message was not sent: %s", error, extra={"subject": effect.subject, **about(message)})

    def _publish_behind(self, effect: PublishBehind) -> None:
        try:
            self.bus.publish_behind(effect.subject, encode(effect.message))
        except BusError as error:
            log.warning("a message was not sent: %s", error, extra={"subject": effect.subject})

    def _after(self, effect: After) -> None:
        key = effect.key
        old = self._timers.get(key)
        if old is not None:
            old.cancel()
        if effect.delay <= 0:
            self._timers[key] = self._loop.call_soon(self._ring, key, effect.message)
        else:
            self._timers[key] = self._loop.call_later(effect.delay, self._ring, key, effect.message)

    def _ring(self, key: Any, message: Any) -> None:
        self._timers.pop(key, None)
        self._deliver(Envelope(self.clock(), message))

    def _cancel(self, effect: Cancel) -> None:
        handle = self._timers.pop(effect.key, None)
        if handle is not None:
            handle.cancel()

    def _do(self, effect: Do) -> None:
        if self._inline is not None:
            try:
                result = self._inline(effect.command)
            except Exception as error:
                self._deliver(Envelope(self.clock(), Failed(effect.id, str(error) or repr(error))))
                return
            if result is not NotImplemented:
                self._deliver(Envelope(self.clock(), Done(effect.id, result)))
                return
        task = self._loop.create_task(self._work(effect))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, effect: Do) -> None:
        message: Done | Failed | TimedOut
        began = time.monotonic()
        if self.edge is None:
            raise ActorFailed(f"{self.name} has no edge for {effect.command!r}")
        try:
            async with asyncio.timeout(effect.timeout or None):
                message = Done(effect.id, await self.edge.perform(effect.command))
        except TimeoutError:
            message = TimedOut(effect.id)
        except Exception as error:
            # A failure outside is logged in a line; a traceback is for what should not have happened.
            trace = None if isinstance(error, BusError | OSError) else error
            what, concerned = type(effect.command).__name__, about(effect.command)
            log.warning("%s: %s failed: %s", self.name, what, error, exc_info=trace, extra=concerned)
            message = Failed(effect.id, str(error) or repr(error))
        spent = time.monotonic() - began
        self.counts.carried_out(type(effect.command).__name__, type(message).__name__.lower(), spent)
        self._deliver(Envelope(self.clock(), message))

    def _record(self, effect: Record) -> None:
        self.record(effect.event)

    def record(self, event: Event) -> None:
        """Record what the edge alone has seen."""
        self._outbox.add(event)

    def _keep_will(self, effect: Will) -> None:
        if self.kept is None:
            return
        self.kept.drop(self._wills.pop(effect.key, 0))
        if (last := effect.publish) is not None:
            body = last.message if type(last.message) is bytes else encode(last.message)
            number = self.kept.put(encode((last.subject, body, last.reply, last.headers)), will=True)
            if number:  # else there is no room: thousands of them are here, or a very large one
                self._wills[effect.key] = number

    def _speak_wills(self) -> None:
        """Once it has what it watches: publish the wills of the process before this one, if it was killed, or of the actor before this one."""
        self._unsynced -= 1
        if not self._unsynced and self.kept is not None:
            self._speak(self.kept)

    def _speak(self, kept: Kept) -> None:
        for number, will in kept.left(wills=True).items():
            subject, body, reply, headers = decode(tuple[str, bytes, str, dict[str, str] | None], will)
            try:
                self.bus.publish(subject, body, reply, headers)
            except BusError as error:
                log.warning("what a killed process wanted to say was not sent: %s", error, extra={"subject": subject})
            kept.drop(number)

    def _leave_wills(self, *, spoken: bool) -> None:
        """The actor ends. spoken: it had its last word, so they mean nothing any more."""
        if self.kept is not None:
            for number in self._wills.values() if spoken else ():
                self.kept.drop(number)
            self.kept.leave(self._wills.values())
        self._wills.clear()

    def _span(self, effect: Span) -> None:
        if self.spans is not None:
            self.spans(effect)

    def _halt(self, effect: Halt) -> None:
        if not self._live:
            return
        log.critical("%s stops: %s", self.name, effect.reason)
        self._live = False
        task = self._loop.create_task(self._restart(effect.reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- for metrics and health checks

    def missing(self, now: float) -> str:
        """What the actor lacks to do its work, in words; "" when it is ready."""
        if not self._live:
            return "it is being started again"
        return self.insight.missing(self._actor, now) if self.insight is not None else ""

    def families(self) -> Iterator[MetricFamily]:
        """Its numbers now, and those of its actor; none before its start."""
        if not self._generation:
            return
        box = self._outbox
        yield from self.counts.families(self.name, under_way=len(self._tasks), held=box.held, lost=box.lost)
        if self.insight is not None and self._live:
            yield from self.insight.families(self._actor)
