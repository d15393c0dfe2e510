"""The driver of actors on a real bus."""

import asyncio
from collections.abc import Iterable

from msgspec import Struct

from bus.codec import encode
from bus.natsbus import NatsBus
from bus.port import Delivery
from bus.subjects import Subjects
from services.core.actor import After, Effect, Envelope, Inlet, Publish, Started, Watch
from services.shell.runtime.runtime import Runtime
from tests.support.servers.nats import run


class Word(Struct, frozen=True):
    said: str


class Caller:
    """Calls out as soon as it starts, and keeps what it is told."""

    def __init__(self, prefix: str) -> None:
        self.heard: list[object] = []
        self.answered = asyncio.Event()
        self._prefix = prefix

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        return tuple(Inlet(subject=f"{self._prefix}.{name}", message=Word) for name in ("one", "two", "three"))

    @property
    def watches(self) -> tuple[Watch, ...]:
        return ()

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        message = envelope.message
        self.heard.append(message)
        if isinstance(message, Started):
            return (After("call", 0.0, "call"),)
        if message == "call":
            return (Publish(f"{self._prefix}.call", Word("hello")),)
        self.answered.set()
        return ()


def test_replies_to_an_actors_first_words_arrive(nats_url: str, prefix: str) -> None:
    """Else an executor that has just started would miss the load orders that its first report brings."""

    async def main() -> None:
        def peer(delivery: Delivery) -> None:
            other.publish(f"{prefix}.three", encode(Word("you are heard")))

        other = await NatsBus.connect(nats_url, name="peer")
        bus = await NatsBus.connect(nats_url, name="caller")
        await other.subscribe(f"{prefix}.call", peer)
        await other.flush()
        caller = Caller(prefix)
        runtime = Runtime("caller", lambda: caller, bus, Subjects(prefix))
        assert list(runtime.families()) == []  # a page that is asked for while the process starts
        await runtime.start()
        assert list(runtime.families())
        async with asyncio.timeout(5):
            await caller.answered.wait()
        assert caller.heard == [Started(), "call", Word("you are heard")]
        await runtime.stop(1.0)
        await bus.close()
        await other.close()

    run(main())


def test_what_comes_before_an_actor_has_started_waits(nats_url: str, prefix: str) -> None:
    async def main() -> None:
        other = await NatsBus.connect(nats_url, name="peer")
        bus = await NatsBus.connect(nats_url, name="caller")
        caller = Caller(prefix)
        runtime = Runtime("caller", lambda: caller, bus, Subjects(prefix))
        starting = asyncio.create_task(runtime.start())
        while not starting.done():
            other.publish(f"{prefix}.one", encode(Word("early")))
            await other.flush()
        other.publish(f"{prefix}.one", encode(Word("late")))  # all early ones may have been before it listened
        async with asyncio.timeout(20):
            await caller.answered.wait()
        assert caller.heard[0] == Started()
        await runtime.stop(1.0)
        await bus.close()
        await other.close()

    run(main())
