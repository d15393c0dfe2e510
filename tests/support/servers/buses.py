"""All buses behind one face, for the suite that holds them to the same behaviour."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple, Protocol

import pytest

from bus.memory import Broker
from bus.natsbus import LocalFirstBus, NatsBus
from bus.port import Bus


class Connects(Protocol):
    async def __call__(self, on_error: Callable[[Exception], None] | None = None) -> Bus: ...


class Buses(NamedTuple):
    """kind: memory | nats | local (NATS, with a connection's own messages kept in this process). prefix: of this test's subjects."""

    kind: str
    url: str
    prefix: str


@pytest.fixture(params=["memory", "nats", "local"])
def buses(request: pytest.FixtureRequest, prefix: str) -> Buses:
    url = "" if request.param == "memory" else request.getfixturevalue("nats_url")
    return Buses(request.param, url, prefix)


@pytest.fixture
def connect(buses: Buses) -> AbstractAsyncContextManager[Connects]:
    """As many connections as a test asks for; what goes wrong unasked fails it."""
    return connecting(buses)


@asynccontextmanager
async def connecting(buses: Buses) -> AsyncIterator[Connects]:
    broker = Broker()
    opened: list[Bus] = []
    errors: list[Exception] = []

    async def connect(on_error: Callable[[Exception], None] | None = None) -> Bus:
        report = on_error or errors.append
        bus: Bus
        if buses.kind == "memory":
            bus = broker.connect(on_error=report)
        elif buses.kind == "local":
            bus = local = await LocalFirstBus.connect(buses.url, name="test", on_error=report)
            local.alone = (f"{buses.prefix}.",)
        else:
            bus = await NatsBus.connect(buses.url, name="test", on_error=report)
        opened.append(bus)
        return bus

    try:
        yield connect
    finally:
        for bus in opened:
            await bus.close()
    assert errors == []
