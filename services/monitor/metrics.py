"""Metrics of a monitor: the worker's devices and instances. Pure."""

from collections import Counter
from collections.abc import Iterable

from bus.messages.fleet import DeviceStatus
from services.core.metric import MetricFamily
from services.monitor.actor import MonitorActor

MB = 2**20


def _statuses(actor: MonitorActor) -> list[DeviceStatus]:
    effects = actor._effects
    return [device.status(effects.utilisation(device)) for device in actor._devices.values()]


def families(actor: MonitorActor) -> Iterable[MetricFamily]:
    worker, devices = actor._worker, _statuses(actor)
    alive = MetricFamily("infaas_device_up", "gauge", "1 while the device's executor is heard.")
    utilisation = MetricFamily("infaas_device_utilisation_ratio", "gauge", "How busy the device is.")
    memory = MetricFamily("infaas_device_memory_bytes", "gauge", "What the device has.")
    promised = MetricFamily("infaas_device_memory_promised_bytes", "gauge", "What its instances have been promised.")
    price = MetricFamily("infaas_device_price_dollars_per_hour", "gauge", "What the device costs.")
    for status in devices:
        where = {
            "worker": worker,
            "device": status.device,
            "hardware": status.kind,
            "simulated": "true" if status.simulated else "false",
        }
        alive.add(int(status.alive), **where)
        utilisation.add(status.utilisation, **where)
        memory.add(status.memory_mb * MB, **where)
        promised.add(status.memory_used_mb * MB, **where)
        price.add(status.price_per_hour, **where)
    states = MetricFamily("infaas_instances", "gauge", "Instances of a variant by their state.")
    for (device, variant, state), count in Counter(
        (instance.device, instance.record.variant, instance.state) for instance in actor._table.instances.values()
    ).items():
        states.add(count, worker=worker, device=device, variant=variant, state=state)
    quarantined = MetricFamily(
        "infaas_quarantined_variants", "gauge", "Variants that are not loaded here until they are released."
    )
    quarantined.add(len(actor._table.failures.quarantined), worker=worker)
    draining = MetricFamily("infaas_worker_draining", "gauge", "1 while the worker takes nothing new.")
    draining.add(int(actor._orders.draining), worker=worker)
    return alive, utilisation, memory, promised, price, states, quarantined, draining


def missing(actor: MonitorActor, now: float) -> str:
    del now
    if not actor._executors.synced:
        return "the catalogue"
    silent = [status.device for status in _statuses(actor) if not status.alive]
    return f"executors that are heard: {', '.join(silent)}" if silent else ""
