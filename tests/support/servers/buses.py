"""Both buses behind one face, for the suite that holds them to the same behaviour."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest

from bus.memory import Broker
from bus.natsbus import NatsBus
from bus.port import Bus
from tests.support.servers.nats import run


class Connects(Protocol):
    async def __call__(self, on_error: Callable[[Exception], None] | None = None) -> Bus: ...


class Buses:
    """Runs a test body with as many connections as it asks for; what goes wrong unasked fails the test."""

    def __init__(self, kind: str, url: str, prefix: str) -> None:
        self.kind = kind
        self.prefix = prefix
        self._url = url

    def run(self, body: Callable[[Connects], Awaitable[Any]]) -> None:
        run(self._run(body))

    async def _run(self, body: Callable[[Connects], Awaitable[Any]]) -> None:
        broker = Broker()
        opened: list[Bus] = []
        errors: list[Exception] = []

        async def connect(on_error: Callable[[Exception], None] | None = None) -> Bus:
            report = on_error or errors.append
            bus: Bus
            if self.kind == "memory":
                bus = broker.connect(on_error=report)
            else:
                bus = await NatsBus.connect(self._url, name="test", on_error=report)
            opened.append(bus)
            return bus

        try:
            async with asyncio.timeout(120):
                await body(connect)
        finally:
            for bus in opened:
                await bus.close()
        assert errors == []


@pytest.fixture(params=["memory", "nats"])
def buses(request: pytest.FixtureRequest, prefix: str) -> Buses:
    url = request.getfixturevalue("nats_url") if request.param == "nats" else ""
    return Buses(request.param, url, prefix)


async def until(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    """Wait until `condition` holds; fails when it does not in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (any condition, of either bus)
            await asyncio.sleep(0.005)
