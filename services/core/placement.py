"""Does a variant fit on a device: kind, cores, memory; and what is left of a device's totals.

What the instances of a device take together stays within its totals, of every resource (INFaaS, section 4.2.1, constraint 3):

    memory       the part of the device's memory that is set aside for instances (`memory_share`)
    CPU cores    an instance takes what it is measured to use: nothing while it is idle. One that comes finds room for its threads beside
                 that, up to `cores_overcommit` threads a core. Executors never compute on more threads at once than the device has
                 cores. So many instances that are mostly idle share few cores, and memory says how many.
    accelerator cores (Inferentia)   one an instance, a hard limit: a core holds one compiled model
    GPU          its cores are not counted: instances take turns, memory is what runs out
    instances    as many as the operator allows (`max_models`)
"""

from math import floor, inf
from typing import Annotated

from msgspec import Struct

from bus.fields import KIND, Named, Number, filled
from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus

OVERCOMMIT = 2.0  # threads for each CPU core, by default: those that compute, and those of an instance that comes


class Device(Struct, frozen=True, kw_only=True):
    """One device of a worker. memory_mb: all it has; cores: 1 where a device has none of its own.

    address: what frameworks call it, "cpu", "cuda:0". arithmetic: of a CPU, "exact" or "saturating" (`services.shell.host.accelerators`);
    empty: not known.
    """

    name: Named
    kind: Annotated[str, KIND]
    cores: Annotated[int, Number(1, 4096)]
    memory_mb: Annotated[float, Number(above=0)]
    simulated: bool = False
    address: str = "cpu"
    arithmetic: str = ""


class Amount(Struct, frozen=True):
    """So much of a device: MB of its memory, cores, and how many instances. inf: not counted."""

    memory_mb: float
    cores: float
    instances: float = 0.0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.memory_mb + other.memory_mb, self.cores + other.cores, self.instances + other.instances)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.memory_mb - other.memory_mb, self.cores - other.cores, self.instances - other.instances)

    @property
    def none(self) -> bool:
        """Whether nothing is left to take: no component is above 0."""
        return self.memory_mb <= 0 and self.cores <= 0 and self.instances <= 0


NOTHING = Amount(0.0, 0.0)


_CONTAINER = "container."


def container_kind(model: str, version: str) -> str:
    """The kind of the device of a user's own process (`infaas container`), which holds this version of this model and nothing else."""
    return f"{_CONTAINER}{model}.{version}"


def is_container(kind: str) -> bool:
    """Whether a device of this kind is a user's own process."""
    return kind.startswith(_CONTAINER)


# The kind of device that stands for engines on other machines. One device holds all instances of a worker: an instance takes one of its
# cores, which is one request under way at a time. Its address are the hosts that the operator names, with a space between them.
REMOTE = "remote"
REMOTE_CORES = 64
FORMATS = ("onnx", "pt2", "torchscript", REMOTE)  # of models, beside those in containers


def remote_devices(hosts: tuple[str, ...]) -> list[Device]:
    """The device for engines on these hosts. Empty if there is no host."""
    if not hosts:
        return []
    return [Device(name=REMOTE, kind=REMOTE, cores=REMOTE_CORES, memory_mb=0.0, address=" ".join(hosts))]


def misfit(record: VariantRecord, device: Device, memory_share: float, device_mb: float = 0.0) -> str:
    """Why this variant could never run on the device, even an empty one; empty when it could. device_mb: see `total`."""
    if record.hardware != device.kind:
        return f"{record.variant} needs a device of kind {record.hardware}, {device.name} is of kind {device.kind}"
    if record.simulated != device.simulated:
        kinds = ("real", "simulated")
        return f"{record.variant} is {kinds[record.simulated]}, {device.name} is {kinds[device.simulated]}"
    if not adds_alike(record, device.arithmetic):
        return arithmetic_words(record, device.name, device.arithmetic)
    if device.kind == "cpu" and record.threads > device.cores:
        return f"{record.variant} needs {record.threads} threads, {device.name} has {device.cores} cores"
    limit, key = memory_share * device.memory_mb, "memory_share"
    if 0 < device_mb < limit:
        limit, key = device_mb, "device_mb"
    if record.profile.memory_mb <= limit:
        return ""
    needs, _, has = _apart(record.profile.memory_mb, 0.0, limit)
    return (
        f"{record.variant} needs {needs} MB, {device.name} sets {has} MB aside: "
        f"use a larger device or raise monitor.{key}"
    )


def fits(record: VariantRecord, cores: int, memory_mb: float, memory_share: float, arithmetic: str = "") -> bool:
    """Whether it could run on an empty device of its kind with so many cores and so much memory: no `misfit`."""
    enough = (
        record.hardware != "cpu" or record.threads <= cores
    ) and record.profile.memory_mb <= memory_share * memory_mb
    return enough and adds_alike(record, arithmetic)


def adds_alike(record: VariantRecord, arithmetic: str) -> bool:
    """Whether a CPU of this arithmetic gives the answers that were measured; where that is not known, it does."""
    return not record.arithmetic or not arithmetic or record.arithmetic == arithmetic


def arithmetic_words(record: VariantRecord, where: str, arithmetic: str) -> str:
    """Why a CPU with this arithmetic does not run it. where: the CPU, or its worker."""
    return (
        f"{record.variant} was measured on a CPU with {record.arithmetic} sums of small integers; {where} has"
        f" {arithmetic} ones, and its answers may be others there"
    )


def cores_needed(record: VariantRecord) -> float:
    """Cores of its device that one instance takes while it computes."""
    if record.hardware == "cpu":
        return float(max(1, record.threads))
    return 0.0 if record.hardware == "gpu" else 1.0


def total(
    device: Device,
    memory_share: float,
    cores_overcommit: float = OVERCOMMIT,
    device_mb: float = 0.0,
    max_models: float = 0.0,
) -> Amount:
    """What the instances of a device may take together. device_mb, max_models: limits beside; 0: none."""
    cores = {"cpu": device.cores * max(1.0, cores_overcommit), "gpu": inf}.get(device.kind, float(device.cores))
    return Amount(min(device_mb or inf, memory_share * device.memory_mb), cores, max_models or inf)


def device_of(status: DeviceStatus) -> Device:
    """The device that a heartbeat shows."""
    return filled(Device, status, name=status.device)


def how_many_fit(
    record: VariantRecord,
    status: DeviceStatus,
    memory_share: float,
    cores_overcommit: float = 1.0,
) -> int:
    """How many more instances the device has room for, by its last heartbeat."""
    device = device_of(status)
    if not status.alive or misfit(record, device, memory_share):
        return 0
    free = total(device, memory_share, cores_overcommit) - Amount(status.memory_used_mb, status.cores_used)
    memory, cores = record.profile.memory_mb, cores_needed(record)
    most = min(free.memory_mb / memory if memory > 0 else inf, free.cores / cores if cores > 0 else inf)
    return max(0, floor(min(most, 1000.0) + 1e-9))


def busy_quarters(record: VariantRecord, used: float) -> int:
    """How many quarters of its time, 0 to 4, a device of this variant's kind is used; 0 where instances do not take turns.

    An instance goes where fewest are used. So a GPU that one variant keeps busy is left to it while others are free, and shared later
    (INFaaS's code, `queryfe_server.cc`: a popular variant's "slack" GPU). Quarters, so that small differences decide nothing.
    """
    return floor(4.0 * min(1.0, max(0.0, used)) + 1e-9) if record.hardware == "gpu" else 0


def short_of(need: Amount, free: Amount) -> Amount:
    """What is missing: above 0 where `free` (which may be negative) does not suffice."""
    return Amount(
        max(0.0, need.memory_mb - free.memory_mb),
        max(0.0, need.cores - free.cores),
        max(0.0, need.instances - free.instances),
    )


def shortage(variant: str, need: Amount, taken: Amount, limit: Amount, device: str) -> str:
    """In words: why it does not fit beside what is there."""
    if need.memory_mb > limit.memory_mb - taken.memory_mb:
        needs, has, most = _apart(need.memory_mb, taken.memory_mb, limit.memory_mb)
        return f"{variant} needs {needs} MB; instances in use take {has} of the {most} MB that {device} sets aside"
    if need.instances > limit.instances - taken.instances:
        return f"{device} holds {taken.instances:.0f} instances in use, as many as monitor.max_models allows"
    needs, has, most = _apart(need.cores, taken.cores, limit.cores)
    cores = f"core{'s' * (need.cores != 1)}"
    return f"{variant} needs {needs} {cores}; instances in use take {has} of the {most} that {device} may promise"


def _apart(need: float, taken: float, limit: float) -> tuple[str, str, str]:
    """These figures with as many digits as show that `need` and `taken` are more than `limit`."""
    for digits in range(4):
        told = [f"{round(value, digits):.10g}" for value in (need, taken, limit)]
        if float(told[0]) + float(told[1]) > float(told[2]):
            break
    return told[0], told[1], told[2]


# -- Quarantines: keys `quarantine.<worker>.<variant>` of the control bucket, so that they outlive a monitor. A worker's monitor writes
# them. The registrar deletes them when an operator releases a variant.

_PREFIX = "quarantine"


def quarantine_key(worker: str, variant: str) -> str:
    return f"{_PREFIX}.{worker}.{variant}"


def quarantined_words(variant: str, where: str, why: str) -> str:
    """Why a worker does not load it. where: "here" or "on <worker>"."""
    return f"{variant} is quarantined {where} until infaas.admin.release-variant names it: {why}"


def quarantined_at(key: str) -> tuple[str, str] | None:
    """(worker, variant) of such a key. None for any other key."""
    parts = key.split(".")
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == _PREFIX else None
