"""The controller's edge on both buses: one of many claims wins, notes are kept for the next leader."""

import asyncio

import pytest

from bus.codec import decode, encode
from bus.messages.scaling import LeaderRecord, MachineRecord, PipelineReplicas, StartMachine
from bus.subjects import Subjects
from services.autoscaler.vms.commands import (
    ClaimLease,
    DeleteRecord,
    DeleteReplicas,
    LeaseClaimed,
    SaveRecord,
    SaveReplicas,
    Start,
)
from services.autoscaler.vms.edge import ControllerEdge
from tests.support.servers.buses import Buses, Connects


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


async def test_a_record_that_cannot_be_read_stands_for_nobody(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    await _put(bus, buses.prefix, b"\xc1")
    assert (await ControllerEdge(bus, Subjects(buses.prefix), None).perform(claim("vm-a", 1, None))).ok


async def test_notes_are_kept_and_dropped(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    edge = ControllerEdge(bus, Subjects(buses.prefix), None)
    note = MachineRecord(worker="cpu-1-1", kind="cpu", epoch=1, state="Booting", at=5.0)
    await edge.perform(SaveRecord(record=note))
    bucket = await bus.key_value(Subjects(buses.prefix).control_bucket)
    assert (await bucket.get("machine.cpu-1-1")).value == encode(note)
    await edge.perform(DeleteRecord(worker="cpu-1-1"))
    assert await bucket.keys() == []


def kept(epoch: int, at: float) -> PipelineReplicas:
    return PipelineReplicas(
        pipeline="p", epoch=epoch, plan="d", replicas={"a": int(at)}, variants={"a": "v"}, lambda_max=5.0, at=at
    )


async def test_replicas_of_a_pipeline_are_those_of_the_latest_leader(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    edge = ControllerEdge(bus, Subjects(buses.prefix), None)
    bucket = await bus.key_value(Subjects(buses.prefix).control_bucket)
    for epoch, at, expected in ((2, 5.0, 5.0), (2, 6.0, 6.0), (1, 9.0, 6.0), (3, 7.0, 7.0), (3, 6.5, 7.0)):
        await edge.perform(SaveReplicas(record=kept(epoch, at)))
        assert decode(PipelineReplicas, (await bucket.get("pipeline.p")).value or b"").at == expected
    for epoch, at in ((2, 99.0), (3, 6.0)):
        await edge.perform(DeleteReplicas(pipeline="p", epoch=epoch, at=at))
        assert await bucket.keys() == ["pipeline.p"]
    for _ in range(2):
        await edge.perform(DeleteReplicas(pipeline="p", epoch=3, at=8.0))
        assert await bucket.keys() == []
    await edge.perform(SaveReplicas(record=kept(1, 1.0)))
    await bucket.put("pipeline.p", b"\xc1")
    await edge.perform(SaveReplicas(record=kept(4, 2.0)))
    assert decode(PipelineReplicas, (await bucket.get("pipeline.p")).value or b"").at == 2.0


async def test_without_a_provider_nothing_is_started(buses: Buses, connect: Connects) -> None:
    edge = ControllerEdge(await connect(), Subjects(buses.prefix), None)
    with pytest.raises(ValueError, match="cannot Start"):
        await edge.perform(Start(order=StartMachine(worker="x", kind="cpu", epoch=1)))


async def _put(bus: object, prefix: str, value: bytes) -> None:
    bucket = await bus.key_value(Subjects(prefix).control_bucket)
    await bucket.put("controller", value)
