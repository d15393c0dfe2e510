import asyncio
import re
import time
from contextlib import asynccontextmanager

import msgpack
import numpy as np
import pytest

from bus.memory import Broker
from infaas.cli.bench import so_far
from infaas.client import Client
from infaas.loadgen import BURST, Generator, in_shares
from tests.support.clients.responders import Responder, answer, refusal
from tests.support.servers.nats import run


def due(times, apps=1):
    """In chunks of 7, the apps in turn."""
    which = np.arange(len(times)) % apps
    return ((times[at : at + 7], which[at : at + 7]) for at in range(0, len(times), 7))


@asynccontextmanager
async def asking(broker):
    """A client that sends nothing again, however long the machine stands still: each query is heard once."""
    async with await Client(broker.connect()).open() as client:
        client._exchange._silence = float("inf")
        yield client


def until_heard(number, behave):
    """Peer and drive of a closed loop that goes on until so many queries came, however long that takes."""
    generators = []

    def heard(body, n):
        if n == number:
            generators[0]._end = 0.0
        return behave(body, n)

    def drive(generator, clients, which=None):
        generators.append(generator)
        return generator.closed(clients, 600.0, which)

    return heard, drive


NO_NEEDS, ONE_APP = {}, {"a": [[[1.0], [2.0]]]}


def measured(behave, drive, needs=NO_NEEDS, queries=ONE_APP, **options):
    """The report of a run against a peer. drive(generator) -> report. queries: by app, what is sent in turn."""

    async def main():
        broker = Broker()
        peer = await Responder(broker.connect(), behave).listen("infaas.query.*")
        async with asking(broker) as client:
            prepared = {app: [await client.prepare(app, x, **needs) for x in sent] for app, sent in queries.items()}
            return await drive(Generator(client, prepared, **options)), peer

    return run(main())


def test_a_closed_loop_keeps_its_number_under_way():
    async def main():
        broker = Broker()
        bus = broker.connect()
        loop = asyncio.get_running_loop()
        under_way = set()
        counts = []
        generator = None

        def reply(to):
            counts.append(len(under_way))
            if len(counts) == 40:
                generator._end = 0.0
            under_way.discard(to)
            bus.publish(to, msgpack.packb(answer({})))

        def hear(delivery):
            under_way.add(delivery.reply)
            loop.call_later(0.002, reply, delivery.reply)  # the others are heard before

        await bus.subscribe("infaas.query.a", hear)
        async with asking(broker) as client:
            generator = Generator(client, {"a": [await client.prepare("a", [[1.0]])]})
            return await generator.closed(4, 600.0), counts

    report, counts = run(main())
    assert max(counts) == 4
    assert report.answered == report.offered == len(counts) >= 40
    assert len(counts) < 44
    assert report.failed == report.refused == 0
    assert report.throughput_qps == pytest.approx(report.answered / report.seconds)


def test_an_open_loop_sends_each_arrival_once_and_says_how_late():
    times = np.linspace(0, 0.2, 50)
    report, peer = measured(lambda body, n: answer(body), lambda g: g.open(due(times), 0.2, "uniform"), items=2)
    assert report.offered == report.answered == len(peer.heard) == 50
    assert len({body["retry_key"] for body in peer.heard}) == 50
    assert report.cost_per_1000 == pytest.approx(0.5)
    assert report.effective_accuracy == pytest.approx(0.9)
    assert report.slo_attainment == 1.0
    assert report.variants == {"adder-v1": 50}
    assert 0 <= report.late_send_p99_ms <= report.late_send_max_ms
    assert 0 <= report.p50_ms <= report.p95_ms <= report.p99_ms <= report.max_ms


def test_latency_counts_from_the_intended_time():
    # Every arrival is due at the start, and the loop is blocked before it may send: all have waited for that long.
    async def drive(generator):
        asyncio.get_running_loop().call_soon(lambda: time.sleep(0.1))
        return await generator.open(due(np.full(300, 0.01)), 0.1, "burst")

    report, _ = measured(lambda body, n: answer(body), drive)
    assert report.p50_ms >= 80
    assert report.late_send_max_ms >= 80


def test_refusals_missed_needs_and_slow_answers_are_told_apart():
    def behave(body, n):
        if n % 4 == 0:
            return refusal("overloaded")
        if n % 4 == 1:
            return answer(body, missed=["latency", "cost"], accuracy=0.1)
        return answer(body, variant="fine", accuracy=0.95)

    report, _ = measured(behave, lambda g: g.open(due(np.arange(40) / 400), 0.1, "x"), needs={"latency_ms": 600_000})
    assert (report.answered, report.refused, report.failed) == (30, 10, 0)
    assert report.refusals == {"overloaded": 10}
    assert report.missed == {"latency": 10, "cost": 10}
    assert report.slo_attainment == 0.5
    assert report.effective_accuracy == pytest.approx(0.95)
    assert report.latency_ms == 600_000


def test_no_answer_is_a_failure_and_a_warm_up_not_counted() -> None:
    report, _ = measured(lambda body, n: None, lambda g: g.open(due(np.zeros(3)), 0.1, "x"), needs={"timeout": 0.1})
    assert report.failures == {"timeout": 3}
    assert report.p50_ms is report.effective_accuracy is report.cost_per_1000 is None
    assert report.slo_attainment == 0.0
    report, peer = measured(
        lambda body, n: answer(body), lambda g: g.open(due(np.arange(20) / 100), 0.2, "x"), warmup=0.1
    )
    assert len(peer.heard) == 20
    assert report.offered == report.answered == 10


def test_a_connection_lost_ends_the_run():
    closing = []

    def behave(body, n):
        if n == 5:
            closing[0]()
        return answer(body)

    async def drive(generator):
        closing.append(generator._client._exchange.close)
        return await generator.open(due(np.arange(1000) / 100), 10.0, "x")

    report, _ = measured(behave, drive)
    assert report.failures.keys() == {"not_connected"}
    assert report.failed == report.failures["not_connected"] <= 1 + BURST  # those that were due by then, not the rest
    assert report.answered + report.failed == report.offered < 1000


def several(behave, drive):
    """A run against apps x and y."""
    queries = {app: [[[float(n)]] for n in range(numbers)] for app, numbers in (("x", 2), ("y", 3))}
    return measured(behave, drive, {"latency_ms": 600_000}, queries)


def test_several_apps_are_asked_in_their_places_and_told_apart():
    def behave(body, n):
        return answer(body) if n % 2 else refusal("overloaded")

    report, peer = several(behave, lambda g: g.open(due(np.arange(40) / 400, apps=2), 0.1, "x"))
    assert report.app == "x,y"
    assert (report.apps["x"].offered, report.apps["x"].answered, report.apps["x"].slo_attainment) == (20, 20, 1.0)
    assert (report.apps["y"].offered, report.apps["y"].answered, report.apps["y"].slo_attainment) == (20, 0, 0.0)
    assert report.apps["y"].p99_ms is None
    assert report.apps["x"].p99_ms == pytest.approx(report.p99_ms)
    assert (report.offered, report.answered, report.refused, report.slo_attainment) == (40, 20, 20, 0.5)
    inputs = [body["inputs"][0][0] for body in peer.heard]
    assert inputs[::2][:4] == [0, 1, 0, 1]
    assert inputs[1::2][:4] == [0, 1, 2, 0]


def test_a_closed_loop_asks_apps_by_their_shares():
    heard, drive = until_heard(200, lambda body, n: answer(body))
    report, _ = several(heard, lambda g: drive(g, 4, in_shares((0.1, 0.9), np.random.default_rng(1))))
    x, y = report.apps["x"].answered, report.apps["y"].answered
    assert x + y == report.answered
    assert 0 < x < y


def test_progress_says_what_was_answered_so_far():
    async def drive(generator):
        return (await generator.closed(2, 0.2)), so_far(generator, 10.0)

    (report, said), _ = measured(lambda body, n: answer(body), drive)
    assert re.match(r"\d+ of 10 s: [\d,]+ answers/s, ", said)
    assert said.endswith(f"answers/s, {report.answered:,} of {report.offered:,} answered, 100.00% in time")
