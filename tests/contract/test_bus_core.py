"""What every bus promises of plain messages."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from bus.port import BusClosed, BusError, Delivery, NoResponders, PayloadTooLarge, RequestTimeout
from tests.support.clients.responders import until
from tests.support.servers.buses import Buses, Connects


async def test_messages_of_one_publisher_arrive_once_and_in_order(buses: Buses, connect: Connects) -> None:
    sender, receiver = await connect(), await connect()
    got: list[int] = []
    await receiver.subscribe(f"{buses.prefix}.n", lambda d: got.append(int(d.data)))
    for number in range(2000):
        sender.publish(f"{buses.prefix}.n", b"%d" % number)
        if number % 97 == 0:
            await asyncio.sleep(0)
    await until(lambda: len(got) >= 2000)
    assert got == list(range(2000))


async def test_where_there_is_one_server_what_goes_behind_all_comes_once_in_its_turn(
    buses: Buses, connect: Connects
) -> None:
    bus = await connect()
    got: list[Delivery] = []
    await bus.subscribe(f"{buses.prefix}-behind.n", got.append)
    for number in range(9):
        say = bus.publish_behind if number % 3 == 1 else bus.publish
        say(f"{buses.prefix}-behind.n", b"%d" % number)
    await until(lambda: len(got) >= 9)
    assert got == [Delivery(f"{buses.prefix}-behind.n", b"%d" % number) for number in range(9)]


@pytest.mark.parametrize("size", [0, 1, 70_000, 600_000])
async def test_a_body_may_come_in_two_parts(buses: Buses, connect: Connects, size: int) -> None:
    bus = await connect()
    got: list[bytes] = []
    await bus.subscribe(f"{buses.prefix}.n", lambda d: got.append(d.data))
    rest = bytes(range(256)) * (size // 256) + bytes(size % 256)
    bus.publish(f"{buses.prefix}.n", b"beginning", tail=memoryview(rest))
    bus.publish(f"{buses.prefix}.n", b"next", headers={"A": "b"}, tail=rest[:5])
    await until(lambda: len(got) == 2)
    assert got == [b"beginning" + rest, b"next" + rest[:5]]
    with pytest.raises(PayloadTooLarge):
        bus.publish(f"{buses.prefix}.n", b"x", tail=bytes(bus.max_payload))


async def test_a_delivery_carries_subject_body_reply_and_headers(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    got: list[Delivery] = []
    await bus.subscribe(f"{buses.prefix}.*.b", got.append)
    bus.publish(f"{buses.prefix}.a.b", b"")
    bus.publish(
        f"{buses.prefix}.ä.b", bytes(range(256)), reply="some.reply", headers={"Traceparent": "00-1", "X": "é: 1"}
    )
    await until(lambda: len(got) == 2)
    assert got[0] == Delivery(f"{buses.prefix}.a.b", b"")
    assert got[1] == Delivery(
        f"{buses.prefix}.ä.b", bytes(range(256)), "some.reply", {"Traceparent": "00-1", "X": "é: 1"}
    )


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [
        ("q.*", ["q.a", "q.b"]),
        ("q.>", ["q.a", "q.b", "q.a.c"]),
        ("q.a", ["q.a"]),
        ("*.a", ["q.a", "r.a"]),
        ("q.*.c", ["q.a.c"]),
        ("q", []),
    ],
)
async def test_wildcards(buses: Buses, connect: Connects, pattern: str, heard: list[str]) -> None:
    bus = await connect()
    got: list[str] = []
    await bus.subscribe(f"{buses.prefix}.{pattern}", lambda d: got.append(d.subject))
    for subject in ("q.a", "q.b", "q.a.c", "r.a"):
        bus.publish(f"{buses.prefix}.{subject}", b"")
    await bus.flush()
    await until(lambda: len(got) >= len(heard))
    await asyncio.sleep(0.02)
    assert got == [f"{buses.prefix}.{subject}" for subject in heard]


async def test_a_queue_group_shares_and_everyone_else_gets_all(buses: Buses, connect: Connects) -> None:
    sender = await connect()
    members: list[list[int]] = [[], [], []]
    for got in members:
        await (await connect()).subscribe(f"{buses.prefix}.w", _number_into(got), queue="workers")
    other: list[int] = []
    await (await connect()).subscribe(f"{buses.prefix}.w", _number_into(other), queue="auditors")
    plain: list[int] = []
    await (await connect()).subscribe(f"{buses.prefix}.w", _number_into(plain))
    for number in range(300):
        sender.publish(f"{buses.prefix}.w", b"%d" % number)
    await until(lambda: sum(map(len, members)) >= 300 and len(other) >= 300 and len(plain) >= 300)
    assert sorted(number for got in members for number in got) == list(range(300))
    assert all(len(got) >= 30 for got in members)
    assert other == plain == list(range(300))


async def test_a_forward_that_nobody_hears_comes_back_to_its_sender_as_503(buses: Buses, connect: Connects) -> None:
    dispatcher, stranger = await connect(), await connect()
    came_back: list[Delivery] = []
    await dispatcher.subscribe(f"{buses.prefix}.done.d1.*", came_back.append)
    dispatcher.publish(f"{buses.prefix}.execute.gone.cpu", b"query", reply=f"{buses.prefix}.done.d1.u1")
    stranger.publish(f"{buses.prefix}.execute.gone.cpu", b"query", reply=f"{buses.prefix}.done.d1.u2")
    await stranger.flush()
    await until(lambda: bool(came_back))
    await asyncio.sleep(0.02)
    assert [(d.subject, d.data, d.status) for d in came_back] == [(f"{buses.prefix}.done.d1.u1", b"", "503")]

    executor = await connect()
    taken: list[Delivery] = []
    await executor.subscribe(f"{buses.prefix}.execute.gone.cpu", taken.append, queue="executor")
    dispatcher.publish(f"{buses.prefix}.execute.gone.cpu", b"query", reply=f"{buses.prefix}.done.d1.u3")
    await until(lambda: bool(taken))
    await dispatcher.flush()
    assert len(came_back) == 1
    assert (taken[0].status, taken[0].reply) == ("", f"{buses.prefix}.done.d1.u3")


async def test_requests_in_parallel_each_get_their_own_answer(buses: Buses, connect: Connects) -> None:
    server, client = await connect(), await connect()
    held: list[Delivery] = []
    await server.subscribe(f"{buses.prefix}.twice", held.append)
    asked = [asyncio.ensure_future(client.request(f"{buses.prefix}.twice", b"%d" % n, 60.0)) for n in range(100)]
    await until(lambda: len(held) == 100)
    for delivery in reversed(held):
        server.publish(delivery.reply, delivery.data * 2, headers={"Served-By": "test"})
    for number, answer in enumerate(await asyncio.gather(*asked)):
        assert answer.data == b"%d" % number * 2
        assert answer.headers == {"Served-By": "test"}


async def test_a_request_to_nobody_fails_at_once_and_to_the_silent_in_time(buses: Buses, connect: Connects) -> None:
    server, client = await connect(), await connect()
    with pytest.raises(NoResponders, match=r"\.nobody"):
        await client.request(f"{buses.prefix}.nobody", b"", 20.0)
    late: list[Delivery] = []
    await server.subscribe(f"{buses.prefix}.slow", late.append)
    with pytest.raises(RequestTimeout, match=r"0\.05 s"):
        await client.request(f"{buses.prefix}.slow", b"", 0.05)
    await until(lambda: bool(late))
    server.publish(late[0].reply, b"too late")
    await server.subscribe(f"{buses.prefix}.fast", lambda d: server.publish(d.reply, b"in time"))
    assert (await client.request(f"{buses.prefix}.fast", b"", 60.0)).data == b"in time"


async def test_a_handler_that_raises_is_reported_and_ends_nothing(buses: Buses, connect: Connects) -> None:
    errors: list[Exception] = []
    bus = await connect(on_error=errors.append)
    got: list[bytes] = []

    def handle(delivery: Delivery) -> None:
        if delivery.data == b"bad":
            raise ValueError("cannot digest this")
        got.append(delivery.data)

    await bus.subscribe(f"{buses.prefix}.x", handle)
    for data in (b"1", b"bad", b"2"):
        bus.publish(f"{buses.prefix}.x", data, headers={"A": "b"} if data == b"bad" else None)
    bus.publish(f"{buses.prefix}.x", b"bad")
    bus.publish(f"{buses.prefix}.x", b"3")
    await until(lambda: len(got) == 3)
    assert got == [b"1", b"2", b"3"]
    assert [str(error) for error in errors] == ["cannot digest this"] * 2
    assert f"{buses.prefix}.x" in "".join(errors[0].__notes__)


async def test_a_subscription_that_is_drained_has_handled_what_came_and_takes_nothing_more(
    buses: Buses, connect: Connects
) -> None:
    sender, receiver = await connect(), await connect()
    got: list[int] = []
    subscription = await receiver.subscribe(f"{buses.prefix}.x", _number_into(got))
    for number in range(500):
        sender.publish(f"{buses.prefix}.x", b"%d" % number)
    await sender.flush()
    await subscription.drain()
    assert got == list(range(500))
    sender.publish(f"{buses.prefix}.x", b"500")
    await sender.flush()
    await receiver.flush()
    assert len(got) == 500
    await subscription.drain()  # a second time does no harm


async def test_a_bus_that_is_drained_handles_answers_and_closes(buses: Buses, connect: Connects) -> None:
    client, server = await connect(), await connect()
    said: list[str] = []
    server.on_status(said.append)
    answers: list[bytes] = []
    await client.subscribe(f"{buses.prefix}.answers", lambda d: answers.append(d.data))
    await server.subscribe(f"{buses.prefix}.x", lambda d: server.publish(d.reply, d.data))
    for number in range(100):
        client.publish(f"{buses.prefix}.x", b"%d" % number, reply=f"{buses.prefix}.answers")
    await client.flush()
    await server.drain()
    await until(lambda: len(answers) == 100)
    assert said == ["closed"]
    with pytest.raises(BusClosed):
        server.publish(f"{buses.prefix}.x", b"")
    with pytest.raises(BusClosed):
        await server.request(f"{buses.prefix}.x", b"", 1.0)
    with pytest.raises(BusClosed):
        await server.subscribe(f"{buses.prefix}.x", _number_into([]))
    with pytest.raises(NoResponders):
        await client.request(f"{buses.prefix}.x", b"", 5.0)
    await server.drain()
    await server.close()


async def test_closing_wakes_who_waits_for_an_answer(buses: Buses, connect: Connects) -> None:
    client, server = await connect(), await connect()
    await server.subscribe(f"{buses.prefix}.x", lambda d: None)
    asked = asyncio.ensure_future(client.request(f"{buses.prefix}.x", b"", 20.0))
    await client.flush()
    await client.close()
    with pytest.raises(BusClosed):
        await asked


async def test_a_body_above_the_limit_is_refused_before_it_is_sent(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    got: list[int] = []
    await bus.subscribe(f"{buses.prefix}.x", lambda d: got.append(len(d.data)))
    most = bus.max_payload
    assert most == 8 * 2**20
    bus.publish(f"{buses.prefix}.x", bytes(most))
    for send in (bus.publish, partial(bus.publish, headers={"A": "b"})):
        with pytest.raises(PayloadTooLarge, match=str(most)):
            send(f"{buses.prefix}.x", bytes(most + 1))
    with pytest.raises(PayloadTooLarge):
        await bus.request(f"{buses.prefix}.x", bytes(most + 1), 1.0)
    with pytest.raises(PayloadTooLarge):
        await bus.publish_durable(f"{buses.prefix}.x", bytes(most + 1), "id")
    bus.publish(f"{buses.prefix}.x", b"fine")
    await until(lambda: len(got) == 2)
    assert got == [most, 4]


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB x 1\r\n1", "a\tb", "a\x00b", "a\nb", "\u2028"])
async def test_a_subject_cannot_break_out_of_its_line(connect: Connects, subject: str) -> None:
    bus = await connect()
    with pytest.raises(BusError, match="subject"):
        bus.publish(subject, b"")
    with pytest.raises(BusError, match="subject"):
        await bus.subscribe(subject, lambda d: None)
    if subject:
        with pytest.raises(BusError, match="subject"):
            bus.publish("fine", b"", reply=subject)
        with pytest.raises(BusError, match="subject"):
            await bus.subscribe("fine", lambda d: None, queue=subject)


@pytest.mark.parametrize("pattern", ["a..b", ".a", "a.", "a.>.b", "a.b*", "a.>b", ">>"])
async def test_a_pattern_with_misplaced_wildcards_is_refused(connect: Connects, pattern: str) -> None:
    with pytest.raises(BusError, match="subject"):
        await (await connect()).subscribe(pattern, lambda d: None)


@pytest.mark.parametrize("headers", [{"A": "b\r\nC: d"}, {"A\r\nB": "c"}, {"A B": "c"}, {"A:": "c"}, {"": "c"}])
async def test_a_header_cannot_break_out_of_its_line(buses: Buses, connect: Connects, headers: dict[str, str]) -> None:
    bus = await connect()
    with pytest.raises(BusError, match="header"):
        bus.publish(f"{buses.prefix}.x", b"", headers=headers)


async def test_inboxes_are_unlike(connect: Connects) -> None:
    one, two = await connect(), await connect()
    inboxes = {one.new_inbox(), one.new_inbox(), two.new_inbox()}
    assert len(inboxes) == 3
    assert min(map(len, inboxes)) >= 20


async def test_a_handler_may_publish_and_close_what_it_listens_to(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    steps: list[int] = []

    def step(delivery: Delivery) -> None:
        number = int(delivery.data)
        steps.append(number)
        if number < 50:
            bus.publish(f"{buses.prefix}.step", b"%d" % (number + 1))

    await bus.subscribe(f"{buses.prefix}.step", step)
    bus.publish(f"{buses.prefix}.step", b"0")
    await until(lambda: len(steps) == 51)
    assert steps == list(range(51))


def _number_into(got: list[int]) -> Callable[[Delivery], None]:
    return lambda delivery: got.append(int(delivery.data))
