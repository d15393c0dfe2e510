"""Does a variant fit on a device: kind, cores, memory; and what is left of a device's totals.

What the instances of a device take together stays within its totals, of every resource (INFaaS, section 4.2.1, constraint 3):

    memory       the part of the device's memory that is set aside for instances (`memory_share`)
    CPU cores    `cores_overcommit` threads a core. An instance takes all its threads until it has been measured for a second, then the
                 part of them that it computes. Executors never compute on more threads at once than the device has cores, so
                 measured instances together take no more than the cores, and those that come may double that.
    accelerator cores (Inferentia)   one an instance, a hard limit: a core holds one compiled model
    GPU          its cores are not counted: instances take turns, memory is what runs out
    instances    as many as the operator allows (`max_models`)
"""

from math import floor, inf

from msgspec import Struct

from bus.messages.catalog import VariantRecord

OVERCOMMIT = 2.0  # threads that compute, or may soon, for each CPU core, by default


class Device(Struct, frozen=True, kw_only=True):
    """One device of a worker. memory_mb: all it has; cores: 1 where a device has none of its own.

    address: what frameworks call it, "cpu", "cuda:0", "neuron:0".
    """

    name: str
    kind: str
    cores: int
    memory_mb: float
    simulated: bool = False
    address: str = "cpu"


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
    if device.kind == "cpu" and record.threads > device.cores:
        return f"{record.variant} needs {record.threads} threads, {device.name} has {device.cores} cores"
    limit, key = memory_share * device.memory_mb, "memory_share"
    if 0 < device_mb < limit:
        limit, key = device_mb, "device_mb"
    if record.profile.memory_mb <= limit:
        return ""
    return (
        f"{record.variant} needs {record.profile.memory_mb:.0f} MB, {device.name} sets {limit:.0f} MB aside: "
        f"use a larger device or raise monitor.{key}"
    )


def fits(record: VariantRecord, cores: int, memory_mb: float, memory_share: float) -> bool:
    """Whether it could run on an empty device of its kind with so many cores and so much memory: no `misfit`."""
    return (
        record.hardware != "cpu" or record.threads <= cores
    ) and record.profile.memory_mb <= memory_share * memory_mb


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
        return (
            f"{variant} needs {need.memory_mb:.0f} MB; instances in use take {taken.memory_mb:.0f} of the "
            f"{limit.memory_mb:.0f} MB that {device} sets aside"
        )
    if need.instances > limit.instances - taken.instances:
        return f"{device} holds {taken.instances:.0f} instances in use, as many as monitor.max_models allows"
    return (
        f"{variant} needs {need.cores:.0f} core{'s' * (need.cores != 1)}; instances in use take {taken.cores:.0f} of the "
        f"{limit.cores:.0f} that {device} may promise"
    )


# -- Quarantines: keys `quarantine.<worker>.<variant>` of the control bucket, so that they outlive a monitor. A worker's monitor writes
# them. The registrar deletes them when an operator releases a variant.

_PREFIX = "quarantine"


def quarantine_key(worker: str, variant: str) -> str:
    return f"{_PREFIX}.{worker}.{variant}"


def quarantined_at(key: str) -> tuple[str, str] | None:
    """(worker, variant) of such a key. None for any other key."""
    parts = key.split(".")
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == _PREFIX else None
