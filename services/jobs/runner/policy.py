"""When a worker may take offline work, and with which variant. Pure.

INFaaS, section 4.2: offline queries are throttled while the worker's utilisation is above 40 % or an online variant there is above
its profiled latency. The published code looks again every 500 ms (common_model_util.cc), counts the offline work itself, and
loads a copy of its own; here the offline work's own use does not count, and it shares what is loaded: online queries go first.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from services.core.cost import latency_ms
from services.jobs.policy import cost_per_item

LOOK_S = 0.5  # between looks (the published code's period)
_TROUBLED = ("Overloaded", "Interfered")


class Knobs(Struct, frozen=True, kw_only=True):
    """See JobsSettings. latency_least_s: seconds by which a batch must exceed its profile to count. simulated: the whole system
    is, and its variants count as others do.
    """

    utilisation_below: float = 0.4
    latency_ratio: float = 1.25
    latency_least_s: float = 0.002
    in_flight: int = 2
    simulated: bool = False


def obstacle(
    beat: WorkerHeartbeat | None,
    device: str,
    record_of: Callable[[str], VariantRecord | None],
    knobs: Knobs,
) -> str:
    """Why no offline work may be taken on this device now; empty when the worker is calm."""
    if beat is None:
        return "the worker is silent"
    if beat.draining or beat.leaving:
        return "the worker is leaving"
    status = next((d for d in beat.devices if d.device == device), None)
    if status is None or not status.alive:
        return f"the executor of {device} does not run"
    others = max(0.0, status.utilisation - status.offline)
    if others > knobs.utilisation_below:
        return f"{device} is used {others:.0%} by other work, offline work waits above {knobs.utilisation_below:.0%}"
    for instance in beat.instances:
        why = _trouble(instance, record_of(instance.variant), knobs)
        if why:
            return why
    return ""


def _trouble(instance: InstanceStatus, record: VariantRecord | None, knobs: Knobs) -> str:
    """Why an online variant needs the worker for itself; empty when it does not. What serves nothing online needs nothing."""
    worst = next((s for s in (instance.state, *instance.app_states.values()) if s in _TROUBLED), "")
    if worst:
        return f"{instance.variant} is {worst}"
    if record is None or instance.load <= 0 or instance.latency_ms <= 0 or not record.profile.rows:
        return ""
    profiled = latency_ms(record, max(1, round(instance.mean_batch))) / 1000.0
    taken = instance.latency_ms / 1000.0
    if taken > knobs.latency_ratio * profiled and taken - profiled > knobs.latency_least_s:
        return f"{instance.variant} takes {taken * 1e3:.3g} ms a batch, its profile says {profiled * 1e3:.3g} ms"
    return ""


def ranked(
    records: Iterable[VariantRecord], devices: Iterable[DeviceStatus], prices: Mapping[str, float], items: int
) -> list[tuple[VariantRecord, str]]:
    """The variants that this worker has a device for, and which, cheapest item first."""
    found: list[tuple[float, str, VariantRecord, str]] = []
    present = sorted(devices, key=lambda device: not device.alive)  # one whose executor is away may come back
    for record in records:
        for device in present:
            if (device.kind, device.simulated) == (record.hardware, record.simulated):
                cost = cost_per_item(record, items, prices, device.cores, device.memory_mb)
                found.append((cost, record.variant, record, device.device))
                break
    return [(record, device) for _, _, record, device in sorted(found, key=lambda one: one[:2])]
