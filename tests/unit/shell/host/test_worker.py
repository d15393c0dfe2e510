"""A worker is drained before its processes are stopped."""

import asyncio

from bus.codec import decode, encode
from bus.memory import MemoryBus
from bus.messages.fleet import InstanceStatus, WorkerHeartbeat
from bus.messages.scaling import Drain
from bus.port import Delivery
from bus.subjects import Subjects
from services.shell.host import worker
from services.shell.host.worker import drain
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


def test_no_patience_is_no_order() -> None:
    empty, orders = run(monitored([beat()], 0.0))
    assert not empty
    assert not orders
