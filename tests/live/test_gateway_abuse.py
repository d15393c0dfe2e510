"""A gateway process under abuse: the right refusals, little memory, and good answers to others meanwhile."""

import asyncio
import json
import random
from collections.abc import Iterator

import pytest

from tests.support.gateways.abuse import INFER, MUTANTS_MAY, everything, mutant, request, tensor
from tests.support.gateways.gateway_process import Gate, gateway
from tests.support.gateways.web_application import Reply, read, shut
from tests.support.servers.system import Whole

GROWTH_MB = 64


@pytest.fixture(scope="module")
def gate(system: Whole, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway whose limits of time are short."""
    times = {"head_timeout_s": "1", "body_timeout_s": "1", "idle_timeout_s": "5", "connections": "300"}
    with gateway(system, tmp_path_factory.mktemp("gateway"), **times) as found:
        yield found


@pytest.fixture(scope="module")
def patient(system: Whole, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway that gives up on nobody, however slowly a busy machine sends."""
    with gateway(system, tmp_path_factory.mktemp("patient"), head_timeout_s="60", body_timeout_s="60") as found:
        yield found


async def good(gate: Gate) -> Reply:
    """A query as it should be, answered: by others' abuse it may only become slower."""
    reply = await gate.ask("POST", INFER, tensor())
    for _ in range(300):
        if reply.status not in (
            408,
            503,
            504,
        ):  # the variant is being loaded, or the machine stood still while it was sent
            break
        await asyncio.sleep(0.2)
        reply = await gate.ask("POST", INFER, tensor())
    assert reply.status == 200, reply
    assert json.loads(reply.body)["outputs"]
    return reply


async def test_whatever_is_sent_is_refused_rightly_and_costs_little(patient: Gate) -> None:
    gate = patient

    await good(gate)
    before = gate.resident_mb()
    wrong = {}
    count = 0
    for abuse in everything():
        count += 1
        found = await gate.say(abuse.data)
        status = found[0].status if found else 0
        if status in (503, 504) and 200 in abuse.fine:  # nothing wrong with it: the variant is being loaded
            await good(gate)
            found = await gate.say(abuse.data)
            status = found[0].status if found else 0
        if status not in abuse.fine:
            wrong[abuse.name] = (status, found[0].body[:200] if found else b"")
        elif status >= 400 and abuse.data[:5] != b"HEAD ":
            assert json.loads(found[0].body)["error"], abuse.name
    assert wrong == {}
    assert count > 150
    await good(gate)
    assert gate.resident_mb() - before < GROWTH_MB
    assert gate.alive


async def test_mutants_of_good_requests(gate: Gate) -> None:
    chance = random.Random(6)

    async def one() -> None:
        data = mutant(chance)
        for reply in await gate.say(data, replies=4, done=2.0):
            assert reply.status in MUTANTS_MAY, (reply, data)

    await good(gate)
    before = gate.resident_mb()
    for _ in range(2):
        await asyncio.gather(*(one() for _ in range(250)))
    await good(gate)
    assert gate.resident_mb() - before < GROWTH_MB
    assert gate.alive


async def test_a_thousand_idle_connections_keep_nobody_out(gate: Gate) -> None:
    before = gate.resident_mb()
    held = []
    for number in range(1000):
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        held.append(writer)
        if number % 3 == 1:
            writer.write(b"GET /v2 HTTP/1.1\r\nHost: local")
        elif number % 3 == 2:
            writer.write(request("/v2", method="GET"))
        del reader
    for _ in range(5):
        await good(gate)
    assert gate.resident_mb() - before < GROWTH_MB
    for writer in held:
        writer.transport.abort()
    await asyncio.sleep(0)


async def test_slow_clients_are_sent_away(gate: Gate) -> None:
    async def slow(drops: bytes, at_once: bytes = b"") -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        try:
            writer.write(at_once)
            sending = asyncio.create_task(send(writer, drops))
            reply = await read(reader)
            sending.cancel()
            return reply.status if reply else 0
        finally:
            await shut(writer)

    async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await asyncio.sleep(0.05)

    head, _, body = request(INFER, tensor()).partition(b"\r\n\r\n")
    heads = [slow(b"GET /v2 HTTP/1.1\r\nX: " + b"a" * 1000) for _ in range(20)]
    bodies = [slow(body, head + b"\r\n\r\n") for _ in range(20)]
    found = await asyncio.gather(*heads, *bodies, slow(b""))
    assert found == [408] * 40 + [0]
    await good(gate)


async def test_clients_that_leave_at_any_moment(gate: Gate) -> None:
    whole = request(INFER, tensor())
    for at in [*range(0, 400, 37), *range(400, len(whole), 500), len(whole)]:
        _, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        writer.write(whole[:at])
        await writer.drain()
        writer.transport.abort()
    await good(gate)
    assert gate.alive
    assert "Traceback" not in gate.log.read_text()
