"""Orders for workers on this machine, over the memory bus: idempotent, fenced by epoch, with boot times, complete stops."""

import asyncio
from collections.abc import Awaitable, Callable

from bus.codec import decode, encode
from bus.memory import Broker
from bus.messages.scaling import LeaderRecord, MachineReply, StartMachine, StopMachine
from bus.port import Bus
from bus.subjects import Subjects
from services.autoscaler.vms.providers import PROVIDERS
from services.autoscaler.vms.providers.base import ProviderError
from services.core.settings import MachineSettings
from services.shell.host.local_workers import LocalWorkers
from services.shell.host.process import ServerError
from tests.support.clients.responders import until
from tests.support.servers.nats import run

SUBJECTS = Subjects()


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


def hosted(work: Callable[[Machine, LocalWorkers, Say, Bus], Awaitable[None]]) -> None:
    async def main() -> None:
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
            await work(machine, hosting, say, bus)
        finally:
            await hosting.close()
            await bus.close()

    run(main())


def start(worker: str = "cpu-1-1", epoch: int = 1, **more: object) -> StartMachine:
    return StartMachine(worker=worker, epoch=epoch, **({"kind": "cpu"} | more))


def test_a_start_and_a_stop_are_done_once_however_often_they_are_said() -> None:
    async def work(machine: Machine, hosting: LocalWorkers, say: Say, bus: Bus) -> None:
        assert [await say(start()) for _ in range(3)] == ["", "", ""]
        assert machine.running == [("w0", "cpu"), ("cpu-1-1", "cpu")]
        stops = [say(StopMachine(worker="cpu-1-1", epoch=1)) for _ in range(3)]
        assert await asyncio.gather(*stops) == ["", "", ""]
        assert machine.running == [("w0", "cpu")]
        assert "not used again" in await say(start())
        assert await say(StopMachine(worker="w0", epoch=1)) == ""
        assert machine.running == []

    hosted(work)


def test_a_later_epoch_in_an_order_or_in_the_leaders_record_shuts_earlier_ones_out() -> None:
    async def work(machine: Machine, hosting: LocalWorkers, say: Say, bus: Bus) -> None:
        assert await say(start(epoch=3)) == ""
        assert "since epoch 3" in await say(start("cpu-2-1", epoch=2))
        assert "since epoch 3" in await say(StopMachine(worker="cpu-1-1", epoch=2))
        control = await bus.key_value(SUBJECTS.control_bucket)
        await control.put("controller", encode(LeaderRecord(holder="vm-b", epoch=7, until=0.0)))
        await until(lambda: hosting._epoch == 7)
        assert "since epoch 7" in await say(start("cpu-3-1", epoch=6))
        assert machine.running == [("w0", "cpu"), ("cpu-1-1", "cpu")]

    hosted(work)


def test_a_machine_boots_for_its_time_and_can_be_stopped_meanwhile() -> None:
    async def work(machine: Machine, hosting: LocalWorkers, say: Say, bus: Bus) -> None:
        assert await say(start("cpu-1-1", boot_s=0.2)) == ""
        assert await say(start("cpu-1-2", boot_s=600.0)) == ""
        assert machine.running == [("w0", "cpu")]
        await until(lambda: ("cpu-1-1", "cpu") in machine.running)
        assert await say(StopMachine(worker="cpu-1-2", epoch=1)) == ""
        assert hosting._booting == {}

    hosted(work)


def test_what_cannot_be_started_is_said_and_cleaned_up() -> None:
    async def work(machine: Machine, hosting: LocalWorkers, say: Say, bus: Bus) -> None:
        machine.broken = True
        assert await say(start()) == "no such program"
        machine.broken = False
        assert await say(start("cpu-1-2")) == ""
        assert "no kind of machine 'tpu' here: cpu, fast" in await say(start("x", kind="tpu"))
        assert "boot_s" in await say(start("x", boot_s=float("nan")))
        assert "worker 'a b' must be" in await say(start("a b"))
        reply = await bus.request(SUBJECTS.machines("start"), b"\xc1", 5.0)
        assert decode(MachineReply, reply.data).error

    hosted(work)


def test_providers_ask_the_host_and_pass_on_what_it_says() -> None:
    async def work(machine: Machine, hosting: LocalWorkers, say: Say, bus: Bus) -> None:
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

    hosted(work)


async def test_without_a_host_a_provider_says_who_would_be_one() -> None:
    bus = Broker().connect()
    try:
        await PROVIDERS["local"](bus, SUBJECTS, MachineSettings()).start(start())
    except ProviderError as error:
        assert "infaas up" in str(error)
    else:
        raise AssertionError
    await bus.close()
