"""Wires the monitor of one worker."""

import time

from bus.port import Bus
from bus.subjects import Subjects, valid_name
from services.core.cost import UnknownPrice, price_per_hour
from services.core.lifecycle import Thresholds
from services.core.settings import Settings
from services.monitor import metrics
from services.monitor.actor import MonitorActor
from services.monitor.edge import MachineEdge
from services.monitor.policy import Knobs
from services.shell.host.machine import devices_of, worker_name
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime
from services.shell.settings import SettingsError

ACQUAINT = 1.0  # s; executors report every 0.5 s


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One monitor; raises SettingsError when the worker's name or the price of a device cannot be used."""
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    if not valid_name(worker):
        raise SettingsError(f"worker.name {worker!r} must be 1 to 64 letters, digits, - or _, a letter or digit first")
    devices = devices_of(settings.worker)
    prices = load_prices(settings.prices)
    try:
        for device in devices:
            price_per_hour(device.kind, prices)
    except UnknownPrice as error:
        raise SettingsError(str(error)) from error
    knobs = knobs_of(settings)

    def make() -> MonitorActor:
        incarnation = time.time_ns() // 1000  # grows with every start, also when the actor alone is started again
        ours = settings.worker
        return MonitorActor(worker, ours.hardware, devices, prices, subjects, incarnation, knobs, ours.kind)

    edge = MachineEdge(bus=bus, bucket=subjects.control_bucket)
    return [Runtime(f"monitor-{worker}", make, bus, subjects, edge, insight=metrics)]


def knobs_of(settings: Settings) -> Knobs:
    """The settings as the policies read them, in seconds."""
    ours = settings.monitor
    return Knobs(
        heartbeat_s=ours.heartbeat_s,
        sample_s=ours.sample_s,
        cost_s=ours.cost_s,
        memory_share=ours.memory_share,
        idle_s=ours.idle_s,
        acquaint_s=ACQUAINT,
        cores_overcommit=ours.cores_overcommit,
        mitigate_after_s=ours.mitigate_after_s,
        mitigate_again_s=ours.mitigate_again_s,
        quarantine_after=ours.quarantine_after,
        failure_timeout_s=settings.dispatcher.failure_timeout_s,
        thresholds=Thresholds(
            overloaded_backlog_s=ours.overloaded_backlog_s,
            overloaded_slo_share=ours.overloaded_slo_share,
            interfered_ratio=ours.interfered_ratio,
            interfered_least_s=ours.interfered_least_ms / 1000.0,
            interfered_load_share=ours.interfered_load_share,
            clear_ratio=ours.clear_ratio,
            least_items=ours.least_items,
        ),
    )
