"""A worker is drained before its processes are stopped."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bus.codec import decode, encode
from bus.memory import Broker, MemoryBus
from bus.messages.fleet import InstanceStatus, WorkerHeartbeat
from bus.messages.scaling import Drain, LeaderRecord, MachineReply, StartMachine, StopMachine
from bus.port import Bus, BusError, Delivery
from bus.subjects import Subjects
from services.autoscaler.vms.providers import PROVIDERS
from services.autoscaler.vms.providers.base import ProviderError
from services.core.settings import MachineSettings, Settings, WorkerSettings
from services.shell.host import process, worker
from services.shell.host.process import ServerError
from services.shell.host.supervise import Child
from services.shell.host.worker import LocalWorkers, WorkerHost, drain
from tests.support.clients.responders import until
from tests.support.servers.nats import run

SUBJECTS = Subjects()


def beat(*, queued: int = 0, draining: bool = False, leaving: bool = False) -> bytes:
    instance = InstanceStatus(instance="i", variant="v", device="cpu", state="Active", since=0.0, queued=queued)
    return encode(
        WorkerHeartbeat(
            worker="n1",
            hardware="cpu",
            incarnation=1,
            at=0.0,
            devices=[],
            instances=[instance],
            draining=draining,
            leaving=leaving,
        )
    )


async def monitored(bodies: list[bytes], patience: float) -> tuple[bool, list[Drain]]:
    """Whether it became empty, and the orders it got, when its monitor says these in turn and repeats the last."""
    bus = MemoryBus()
    orders: list[Drain] = []

    def order(delivery: Delivery) -> None:
        orders.append(decode(Drain, delivery.data))

    await bus.subscribe(SUBJECTS.worker("n1", "drain"), order)

    async def speak() -> None:
        for number in range(1000):
            bus.publish(SUBJECTS.worker_heartbeat("n1"), bodies[min(number, len(bodies) - 1)])
            await asyncio.sleep(0.05)

    speaking = asyncio.create_task(speak())
    empty = await drain(bus, SUBJECTS, "n1", patience)
    speaking.cancel()
    return empty, orders


def test_it_returns_once_the_worker_drains_or_in_time() -> None:
    empty, orders = run(monitored([beat(queued=2), beat(queued=2, draining=True), beat(draining=True)], 30.0))
    assert empty
    assert orders[0] == Drain(epoch=0, reason="its processes are being stopped", orderer="worker")
    empty, _ = run(monitored([beat(queued=1, draining=True)], 0.5))
    assert not empty
    empty, _ = run(monitored([beat(queued=3, leaving=True)], 30.0))
    assert empty
    empty, orders = run(monitored([beat()], 0.0))
    assert not empty
    assert not orders


def test_a_worker_that_nobody_hears_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SILENT_S", 0.5)

    async def main() -> bool:
        return await asyncio.wait_for(drain(MemoryBus(), SUBJECTS, "n1", 3600.0), 60.0)

    assert not run(main())


def test_a_machine_that_stands_still_is_no_silent_monitor() -> None:
    async def main() -> bool:
        bus, loop = MemoryBus(), asyncio.get_running_loop()

        async def speak() -> None:
            bus.publish(SUBJECTS.worker_heartbeat("n1"), beat(queued=1))
            await asyncio.sleep(0.1)
            loop.call_soon(time.sleep, worker.SILENT_S + 0.2)
            await asyncio.sleep(0.2)
            await asyncio.sleep(0.2)  # what was said meanwhile has not arrived
            while True:
                bus.publish(SUBJECTS.worker_heartbeat("n1"), beat(draining=True))
                await asyncio.sleep(0.05)

        speaking = asyncio.create_task(speak())
        empty = await drain(bus, SUBJECTS, "n1", 600.0)
        speaking.cancel()
        return empty

    assert run(main())


class Children:
    """Keeps a list instead of processes."""

    def __init__(self) -> None:
        self.kept: list[Child] = []
        self.pids = {"monitor": 1}

    def start(self, child: Child) -> None:
        self.kept.append(child)

    async def stop(self) -> None:
        pass


def hosted(directory: Path, **settings: Any) -> tuple[dict[str, Child], list[Drain]]:
    """What a worker with these settings keeps running, and the orders it gets when it is stopped in the midst of work."""
    children, orders = Children(), list[Drain]()

    async def main() -> None:
        bus = MemoryBus()
        await bus.subscribe(SUBJECTS.worker("n1", "drain"), lambda said: orders.append(decode(Drain, said.data)))
        host = WorkerHost(Settings(data_dir=str(directory), worker=WorkerSettings(name="n1", **settings)), {})
        host._bus, host._supervisor = bus, children  # type: ignore[assignment]

        async def speak() -> None:
            with suppress(BusError):  # it is closed when the worker has stopped
                while True:
                    bus.publish(SUBJECTS.worker_heartbeat("n1"), beat(queued=1, draining=True))
                    await asyncio.sleep(0.05)

        speaking = asyncio.create_task(speak())
        await host.start()
        await host.stop()
        speaking.cancel()

    run(main())
    return {child.name: child for child in children.kept}, orders


@pytest.mark.parametrize("drain_s", [0.0, 0.3])
def test_it_is_drained_when_it_is_stopped_unless_the_settings_give_it_no_time(tmp_path: Path, drain_s: float) -> None:
    _, orders = hosted(tmp_path, drain_s=drain_s)
    assert bool(orders) is (drain_s > 0)


# -- Orders for workers on this machine, over the memory bus: idempotent, fenced by epoch, with boot times, complete stops.


class Machine:
    """Keeps a list instead of processes."""

    def __init__(self) -> None:
        self.running: list[tuple[str, str]] = []
        self.broken = False

    def launch(self, worker: str, kind: str) -> None:
        if self.broken:
            raise ServerError("no such program")
        self.running.append((worker, kind))

    async def end(self, worker: str) -> None:
        await asyncio.sleep(0.01)
        self.running = [one for one in self.running if one[0] != worker]


Say = Callable[[StartMachine | StopMachine], Awaitable[str]]


@asynccontextmanager
async def on_machine() -> AsyncIterator[tuple[Machine, LocalWorkers, Say, Bus]]:
    bus, machine = Broker().connect(), Machine()
    machine.running.append(("w0", "cpu"))
    hosting = LocalWorkers(bus, SUBJECTS, {"cpu", "fast"}, machine.launch, machine.end)
    control = await bus.key_value(SUBJECTS.control_bucket)
    await control.put("machine.old-1-1", b"of an earlier life")
    await hosting.open(["w0"])
    assert "machine.old-1-1" not in await control.keys()

    async def say(order: StartMachine | StopMachine) -> str:
        what = "start" if isinstance(order, StartMachine) else "stop"
        return decode(MachineReply, (await bus.request(SUBJECTS.machines(what), encode(order), 5.0)).data).error

    try:
        yield machine, hosting, say, bus
    finally:
        await hosting.close()
        await bus.close()


def start(worker: str = "cpu-1-1", epoch: int = 1, **more: object) -> StartMachine:
    return StartMachine(worker=worker, epoch=epoch, **({"kind": "cpu"} | more))


async def test_a_start_and_a_stop_are_done_once_however_often_they_are_said() -> None:
    async with on_machine() as (machine, _, say, _):
        assert [await say(start()) for _ in range(3)] == ["", "", ""]
        assert machine.running == [("w0", "cpu"), ("cpu-1-1", "cpu")]
        stops = [say(StopMachine(worker="cpu-1-1", epoch=1)) for _ in range(3)]
        assert await asyncio.gather(*stops) == ["", "", ""]
        assert machine.running == [("w0", "cpu")]
        assert "not used again" in await say(start())
        assert await say(StopMachine(worker="w0", epoch=1)) == ""
        assert machine.running == []


async def test_a_later_epoch_in_an_order_or_in_the_leaders_record_shuts_earlier_ones_out() -> None:
    async with on_machine() as (machine, hosting, say, bus):
        assert await say(start(epoch=3)) == ""
        assert "since epoch 3" in await say(start("cpu-2-1", epoch=2))
        assert "since epoch 3" in await say(StopMachine(worker="cpu-1-1", epoch=2))
        control = await bus.key_value(SUBJECTS.control_bucket)
        await control.put("controller", encode(LeaderRecord(holder="vm-b", epoch=7, until=0.0)))
        await until(lambda: hosting._epoch == 7)
        assert "since epoch 7" in await say(start("cpu-3-1", epoch=6))
        assert machine.running == [("w0", "cpu"), ("cpu-1-1", "cpu")]


async def test_a_machine_boots_for_its_time_and_can_be_stopped_meanwhile() -> None:
    async with on_machine() as (machine, hosting, say, _):
        assert await say(start("cpu-1-1", boot_s=0.2)) == ""
        assert await say(start("cpu-1-2", boot_s=600.0)) == ""
        assert machine.running == [("w0", "cpu")]
        await until(lambda: ("cpu-1-1", "cpu") in machine.running)
        assert await say(StopMachine(worker="cpu-1-2", epoch=1)) == ""
        assert hosting._booting == {}


async def test_what_cannot_be_started_is_said_and_cleaned_up() -> None:
    async with on_machine() as (machine, _, say, bus):
        machine.broken = True
        assert await say(start()) == "no such program"
        machine.broken = False
        assert await say(start("cpu-1-2")) == ""
        assert "no kind of machine 'tpu' here: cpu, fast" in await say(start("x", kind="tpu"))
        assert "boot_s" in await say(start("x", boot_s=float("nan")))
        assert "worker 'a b' must be" in await say(start("a b"))
        reply = await bus.request(SUBJECTS.machines("start"), b"\xc1", 5.0)
        assert decode(MachineReply, reply.data).error


async def test_providers_ask_the_host_and_pass_on_what_it_says() -> None:
    async with on_machine() as (machine, hosting, _, bus):
        local, simulated = (PROVIDERS[name](bus, SUBJECTS, MachineSettings()) for name in ("local", "simulated"))
        await local.start(start("cpu-1-1", boot_s=600.0))
        assert ("cpu-1-1", "cpu") in machine.running  # nothing boots here
        await simulated.start(start("cpu-1-2", boot_s=600.0))
        assert ("cpu-1-2", "cpu") not in machine.running
        assert "cpu-1-2" in hosting._booting
        await local.stop(StopMachine(worker="cpu-1-2", epoch=1))
        assert hosting._booting == {}
        assert (local.traits.simulated, simulated.traits.simulated) == (False, True)
        try:
            await local.start(start("x", kind="tpu"))
        except ProviderError as error:
            assert "no kind of machine" in str(error)
        else:
            raise AssertionError


async def test_without_a_host_a_provider_says_who_would_be_one() -> None:
    bus = Broker().connect()
    try:
        await PROVIDERS["local"](bus, SUBJECTS, MachineSettings()).start(start())
    except ProviderError as error:
        assert "infaas up" in str(error)
    else:
        raise AssertionError
    await bus.close()


def test_logs_of_workers_go_a_week_after_they_have(tmp_path: Path) -> None:
    logs = tmp_path / worker.LOGS
    logs.mkdir()
    names = [f"{role}-{of}.log" for role in worker.ROLES for of in ("gone", "here", "beside", "new")]
    long_ago = time.time() - worker.KEPT_S - 1.0
    for name in (*names, "dispatcher-0.log", "executor-gone.log.1"):
        (logs / name).touch()
        if "new" not in name:
            os.utime(logs / name, (long_ago, long_ago))
    for of in ("gone", "beside"):
        (tmp_path / worker.WORKERS / of).mkdir(parents=True)
    runs = process.Lock(tmp_path / worker.WORKERS / "beside" / worker.LOCK)
    worker.forget_gone(tmp_path, {f"{role}-here" for role in worker.ROLES})
    kept = {"dispatcher-0.log", *(name for name in names if "-gone" not in name)}
    assert {each.name for each in logs.iterdir()} == kept
    assert [each.name for each in (tmp_path / worker.WORKERS).iterdir()] == ["beside"]
    runs.release()
