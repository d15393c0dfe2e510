"""Wires the executor of one worker's CPU device, and the workshop that builds and profiles models beside it."""

import time
from pathlib import Path

from bus.port import Bus
from bus.subjects import Subjects
from services.executor.actor import Executor
from services.executor.edge import ExecutorEdge
from services.executor.workshop.actor import WorkshopActor
from services.executor.workshop.edge import WorkshopEdge
from services.shell.machine import cores_of, worker_name
from services.shell.runtime import Runtime
from services.shell.settings import Settings

DEVICE = "cpu"


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """The device's batch queue; its incarnation is its start in microseconds, so a later one is always larger."""
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    cores = cores_of(settings.worker)
    ours = settings.executor
    cache = Path(settings.data_dir) / "workers" / worker / "artifacts"
    edge = ExecutorEdge(bus, subjects, DEVICE, cores, cache, watchdog=ours.watchdog, least_s=ours.watchdog_least_s)
    incarnation = time.time_ns() // 1000

    def make() -> Executor:
        return Executor(
            worker,
            DEVICE,
            incarnation,
            subjects,
            cores=cores,
            inline_below_s=ours.inline_below_ms / 1000.0,
            max_inline=settings.dispatcher.max_inline,
            failure_timeout_s=settings.dispatcher.failure_timeout_s,
        )

    def make_workshop() -> WorkshopActor:
        return WorkshopActor(worker, settings.worker.hardware, subjects, settings.registrar.seconds)

    return [
        Runtime("executor", make, bus, subjects, edge),
        Runtime("workshop", make_workshop, bus, subjects, WorkshopEdge(settings)),
    ]
