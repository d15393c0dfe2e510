"""Wires one worker's executors, one for each device, and the workshop that builds and profiles models beside them.

All devices share one process: an accelerator's batches take little of the CPU, simulated devices mostly sleep, and an idle device
takes almost no memory.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bus.port import Bus
from bus.subjects import Subjects
from services.core.actor import Edge
from services.core.placement import REMOTE, Device
from services.core.settings import Settings
from services.executor import metrics
from services.executor.actor import make_executor
from services.executor.edge import AcceleratedEdge, ContainerEdge, ExecutorEdge, RemoteEdge
from services.executor.edge_simulated import SimulatedEdge
from services.executor.workshop.actor import make_workshop
from services.executor.workshop.edge import WorkshopEdge
from services.shell.host.accelerators import Accelerator
from services.shell.host.machine import CPU, cores_of, devices_of, worker_name
from services.shell.runtime.runtime import Runtime

if TYPE_CHECKING:
    from services.executor.backends.container import UserProcess


async def wire(settings: Settings, bus: Bus, found: Iterable[Accelerator] | None = None) -> list[Runtime]:
    """One executor for each device. Its incarnation is its start in microseconds, so that a later one is larger.

    found: the machine's accelerators. By default its drivers are asked.
    """
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    cache = Path(settings.data_dir) / "workers" / worker / "artifacts"
    incarnation = time.time_ns() // 1000

    def edge(make: type[ExecutorEdge] = ExecutorEdge, address: str = CPU, cores: int = 0) -> ExecutorEdge:
        return make(bus, subjects, address, cores or cores_of(settings.worker), cache, settings.executor)

    def runtime(device: Device, its_edge: Edge, name: str = "") -> Runtime:
        make = partial(make_executor, settings, subjects, worker, device, incarnation)
        return Runtime(name or f"executor-{device.name}", make, bus, subjects, its_edge, insight=metrics)

    cpu, *others = devices_of(settings.worker, found, settings.executor.remote_hosts)
    real = [device for device in others if not device.simulated]
    addresses: dict[str, str] = {}  # variants are built on the first device of their kind
    for device in real:
        addresses.setdefault(device.kind, device.address)

    workshop = partial(make_workshop, settings, subjects, worker, addresses)
    runtimes = [
        runtime(cpu, edge(), "executor"),
        Runtime("workshop", workshop, bus, subjects, WorkshopEdge(settings)),
    ]
    for device in real:
        make = RemoteEdge if device.kind == REMOTE else AcceleratedEdge
        runtimes.append(runtime(device, edge(make, device.address, device.cores)))
    if len(real) < len(others):
        shared = edge()  # not the CPU's own, whose watchdog and loads must not wait for simulated devices
        for device in others:
            if device.simulated:
                edge_of = SimulatedEdge(shared, device.kind, device.cores, settings.executor.sharing)
                runtimes.append(runtime(device, edge_of))
    return runtimes


def wire_container(
    settings: Settings, bus: Bus, device: Device, process: "UserProcess", loaded: Callable[[], None]
) -> Runtime:
    """The executor of a user's own process, which is the only device of its worker. loaded: is called when its model serves."""
    subjects = Subjects(settings.prefix)
    make = partial(make_executor, settings, subjects, worker_name(settings.worker), device, time.time_ns() // 1000)
    edge = ContainerEdge(bus, subjects, process, settings.executor, loaded)
    return Runtime("executor", make, bus, subjects, edge, insight=metrics)
