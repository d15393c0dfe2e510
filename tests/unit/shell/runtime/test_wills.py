"""What a killed process wanted said, its successor says; nothing is said for one that ends by itself."""

import asyncio
import mmap
from collections.abc import Iterable

from bus.codec import decode
from bus.memory import Broker
from bus.messages.events import OutcomeEvent
from bus.port import Delivery
from bus.subjects import Subjects
from services.core.actor import Effect, Envelope, Inlet, Publish, Record, Started, Synced, Watch, Will
from services.shell.host.kept import SIZE, Kept
from services.shell.runtime.runtime import Runtime


class Wisher:
    """It wants two things said when it starts, and takes one of them back."""

    def __init__(self, *, wants: bool) -> None:
        self.inlets: tuple[Inlet, ...] = ()
        self.watches = (Watch(bucket="known"),)
        self.synced = asyncio.Event()
        self._wants = wants

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        if isinstance(envelope.message, Synced):
            self.synced.set()
        if not isinstance(envelope.message, Started) or not self._wants:
            return ()
        first, second = Publish("heir", b"first", "inbox.1", {"a": "b"}), Publish("heir", b"second")
        return (Will(1, first), Will(2, first), Will(2, second), Will(3, second), Will(3, None))


class System:
    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SIZE)
        self.broker = Broker()
        self.heard: list[Delivery] = []

    async def start(self, *, wants: bool = False) -> Runtime:
        """A process with one actor, which is ready."""
        actor = Wisher(wants=wants)
        runtime = Runtime("one", lambda: actor, self.broker.connect(), Subjects())
        runtime.kept = Kept(self.memory)
        await runtime.start()
        await actor.synced.wait()
        return runtime

    async def said(self) -> list[tuple[bytes, str, dict[str, str] | None]]:
        """To the heir, by now."""
        await self.broker.connect().flush()
        return [(bytes(one.data), one.reply, one.headers) for one in self.heard]


def test_a_killed_process_is_spoken_for_once_and_one_that_stops_is_not() -> None:
    async def main() -> None:
        system = System()
        await system.broker.connect().subscribe("heir", system.heard.append)
        first = await system.start(wants=True)
        assert await system.said() == []
        second = await system.start()  # in the memory that the first one has left
        wanted = [(b"first", "inbox.1", {"a": "b"}), (b"second", "", None)]
        assert await system.said() == wanted
        third = await system.start(wants=True)
        assert await system.said() == wanted, "once"
        await third.stop(1.0)
        fourth = await system.start()
        assert await system.said() == wanted
        for runtime in (first, second, fourth):
            await runtime.stop(1.0)

    asyncio.run(main())


def test_one_that_was_killed_while_its_successor_came_is_spoken_for_too() -> None:
    async def main() -> None:
        system = System()
        await system.broker.connect().subscribe("heir", system.heard.append)
        first = await system.start(wants=True)
        left, system.memory = system.memory, mmap.mmap(-1, SIZE)
        successor = await system.start()
        successor.inherit(Kept(left))
        assert [body for body, _, _ in await system.said()] == [b"first", b"second"]
        assert Kept(left).left(wills=True) == {}
        for runtime in (first, successor):
            await runtime.stop(1.0)

    asyncio.run(main())


class Teller:
    """It records two outcomes in its first turn."""

    inlets: tuple[Inlet, ...] = ()
    watches: tuple[Watch, ...] = ()

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        rows = [OutcomeEvent(time=1.0, uid=uid, id=None, app="app", outcome="refused") for uid in (b"1", b"2")]
        return [Record(row) for row in rows] if isinstance(envelope.message, Started) else ()


def test_what_a_turn_recorded_is_kept_when_the_turn_is_over() -> None:
    async def main() -> None:
        memory = mmap.mmap(-1, SIZE)
        runtime = Runtime("one", Teller, Broker().connect(), Subjects())
        runtime.kept = Kept(memory)
        await runtime.start()
        [kept] = Kept(memory).left().values()
        assert [row.uid for row in decode(list[OutcomeEvent], kept)] == [b"1", b"2"]
        await runtime.stop(0.01)

    asyncio.run(main())
