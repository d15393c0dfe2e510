"""Clients that have gone, by every door: what waits behind a busy model is neither computed nor charged."""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgpack
import nats
import numpy as np
import pytest

import infaas
from infaas.errors import Timeout
from tests.support.clients.responders import until
from tests.support.clients.stock import tensor
from tests.support.servers.nats import run
from tests.support.servers.processes import container, eventually, fetched
from tests.support.servers.system import QUICK, Whole, running

APP = "left"
CLIENTS = 60
CALLS = 10  # over gRPC
MOST = 6  # that may have begun before their client had gone
LONG = {"INFAAS_EXECUTOR__WATCHDOG_LEAST_S": "120"}  # no run is ended
CLASSES = """
import pathlib
import time

import numpy as np

HERE = pathlib.Path(__file__).parent


class Gated:
    def predict_batch(self, inputs):
        with (HERE / "computed").open("a") as file:
            file.writelines(f"{number}\\n" for number in inputs["x"][:, 0].tolist())
        while (HERE / "busy").exists():
            time.sleep(0.01)
        return {"y": np.stack([inputs["x"][:, 0], -inputs["x"][:, 0]], axis=1)}
"""


class Gated:
    """A system with a model that can be held up. It writes down what it computes: of each query its number."""

    def __init__(self, whole: Whole, place: Path) -> None:
        self.whole = whole
        self._place = place
        self._last = 0.0

    def x(self) -> np.ndarray:
        """The inputs of the next query."""
        self._last += 1.0
        return np.array([[self._last, 0.0]], np.float32)

    def under_way(self, protocol: str) -> int:
        """Requests that the gateway has."""
        lines = fetched(f"{self.whole.gateway}/metrics")[1].splitlines()
        mine = [one for one in lines if one.startswith("infaas_gateway_requests_under_way") and protocol in one]
        return sum(int(float(one.split()[-1])) for one in mine)

    def computed(self, since: float) -> int:
        lines = (self._place / "computed").read_text().splitlines()
        return sum(float(line) > since for line in lines)

    def outcomes(self, label: str) -> Counter[str]:
        """Of the queries whose ids begin so, how they ended."""
        rows = self.whole.rows("SELECT outcome, cost FROM infaas.query_outcomes WHERE id LIKE %s", f"{label}%")
        assert {cost for outcome, cost in rows if outcome == "cancelled"} <= {0.0}
        return Counter(outcome for outcome, _ in rows)

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[infaas.Client]:
        """A query is computed until the block ends; then it is answered, and paid."""
        async with infaas.connect(data_dir=self.whole.directory) as client:
            (self._place / "busy").touch()
            try:
                before = self._last
                asked = asyncio.create_task(client.query(APP, self.x(), deadline=time.time() + 300.0))
                await until(lambda: self.computed(before) == 1)
                yield client
            finally:
                (self._place / "busy").unlink()
            assert (await asked).cost > 0.0

    def leave(self, label: str, count: int, work: Callable[[infaas.Client], Awaitable[None]]) -> None:
        """So many queries with ids that begin so come while the model is busy, and their clients leave."""

        async def main() -> float:
            async with self.busy() as client:
                before = self._last
                await work(client)
                ended = lambda: self.outcomes(label).total() >= count - MOST  # noqa: E731
                assert await asyncio.to_thread(eventually, ended), self.outcomes(label)
            return before

        before = run(main())
        self.whole.done("query", APP, "--json-input", "[[0.0, 0.0]]")  # behind all others
        assert eventually(lambda: self.outcomes(label).total() == count), self.outcomes(label)
        found = self.outcomes(label)
        print(label, dict(found), "computed", self.computed(before))
        assert found["cancelled"] >= count - MOST, found
        assert self.computed(before) <= MOST


@pytest.fixture(scope="module", params=["two dispatchers", "fused"])
def gated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gated]:
    place = tmp_path_factory.mktemp("cancelling")
    (place / "classes.py").write_text(CLASSES)
    (place / "infaas.toml").write_text(QUICK)
    np.savez(place / "validation.npz", x=np.array([[1, 0], [-1, 0]] * 20, np.float32), y=np.array([0, 1] * 20))
    how = ("--fused",) if request.param == "fused" else ("--dispatchers", "2")
    with running(place / "data", "--no-dashboard", *how, "--config", str(place / "infaas.toml")) as whole:
        about = ("--app", APP, "--model", "gated", "--validation", "validation.npz")
        with container(place, "classes:Gated", *about, *whole.where, **LONG):
            whole.done("query", APP, "--json-input", "[[0.0, 0.0]]")
            (place / "computed").write_text("")  # without what it was measured with
            yield Gated(whole, place)


def test_http_clients_that_close_their_connection(gated: Gated) -> None:
    door = urlsplit(gated.whole.gateway)

    async def work(_: infaas.Client) -> None:
        with ExitStack() as waiting:
            for number in range(CLIENTS):
                given = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": gated.x()[0].tolist()}
                body = json.dumps({"id": f"http-{number}", "inputs": [given]})
                head = f"POST /v2/models/{APP}/infer HTTP/1.1\r\nHost: {door.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
                connection = socket.create_connection((door.hostname or "", door.port or 0))
                connection.sendall((head + body).encode())
                if number % 2:
                    connection.close()  # at once
                else:
                    waiting.enter_context(connection)  # until its query waits for its answer
            await until(lambda: gated.under_way("http") >= CLIENTS // 2)

    gated.leave("http-", CLIENTS, work)


def test_grpc_calls_that_are_cancelled(gated: Gated) -> None:
    triton = pytest.importorskip("tritonclient.grpc")

    async def work(_: infaas.Client) -> None:
        with triton.InferenceServerClient(gated.whole.gateway_grpc) as door:
            calls = []
            for number in range(CALLS):
                given = triton.InferInput("x", [1, 2], "FP32")
                given.set_data_from_numpy(gated.x())
                calls.append(door.async_infer(APP, [given], lambda *_, **__: None, request_id=f"grpc-{number}"))
            await until(lambda: gated.under_way("grpc") == CALLS)
            for call in calls:
                call.cancel()
            await until(lambda: gated.under_way("grpc") == 0)

    gated.leave("grpc-", CALLS, work)


def test_cancelled_tasks_of_the_client_library(gated: Gated) -> None:
    async def work(client: infaas.Client) -> None:
        asks = (client.query(APP, gated.x(), id=f"task-{number}", timeout=60.0) for number in range(CLIENTS))
        tasks = [asyncio.create_task(ask) for ask in asks]
        await until(lambda: len(client._exchange) > CLIENTS)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in ends} == {asyncio.CancelledError}

    gated.leave("task-", CLIENTS, work)


def test_ended_timeouts_of_the_client_library(gated: Gated) -> None:
    async def work(client: infaas.Client) -> None:
        asks = (client.query(APP, gated.x(), id=f"timeout-{number}", timeout=0.5) for number in range(10))
        ends = await asyncio.gather(*asks, return_exceptions=True)
        assert {type(one) for one in ends} == {Timeout}

    gated.leave("timeout-", 10, work)


def test_a_stock_client_hears_what_became_of_it_whichever_dispatcher_has_it(gated: Gated) -> None:
    async def work(_: infaas.Client) -> None:
        nc = await nats.connect(gated.whole.nats)

        async def take_back(key: bytes) -> dict[str, object]:
            said = await nc.request(f"infaas.cancel.{APP}", msgpack.packb({"retry_key": key}), timeout=60)
            return dict(msgpack.unpackb(said.data))

        for number in range(20):
            key = number.to_bytes(16, "big")
            query = msgpack.packb({"inputs": tensor(gated.x()), "id": f"stock-{number}", "retry_key": key})
            reply = asyncio.create_task(nc.request(f"infaas.query.{APP}", query, timeout=60))
            await asyncio.sleep(0)  # it is sent before what takes it back
            assert await take_back(key) == {"cancelled": True}
            assert msgpack.unpackb((await reply).data)["error"]["code"] == "cancelled"
            assert await take_back(key) == {"cancelled": True}
        assert await take_back(b"?" * 16) == {"cancelled": False}
        assert "retry_key" in (await take_back(b"short"))["error"]["message"]  # type: ignore[index]
        await nc.close()

    gated.leave("stock-", 20, work)
    whole = "SELECT count(*), count(*) FILTER (WHERE outcome = 'ok') FROM infaas.query_outcomes WHERE app = %s AND outcome <> 'cancelled'"
    objective = "SELECT sum(queries), sum(queries * attainment) FROM infaas.slo_by_app_minutely WHERE app = %s"
    # Rows of other tests may come between the two looks.
    assert eventually(lambda: gated.whole.rows(whole, APP) == gated.whole.rows(objective, APP)), "no objective of it"
