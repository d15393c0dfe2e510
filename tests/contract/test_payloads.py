"""The bucket of kept queries, on a NATS server: it holds as much, and as long, as the settings say."""

import pytest

from bus.codec import encode
from bus.messages.flow import Payload, payload_key
from bus.port import KeyValue
from bus.subjects import Subjects
from services.core.settings import QualitySettings
from services.core.settings.fields import DAY
from services.dispatcher.commands import FindKept
from services.dispatcher.edge import DispatcherEdge
from services.registrar.edge import RegistrarEdge
from tests.support.clients.responders import until
from tests.support.servers.buses import Buses, Connects

pytestmark = pytest.mark.parametrize("buses", ["nats"], indirect=True)
NAMES = [digit * 32 for digit in "abcd"]


async def filled(buses: Buses, connect: Connects, **settings: float) -> KeyValue:
    """With two values of 600 kB, the older one first."""
    bus, subjects = await connect(), Subjects(buses.prefix)
    await RegistrarEdge.open(bus, subjects, QualitySettings(**settings))
    bucket = await bus.key_value(subjects.payloads_bucket, create=False)
    for key in ("app.old", "app.new"):
        await bucket.put(key, bytes(600_000))
    return bucket


async def test_the_oldest_go_beyond_payload_mb(buses: Buses, connect: Connects) -> None:
    bucket = await filled(buses, connect, payload_mb=1.0)
    assert await bucket.keys("app") == ["app.new"]
    bucket = await filled(buses, connect, payload_mb=2.0)  # of a bucket that is there
    assert sorted(await bucket.keys("app")) == ["app.new", "app.old"]


async def test_all_go_after_payload_days(buses: Buses, connect: Connects) -> None:
    bucket = await filled(buses, connect, payload_days=1.0 / DAY)

    async def gone() -> bool:
        return not await bucket.keys("app")

    await until(gone)


async def test_a_dispatcher_finds_what_a_late_label_is_about(buses: Buses, connect: Connects) -> None:
    bus, subjects = await connect(), Subjects(buses.prefix)
    edge = DispatcherEdge(bus, subjects)
    assert await edge.perform(FindKept("app", NAMES[0], None)) is None, "there is no bucket"
    await RegistrarEdge.open(bus, subjects, QualitySettings())
    bucket = await bus.key_value(subjects.payloads_bucket, create=False)
    first, second, asked, stage = NAMES  # two with one id; a pipeline's query, and what a stage was asked for it
    for at, (query, uid) in enumerate(((first, first), (second, second), (asked, stage))):
        kept = Payload(query=query, id="q", time=float(at), variant="v", inputs={}, outputs={})
        await bucket.put(payload_key("app", query, "q", uid), encode(kept))

    async def found(query: str | None, id: str | None = None, app: str = "app") -> float | None:
        kept = await edge.perform(FindKept(app, query, id))
        return None if kept is None else kept.time

    assert [await found(name) for name in NAMES] == [0.0, 1.0, None, 2.0]
    assert [await found(None, "q"), await found(None, "p"), await found(first, app="other")] == [1.0, None, None]
    await bucket.delete(payload_key("app", second, "q", second))
    assert await found(None, "q") == 0.0
