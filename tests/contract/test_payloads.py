"""The bucket of kept queries, on a NATS server: it holds as much, and as long, as the settings say."""

import pytest

from bus.port import KeyValue
from bus.subjects import Subjects
from services.core.settings import QualitySettings
from services.core.settings.fields import DAY
from services.registrar.edge import RegistrarEdge
from tests.support.clients.responders import until
from tests.support.servers.buses import Buses, Connects

pytestmark = pytest.mark.parametrize("buses", ["nats"], indirect=True)


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
