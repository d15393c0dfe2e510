"""Several dispatchers learn from feedback through one bucket, on both buses: by compare-and-set, each feedback once, nothing lost."""

import asyncio
from typing import Any

import numpy as np
import pytest

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, Ensemble
from bus.messages.public import Listing, ListRequest
from bus.messages.quality import AppQuality
from bus.messages.scaling import LeaderRecord, MachineRecord, PipelineReplicas, StartMachine
from bus.port import Bus
from bus.subjects import Subjects
from services.autoscaler.vms.commands import (
    ClaimLease,
    LeaseClaimed,
    SaveMachine,
    SaveReplicas,
    Start,
)
from services.autoscaler.vms.edge import ControllerEdge
from services.core.catalog import key_of
from services.core.ensemble.base import Member
from services.core.selection.policy import InfaasPolicy
from services.core.settings import BusSettings, Settings
from services.dispatcher.actor import Dispatcher, make_dispatcher
from services.dispatcher.commands import ContextWritten, PutQuality, ReadContext, StoredContext, WriteContext
from services.dispatcher.edge import DispatcherEdge, uid_maker
from services.dispatcher.predictions import Prediction
from services.recorder.__main__ import streams
from services.shell.runtime.runtime import Runtime
from tests.support.clients.responders import until
from tests.support.servers.buses import Buses, Connects
from tests.support.simulated.fleet import catalogue, variant

# On `local` all that is tested there stays in a process, and dispatchers are several.
pytestmark = pytest.mark.parametrize("buses", ["memory", "nats"], indirect=True)
MODELS = ("bad", "good")
MEMBERS = [Member(model=model, version="1", accuracy=0.9) for model in MODELS]
SAID = {"good": {"y": np.array([[0.9, 0.1]], np.float32)}, "bad": {"y": np.array([[0.1, 0.9]], np.float32)}}
SELECTION = Ensemble(policy="exp4", contextual=True)


class Learners:
    """Dispatchers on one bus, and a client."""

    def __init__(self, subjects: Subjects, client: Bus) -> None:
        self.subjects = subjects
        self.client = client
        self.actors: list[Dispatcher] = []
        self.runtimes: list[Runtime] = []

    @classmethod
    async def start(cls, prefix: str, connect: Connects, count: int) -> "Learners":
        subjects, client = Subjects(prefix), await connect()
        for spec in streams(subjects, BusSettings()).values():
            await client.ensure_stream(spec)
        await client.key_value(subjects.selection_bucket)
        bucket = await client.key_value(subjects.catalog_bucket)
        *records, app = catalogue(*[variant(f"{model}-1", model=model) for model in MODELS], app="a")
        records.append(AppRecord(app="a", links=app.links, signature=app.signature, selection=SELECTION))
        for record in records:
            await bucket.put(key_of(record), encode(record))
        self = cls(subjects, client)
        for number in range(count):
            await self.add(await connect(), f"d{number}-{prefix}")
        return self

    async def add(self, bus: Bus, name: str) -> None:
        """Start a dispatcher. It begins when it knows the catalogue."""

        def make() -> Dispatcher:
            made = make_dispatcher(Settings(), self.subjects, name, InfaasPolicy(), {"cpu": 1.0}, uid_maker())
            self.actors.append(made)
            return made

        runtime = Runtime(name, make, bus, self.subjects, DispatcherEdge(bus, self.subjects))
        await runtime.start()
        self.runtimes.append(runtime)
        await until(lambda: self.actors[-1].apps.synced)

    async def stop(self) -> None:
        for runtime in self.runtimes:
            await runtime.stop(1.0)

    def predicted(self, dispatcher: int, number: int, context: str | None = None) -> str:
        uid = (1000 * dispatcher + number).to_bytes(16, "big")
        p = dict.fromkeys(MODELS, 0.5)
        self.actors[dispatcher].composites.predictions.add(Prediction(uid, "a", context, None, 0.0, MEMBERS, p, SAID))
        return uid.hex()

    async def told(self, query: str, retry_key: bytes | None = None, context: str | None = None) -> dict[str, Any]:
        """The reply to a feedback."""
        body = encode({"query": query, "label": 0, "retry_key": retry_key, "context": context})
        reply = await self.client.request(self.subjects.feedback("a"), body, 30.0)
        return decode(dict[str, Any], reply.data)

    async def tell(self, query: str, retry_key: bytes | None = None) -> None:
        """Raises unless it is accepted."""
        assert await self.told(query, retry_key) == {"accepted": True}

    async def rows(self, context: str | None = None) -> dict[str, dict[str, Any]]:
        body = encode(ListRequest(app="a", context=context))
        reply = await self.client.request(self.subjects.list("selection"), body, 30.0)
        return {row["member"]: row for row in decode(Listing, reply.data).items}


async def test_what_several_dispatchers_learn_at_once_is_all_there(buses: Buses, connect: Connects) -> None:
    """Whichever dispatcher gets a feedback, the one with the prediction applies it; both write the same key."""
    system = await Learners.start(buses.prefix, connect, 2)
    queries = [system.predicted(dispatcher, number) for dispatcher in (0, 1) for number in range(30)]
    await asyncio.gather(*map(system.tell, queries))
    rows = await system.rows()
    assert {row["n"] for row in rows.values()} == {60}
    assert rows["good"]["weight"] > 0.9
    await system.stop()


async def test_after_all_dispatchers_have_gone_the_weights_are_there_and_the_predictions_are_not(
    buses: Buses, connect: Connects
) -> None:
    """What is sent again then teaches nothing. Without its context, a refusal says how it can be judged."""
    system = await Learners.start(buses.prefix, connect, 2)
    query, key = system.predicted(0, 1, "me"), b"k" * 16
    await asyncio.gather(*(system.tell(query, key) for _ in range(8)))
    before = await system.rows("me")
    assert {row["n"] for row in before.values()} == {1}
    await system.stop()
    system.actors.clear()
    system.runtimes.clear()
    await system.add(await connect(), f"later-{buses.prefix}")
    assert await system.rows("me") == before
    error = (await system.told(query, key))["error"]
    assert (error["code"], "send the feedback with the query's `inputs`" in error["message"]) == (
        "bad_request",
        True,
    )
    assert await system.told(query, key, "me") == {"accepted": True}, "the bucket knows that it has counted"
    assert await system.told(query, None, "me") == {"accepted": True}
    assert await system.rows("me") == before
    await system.stop()


async def test_of_two_writes_on_one_value_one_wins_and_the_other_gets_it(buses: Buses, connect: Connects) -> None:
    subjects = Subjects(buses.prefix)
    bucket = await (await connect()).key_value(subjects.selection_bucket)
    one, two = [DispatcherEdge(await connect(), subjects) for _ in range(2)]
    assert await one.perform(ReadContext("a._")) == StoredContext(None, 0)
    first = await one.perform(WriteContext("a._", b"1", 0))
    assert isinstance(first, ContextWritten)
    assert await two.perform(WriteContext("a._", b"2", 0)) == StoredContext(b"1", first.revision)
    second = await two.perform(WriteContext("a._", b"12", first.revision))
    assert isinstance(second, ContextWritten)
    assert await one.perform(WriteContext("a._", b"3", first.revision)) == StoredContext(b"12", second.revision)
    await bucket.delete("a._")
    assert await one.perform(WriteContext("a._", b"3", second.revision)) == StoredContext(None, 0)
    assert isinstance(await one.perform(WriteContext("a._", b"4", 0)), ContextWritten)


async def test_nothing_is_put_of_an_app_that_was_deleted_meanwhile(buses: Buses, connect: Connects) -> None:
    subjects, bus = Subjects(buses.prefix), await connect()
    bucket = await bus.key_value(subjects.catalog_bucket)
    await bucket.put("app.there", b"")
    for app in ("there", "gone"):
        await DispatcherEdge(bus, subjects).perform(PutQuality(app, encode(AppQuality(app=app, revision=1)), 1))
    assert sorted(await bucket.keys()) == ["app.there", "quality.there"]


# -- The controller's edge on both buses: one of many claims wins, notes are kept for the next leader.


def record(holder: str, epoch: int, until: float = 0.0) -> LeaderRecord:
    return LeaderRecord(holder=holder, epoch=epoch, until=until)


def claim(holder: str, epoch: int, expected: LeaderRecord | None, until: float = 0.0) -> ClaimLease:
    return ClaimLease(record=record(holder, epoch, until), expected=expected, by=holder)


async def test_of_many_claims_at_once_one_wins_and_the_others_learn_whose(buses: Buses, connect: Connects) -> None:
    edges = [ControllerEdge(await connect(), Subjects(buses.prefix), None) for _ in range(5)]
    for epoch, before in ((1, None), (2, record("vm-0", 1))):
        if before is not None:
            await _put(await connect(), buses.prefix, encode(before))
        results = await asyncio.gather(*(e.perform(claim(f"vm-{n}", epoch, before)) for n, e in enumerate(edges)))
        winners = [n for n, result in enumerate(results) if result.ok]
        assert len(winners) == 1
        assert all(
            r in (LeaseClaimed(ok=True), LeaseClaimed(ok=False, present=record(f"vm-{winners[0]}", epoch)))
            for r in results
        )


async def test_a_claim_on_what_has_changed_since_is_refused_but_an_unanswered_renewal_is_ones_own(
    buses: Buses, connect: Connects
) -> None:
    edge = ControllerEdge(await connect(), Subjects(buses.prefix), None)
    assert (await edge.perform(claim("vm-a", 1, None))).ok
    assert (await edge.perform(claim("vm-a", 1, record("vm-a", 1), until=1.0))).ok
    assert not (await edge.perform(claim("vm-b", 2, record("vm-a", 1)))).ok  # it has been renewed since
    assert (await edge.perform(claim("vm-a", 1, record("vm-a", 1), until=2.0))).ok
    assert (await edge.perform(claim("vm-b", 2, record("vm-a", 1, 2.0)))).ok
    assert not (await edge.perform(claim("vm-a", 1, record("vm-a", 1, 2.0)))).ok


async def test_unreadable_records_stand_for_nobody_and_nothing_starts_without_a_provider(
    buses: Buses, connect: Connects
) -> None:
    bus = await connect()
    await _put(bus, buses.prefix, b"\xc1")
    assert (await ControllerEdge(bus, Subjects(buses.prefix), None).perform(claim("vm-a", 1, None))).ok
    edge = ControllerEdge(await connect(), Subjects(buses.prefix), None)
    with pytest.raises(ValueError, match="cannot Start"):
        await edge.perform(Start(order=StartMachine(worker="x", kind="cpu", epoch=1)))


async def test_notes_are_kept_and_dropped(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    edge = ControllerEdge(bus, Subjects(buses.prefix), None)
    note = MachineRecord(worker="cpu-1-1", kind="cpu", epoch=1, state="Booting", at=5.0)
    await edge.perform(SaveMachine(worker="cpu-1-1", record=note))
    bucket = await bus.key_value(Subjects(buses.prefix).control_bucket)
    assert (await bucket.get("machine.cpu-1-1")).value == encode(note)
    await edge.perform(SaveMachine(worker="cpu-1-1"))
    assert await bucket.keys() == []


def saved(epoch: int, at: float) -> SaveReplicas:
    record = PipelineReplicas(
        pipeline="p", epoch=epoch, plan="d", replicas={"a": int(at)}, variants={"a": "v"}, lambda_max=5.0, at=at
    )
    return SaveReplicas(pipeline="p", epoch=epoch, at=at, record=record)


async def test_replicas_of_a_pipeline_are_those_of_the_latest_leader(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    edge = ControllerEdge(bus, Subjects(buses.prefix), None)
    bucket = await bus.key_value(Subjects(buses.prefix).control_bucket)
    for epoch, at, expected in ((2, 5.0, 5.0), (2, 6.0, 6.0), (1, 9.0, 6.0), (3, 7.0, 7.0), (3, 6.5, 7.0)):
        await edge.perform(saved(epoch, at))
        assert decode(PipelineReplicas, (await bucket.get("pipeline.p")).value or b"").at == expected
    for epoch, at in ((2, 99.0), (3, 6.0)):
        await edge.perform(SaveReplicas(pipeline="p", epoch=epoch, at=at))
        assert await bucket.keys() == ["pipeline.p"]
    for _ in range(2):
        await edge.perform(SaveReplicas(pipeline="p", epoch=3, at=8.0))
        assert await bucket.keys() == []
    await edge.perform(saved(1, 1.0))
    await bucket.put("pipeline.p", b"\xc1")
    await edge.perform(saved(4, 2.0))
    assert decode(PipelineReplicas, (await bucket.get("pipeline.p")).value or b"").at == 2.0


async def _put(bus: object, prefix: str, value: bytes) -> None:
    await (await bus.key_value(Subjects(prefix).control_bucket)).put("controller", value)
