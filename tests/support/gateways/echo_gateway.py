"""A real gateway before a peer that sends every input back as an output: for what the protocols do to tensors of any kind.

It runs on a thread of its own, since stock clients block. The bus is the memory bus; the peer speaks the contract with the stock
msgpack package.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgpack
import pytest
import uvloop
from msgspec.structs import replace

from bus.codec import encode
from bus.datatypes import DATATYPES
from bus.memory import Broker, MemoryBus
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.fleet import DispatcherHeartbeat
from bus.port import Delivery
from bus.subjects import Subjects
from services.core.catalog import key_of
from services.core.settings import GatewaySettings, Settings
from services.gateway.__main__ import wire
from services.shell.runtime.runtime import Runtime
from tests.support.clients.responders import until
from tests.support.servers.nats import free_port
from tests.support.simulated.fleet import catalogue, variant

SUBJECTS = Subjects("echo")


def specs(**shapes: tuple[str, list[int]]) -> list[TensorSpec]:
    return [TensorSpec(name=name, datatype=datatype, shape=shape) for name, (datatype, shape) in shapes.items()]


def records() -> list[Any]:
    """An app for each datatype, with one input `x` of any length, and `several` with three inputs; outputs are called as inputs."""
    found: list[Any] = []
    apps = {datatype.lower(): specs(x=(datatype, [-1])) for datatype in DATATYPES}
    apps["several"] = specs(a=("FP32", [2]), b=("INT64", [-1]), c=("BYTES", [1]))
    apps["fixed"] = specs(x=("FP32", [3]))
    for app, given in apps.items():
        signature = Signature(inputs=given, outputs=given)
        one = variant(f"{app}-v1", model=f"m-{app}", signature=signature)
        found += [replace(record, signature=signature) for record in catalogue(one, app=app)]
    return found


class Echoing:
    """url: without a scheme, as tritonclient takes it. heard: the last query that came, less its key. told: all feedback. settings: of the gateway."""

    def __init__(self, **settings: Any) -> None:
        self.port, self.grpc_port = free_port(), free_port()
        self.settings = Settings(
            prefix=SUBJECTS.prefix,
            gateway=GatewaySettings(port=self.port, grpc_port=self.grpc_port, **{"drain_s": 0.0, **settings}),
        )
        self.heard: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        self.told: list[dict[str, Any]] = []
        self.delay = 0.0
        self.grace = 2.0  # s that what is under way gets when it stops
        self._held: list[Callable[[], None]] | None = None
        self.runtimes: list[Runtime] = []
        self._stop: asyncio.Event
        self._broker = Broker()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    async def main(self, ready: "Future[None]") -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        peer, ours = self._broker.connect("peer"), self._broker.connect("gateway")
        try:
            await self._begin(peer, ours)
        except BaseException as error:
            ready.set_exception(error)
            raise
        beating = asyncio.create_task(self._beat(peer))
        await until(lambda: not self.runtimes[0].missing(time.time()))
        ready.set_result(None)
        await self._stop.wait()
        for runtime in self.runtimes:
            await runtime.stop(self.grace)
        beating.cancel()
        await asyncio.wait([beating])
        await ours.close()
        await peer.close()

    async def _begin(self, peer: MemoryBus, ours: MemoryBus) -> None:
        bucket = await peer.key_value(SUBJECTS.catalog_bucket)
        for record in records():
            await bucket.put(key_of(record), encode(record))
        await peer.subscribe(SUBJECTS.query(), lambda delivery: self._answer(peer, delivery), "dispatchers")
        await peer.subscribe(SUBJECTS.feedback(), lambda delivery: self._accept(peer, delivery), "dispatchers")
        self.runtimes = await wire(self.settings, ours)
        for runtime in self.runtimes:
            await runtime.start()

    async def _beat(self, peer: MemoryBus) -> None:
        while True:
            beat = DispatcherHeartbeat(dispatcher="d", incarnation=1, at=time.time())
            peer.publish(SUBJECTS.dispatcher_heartbeat("d"), encode(beat))
            await asyncio.sleep(0.2)

    def _accept(self, peer: MemoryBus, delivery: Delivery) -> None:
        self.told.append(msgpack.unpackb(delivery.data))
        peer.publish(delivery.reply, msgpack.packb({"accepted": True}))

    def _answer(self, peer: MemoryBus, delivery: Delivery) -> None:
        query = msgpack.unpackb(delivery.data)
        self.heard = {name: value for name, value in query.items() if name != "retry_key"}
        self.headers = dict(delivery.headers or {})
        reply = msgpack.packb(self._reply(delivery.subject.rpartition(".")[2], query))
        if self._held is None:
            asyncio.get_running_loop().call_later(self.delay, peer.publish, delivery.reply, reply)
        else:
            self._held.append(partial(peer.publish, delivery.reply, reply))

    def _reply(self, app: str, query: dict[str, Any]) -> dict[str, Any]:
        code = query.get("context")
        if code and code != "default":
            return {
                "id": query.get("id"),
                "error": {"code": code, "message": f"it is {code}", "retry_after_ms": 2500.0},
            }
        inputs = query["inputs"]
        if code:  # an app's default output is one of its first output
            outputs = {"x": inputs} if "datatype" in inputs else dict([next(iter(inputs.items()))])
            default = {"model": "", "version": "", "variant": "", "default": True, "reason": "deadline: it is late"}
            return {**self._reply(app, {**query, "context": None}), "outputs": outputs, **default}
        return {
            "id": query.get("id"), "outputs": {"x": inputs} if "datatype" in inputs else inputs, "model": f"m-{app}",
            "version": "1", "variant": f"{app}-v1", "hardware": "cpu", "worker": "w0", "accuracy": 0.9, "latency_ms": 1.5,
            "queue_ms": 0.5, "compute_ms": 1.0, "batch": 1, "cached": False, "simulated": False, "cost": 0.001,
            "missed": ["latency", "cost"],
        }  # fmt: skip

    def hold(self) -> None:
        """No query is answered until `release`."""
        self._held = []

    def release(self) -> None:
        """Answer what waits, and whatever comes, at once."""

        def work() -> None:
            held, self._held = self._held, None
            for answer in held or []:
                answer()

        with suppress(RuntimeError):  # it has stopped
            self._loop.call_soon_threadsafe(work)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The gateway does nothing within the block."""
        stands, goes_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            goes_on.wait(120)

        self._loop.call_soon_threadsafe(stand)
        assert stands.wait(120)
        try:
            yield
        finally:
            goes_on.set()

    def set_objective(self, app: str, latency_ms: float) -> None:
        """From now on, the app has it."""
        service: Any = self.runtimes[0].edge._service  # type: ignore[union-attr]
        record = replace(service.catalog.app(app), latency_ms=latency_ms)
        service.catalog.apply(key_of(record), encode(record))

    def stop(self) -> None:
        with suppress(RuntimeError):  # it has stopped
            self._loop.call_soon_threadsafe(self._stop.set)


@contextmanager
def echoing(**settings: Any) -> Iterator[Echoing]:
    """A gateway that runs until the end of the block."""
    stage = Echoing(**settings)
    ready: Future[None] = Future()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(stage.main(ready))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        ready.result(120)
        yield stage
    finally:
        if not failed:
            stage.stop()
        thread.join(120)
    assert not failed, failed


@pytest.fixture(scope="module")
def stage() -> Iterator[Echoing]:
    """A gateway for the tests of a module."""
    with echoing() as found:
        yield found
