"""One worker and a dispatcher for real, in the test's own process, on a real nats-server: monitor, executor, models that compute."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, Profile, ProfileRow, VariantRecord
from bus.messages.fleet import InstanceLoaded, InstanceMoved, WorkerHeartbeat
from bus.messages.public import ListRequest
from bus.natsbus import NatsBus
from bus.port import Bus
from bus.subjects import Subjects
from bus.tensors import from_array
from services.core.catalog import key_of
from services.core.settings import BusSettings, MonitorSettings, Settings, WorkerSettings
from services.dispatcher.__main__ import wire as wire_dispatcher
from services.executor.__main__ import wire as wire_executor
from services.monitor.__main__ import wire as wire_monitor
from services.recorder.__main__ import streams
from services.shell.runtime.runtime import Runtime
from tests.support.data.events import floats, model_record, variant_record

APP = "app"


def measured(model: bytes, x: np.ndarray, outputs: list[int], name: str = "m", threads: int = 1) -> VariantRecord:
    """A variant of this ONNX model for batches up to x, with the least latency of several: other load on the machine only adds to it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    rows = []
    for batch in sorted({1, len(x)}):
        taken = []
        for _ in range(5):
            started = time.perf_counter()
            session.run(None, {"x": x[:batch]})
            taken.append((time.perf_counter() - started) * 1e3)
        ms = min(taken)
        rows.append(ProfileRow(batch=batch, p50_ms=ms, p99_ms=2 * ms, cpu_ms=ms, wall_over_cpu=1.0))
    saturation = 1000.0 * rows[-1].batch / rows[-1].p50_ms
    return variant_record(
        variant=f"{name}-v1-ort-fp32-t{threads}-b{len(x)}",
        model=name,
        threads=threads,
        max_batch=len(x),
        artifact=hashlib.sha256(model).hexdigest(),
        accuracy=1.0,
        profile=Profile(rows=rows, load_ms=100.0, memory_mb=50.0, saturation_qps=saturation),
        signature=floats({"x": list(x.shape[1:])}, {"scores": outputs}),
    )


class Worker:
    """beats, moves, loads: what the monitor and the executor said, newest last."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self.bus = bus
        self.settings = settings
        self.subjects = Subjects(settings.prefix)
        self.name = settings.worker.name
        self.beats: list[WorkerHeartbeat] = []
        self.moves: list[InstanceMoved] = []
        self.loads: list[InstanceLoaded] = []
        self.runtimes: dict[str, list[Runtime]] = {}

    async def start(self, service: str, wire: Callable[[Settings, Bus], Awaitable[list[Runtime]]]) -> None:
        self.runtimes[service] = await wire(self.settings, self.bus)
        for runtime in self.runtimes[service]:
            if runtime.name != "workshop":
                await runtime.start()

    async def stop(self, service: str) -> None:
        for runtime in self.runtimes.pop(service):
            await runtime.stop(1.0)

    async def open(self) -> None:
        await self.bus.ensure_stream(streams(self.subjects, self.settings.bus)["events"])
        await self.bus.ensure_stream(streams(self.subjects, self.settings.bus)["outcomes"])
        await self.bus.subscribe(
            self.subjects.worker_heartbeat(), lambda d: self.beats.append(decode(WorkerHeartbeat, d.data))
        )
        await self.bus.subscribe(
            self.subjects.monitor(self.name, "moved"), lambda d: self.moves.append(decode(InstanceMoved, d.data))
        )
        await self.bus.subscribe(
            self.subjects.monitor(self.name, "loaded"), lambda d: self.loads.append(decode(InstanceLoaded, d.data))
        )
        await self.start("dispatcher", wire_dispatcher)
        await self.start("monitor", wire_monitor)
        await self.start("executor", wire_executor)

    async def catalogue(self, record: VariantRecord, artifact: bytes) -> None:
        """Make a variant known to the app, and what it is loaded from."""
        store = await self.bus.object_store(self.subjects.artifacts_bucket)
        await store.put(record.artifact, artifact)
        bucket = await self.bus.key_value(self.subjects.catalog_bucket)
        model = model_record(model=record.model, signature=record.signature)
        app = AppRecord(app=APP, links={record.model: "1"}, signature=record.signature)
        for each in (record, model, app):
            await bucket.put(key_of(each), encode(each))
        for _ in range(3000):
            if (await self.order(self.subjects.list("apps"), ListRequest()))["items"]:
                return
            await asyncio.sleep(0.02)
        raise TimeoutError("the dispatcher has not heard of the app")

    async def ask(self, x: np.ndarray, seconds: float = 60.0, **needs: Any) -> dict[str, Any]:
        """One query; the Answer or Refusal."""
        body = encode({"inputs": from_array(x), **needs})
        delivery = await self.bus.request(self.subjects.query(APP), body, seconds)
        reply: dict[str, Any] = msgspec.msgpack.decode(delivery.data)
        return reply

    async def order(self, subject: str, message: Any, seconds: float = 60.0) -> dict[str, Any]:
        """One order; its reply."""
        reply: dict[str, Any] = msgspec.msgpack.decode((await self.bus.request(subject, encode(message), seconds)).data)
        return reply

    def states(self) -> dict[str, str]:
        return {i.instance: i.state for i in self.beats[-1].instances} if self.beats else {}

    async def rows(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind that are in the stream; what has just happened may come a moment later."""
        return await rows_of(self.bus, self.subjects, kind)


async def rows_of(bus: Bus, subjects: Subjects, kind: str) -> list[dict[str, Any]]:
    """See `Worker.rows`."""
    stream, name = subjects.event_stream, f"reader-{kind}-{time.monotonic_ns()}"
    consumer = await bus.consumer(stream, name, subjects.event(kind))
    found: list[dict[str, Any]] = []
    while True:
        for one in await consumer.fetch(100, 0.1):
            found += msgspec.msgpack.decode(one.data)["rows"]
            await one.ack()
        about = json.loads((await bus.request(f"$JS.API.CONSUMER.INFO.{stream}.{name}", b"", 60.0)).data)
        if about["num_pending"] == about["num_ack_pending"] == 0:
            return found


@asynccontextmanager
async def worker(
    url: str,
    prefix: str,
    directory: Path,
    monitor: MonitorSettings,
    *,
    settings: Settings | None = None,
    simulate: dict[str, int] | None = None,
) -> AsyncIterator[Worker]:
    """A running one, named w1."""
    bus = await NatsBus.connect(url, name="test")
    made = replace(
        settings or Settings(),
        prefix=prefix,
        data_dir=str(directory),
        bus=BusSettings(url=url),
        worker=WorkerSettings(name="w1", memory_mb=1000, simulate=simulate or {}),
        monitor=monitor,
    )
    here = Worker(bus, made)
    try:
        await here.open()
        yield here
    finally:
        for service in ("dispatcher", "monitor", "executor"):
            if service in here.runtimes:
                await here.stop(service)
        await bus.close()
