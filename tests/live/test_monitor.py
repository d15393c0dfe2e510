"""The monitor as a service on a real nats-server, against an executor that speaks the same messages."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from bus.codec import decode, encode
from bus.messages.fleet import (
    EnsureLoaded,
    ExecutorExited,
    ExecutorReport,
    InstanceLoaded,
    InstanceSample,
    InstanceUnloaded,
    LoadInstance,
    LoadReply,
    Release,
    UnloadInstance,
    WorkerHeartbeat,
)
from bus.messages.public import Refusal
from bus.natsbus import NatsBus
from bus.port import Bus, Delivery, NoResponders
from bus.subjects import Subjects
from services.core.catalog import variant_key
from services.core.settings import BusSettings, MonitorSettings, PriceSettings, Settings, WorkerSettings
from services.monitor.__main__ import wire
from services.recorder.__main__ import streams
from services.shell.runtime.runtime import unix_now
from services.shell.settings import SettingsError
from tests.support.clients.responders import until
from tests.support.servers.worker import rows_of
from tests.support.simulated.monitored_worker import variant


class Partner:
    """An executor process on the bus: it loads what it is told to, reports, and can die and come back."""

    def __init__(self, bus: Bus, subjects: Subjects, incarnation: int) -> None:
        self.bus, self.subjects, self.incarnation = bus, subjects, incarnation
        self.loaded: dict[str, str] = {}
        self.orders: list[LoadInstance | UnloadInstance] = []
        self.subscriptions: list[Any] = []

    async def start(self) -> None:
        for order, handler in (("load", self._load), ("unload", self._unload)):
            self.subscriptions.append(await self.bus.subscribe(self.subjects.executor("w1", "cpu", order), handler))
        self.report()

    async def die(self) -> None:
        for subscription in self.subscriptions:
            await subscription.drain()
        fact = ExecutorExited(worker="w1", device="cpu", at=unix_now(), reason="killed by signal 9")
        self.bus.publish(self.subjects.exited("w1", "cpu"), encode(fact))

    def report(self) -> None:
        samples = [InstanceSample(i, v, 0, 0.0, 0, 0, 0.0, 0.0, []) for i, v in self.loaded.items()]
        report = ExecutorReport(
            worker="w1",
            device="cpu",
            incarnation=self.incarnation,
            at=unix_now(),
            seconds=0.5,
            samples=samples,
            memory_mb=1.0,
        )
        self.bus.publish(self.subjects.monitor("w1", "report"), encode(report))

    def _load(self, delivery: Delivery) -> None:
        order = decode(LoadInstance, delivery.data)
        self.orders.append(order)
        name = self.loaded[order.instance] = order.variant.variant
        fact = InstanceLoaded(
            instance=order.instance,
            variant=name,
            device="cpu",
            incarnation=self.incarnation,
            load_ms=1.0,
            memory_mb=1.0,
            proof="in this test",
        )
        self.bus.publish(self.subjects.monitor("w1", "loaded"), encode(fact))

    def _unload(self, delivery: Delivery) -> None:
        order = decode(UnloadInstance, delivery.data)
        self.orders.append(order)
        fact = InstanceUnloaded(
            instance=order.instance, variant=self.loaded.pop(order.instance), device="cpu", incarnation=self.incarnation
        )
        self.bus.publish(self.subjects.monitor("w1", "unloaded"), encode(fact))


class Stand:
    """A monitor, its executor, and what dispatchers would hear."""

    def __init__(self, url: str, prefix: str, bus: Bus) -> None:
        self.bus = bus
        self.subjects = Subjects(prefix)
        self.settings = Settings(
            prefix=prefix,
            bus=BusSettings(url=url),
            worker=WorkerSettings(name="w1", cores=2, memory_mb=1000),
            monitor=MonitorSettings(heartbeat_s=0.05, sample_s=0.1, cost_s=0.2),
        )
        self.beats: list[WorkerHeartbeat] = []
        self.partner = Partner(bus, self.subjects, 1)

    async def start(self, loaded: dict[str, str]) -> None:
        """loaded: what the executor has already, by an earlier monitor's order."""
        bucket = await self.bus.key_value(self.subjects.catalog_bucket)
        for name in loaded.values():
            await bucket.put(variant_key(name), encode(variant(name)))
        self.partner.loaded = loaded
        await self.bus.ensure_stream(streams(self.subjects, self.settings.bus)["events"])
        await self.bus.subscribe(
            self.subjects.worker_heartbeat(), lambda d: self.beats.append(decode(WorkerHeartbeat, d.data))
        )
        [self.monitor] = await wire(self.settings, self.bus)
        await self.monitor.start()
        await self.partner.start()

    async def ensure(self, at_least: int = 1) -> LoadReply:
        order = EnsureLoaded(variant=variant(), at_least=at_least, app="faces", orderer="d1", reason="a query needs it")
        delivery = await self.bus.request(self.subjects.worker("w1", "load"), encode(order), 60.0)
        return decode(LoadReply, delivery.data)

    def states(self) -> dict[str, str]:
        return {i.instance: i.state for i in self.beats[-1].instances} if self.beats else {}

    async def rows(self, kind: str) -> list[dict[str, Any]]:
        return await rows_of(self.bus, self.subjects, kind)


@asynccontextmanager
async def stand(url: str, prefix: str, loaded: dict[str, str] | None = None) -> AsyncIterator[Stand]:
    bus = await NatsBus.connect(url, name="test")
    made = Stand(url, prefix, bus)
    await made.start(loaded or {})
    try:
        yield made
    finally:
        await made.monitor.stop(30.0)
        await bus.close()


async def test_a_load_from_order_to_heartbeat_to_history(nats_url: str, prefix: str) -> None:
    async with stand(nats_url, prefix) as here:
        reply = await here.ensure(2)
        assert (reply.instances, reply.reason) == (["v.w1-1", "v.w1-2"], "")
        await until(lambda: here.states() == dict.fromkeys(reply.instances, "Active"))
        [device] = here.beats[-1].devices
        assert (device.alive, device.incarnation, device.cores, device.memory_mb) == (True, 1, 2, 1000.0)
        assert 0.0 <= device.utilisation <= 1.0
        assert all(order.price_per_s > 0 for order in here.partner.orders if isinstance(order, LoadInstance))
        await until(lambda: here.rows("worker-sample"))
        await until(lambda: here.rows("instance-sample"))
        here.bus.publish(here.subjects.worker("w1", "release"), encode(Release(variant="v", keep=1)))
        await until(lambda: len(here.states()) == 1)
        await here.monitor.stop(30.0)
        await until(lambda: here.beats[-1].leaving)

        async def stopped() -> bool:
            return "Stopped" in [row["to_state"] for row in await here.rows("worker")]

        await until(stopped)
        moves = [(row["instance"], row["to_state"]) for row in await here.rows("state")]
        assert moves[:4] == [(i, state) for state in ("Loading", "Active") for i in reply.instances]
        assert [row["to_state"] for row in await here.rows("worker")] == ["Booting", "Ready", "Stopped"]
        assert {row["action"] for row in await here.rows("scaling")} == {"load", "replicate", "unload"}
        costs = await here.rows("cost")
        spans = {row["time"]: row["seconds"] for row in costs if row["variant"] is None}
        assert sum(row["cost"] for row in costs) == pytest.approx(sum(spans.values()) * 0.096 / 3600)


async def test_a_worker_is_back_after_its_executor_was_killed(nats_url: str, prefix: str) -> None:
    async with stand(nats_url, prefix) as here:
        await here.ensure()
        await until(lambda: here.states() == {"v.w1-1": "Active"})
        await here.partner.die()
        await until(lambda: not here.beats[-1].devices[0].alive and here.states() == {"v.w1-2": "Loading"})
        here.partner = Partner(here.bus, here.subjects, 2)
        await here.partner.start()
        await until(lambda: here.states() == {"v.w1-2": "Active"})
        assert here.beats[-1].devices[0].incarnation == 2


async def test_a_monitor_that_is_started_again_adopts_what_is_loaded(nats_url: str, prefix: str) -> None:
    async with stand(nats_url, prefix, {"v.w1-4": "v"}) as here:
        await until(lambda: here.partner.report() or here.states() == {"v.w1-4": "Active"})
        assert here.partner.orders == []
        assert (await here.ensure(2)).instances == ["v.w1-4", "v.w1-5"]


async def test_bad_orders_are_refused_and_do_no_harm(nats_url: str, prefix: str) -> None:
    async with stand(nats_url, prefix) as here:
        for body in (
            b"",
            b"\xc1",
            encode({"variant": 7}),
            encode({"variant": msgspec.to_builtins(variant()) | {"threads": "x"}}),
        ):
            delivery = await here.bus.request(here.subjects.worker("w1", "load"), body, 60.0)
            assert decode(Refusal, delivery.data).error.code == "bad_request"
        assert (await here.ensure()).reason == ""


async def test_two_workers_do_not_hear_each_other(nats_url: str, prefix: str) -> None:
    async with stand(nats_url, prefix) as here:
        order = EnsureLoaded(variant=variant())
        with pytest.raises(NoResponders):
            await here.bus.request(here.subjects.worker("w2", "load"), encode(order), 60.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(worker=WorkerSettings(name="a.b")), r"worker\.name 'a\.b' must be"),
        (
            Settings(worker=WorkerSettings(name="w"), prices=PriceSettings(per_hour={"cpu": -1.0})),
            r"prices\.per_hour\.cpu",
        ),
    ],
)
async def test_settings_that_cannot_be_used_are_named(nats_url: str, settings: Settings, words: str) -> None:
    bus = await NatsBus.connect(nats_url, name="test")
    try:
        with pytest.raises(SettingsError, match=words):
            await wire(settings, bus)
    finally:
        await bus.close()
