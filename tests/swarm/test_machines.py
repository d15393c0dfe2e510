"""The VM-autoscaler itself before real engines: it starts the minimum, adds, removes, heeds the operator and replaces what dies.

Its workers are containers that do nothing; what workers say of themselves, the test says for those that run.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from bus.codec import decode, encode
from bus.memory import Broker
from bus.messages.events import ScalingEvent
from bus.messages.fleet import DeviceStatus, WorkerHeartbeat
from bus.messages.scaling import Drain
from bus.port import Bus, Delivery, StreamSpec
from bus.subjects import Subjects
from services.autoscaler.vms.__main__ import wire
from services.autoscaler.vms.providers.swarm import Swarm as Provider
from services.core.settings import MachineKind, MachineSettings, Settings, SwarmSettings
from tests.support.clients.responders import until
from tests.support.servers.nats import free_port, run
from tests.support.servers.processes import environ, eventually
from tests.swarm.node import SwarmError
from tests.swarm.nodes import Swarm
from tests.swarm.sleepers import insist, pooled, running, start, stop

pytest.importorskip("docker", reason="docker-py is missing: the extra swarm")

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
SUBJECTS = Subjects()


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    """One manager and three machines of the pool cpu, none with a worker."""
    with pooled(1, *[{"infaas.pool": "cpu"}] * 3) as swarm:
        yield swarm


class Workers:
    """Speaks for the containers that run: all as busy as `used` says, draining when told to."""

    def __init__(self, swarm: Swarm, bus: Bus) -> None:
        self.used = 0.1
        self.running: list[str] = []
        self.most = 0
        self._swarm = swarm
        self._bus = bus
        self._draining: set[str] = set()

    async def speak(self) -> None:
        await self._bus.subscribe(SUBJECTS.worker("*", "drain"), self._drain)
        while True:
            with contextlib.suppress(SwarmError):  # a machine that is being killed
                await self._look()
            await asyncio.sleep(0.2)

    async def _look(self) -> None:
        found = await asyncio.to_thread(running, self._swarm)
        self.running = sorted(name for name, services in found.items() if "worker-cpu" in services)
        self.most = max(self.most, len(self.running))
        self._draining &= set(self.running)
        for name in self.running:
            ids = (await asyncio.to_thread(self._swarm.nodes[name].docker, "ps", "--quiet")).split()
            if ids:
                self._bus.publish(SUBJECTS.worker_heartbeat(name), encode(self._beat(name, int(ids[0], 16))))

    def _beat(self, name: str, incarnation: int) -> WorkerHeartbeat:
        cpu = DeviceStatus(
            device="cpu",
            kind="cpu",
            cores=2,
            memory_mb=1000.0,
            memory_used_mb=0.0,
            cores_used=0.0,
            utilisation=self.used,
            price_per_hour=0.1,
        )
        return WorkerHeartbeat(
            worker=name,
            hardware="cpu",
            kind="cpu",
            incarnation=incarnation,
            at=time.time(),
            devices=[cpu],
            instances=[],
            draining=name in self._draining,
        )

    def _drain(self, delivery: Delivery) -> None:
        worker = delivery.subject.split(".")[-2]
        if decode(Drain, delivery.data).resume:
            self._draining.discard(worker)
        else:
            self._draining.add(worker)


def settings_of(swarm: Swarm, **more: Any) -> Settings:
    kinds = {"cpu": MachineKind(minimum=1, maximum=2, cores=2, memory_mb=1000)}
    hosts = SwarmSettings(hosts=(swarm.manager.host,), **more)
    machines = MachineSettings(provider="swarm", period_s=0.5, lease_s=1.0, idle_s=4.0, kinds=kinds, swarm=hosts)
    return Settings(machines=machines)


@contextlib.asynccontextmanager
async def autoscaled(swarm: Swarm, **more: Any) -> AsyncIterator[tuple[Workers, list[ScalingEvent]]]:
    """A VM-autoscaler that leads; the workers; its rows of scaling events."""
    bus = Broker().connect()
    kept = (SUBJECTS.event("scaling"), SUBJECTS.event("worker"))
    await bus.ensure_stream(StreamSpec(SUBJECTS.event_stream, kept, "limits", 2**20))
    workers, events = Workers(swarm, bus), []
    [runtime] = await wire(settings_of(swarm, **more), bus)
    runtime.sealed = lambda kind, rows: events.extend(rows if kind == "scaling" else ())
    speaking = asyncio.create_task(workers.speak())
    await runtime.start()
    try:
        yield workers, events
    finally:
        await runtime.stop()
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
        await bus.close()


async def becomes(workers: Workers, *names: str, seconds: float = 60.0) -> float:
    """Wait until these run; returns how long that took."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            while workers.running != sorted(names):
                assert workers.most <= 2
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not within {seconds:.0f} s: {names}, but {workers.running}")
    return time.monotonic() - began


async def test_workers_come_and_go_as_load_operator_and_fate_have_it(swarm: Swarm) -> None:
    async with autoscaled(swarm) as (workers, events):
        took = {"minimum from nothing": await becomes(workers, "w0")}
        await asyncio.sleep(4.0)
        workers.used = 0.95
        took["busy to a second worker"] = await becomes(workers, "w0", "w1")
        await asyncio.to_thread(swarm.manager.docker, "node", "update", "--availability", "drain", "w1")
        took["drained machine to its replacement"] = await becomes(workers, "w0", "w2")
        assert "infaas.worker" not in swarm.labels(swarm.nodes["w1"])
        workers.used = 0.1
        began = time.monotonic()
        await until(lambda: len(workers.running) == 1, 60.0)
        took["idle to one worker"] = time.monotonic() - began
        [left] = workers.running
        await asyncio.to_thread(swarm.nodes[left].kill)
        other = "w2" if left == "w0" else "w0"
        took["killed machine to its replacement"] = await becomes(workers, other, seconds=90.0)
        print({what: round(seconds, 1) for what, seconds in took.items()})
        actions = [(e.action, e.worker) for e in events if e.count]
        assert actions[:2] == [("add_worker", "w0"), ("add_worker", "w1")]
        labelled = {name for name, node in swarm.nodes.items() if "infaas.worker" in swarm.labels(node)}
        assert labelled <= {left, other}  # w1 is still drained


async def test_a_dry_run_labels_nothing_and_tells_once(swarm: Swarm) -> None:
    async with autoscaled(swarm, dry_run=True) as (workers, events):
        swarm.label(swarm.nodes["w0"], {"infaas.worker": "cpu"})  # the operator's
        await becomes(workers, "w0")
        workers.used = 0.95
        await asyncio.sleep(15.0)
        assert workers.running == ["w0"]
        told = [(e.action, e.worker, e.count) for e in events]
        assert told == [("add_worker", "w1", 0)]
    labels = {name: swarm.labels(node) for name, node in swarm.nodes.items() if name.startswith("w")}
    assert labels == {
        "w0": {"infaas.pool": "cpu", "infaas.worker": "cpu"},
        "w1": {"infaas.pool": "cpu"},
        "w2": {"infaas.pool": "cpu"},
    }


def test_the_provider_gets_on_with_what_the_engine_proxy_lets_through(swarm: Swarm) -> None:
    """Beside it a proxy that cannot be reached, and one to which the token is unknown."""
    port, token = free_port(), "0123456789abcdef"
    said = environ(
        INFAAS_ENGINE__PORT=str(port),
        INFAAS_ENGINE__TOKEN=token,
        INFAAS_ENGINE__SOCKET=swarm.manager.host.removeprefix("unix://"),
    )
    log = swarm.directory / "proxy.log"

    async def main() -> None:
        hosts = (f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{port}")
        provider = Provider(SwarmSettings(hosts=hosts, token=token))
        stranger = Provider(SwarmSettings(hosts=hosts, token="guessed"))
        try:
            await provider.start(start("w1"))
            found = {node.name: (node.kind, node.worker, node.order) for node in (await provider.inventory()).nodes}
            assert found == {"w0": ("cpu", "", ""), "w1": ("cpu", "cpu", "1-1"), "w2": ("cpu", "", "")}
            await until(lambda: running(swarm) == {"w1": ["worker-cpu"]}, 30.0)
            assert "status 401" in (await stranger.inventory()).error
            await insist(lambda: provider.stop(stop("w1")))
            await until(lambda: running(swarm) == {}, 30.0)
        finally:
            await provider.close()
            await stranger.close()

    command = [sys.executable, "-P", "-m", "infaas.cli", "run", "engine-proxy"]
    with log.open("w") as file, subprocess.Popen(command, env=said, stderr=file) as process:
        try:
            assert eventually(lambda: "the engine proxy runs" in log.read_text())
            run(main())
        finally:
            process.terminate()
            process.wait(20)
    assert log.read_text().count("labels of a node were changed") == 2
