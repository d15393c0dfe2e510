"""Each service of a running system is restarted under load: nothing is refused or broken, and the new process does its work."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import msgpack
import nats
import pytest

from tests.support.clients.stock import tensor
from tests.support.servers.processes import alive, eventually, fetched
from tests.support.servers.system import APP, MODELS, Whole, with_digits

EVERY = 0.05  # s between two queries
PATIENCE_MS = 60_000  # generous: a slow machine is late, and refuses nothing


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    directory = tmp_path_factory.mktemp("restarts") / "data"
    with with_digits(directory, "--no-dashboard", models=MODELS[:1]) as whole:
        yield whole


Ask = Callable[[], Awaitable[str]]  # sends a query, and tells how it ended


async def restarted(system: Whole, part: str, ask: Ask) -> set[str]:
    """How the queries ended that were sent before, while and after the part was restarted."""
    ends = {await ask()}
    asked: list[asyncio.Task[str]] = []
    restart = asyncio.create_task(asyncio.to_thread(system.command, "restart", part))
    while not restart.done():
        asked.append(asyncio.create_task(ask()))
        await asyncio.sleep(EVERY)
    assert restart.result().returncode == 0, restart.result().stderr
    assert restart.result().stdout.startswith(part)
    return {*ends, *await asyncio.gather(*asked), await ask()}


async def over_nats(system: Whole, part: str) -> set[str]:
    nc = await nats.connect(system.nats)
    body = msgpack.packb({"inputs": tensor(system.x[:1]), "latency_ms": PATIENCE_MS})

    async def ask() -> str:
        try:
            reply = await nc.request(f"infaas.query.{APP}", body, timeout=2 * PATIENCE_MS / 1000)
        except nats.errors.Error as error:
            return repr(error)
        return str(msgpack.unpackb(reply.data).get("error", "answered"))

    try:
        return await restarted(system, part, ask)
    finally:
        await nc.close()


async def over_http(system: Whole, part: str) -> set[str]:
    """Each request on a connection of its own: a client that is slow for seconds may find one that it kept closed."""
    inputs = [{"name": "x", "shape": [1, 784], "datatype": "FP32", "data": system.x[0].tolist()}]
    body = {"inputs": inputs, "parameters": {"latency_ms": PATIENCE_MS}}

    def post() -> str:
        status, text = fetched(f"{system.gateway}/v2/models/{APP}/infer", body)
        return "answered" if status == 200 else f"{status} {text}"

    return await restarted(system, part, lambda: asyncio.to_thread(post))


@pytest.mark.parametrize("service", ["dispatcher", "monitor", "executor", "registrar", "gateway"])
def test_a_service_is_restarted_without_a_query_noticing(system: Whole, service: str) -> None:
    assert eventually(lambda: len(system.pids(service)) == 1)
    (old,) = system.pids(service)
    ask = over_http if service == "gateway" else over_nats
    assert asyncio.run(ask(system, service)) == {"answered"}
    assert not alive(old)
    assert eventually(lambda: len(system.pids(service)) == 1)
