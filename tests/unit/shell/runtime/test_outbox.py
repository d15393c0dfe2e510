"""Events on their way to the stream, when the process that has them is killed or its actor begins anew."""

import asyncio
import mmap
from collections.abc import Iterable
from typing import Any

import pytest

from bus.codec import decode
from bus.memory import Broker
from bus.messages.events import CostEvent, FeedbackEvent, OutcomeEvent
from bus.port import Delivery, StreamSpec
from bus.subjects import Subjects
from services.core.actor import Effect, Envelope, Inlet, Publish, Record, Started, Synced, Watch, Will
from services.recorder.tables import Batch
from services.shell.host.running import KEPT_SIZE, ROOM, Kept
from services.shell.runtime.outbox import Outbox
from services.shell.runtime.runtime import Runtime
from tests.support.clients.responders import until

SUBJECTS = Subjects()
STREAM = StreamSpec("outcomes", (SUBJECTS.event("outcome"),), "limits", 10**9)
UIDS = [bytes([n]) * 16 for n in range(5)]


def outcome(uid: bytes) -> OutcomeEvent:
    return OutcomeEvent(time=1.0, uid=uid, id=None, app="app", outcome="refused", code="deadline")


def add(outbox: Outbox, *uids: bytes) -> None:
    """Outcomes of one turn of the actor."""
    for uid in uids:
        outbox.add(outcome(uid))
    outbox.keep()


class System:
    """A broker, and memory that outlives the processes on it."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, KEPT_SIZE)
        self.broker = Broker()
        self.recorded: list[int] = []
        self._lives = 0

    def start(self, kept: Kept | None = None) -> Outbox:
        """The outbox of a new process; of a new actor in the same one, if it is given what that keeps."""
        self._lives += 1
        bus = self.broker.connect()
        kept = kept or Kept(self.memory)
        outbox = Outbox(bus, SUBJECTS, f"d-{self._lives}", self.recorded.append, kept=kept)
        outbox.start()
        return outbox

    async def stored(self) -> list[bytes]:
        """The uids in the stream."""
        consumer = await self.broker.connect().consumer("outcomes", "test")
        bodies = [message.data for message in await consumer.fetch(1000, 0.1)]
        return [row.uid for body in bodies for row in decode(Batch[OutcomeEvent], body).rows]


async def kill(outbox: Outbox) -> None:
    task = outbox._task
    task.cancel()
    await asyncio.wait([task])
    if outbox._timer is not None:
        outbox._timer.cancel()


async def test_what_a_killed_process_had_not_sent_its_successor_sends() -> None:
    system = System()
    first = system.start()
    add(first, *UIDS[:2])
    add(first, UIDS[2])
    cost = {
        "worker": "w",
        "hardware": "cpu",
        "app": None,
        "model": None,
        "variant": None,
        "busy_seconds": 1.0,
        "cost": 1.0,
    }
    first.add(CostEvent(time=1.0, seconds=1.0, simulated=False, **cost))
    await kill(first)
    await system.broker.connect().ensure_stream(STREAM)
    second = system.start()
    add(second, UIDS[3])
    await second.close(30.0)
    assert await system.stored() == UIDS[:4], "also those of the process before, which goes first; no other kind"
    assert system.recorded == [1], "rows of another process have no number here"
    assert Kept(system.memory).left() == {}


async def test_what_is_in_the_stream_is_not_kept() -> None:
    system = System()
    await system.broker.connect().ensure_stream(STREAM)
    outbox = system.start()
    add(outbox, *UIDS)
    await outbox.close(30.0)
    assert system.recorded == [5]
    assert Kept(system.memory).left() == {}


async def test_a_row_that_somebody_waits_for_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.shell.runtime.outbox.LATEST", 3600.0)
    system = System()
    subjects = (SUBJECTS.event("outcome"), SUBJECTS.event("feedback"))
    await system.broker.connect().ensure_stream(StreamSpec("rows", subjects, "limits", 10**9))
    outbox = system.start()
    label = FeedbackEvent(time=1.0, app="app", id=None, context=None, label="1", input_digest=None)
    add(outbox, UIDS[0])
    outbox.add(label)
    await until(lambda: system.recorded[-1:] == [2])
    add(outbox, UIDS[1])
    outbox._seal()
    outbox.add(label)  # behind a batch that is on its way
    await until(lambda: system.recorded[-1:] == [4])
    await outbox.close(30.0)


async def test_what_an_actor_could_not_send_the_next_one_sends() -> None:
    """Its process goes on: the runtime starts a new actor after repeated faults."""
    system = System()
    kept = Kept(system.memory)
    first = system.start(kept)
    add(first, UIDS[0])
    await first.close(0.01)  # there is no stream
    await system.broker.connect().ensure_stream(STREAM)
    await system.start(kept).close(30.0)
    assert await system.stored() == UIDS[:1]


async def test_a_successor_with_memory_of_its_own_sends_what_the_one_before_it_could_not() -> None:
    """A planned restart: both run for a while, so each has its own."""
    system, theirs = System(), Kept(mmap.mmap(-1, KEPT_SIZE))
    old = system.start(theirs)
    add(old, *UIDS[:2])
    memory = theirs._memory
    new = system.start()
    add(new, UIDS[2])
    await old.close(0.01)  # there is no stream
    new.inherit(Kept(memory))
    assert Kept(memory).left() == {}
    add(new, UIDS[3])
    kept = Kept(system.memory).left().values()
    assert sum(len(decode(list[Any], rows)) for rows in kept) == 4, "if it is killed as well, they are not lost"
    await system.broker.connect().ensure_stream(STREAM)
    await new.close(30.0)
    assert sorted(await system.stored()) == UIDS[:4]
    assert Kept(system.memory).left() == {}


async def test_a_successor_of_one_that_left_nothing_sends_its_own() -> None:
    system = System()
    await system.broker.connect().ensure_stream(STREAM)
    new = system.start()
    await asyncio.sleep(0)  # it waits for something to send
    new.inherit(Kept(mmap.mmap(-1, KEPT_SIZE)))
    await asyncio.sleep(0)
    add(new, UIDS[0])
    await new.close(30.0)
    assert await system.stored() == UIDS[:1]


async def test_without_room_events_go_their_way_as_without_such_memory() -> None:
    system = System()
    kept = Kept(system.memory)
    assert kept.put(bytes(ROOM - 100))
    outbox = system.start(kept)
    add(outbox, *UIDS)
    await system.broker.connect().ensure_stream(STREAM)
    await outbox.close(30.0)
    assert await system.stored() == UIDS


# -- What a killed process wanted said, its successor says; nothing is said for one that ends by itself.


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


class Willing:
    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, KEPT_SIZE)
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


async def test_a_killed_process_is_spoken_for_once_and_one_that_stops_is_not() -> None:
    system = Willing()
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


async def test_one_that_was_killed_while_its_successor_came_is_spoken_for_too() -> None:
    system = Willing()
    await system.broker.connect().subscribe("heir", system.heard.append)
    first = await system.start(wants=True)
    left, system.memory = system.memory, mmap.mmap(-1, KEPT_SIZE)
    successor = await system.start()
    successor.inherit(Kept(left))
    assert [body for body, _, _ in await system.said()] == [b"first", b"second"]
    assert Kept(left).left(wills=True) == {}
    for runtime in (first, successor):
        await runtime.stop(1.0)


class Teller:
    """It records two outcomes in its first turn."""

    inlets: tuple[Inlet, ...] = ()
    watches: tuple[Watch, ...] = ()

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        rows = [OutcomeEvent(time=1.0, uid=uid, id=None, app="app", outcome="refused") for uid in (b"1", b"2")]
        return [Record(row) for row in rows] if isinstance(envelope.message, Started) else ()


async def test_what_a_turn_recorded_is_kept_when_the_turn_is_over() -> None:
    memory = mmap.mmap(-1, KEPT_SIZE)
    runtime = Runtime("one", Teller, Broker().connect(), Subjects())
    runtime.kept = Kept(memory)
    await runtime.start()
    [kept] = Kept(memory).left().values()
    assert [row.uid for row in decode(list[OutcomeEvent], kept)] == [b"1", b"2"]
    await runtime.stop(0.01)
