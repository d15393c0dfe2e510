"""Machines with real processes: `infaas up` gives workers back and gets new ones; a killed controller's successor goes on."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import infaas
from bus.codec import decode, encode
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from bus.messages.scaling import LeaderRecord, MachineReply, StartMachine, StopMachine
from bus.natsbus import NatsBus
from bus.port import Delivery, NotFound
from bus.subjects import Subjects
from services.shell.runtime.runtime import unix_now
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.nats import run
from tests.support.servers.processes import about, alive, eventually, living_of, program
from tests.support.servers.system import Whole, running

CLIENTS = 60  # with 64 items each they are seconds of work
LONG = 1e7  # s: far more than that work is predicted to take; where a machine stands still, the prediction is wrong by much
PATIENCE = 500.0  # s; only ends a failing test: a worker comes and loads beside that work

SHORT = """
[registrar]
threads = [1]
max_batches = [8]
[autoscaler]
policy = "off"
[machines]
period_s = 0.25
idle_s = 1.5
utilisation_above = 1.0
[machines.kinds.cpu]
minimum = 1
maximum = 2
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """`infaas up` with workers of a kind of which there may be one or two."""
    tmp_path = tmp_path_factory.mktemp("machines")
    (tmp_path / "infaas.toml").write_text(SHORT)
    with running(tmp_path / "data", "--config", str(tmp_path / "infaas.toml")) as whole:
        yield whole
    assert living_of(tmp_path / "data") == []


def processes(directory: Path, worker: str) -> list[int]:
    """Those of one worker, those that stand by included."""
    return [pid for pid in living_of(directory) if f"INFAAS_WORKER__NAME={worker}\0" in about(pid, "environ")]


@pytest.mark.timeout(1800)
def test_a_burst_brings_a_worker_and_low_load_gives_one_back_without_a_query_lost(system: Whole) -> None:
    x, y = tiny_models.images(64)
    system.register("pictures", tiny_models.convnet(), x, y)
    ends: list[Any] = []
    sent = 0

    async def main() -> list[set[str]]:
        async with infaas.connect(system.nats) as client:

            async def one_after_the_other(items: int, pause: float, enough: asyncio.Event) -> None:
                nonlocal sent
                while not enough.is_set():
                    sent += 1
                    ends.append(
                        await client.query("pictures", x[:items], raise_refused=False, deadline=time.time() + LONG)
                    )
                    await asyncio.sleep(pause)

            async def workers() -> dict[str, bool]:
                """Worker to whether it has an instance that serves."""
                return {
                    worker["worker"]: any(one["state"] != "Loading" for one in worker["instances"])
                    for worker in await client.workers()
                }

            async def serving(count: int) -> bool:
                seen.append(await workers())
                return sum(seen[-1].values()) == count

            async def alone() -> bool:
                seen.append(await workers())
                return len(seen[-1]) == 1

            async def burst() -> None:
                enough = asyncio.Event()
                async with asyncio.TaskGroup() as group:
                    for _ in range(CLIENTS):
                        group.create_task(one_after_the_other(64, 0.0, enough))
                    await until(lambda: serving(2), PATIENCE)
                    enough.set()

            seen: list[dict[str, bool]] = []
            fleets = []
            over = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for _ in range(3):  # low load, all the time
                    group.create_task(one_after_the_other(1, 0.2, over))
                await burst()
                fleets.append(set(seen[-1]))
                await until(alone, PATIENCE)
                fleets.append(set(seen[-1]))
                await burst()
                fleets.append(set(seen[-1]))
                over.set()
            return fleets

    two, one, again = run(main())
    assert len(two) == 2
    assert "w0" in two
    assert one < two
    assert one < again
    [gone], [came] = two - one, again - one
    assert came not in two  # a name that no worker has had
    assert len(ends) == sent
    assert [end for end in ends if not isinstance(end, infaas.Answer)] == []
    assert eventually(lambda: processes(system.directory, gone) == [])

    def told() -> bool:
        rows = system.rows(
            "SELECT action, worker FROM infaas.scaling_events WHERE scaler = 'vm' AND action LIKE '%%_worker'"
        )
        drained = system.rows("SELECT worker FROM infaas.worker_events WHERE to_state = 'Draining'")
        return {("remove_worker", gone), ("add_worker", came)} <= set(rows) and (gone,) in drained

    assert eventually(told)


# -- two controllers of a cluster whose workers and host are this test's


CONTROLLER = """
prefix = "{prefix}"
[bus]
url = "{url}"
[machines]
period_s = 0.5
lease_s = 5.0
[machines.kinds.cpu]
minimum = 1
maximum = 3
"""


def controller(config: Path) -> AbstractContextManager["subprocess.Popen[str]"]:
    words = ("infaas.cli.run", "vm-autoscaler", "--config", str(config))
    return program(*words, errors=config.parent / "controller.log", patience=0.0)


def beat(worker: str, state: Any = "Active") -> WorkerHeartbeat:
    """One worker with one instance in this state."""
    device = DeviceStatus(
        device="cpu", kind="cpu", cores=2, memory_mb=4000.0, memory_used_mb=50.0, cores_used=1.0, utilisation=0.5,
        price_per_hour=0.1,
    )  # fmt: skip
    status = InstanceStatus(instance=f"m.{worker}-1", variant="m", device="cpu", state=state, since=0.0, load=5.0)
    return WorkerHeartbeat(
        worker=worker, hardware="cpu", kind="cpu", incarnation=1, at=unix_now(), devices=[device], instances=[status]
    )


async def test_a_killed_controller_is_replaced_and_nothing_is_started_twice(
    nats_url: str, prefix: str, tmp_path: Path
) -> None:
    config = tmp_path / "infaas.toml"
    config.write_text(CONTROLLER.format(prefix=prefix, url=nats_url))
    subjects = Subjects(prefix)

    bus = await NatsBus.connect(nats_url, name="test")
    control = await bus.key_value(subjects.control_bucket)
    orders: list[StartMachine] = []
    started: set[str] = set()
    answering = False

    async def leader() -> LeaderRecord | None:
        try:
            return decode(LeaderRecord, (await control.get("controller")).value or b"")
        except NotFound:
            return None

    def start(delivery: Delivery) -> None:
        order = decode(StartMachine, delivery.data)
        orders.append(order)
        if answering:
            started.add(order.worker)
            bus.publish(delivery.reply, encode(MachineReply(worker=order.worker)))

    async def beats() -> None:
        while True:
            bus.publish(subjects.worker_heartbeat("w0"), encode(beat("w0", "Overloaded")))
            for name in started:
                bus.publish(subjects.worker_heartbeat(name), encode(beat(name)))
            await asyncio.sleep(0.2)

    await bus.subscribe(subjects.machines("start"), start)
    await bus.flush()
    beating = asyncio.create_task(beats())
    with controller(config) as first:
        await until(leader)
        with controller(config) as second:
            await until(lambda: orders)
            await until(lambda: "vm-autoscaler runs" in (tmp_path / "controller.log").read_text().partition("runs")[2])
            first.send_signal(signal.SIGKILL)  # its order stands, unanswered
            killed = orders[-1].epoch
            answering = True
            await until(lambda: orders[-1].epoch > killed)
            assert alive(second.pid)
            await asyncio.sleep(4.0)  # several periods in which a second machine could be started
            record = await leader()
    beating.cancel()
    assert {order.worker for order in orders} == {"cpu-1-1"}
    epochs = [order.epoch for order in orders]
    assert epochs == sorted(epochs)
    assert record.epoch == epochs[-1]
    await bus.close()


async def test_orders_of_an_earlier_leader_are_refused(system: Whole) -> None:
    bus = await NatsBus.connect(system.nats, name="test")
    subjects = Subjects()

    async def say(what: str, order: StartMachine | StopMachine) -> str:
        reply = await bus.request(subjects.machines(what), encode(order), 180.0)
        return decode(MachineReply, reply.data).error

    assert "no kind of machine 'tpu'" in await say("start", StartMachine(worker="x", kind="tpu", epoch=99))
    assert "letters" in await say("start", StartMachine(worker="a.b", kind="cpu", epoch=99))
    assert await say("start", StartMachine(worker="extra", kind="cpu", epoch=99)) == ""
    assert await say("start", StartMachine(worker="extra", kind="cpu", epoch=99)) == ""
    # A process that has just been started has no environment to be known by.
    assert eventually(lambda: len(processes(system.directory, "extra")) >= 2)
    assert await say("stop", StopMachine(worker="extra", epoch=99)) == ""
    assert processes(system.directory, "extra") == []
    assert "another controller leads since epoch" in await say("start", StartMachine(worker="x", kind="cpu", epoch=98))
    assert "another controller leads since epoch" in await say("stop", StopMachine(worker="w0", epoch=98))
    assert "not used again" in await say("start", StartMachine(worker="extra", kind="cpu", epoch=99))
    assert await say("stop", StopMachine(worker="nobody", epoch=99)) == ""
    await bus.close()
