"""Wires the monitor of one worker."""

import time

from bus.messages.catalog import VariantRecord
from bus.port import Bus
from bus.subjects import Subjects, valid_name
from services.core.cost import UnknownPrice, price_per_hour
from services.core.placement import Device
from services.core.settings import Settings
from services.monitor import actor
from services.monitor.actor import MonitorActor, make_monitor
from services.monitor.edge import MachineEdge
from services.shell.host.machine import devices_of, worker_name
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime
from services.shell.settings import SettingsError


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One monitor. Raises SettingsError if the worker's name is invalid or a device has no price."""
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    if not valid_name(worker):
        raise SettingsError(f"worker.name {worker!r} must be 1 to 64 letters, digits, - or _, a letter or digit first")
    devices = devices_of(settings.worker, engines=settings.executor.remote_hosts)
    prices = load_prices(settings.prices)
    try:
        for device in devices:
            price_per_hour(device.kind, prices)
    except UnknownPrice as error:
        raise SettingsError(str(error)) from error

    def make() -> MonitorActor:
        incarnation = time.time_ns() // 1000  # grows with every start, also if the actor alone is started again
        ours = settings.worker
        return make_monitor(settings, subjects, worker, ours.hardware, ours.kind, devices, prices, incarnation)

    gpus = [device.address for device in devices if device.kind == "gpu" and not device.simulated]
    edge = MachineEdge(gpus=gpus, bus=bus, bucket=subjects.control_bucket)
    return [Runtime(f"monitor-{worker}", make, bus, subjects, edge, insight=actor)]


def wire_container(settings: Settings, bus: Bus, device: Device, variant: VariantRecord) -> Runtime:
    """The monitor of a user's own process: its worker has this device alone, and keeps this variant loaded."""
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    prices = load_prices(settings.prices)

    def make() -> MonitorActor:
        incarnation = time.time_ns() // 1000
        hardware = variant.framework
        return make_monitor(settings, subjects, worker, hardware, hardware, [device], prices, incarnation, variant)

    edge = MachineEdge(bus=bus, bucket=subjects.control_bucket)
    return Runtime(f"monitor-{worker}", make, bus, subjects, edge, insight=actor)
