"""Wires one worker's executors, one for each device, and the workshop that builds and profiles models beside them.

All devices share one process: an accelerator's batches take little of the CPU, simulated devices mostly sleep, and an idle device
takes almost no memory.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bus.codec import BadMessage, decode, encode
from bus.messages.fleet import HeldInstances, SucceedExecutor
from bus.port import Bus, BusError
from bus.subjects import Subjects
from services.core.actor import Edge
from services.core.metric import ITEMS, Histogram, MetricFamily, counter, gauge, histogram
from services.core.placement import REMOTE, Device
from services.core.settings import Settings
from services.executor.actor import Executor, make_executor
from services.executor.edge import AcceleratedEdge, ContainerEdge, ExecutorEdge, RemoteEdge
from services.executor.edge_simulated import SimulatedEdge
from services.executor.loading import fits_twice
from services.executor.workshop.actor import make_workshop
from services.executor.workshop.edge import WorkshopEdge
from services.shell.host.accelerators import Accelerator
from services.shell.host.machine import CPU, cores_of, devices_of, worker_name
from services.shell.host.running import BESIDE, inherited
from services.shell.runtime.runtime import Runtime

if TYPE_CHECKING:
    from services.executor.backends.container import UserProcess

log = logging.getLogger(__name__)

HELD_S = 10.0  # s that the process before this one has to say what it has loaded


class ExecutorInsight:
    """An executor's metrics: what waits and runs on its device, sizes and times of batches."""

    def families(self, actor: Executor) -> Iterable[MetricFamily]:
        waiting = gauge("infaas_instance_queue_items", "Items that wait in an instance's queue.")
        running = gauge("infaas_instance_running_items", "Items that an instance computes now.")
        overlapping = gauge(
            "infaas_instance_running_batches", "Batches that an instance computes now, at most one for each context."
        )
        factor = gauge("infaas_instance_latency_factor", "Live correction of the profiled latency; 1: as profiled.")
        limit = gauge(
            "infaas_instance_batch_limit", "The most items of an instance's next batch, by its batching policy."
        )
        for loaded in actor.instances.values():
            where = {
                "worker": actor.worker,
                "device": actor.device,
                "variant": loaded.record.variant,
                "instance_id": loaded.id,
            }
            waiting.add(loaded.queue.items, **where)
            running.add(loaded.running_items, **where)
            overlapping.add(loaded.running, **where)
            factor.add(loaded.queue.factor, **where)
            limit.add(loaded.queue.max_batch, policy=loaded.rule.policy if loaded.rule is not None else "edf", **where)
        pending = gauge("infaas_executor_queries", "Queries that an executor has taken and not yet ended.")
        pending.add(len(actor.pending), worker=actor.worker, device=actor.device)
        sizes = histogram("infaas_batch_items", "Items of the batches that were computed.")
        busy = counter("infaas_batch_seconds_total", "Time spent computing batches.")
        for variant, tally in actor.tallies.items():
            where = {"worker": actor.worker, "device": actor.device, "variant": variant}
            counted = Histogram(ITEMS)
            for size, batches in tally.sizes.items():
                counted.observe(size, batches)
            sizes.add(counted, **where)
            busy.add(tally.seconds, **where)
        return waiting, running, overlapping, factor, limit, pending, sizes, busy

    def missing(self, actor: Executor, _now: float) -> str:
        return actor.succession.missing

    def under_way(self, actor: Executor) -> bool:
        """Whether queries that it took have not ended."""
        return bool(actor.pending)


async def wire(settings: Settings, bus: Bus, found: Iterable[Accelerator] | None = None) -> list[Runtime]:
    """One executor for each device. Its incarnation is its start in microseconds, so that a later one is larger.

    found: the machine's accelerators. By default its drivers are asked.
    """
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    cache = Path(settings.data_dir) / "workers" / worker / "artifacts"
    incarnation = time.time_ns() // 1000
    running = inherited()
    succeeds = running is not None and running.role == BESIDE

    def edge(make: type[ExecutorEdge] = ExecutorEdge, address: str = CPU, cores: int = 0) -> ExecutorEdge:
        alone = not settings.bus.url  # nobody counts what is sampled, and others' code runs here
        made = make(
            bus, subjects, address, cores or cores_of(settings.worker), cache, settings.executor, running,
            0.0 if alone else settings.quality.sample_share, payloads=not alone,
        )  # fmt: skip
        made.may_end_process = not alone
        return made

    async def runtime(device: Device, its_edge: Edge, name: str = "") -> Runtime:
        held = await _held(bus, subjects, worker, device) if succeeds else None
        first = [held]  # an actor that is made again later has nothing, as its own incarnation says

        def make() -> Executor:
            return make_executor(settings, subjects, worker, device, incarnation, first.pop() if first else None)

        return Runtime(name or f"executor-{device.name}", make, bus, subjects, its_edge, insight=ExecutorInsight())

    cpu, *others = devices_of(settings.worker, found, settings.executor.remote_hosts)
    real = [device for device in others if not device.simulated]
    addresses: dict[str, str] = {}  # variants are built on the first device of their kind
    for device in real:
        addresses.setdefault(device.kind, device.address)

    workshop = partial(make_workshop, settings, subjects, worker, addresses)
    runtimes = [
        await runtime(cpu, edge(), "executor"),
        Runtime("workshop", workshop, bus, subjects, WorkshopEdge(settings, bus)),
    ]
    for device in real:
        make = RemoteEdge if device.kind == REMOTE else AcceleratedEdge
        runtimes.append(await runtime(device, edge(make, device.address, device.cores)))
    if len(real) < len(others):
        shared = edge()  # not the CPU's own, whose watchdog and loads must not wait for simulated devices
        for device in others:
            if device.simulated:
                edge_of = SimulatedEdge(shared, device.kind, device.cores, settings.executor.sharing)
                runtimes.append(await runtime(device, edge_of))
    return runtimes


async def _held(bus: Bus, subjects: Subjects, worker: str, device: Device) -> HeldInstances | None:
    """What the process has loaded that this one succeeds. None: it does not say, or there is no room for both; then this one begins without any."""
    try:
        reply = await bus.request(subjects.executor(worker, device.name, "succeed"), encode(SucceedExecutor()), HELD_S)
        held = decode(HeldInstances, reply.data)
    except (BusError, BadMessage) as error:
        log.warning("the executor of %s before this one does not say what it has loaded: %s", device.name, error)
        return None
    if fits_twice(held, device):
        return held
    log.warning(
        "%s has no room for a second copy of its models: they are loaded when the old process has gone", device.name
    )
    return None


def wire_container(
    settings: Settings, bus: Bus, device: Device, process: "UserProcess", loaded: Callable[[], None]
) -> Runtime:
    """The executor of a user's own process, which is the only device of its worker. loaded: is called when its model serves."""
    subjects = Subjects(settings.prefix)
    make = partial(make_executor, settings, subjects, worker_name(settings.worker), device, time.time_ns() // 1000)
    edge = ContainerEdge(bus, subjects, process, settings.executor, loaded, settings.quality.sample_share)
    return Runtime("executor", make, bus, subjects, edge, insight=ExecutorInsight())
