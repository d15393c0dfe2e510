"""Wires one worker's executors, one a device, and the workshop that builds and profiles models beside them.

All devices share one process: what an accelerator computes takes little of the CPU, simulated devices mostly sleep, and an idle one
takes next to no memory.
"""

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from bus.port import Bus
from bus.subjects import Subjects
from services.core.actor import Edge
from services.core.placement import Device
from services.core.settings import Settings
from services.executor import metrics
from services.executor.actor import Executor
from services.executor.edge import AcceleratedEdge, ExecutorEdge
from services.executor.edge_simulated import SimulatedEdge
from services.executor.workshop.actor import WorkshopActor
from services.executor.workshop.edge import WorkshopEdge
from services.shell.host.accelerators import Accelerator
from services.shell.host.machine import CPU, cores_of, devices_of, worker_name
from services.shell.runtime.runtime import Runtime


async def wire(settings: Settings, bus: Bus, found: Iterable[Accelerator] | None = None) -> list[Runtime]:
    """A batch queue for each device; its incarnation is its start in microseconds, so a later one is always larger.

    found: the machine's accelerators; by default its drivers are asked.
    """
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    ours = settings.executor
    cache = Path(settings.data_dir) / "workers" / worker / "artifacts"
    incarnation = time.time_ns() // 1000

    def hands(make: type[ExecutorEdge] = ExecutorEdge, address: str = CPU, cores: int = 0) -> ExecutorEdge:
        cores = cores or cores_of(settings.worker)
        return make(bus, subjects, address, cores, cache, watchdog=ours.watchdog, least_s=ours.watchdog_least_s)

    def executor(device: Device) -> Executor:
        return Executor(
            worker,
            device.name,
            incarnation,
            subjects,
            cores=device.cores,
            inline_below_s=0.0 if device.simulated else ours.inline_below_ms / 1000.0,
            max_inline=settings.dispatcher.max_inline,
            failure_timeout_s=settings.dispatcher.failure_timeout_s,
        )

    def runtime(device: Device, edge: Edge) -> Runtime:
        return Runtime(f"executor-{device.name}", partial(executor, device), bus, subjects, edge, insight=metrics)

    cpu, *others = devices_of(settings.worker, found)
    real = [device for device in others if not device.simulated]
    addresses: dict[str, str] = {}  # variants are built on the first device of their kind
    for device in real:
        addresses.setdefault(device.kind, device.address)

    def make_workshop() -> WorkshopActor:
        return WorkshopActor(worker, subjects, settings.registrar.seconds, addresses)

    runtimes = [
        Runtime("executor", partial(executor, cpu), bus, subjects, hands(), insight=metrics),
        Runtime("workshop", make_workshop, bus, subjects, WorkshopEdge(settings)),
    ]
    runtimes += [runtime(device, hands(AcceleratedEdge, device.address, device.cores)) for device in real]
    if len(real) < len(others):
        shared = hands()  # not the CPU's own: its watchdog and loads are not to wait for what only pretends
        runtimes += [
            runtime(device, SimulatedEdge(shared, device.kind, device.cores)) for device in others if device.simulated
        ]
    return runtimes
