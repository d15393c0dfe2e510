"""The other stage: production's runtime on the in-process bus, everything through the codec, on a loop whose clock jumps.

It takes the kernel's place in services.simulation.run.Run, so that both run one scenario.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from bus.codec import decode, encode
from bus.memory import Broker, MemoryBus, _Published
from bus.memorystores import MemoryKeyValue
from bus.messages.events import EVENTS, Event
from bus.messages.jobs import JobAccepted
from bus.messages.public import Answer, Refusal
from bus.port import Delivery, StreamSpec
from bus.subjects import Subjects
from services.core.actor import Actor, Envelope, Publish, Record
from services.shell.runtime.runtime import Runtime
from services.simulation.hosts import Promised, SimulatedEdge
from services.simulation.kernel import GRACE, NETWORK, Headers, Receive
from tests.support.simulated.jumping_loop import JumpingLoop

STREAM = "EVENTS"


class SlowBroker(Broker):
    """Each message is under way for `delay` seconds; who sends later never arrives earlier."""

    def __init__(self, loop: JumpingLoop, delay: float) -> None:
        super().__init__()
        self.delay = delay
        self._loop = loop
        self._last = loop.time()

    def send(self, message: _Published) -> None:
        if message.flushed is not None:
            super().send(message)
        else:
            self.later(self._route, message)

    def later(self, action: Callable[..., None], *arguments: Any) -> None:
        self._last = max(self._last, self._loop.time() + self.delay)
        self._loop.call_at(self._last, action, *arguments)


class SlowKeyValue(MemoryKeyValue):
    """Changes are stored at once, and under way to those who watch for as long as a message."""

    def __init__(self, broker: SlowBroker) -> None:
        super().__init__(_raise)
        self._broker = broker

    def _set(self, key: str, value: bytes | None) -> int:
        watches, self._watches = self._watches, []
        try:
            revision = super()._set(key, value)
        finally:
            self._watches = watches
        for watch in list(watches):
            self._broker.later(watch._deliver, self._entries[key])
        return revision


class AsyncEdge:
    """An actor's simulated edge as the runtime wants them."""

    def __init__(self, simulated: SimulatedEdge) -> None:
        self._simulated = simulated

    async def perform(self, command: Any) -> Any:
        outcome = self._simulated(command)
        if isinstance(outcome, Promised):
            kept = asyncio.get_running_loop().create_future()
            outcome.then = kept.set_result
            return await kept
        seconds, result = outcome
        await asyncio.sleep(seconds)
        if isinstance(result, Exception):
            raise result
        return result


class Noted:
    """An actor, a note of every event that it records, and a count of its turns."""

    def __init__(self, actor: Actor, note: Callable[[Event], None], count: Callable[[], None]) -> None:
        self.inlets = actor.inlets
        self.watches = actor.watches
        self._actor = actor
        self._note = note
        self._count = count

    def handle(self, envelope: Envelope) -> Any:
        self._count()
        for effect in self._actor.handle(envelope):
            if type(effect) is Record:
                self._note(effect.event)
            yield effect


class Bed:
    """A stage (services.simulation.kernel.Environment) with the kernel's `run`. stored: what came into the stream of events."""

    received: Receive

    def __init__(
        self,
        start: float,
        recorded: Callable[[str, Event], None],
        *,
        delay: float = NETWORK,
    ) -> None:
        self.loop = JumpingLoop(start)
        self.loop.set_exception_handler(_unexpected)
        self.events = 0
        self._subjects = Subjects()
        self._recorded = recorded
        self._broker = SlowBroker(self.loop, delay)
        self._buses: dict[str, MemoryBus] = {}
        self._runtimes: dict[str, Runtime] = {}
        with self.loop.running():
            self._world = MemoryBus(self._broker, on_error=_raise)
            kept = StreamSpec(STREAM, (self._subjects.event(">"),), "limits", 0)
            _at_once(self._world.ensure_stream(kept))
            _at_once(self._world.subscribe("_INBOX.>", self._on_reply))

    @property
    def now(self) -> float:
        return self.loop.time()

    @property
    def delay(self) -> float:
        return self._broker.delay

    @delay.setter
    def delay(self, delay: float) -> None:
        self._broker.delay = delay

    def enter(self, name: str, actor: Actor, simulated: SimulatedEdge | None = None) -> None:
        assert name not in self._runtimes, f"{name} is here already"
        with self.loop.running():
            bus = self._buses[name] = MemoryBus(self._broker, name, on_error=_raise)
            noted = Noted(actor, lambda event: self._recorded(name, event), self._handled)
            for watch in actor.watches:
                self._bucket(watch.bucket)
            edge = None if simulated is None else AsyncEdge(simulated)
            runtime = Runtime(name, lambda: noted, bus, self._subjects, edge, clock=self.loop.time)
            self._runtimes[name] = runtime
            _at_once(runtime.start())

    def leave(self, name: str, *, goodbye: bool) -> None:
        runtime = self._runtimes.pop(name, None)
        if runtime is None:
            return
        bus = self._buses.pop(name)
        with self.loop.running():
            self.loop.create_task(self._stop(runtime, bus) if goodbye else self._kill(runtime, bus))

    @staticmethod
    async def _stop(runtime: Runtime, bus: MemoryBus) -> None:
        await runtime.stop(GRACE)
        await bus.close()

    @staticmethod
    async def _kill(runtime: Runtime, bus: MemoryBus) -> None:
        await bus.close()
        runtime._live = False
        runtime._outbox._task.cancel()
        await runtime._drop_timers_and_tasks()

    def at(self, delay: float, action: Callable[[Any], None], argument: Any = None) -> None:
        self.loop.call_later(delay, action, argument)

    def put(self, bucket: str, key: str, value: bytes | None) -> None:
        self._bucket(bucket)._set(key, value)

    def get(self, bucket: str, key: str) -> bytes | None:
        entry = self._bucket(bucket)._entries.get(key)
        return None if entry is None else entry.value

    def publish(
        self, subject: str, message: Any, reply: str = "", body: bytes = b"", by: str = "", headers: Headers = None
    ) -> None:
        del by
        self._world.publish(subject, body or encode(message), reply, headers)

    def run(self, until: float) -> None:
        self.loop.run_until(until)

    def stored(self) -> list[Event]:
        """All events in the stream, decoded."""
        kinds = {self._subjects.event(event.kind): event for event in EVENTS}
        found: list[Event] = []
        for record in self._broker.streams[STREAM].records.values():
            batch = decode(dict[str, Any], record.data)
            found.extend(msgspec.convert(batch["rows"], list[kinds[record.subject]]))
        return found

    def close(self) -> None:
        """End everything that is still there."""
        for seconds in (0.0, 3 * GRACE):  # those that were asked to stop may take so long, while others boot
            self.loop.run_until(self.now + seconds)
            for name in list(self._runtimes):
                self.leave(name, goodbye=False)
        self.loop.run_until(self.now)
        left = asyncio.all_tasks(self.loop)
        assert not left, left
        self.loop.close()

    def _handled(self) -> None:
        self.events += 1

    def _bucket(self, bucket: str) -> SlowKeyValue:
        buckets = self._broker.buckets
        if bucket not in buckets:
            buckets[bucket] = SlowKeyValue(self._broker)
        return buckets[bucket]

    def _on_reply(self, delivery: Delivery) -> None:
        queries = delivery.subject.startswith("_INBOX.c.") or delivery.subject == "_INBOX.primed"
        if queries or delivery.subject.startswith("_INBOX.job."):
            assert not delivery.status, f"nobody listened for {delivery.subject}"
            accepted: type = Answer if queries else JobAccepted
            refused = "error" in decode(dict[str, Any], delivery.data)
            self.received(Publish(delivery.subject, decode(Refusal if refused else accepted, delivery.data)))


def _at_once(work: Coroutine[Any, Any, Any]) -> None:
    """What waits for nothing is done at once."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something")


def _raise(error: Exception) -> None:
    raise error


def _unexpected(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    raise context.get("exception") or AssertionError(context["message"])
