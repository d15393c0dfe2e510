"""The driver of actors on a real bus."""

import asyncio
import json
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterable

from msgspec import Raw, Struct

from bus.codec import encode
from bus.memory import MemoryBus
from bus.messages.flow import DoneBatch, Execute, Route
from bus.messages.public import QueryHead
from bus.natsbus import NatsBus
from bus.port import Delivery
from bus.subjects import Subjects
from services.core.actor import After, Done, Effect, Envelope, Inlet, Publish, Started, Stopping, Watch
from services.core.metric import MetricFamily
from services.executor.commands import RunBatch
from services.executor.queue import QueuedQuery
from services.shell.runtime.runtime import Runtime
from services.shell.runtime.telemetry import JsonLines, Sentences, about
from tests.support.clients.responders import until
from tests.support.servers.processes import environ


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


async def test_replies_to_an_actors_first_words_arrive(nats_url: str, prefix: str) -> None:
    """Else an executor that has just started would miss the load orders that its first report brings."""

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
    async with asyncio.timeout(60):
        await caller.answered.wait()
    assert caller.heard == [Started(), "call", Word("you are heard")]
    await runtime.stop(1.0)
    await bus.close()
    await other.close()


async def test_what_comes_before_an_actor_has_started_waits(nats_url: str, prefix: str) -> None:
    other = await NatsBus.connect(nats_url, name="peer")
    bus = await NatsBus.connect(nats_url, name="caller")
    caller = Caller(prefix)
    runtime = Runtime("caller", lambda: caller, bus, Subjects(prefix))
    starting = asyncio.create_task(runtime.start())
    while not starting.done():
        other.publish(f"{prefix}.one", encode(Word("early")))
        await other.flush()
    other.publish(f"{prefix}.one", encode(Word("late")))  # all early ones may have been before it listened
    async with asyncio.timeout(60):
        await caller.answered.wait()
    assert caller.heard[0] == Started()
    await runtime.stop(1.0)
    await bus.close()
    await other.close()


class Shared:
    """Shares what comes on one subject, and knows when another has told it enough. taken: what it got of it."""

    def __init__(self, prefix: str) -> None:
        self.knows = False
        self.taken: list[str] = []
        self.ended: list[Stopping] = []
        self.inlets = (
            Inlet(subject=f"{prefix}.work", message=Word, queue="workers"),
            Inlet(subject=f"{prefix}.facts", message=Word),
        )
        self.watches: tuple[Watch, ...] = ()
        self.prefix = prefix

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        message = envelope.message
        if isinstance(message, Stopping):
            self.ended.append(message)
        elif envelope.subject.endswith(".facts"):
            self.knows = True
        elif isinstance(message, Word):
            self.taken.append(message.said)
        return ()


class SharedInsight:
    """under_way: as long as it has taken what did not end."""

    def __init__(self) -> None:
        self.working = True

    def families(self, actor: Shared) -> Iterable[MetricFamily]:
        return ()

    def missing(self, actor: Shared, now: float) -> str:
        return "" if actor.knows else "facts"

    def under_way(self, actor: Shared) -> bool:
        return self.working


async def test_a_successor_shares_the_work_once_it_knows_enough_and_the_one_before_it_ends_what_it_has() -> None:
    bus = MemoryBus()
    old, new, insight = Shared("p"), Shared("p"), SharedInsight()
    first = Runtime("old", lambda: old, bus, Subjects("p"), insight=insight)
    second = Runtime("new", lambda: new, bus, Subjects("p"), insight=SharedInsight())
    await first.start()
    starting = asyncio.create_task(second.start((0.0, 120.0)))

    async def work(times: int) -> None:
        for n in range(times):
            bus.publish("p.work", encode(Word(str(n))))
        await bus.flush()

    await until(lambda: len(second._open) == 1)  # the facts' inlet
    await work(20)
    await until(lambda: len(old.taken) == 20)
    assert not starting.done()
    bus.publish("p.facts", encode(Word("all there is")))
    await starting
    assert new.taken == []
    stopping = asyncio.create_task(first.stop(120.0, succeeded=True))
    await until(lambda: not first._shared)
    await work(20)
    await until(lambda: len(new.taken) == 20)
    assert len(old.taken) == 20
    assert old.ended == [], "it has not ended what it took"
    insight.working = False
    await stopping
    assert old.ended == [Stopping(120.0, succeeded=True)]
    await second.stop(1.0)


async def test_a_successor_that_never_knows_enough_begins_in_the_end() -> None:
    bus = MemoryBus()
    actor = Shared("p")
    runtime = Runtime("new", lambda: actor, bus, Subjects("p"), insight=SharedInsight())
    await runtime.start((0.0, 0.05))
    bus.publish("p.work", encode(Word("at last")))
    await until(lambda: actor.taken == ["at last"])
    await runtime.stop(1.0)


# -- Log lines: JSON for programs, sentences for people, and which query they are about.
UID = bytes(range(16))
ROUTE = Route(UID, 0, 0, "reply", 1.0, 1.0, "d", "i", "app", 1, "mine")


def record(**extra: object) -> logging.LogRecord:
    made = logging.LogRecord("services.x", logging.ERROR, "file", 1, "it %s", ("broke",), None)
    made.__dict__.update(extra)
    return made


def test_lines_for_programs_and_for_people() -> None:
    line = json.loads(JsonLines("dispatcher").format(record(uid="00", worker=object)))
    assert line["level"] == "ERROR"
    assert line["message"] == "it broke"
    assert (line["service"], line["uid"]) == ("dispatcher", "00")
    assert isinstance(line["worker"], str)  # whatever it is, the line is written
    assert Sentences().format(record(uid="00")).endswith("ERROR   services.x: it broke uid=00")


def test_what_a_message_is_about() -> None:
    work = QueuedQuery(ROUTE, Raw(b""), None, 1, None)
    assert about(ROUTE) == {"uid": UID.hex(), "query": "mine"}
    assert about(Execute(ROUTE, Raw(b""))) == {"uid": UID.hex(), "query": "mine"}
    assert about(QueryHead(id="mine")) == {"query": "mine"}
    assert about(RunBatch("i", [work, work], 0.1, False)) == {"uids": [UID.hex()] * 2}
    assert about(DoneBatch("q", "w", 1, "i", "v", 1, 1.0, 2.0, 0.0, 0, [UID])) == {"uids": [UID.hex()]}
    assert about(Done("machine", 1)) == {}  # an id, but no query's
    assert about(None) == {}


SAY = """
import logging
from services.shell.runtime.telemetry import set_up
set_up("INFO", "test")
logging.getLogger("x").warning("hello", extra={"uid": "77"})
"""


def test_who_reads_decides_the_form() -> None:
    command = [sys.executable, "-c", SAY]
    piped = subprocess.run(command, capture_output=True, text=True, env=environ(), check=True).stderr
    assert json.loads(piped) | {"time": 0} == {
        "time": 0,
        "level": "WARNING",
        "logger": "x",
        "message": "hello",
        "service": "test",
        "uid": "77",
    }
    ours, theirs = pty.openpty()
    subprocess.run(command, stderr=theirs, env=environ(), check=True)
    os.close(theirs)
    assert os.read(ours, 1000).decode().strip().endswith("WARNING x: hello uid=77")
    os.close(ours)


def test_a_copy_of_an_older_process_has_the_clock_of_its_own_start() -> None:
    """The machine's clock was set meanwhile, or the machine has slept."""
    program = (
        "import os, time\n"
        "from services.shell.runtime.runtime import unix_now\n"
        "before = time.time\n"
        "time.time = lambda: before() + 100.0\n"
        "if (pid := os.fork()) == 0:\n"
        "    os._exit(abs(unix_now() - time.time()) > 50.0)\n"
        "assert unix_now() < time.time() - 50.0\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
