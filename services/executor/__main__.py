"""Wires one worker's executors, one a device, and the workshop that builds and profiles models beside them.

Simulated devices share the process with the CPU: they mostly sleep, and an idle one takes next to no memory.
"""

import time
from functools import partial
from pathlib import Path

from bus.port import Bus
from bus.subjects import Subjects
from services.core.placement import Device
from services.executor.actor import Executor
from services.executor.edge import ExecutorEdge
from services.executor.simulated import SimulatedEdge
from services.executor.workshop.actor import WorkshopActor
from services.executor.workshop.edge import WorkshopEdge
from services.shell.machine import CPU, cores_of, devices_of, worker_name
from services.shell.runtime import Runtime
from services.shell.settings import Settings


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """A batch queue for each device; its incarnation is its start in microseconds, so a later one is always larger."""
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    ours = settings.executor
    cache = Path(settings.data_dir) / "workers" / worker / "artifacts"
    incarnation = time.time_ns() // 1000

    def hands() -> ExecutorEdge:
        cores = cores_of(settings.worker)
        return ExecutorEdge(bus, subjects, CPU, cores, cache, watchdog=ours.watchdog, least_s=ours.watchdog_least_s)

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

    def make_workshop() -> WorkshopActor:
        return WorkshopActor(worker, settings.worker.hardware, subjects, settings.registrar.seconds)

    cpu, *simulated = devices_of(settings.worker)
    runtimes = [
        Runtime("executor", partial(executor, cpu), bus, subjects, hands()),
        Runtime("workshop", make_workshop, bus, subjects, WorkshopEdge(settings)),
    ]
    if simulated:
        shared = hands()  # not the CPU's own: its watchdog and loads are not to wait for what only pretends
        runtimes += [
            Runtime(
                f"executor-{device.name}",
                partial(executor, device),
                bus,
                subjects,
                SimulatedEdge(shared, device.kind, device.cores),
            )
            for device in simulated
        ]
    return runtimes
