"""What every bus promises of durable messages."""

import asyncio
import time
from typing import Any

import pytest

from bus.port import Bus, BusError, Consumer, NotFound, Stored, StreamSpec
from tests.support.servers.buses import Buses, Connects


def spec(buses: Buses, **changes: Any) -> StreamSpec:
    made = StreamSpec(f"{buses.prefix}_S", (f"{buses.prefix}.event.>",), "work", 10 * 2**20)
    return made._replace(**changes)


async def test_a_message_id_is_stored_once(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    await bus.ensure_stream(spec(buses))
    for data, message_id in ((b"1", "a"), (b"1", "a"), (b"2", "b"), (b"1 again", "a")):
        await bus.publish_durable(f"{buses.prefix}.event.x", data, message_id)
    got = await _fetch_all(await bus.consumer(f"{buses.prefix}_S", "c"), 2)
    assert [(m.subject, m.data, m.message_id, m.deliveries) for m in got] == [
        (f"{buses.prefix}.event.x", b"1", "a", 1),
        (f"{buses.prefix}.event.x", b"2", "b", 1),
    ]


async def test_plain_messages_are_kept_and_what_no_stream_keeps_is_an_error(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    with pytest.raises(BusError, match="no stream"):
        await bus.publish_durable(f"{buses.prefix}.event.x", b"1", "a")
    with pytest.raises(NotFound):
        await bus.consumer(f"{buses.prefix}_S", "c")
    bus = await connect()
    await bus.ensure_stream(spec(buses))
    bus.publish(f"{buses.prefix}.event.x", b"1")
    got = await (await bus.consumer(f"{buses.prefix}_S", "c")).fetch(10, 60.0)
    assert [m.data for m in got] == [b"1"]


async def test_work_is_gone_once_acknowledged_and_comes_back_otherwise(buses: Buses, connect: Connects) -> None:
    one, two = await connect(), await connect()
    await one.ensure_stream(spec(buses))
    await _fill(buses, one, 3)
    consumer = await one.consumer(f"{buses.prefix}_S", "c", ack_wait_s=0.3)
    first, second, third = await _fetch_all(consumer, 3)
    await first.ack()
    await second.nak(0.05)
    again = await _fetch_all(await two.consumer(f"{buses.prefix}_S", "c", ack_wait_s=0.3), 2)
    assert sorted(m.data for m in again) == sorted([second.data, third.data])
    assert all(m.deliveries >= 2 for m in again)
    for message in again:
        await message.ack()
    assert await consumer.fetch(10, 0.5) == []


async def test_what_is_still_worked_on_does_not_come_back(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    await bus.ensure_stream(spec(buses))
    await _fill(buses, bus, 1)
    consumer = await bus.consumer(f"{buses.prefix}_S", "c", ack_wait_s=1.0)
    (held,) = await consumer.fetch(1, 60.0)
    for _ in range(5):
        began = time.monotonic()
        await held.extend()
        for early in await consumer.fetch(1, 0.25):
            assert time.monotonic() - began > 1.0, "it comes back only where the machine stood still for so long"
            held = early
    (again,) = await consumer.fetch(1, 60.0)  # once nobody says so any more
    assert again.deliveries > held.deliveries
    await again.ack()


async def test_fetch_returns_what_is_there_and_waits_for_what_is_not(buses: Buses, connect: Connects) -> None:
    bus, other = await connect(), await connect()
    await bus.ensure_stream(spec(buses))
    consumer = await bus.consumer(f"{buses.prefix}_S", "c")
    assert await consumer.fetch(5, 0.05) == []
    waiting = asyncio.ensure_future(consumer.fetch(5, 60.0))
    await asyncio.sleep(0.05)
    await _fill(buses, other, 1)
    assert [m.data for m in await waiting] == [b"0"]
    await _fill(buses, other, 8, start=1)
    several = await consumer.fetch(5, 60.0)
    assert len(several) <= 5
    assert [m.data for m in several + await _fetch_all(consumer, 8 - len(several))] == [b"%d" % n for n in range(1, 9)]


async def test_one_consumer_is_shared_and_two_of_a_history_are_not(buses: Buses, connect: Connects) -> None:
    one, two = await connect(), await connect()
    await one.ensure_stream(spec(buses, retention="limits", full="oldest"))
    await _fill(buses, one, 20)
    half = await _fetch_all(await one.consumer(f"{buses.prefix}_S", "shared"), 10)
    rest = await _fetch_all(await two.consumer(f"{buses.prefix}_S", "shared"), 10)
    assert [int(m.data) for m in half + rest] == list(range(20))
    for message in half + rest:
        await message.ack()
    own = await _fetch_all(await two.consumer(f"{buses.prefix}_S", "own"), 20)
    assert [int(m.data) for m in own] == list(range(20))


async def test_a_consumer_may_take_only_some_subjects(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    await bus.ensure_stream(spec(buses))
    await bus.publish_durable(f"{buses.prefix}.event.cost", b"cost", "1")
    await bus.publish_durable(f"{buses.prefix}.event.state", b"state", "2")
    consumer = await bus.consumer(f"{buses.prefix}_S", "states", f"{buses.prefix}.event.state")
    assert [m.data for m in await consumer.fetch(10, 60.0)] == [b"state"]
    assert await consumer.fetch(10, 0.05) == []


async def test_a_full_stream_refuses_until_there_is_room(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    await bus.ensure_stream(spec(buses, max_bytes=100_000))
    stored = 0
    with pytest.raises(BusError):
        for stored in range(20):
            await bus.publish_durable(f"{buses.prefix}.event.x", bytes(10_000), str(stored))
    assert 7 <= stored <= 10
    kept = await _fetch_all(await bus.consumer(f"{buses.prefix}_S", "c"), stored)
    await kept[0].ack()
    await bus.flush()
    await bus.publish_durable(f"{buses.prefix}.event.x", bytes(9_000), str(stored))
    await bus.ensure_stream(spec(buses, max_bytes=1_000_000))  # the same call makes it larger
    await _fill(buses, bus, 20)


async def test_a_bounded_history_forgets_the_oldest(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    await bus.ensure_stream(spec(buses, retention="limits", full="oldest", max_bytes=100_000))
    for number in range(20):
        await bus.publish_durable(f"{buses.prefix}.event.x", b"%06d" % number + bytes(10_000), str(number))
    consumer, numbers = await bus.consumer(f"{buses.prefix}_S", "c"), [0]
    while numbers[-1] < 19:
        numbers += [int(m.data[:6]) for m in await consumer.fetch(100, 60.0)]
    del numbers[0]
    assert 7 <= len(numbers) <= 10
    assert numbers == list(range(20))[-len(numbers) :]


async def test_ensuring_a_stream_again_keeps_what_is_in_it(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    await bus.ensure_stream(spec(buses))
    await _fill(buses, bus, 3)
    await bus.ensure_stream(spec(buses))
    await bus.ensure_stream(spec(buses, subjects=(f"{buses.prefix}.event.>", f"{buses.prefix}.more")))
    await bus.publish_durable(f"{buses.prefix}.more", b"3", "more")
    got = await _fetch_all(await bus.consumer(f"{buses.prefix}_S", "c"), 4)
    assert [int(m.data) for m in got] == [0, 1, 2, 3]


async def _fill(buses: Buses, bus: Bus, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        await bus.publish_durable(f"{buses.prefix}.event.n", b"%d" % number, f"n{number}")


async def _fetch_all(consumer: Consumer, count: int) -> list[Stored]:
    """So many, though one fetch may bring less while the server is slow."""
    got: list[Stored] = []
    while len(got) < count:
        got += await consumer.fetch(count - len(got), 5.0)
    return got
