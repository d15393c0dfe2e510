"""NATS fails: a stream's leader steps down, a server dies, the network between servers is cut. Queries go on, no event is lost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from bus.natsbus import NatsBus
from bus.port import BusError
from bus.subjects import Subjects
from infaas.client import Client
from services.core.settings import BusSettings, MonitorSettings
from services.recorder.__main__ import streams
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.nats import skip_without_nats
from tests.support.servers.nats_cluster import Cluster, api, cluster, leader, whole
from tests.support.servers.worker import APP, Worker, measured, worker

__all__ = ["cluster"]

PAUSE_S = 0.02
X = tiny_models.digits(2)[0]


class Traffic:
    """Queries one after the other, from several askers, until `stop`. answers: by the query's id."""

    def __init__(self, client: Client, bus: NatsBus) -> None:
        self.bus = bus
        self.answers: dict[str, str] = {}
        self.last = time.monotonic()
        self._client = client
        self._stopping = False
        self._asked = 0
        self._askers = [asyncio.create_task(self._ask()) for _ in range(4)]

    async def _ask(self) -> None:
        while not self._stopping:
            self._asked += 1
            label = f"q{self._asked}"
            answer = await self._client.query(APP, X, timeout=120, deadline=time.time() + 120, id=label)
            self.answers[label] = answer.variant
            self.last = time.monotonic()
            await asyncio.sleep(PAUSE_S)

    async def some_more(self, count: int = 50) -> None:
        """So many queries have been answered from now on."""
        goal = len(self.answers) + count

        def enough() -> bool:
            return len(self.answers) >= goal or any(asker.done() for asker in self._askers)

        await until(enough)
        for asker in self._askers:
            if asker.done():
                asker.result()

    async def stop(self) -> int:
        """How many were asked; all have been answered."""
        self._stopping = True
        await asyncio.gather(*self._askers)
        assert len(self.answers) == self._asked
        return self._asked


async def settled(here: Worker) -> None:
    """Everything recorded so far is in its stream."""
    boxes = [
        runtime._outbox for runtimes in here.runtimes.values() for runtime in runtimes if hasattr(runtime, "_outbox")
    ]
    await until(lambda: all(box.held == 0 for box in boxes))


async def outcomes(here: Worker, count: int) -> list[dict[str, Any]]:
    """All that the stream of outcomes holds, which is at least `count`, as the recorder would read it."""
    consumer = await here.bus.consumer(here.subjects.outcome_stream, "recorder")
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(180):
        while (stored := await consumer.fetch(100, 1.0)) or len(found) < count:
            for one in stored:
                found += msgspec.msgpack.decode(one.data)["rows"]
                await one.ack()
    return found


@asynccontextmanager
async def busy(cluster: Cluster, prefix: str, directory: Path) -> AsyncIterator[tuple[Worker, Traffic]]:
    """A worker and a dispatcher on the cluster, with queries under way; at the end every one has its answer and its outcome."""
    good = tiny_models.mlp()
    async with worker(cluster.url, prefix, directory, MonitorSettings(heartbeat_s=0.1)) as here:
        await here.bus.object_store(here.subjects.artifacts_bucket)
        # On a busy machine its servers may take a while to choose the leader of a new stream.
        await until(lambda: whole(here.bus, f"OBJ_{here.subjects.artifacts_bucket}"))
        await here.catalogue(measured(good, X, [tiny_models.CLASSES]), good)
        bus = await NatsBus.connect(cluster.url, name="client")
        async with Client(bus, prefix=prefix, owns_bus=True) as client:
            await client.open()
            traffic = Traffic(client, bus)
            await traffic.some_more()
            yield here, traffic
            asked = await traffic.stop()
            await settled(here)
            rows = await outcomes(here, asked)
            assert {row["id"] for row in rows} == set(traffic.answers), "every query has an outcome"
            assert len({row["uid"] for row in rows}) == asked, "and one only"


def streams_of(prefix: str) -> list[str]:
    names = Subjects(prefix)
    return [names.outcome_stream, names.event_stream, f"KV_{names.catalog_bucket}", f"OBJ_{names.artifacts_bucket}"]


async def test_a_leader_steps_down_and_a_server_dies(cluster: Cluster, prefix: str, tmp_path: Path) -> None:
    async with busy(cluster, prefix, tmp_path / "w") as (here, traffic):
        for stream in streams_of(prefix):
            await until(lambda stream=stream: whole(here.bus, stream))
        names = here.subjects
        for stream in streams_of(prefix):
            await until(lambda stream=stream: steps_down(here.bus, stream))
        await traffic.some_more()

        await until(lambda: leader(here.bus, names.outcome_stream))
        dead = await leader(here.bus, names.outcome_stream)
        cluster.servers[dead].stop(kill=True)
        await traffic.some_more(200)

        async def another() -> bool:
            return await leader(here.bus, names.outcome_stream) not in ("", dead)

        await until(another)
        await settled(here)  # events go into the stream with two of three servers
        cluster.servers[dead].start()

        async def all_there() -> bool:
            return all([await whole(here.bus, stream) for stream in streams_of(prefix)])

        await until(all_there)


def server_of(cluster: Cluster, bus: NatsBus) -> str:
    """The one that a connection goes to."""
    url = bus._client.connected_url
    assert url is not None
    return next(name for name, server in cluster.servers.items() if server.port == url.port)


async def test_a_partition_heals(cluster: Cluster, prefix: str, tmp_path: Path) -> None:
    async with busy(cluster, prefix, tmp_path / "w") as (here, traffic):
        stream = here.subjects.outcome_stream
        used = {server_of(cluster, here.bus), server_of(cluster, traffic.bus)}
        other = next(name for name in cluster.servers if name not in used)

        # The leader is cut off: the others elect another one, and everything goes on.
        async def moved() -> bool:
            await steps_down(here.bus, stream, {"placement": {"preferred": other}})
            with contextlib.suppress(TimeoutError):
                await until(lambda: led_by(here.bus, stream, other), 10)
            return await led_by(here.bus, stream, other)

        await until(moved)
        cluster.network.cut(other)
        await traffic.some_more(100)
        await until(lambda: led_by_somebody_but(here.bus, stream, other))
        await settled(here)
        cluster.network.heal()
        await until(lambda: whole(here.bus, stream))

        # Our own server is cut off: nothing can be kept, so it is held.
        ours = server_of(cluster, here.bus)
        cluster.network.cut(ours)
        await asyncio.sleep(6)  # longer than a publisher waits, and than a leader without followers leads
        cluster.network.heal()
        await traffic.some_more()
        await settled(here)
        await until(lambda: whole(here.bus, stream))


async def steps_down(bus: NatsBus, stream: str, body: Any = None) -> bool:
    """Whether the stream's leader has stepped down; it may have none at the moment."""
    with contextlib.suppress(BusError):
        return bool((await api(bus, f"STREAM.LEADER.STEPDOWN.{stream}", body)).get("success"))
    return False


async def led_by(bus: NatsBus, stream: str, name: str) -> bool:
    return await leader(bus, stream) == name


async def led_by_somebody_but(bus: NatsBus, stream: str, name: str) -> bool:
    return await leader(bus, stream) not in ("", name)


async def test_streams_and_buckets_are_copied_to_servers_that_join(tmp_path: Path) -> None:
    made = Cluster(tmp_path)

    skip_without_nats()
    try:
        made.servers["n1"].start()
        made.servers["n2"].start()
        bus = await NatsBus.connect(made.servers["n1"].url, name="test")
        try:
            names = Subjects("t")
            bucket = await bus.key_value(names.catalog_bucket)

            async def written() -> bool:
                try:
                    await bucket.put("a", b"1")
                except BusError:  # its servers have not chosen a leader yet
                    return False
                return True

            await until(written)
            await bus.object_store(names.artifacts_bucket)
            await bus.ensure_stream(streams(names, BusSettings())["outcomes"])
            kept = (f"KV_{names.catalog_bucket}", f"OBJ_{names.artifacts_bucket}", names.outcome_stream)
            for stream in kept:
                await until(lambda stream=stream: whole(bus, stream, 2))
            made.servers["n3"].start()

            async def lifted() -> bool:
                await bus.streams.lift()
                return all([await whole(bus, stream) for stream in kept])

            await until(lifted)
            await bus.streams.lift()  # nothing more to do
            for stream in kept:
                await until(lambda stream=stream: whole(bus, stream))
            assert (await bucket.get("a")).value == b"1"
        finally:
            await bus.close()
    finally:
        made.close()
