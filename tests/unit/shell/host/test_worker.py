"""A worker is drained before its processes are stopped."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bus.codec import decode, encode
from bus.memory import MemoryBus
from bus.messages.fleet import InstanceStatus, WorkerHeartbeat
from bus.messages.scaling import Drain
from bus.port import BusError, Delivery
from bus.subjects import Subjects
from services.core.settings import Settings, WorkerSettings
from services.shell.host import worker
from services.shell.host.supervise import Child
from services.shell.host.worker import WorkerHost, drain
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


def test_it_returns_once_the_worker_drains_and_nothing_is_queued() -> None:
    empty, orders = run(monitored([beat(queued=2), beat(queued=2, draining=True), beat(draining=True)], 30.0))
    assert empty
    assert orders[0] == Drain(epoch=0, reason="its processes are being stopped", orderer="worker")


def test_it_gives_up_in_time_when_work_is_left() -> None:
    empty, _ = run(monitored([beat(queued=1, draining=True)], 0.5))
    assert not empty


def test_a_worker_that_has_left_is_not_waited_for() -> None:
    empty, _ = run(monitored([beat(queued=3, leaving=True)], 30.0))
    assert empty


def test_a_worker_that_nobody_hears_is_not_waited_for() -> None:
    async def main() -> bool:
        return await asyncio.wait_for(drain(MemoryBus(), SUBJECTS, "n1", 3600.0), 10 * worker.SILENT_S)

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


def test_no_patience_is_no_order() -> None:
    empty, orders = run(monitored([beat()], 0.0))
    assert not empty
    assert not orders


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


@pytest.mark.parametrize("standby", [True, False])
def test_an_executor_has_a_spare_if_the_settings_say_so(tmp_path: Path, standby: bool) -> None:
    """What a spare does: tests/live/test_supervise.py."""
    children, _ = hosted(tmp_path, drain_s=0.0, standby=standby)
    assert {name: child.spare is not None for name, child in children.items()} == {
        "executor": standby,
        "monitor": False,
    }
