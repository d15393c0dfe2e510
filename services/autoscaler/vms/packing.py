"""On which workers instances go: bin packing, the fullest that still has room first, so that others empty (INFaaS, 4.2.3). Pure."""

from collections.abc import Collection, Iterable, Mapping
from math import floor, inf

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus
from services.autoscaler.vms.fleet import Worker
from services.core.placement import Amount, Device, cores_needed, misfit, total

BUSY = 1.0  # threads for each CPU core when instances are placed for their load, not for being there
FULL = 0.8  # part of its time that a device which takes instances in turn may be used, for the same reason


def room(record: VariantRecord, status: DeviceStatus, memory_share: float, overcommit: float = BUSY) -> int:
    """How many more instances of a variant the device has room for, by its last heartbeat."""
    device = Device(
        name=status.device,
        kind=status.kind,
        cores=status.cores,
        memory_mb=status.memory_mb,
        simulated=status.simulated,
    )
    if not status.alive or misfit(record, device, memory_share):
        return 0
    free = total(device, memory_share, overcommit) - Amount(status.memory_used_mb, status.cores_used)
    memory, cores = record.profile.memory_mb, cores_needed(record)
    most = min(free.memory_mb / memory if memory > 0 else inf, free.cores / cores if cores > 0 else inf)
    return max(0, floor(min(most, 1000.0) + 1e-9))


def pack(
    record: VariantRecord,
    count: int,
    workers: Iterable[Worker],
    memory_share: float,
    *,
    overcommit: float = BUSY,
    without: Collection[str] = (),
    emptiest_first: bool = False,
    share: float = 0.0,
    promised: Mapping[str, float] = {},
) -> dict[str, int]:
    """Worker to the number of new instances there, `count` together, or as many as there is room for.

    share: of a device's time that each will use where instances take turns (cores are not counted); promised: the same by worker,
    of what has been ordered and does not compute yet.
    """
    rooms: list[tuple[float, str, int]] = []
    for worker in workers:
        if worker.name in without:
            continue
        devices = [(room(record, device, memory_share, overcommit), device) for device in worker.devices]
        if share > 0 and cores_needed(record) == 0:
            busy = promised.get(worker.name, 0.0)
            devices = [(min(number, _in_time(device, share, busy)), device) for number, device in devices]
        space = sum(number for number, _ in devices)
        if space > 0:
            free = [device for number, device in devices if number > 0]
            used = min(d.utilisation for d in free) if emptiest_first else -_fullness(free)
            rooms.append((used, worker.name, space))
    found: dict[str, int] = {}
    for _, name, space in sorted(rooms):
        here = min(space, count - sum(found.values()))
        if here > 0:
            found[name] = here
    return found


def _in_time(device: DeviceStatus, share: float, promised: float) -> int:
    """How many more the device has time for; one that needs all of it has to have it for itself."""
    free = FULL - max(0.0, device.utilisation - device.offline) - promised
    return max(0, floor(free / min(share, FULL) + 1e-9))


def _fullness(devices: Collection[DeviceStatus]) -> float:
    """The part of these devices' memory that is taken."""
    memory = sum(device.memory_mb for device in devices)
    return sum(device.memory_used_mb for device in devices) / memory if memory > 0 else 0.0
