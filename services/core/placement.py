"""Does a variant fit on a device: kind, cores, memory.

A device carries a whole number of instances whose memory, summed, stays within the part of it that is set aside for
instances (INFaaS, section 4.2.1, constraint 3). Cores may be shared: one instance's threads must exist, the sum of all
may exceed them, since an instance that has no work takes no time.
"""

from msgspec import Struct

from bus.messages.catalog import VariantRecord


class Device(Struct, frozen=True, kw_only=True):
    """One device of a worker. memory_mb: all it has; cores: 1 where a device has none of its own."""

    name: str
    kind: str
    cores: int
    memory_mb: float
    simulated: bool = False


def misfit(record: VariantRecord, device: Device, memory_share: float) -> str:
    """Why this variant could never run on the device, even an empty one; empty when it could."""
    if record.hardware != device.kind:
        return f"{record.variant} needs a device of kind {record.hardware}, {device.name} is of kind {device.kind}"
    if record.simulated != device.simulated:
        kinds = ("real", "simulated")
        return f"{record.variant} is {kinds[record.simulated]}, {device.name} is {kinds[device.simulated]}"
    if device.kind == "cpu" and record.threads > device.cores:
        return f"{record.variant} needs {record.threads} threads, {device.name} has {device.cores} cores"
    limit = memory_share * device.memory_mb
    if record.profile.memory_mb > limit:
        return f"{record.variant} needs {record.profile.memory_mb:.0f} MB, {device.name} sets {limit:.0f} MB aside"
    return ""


def free_mb(device: Device, memory_share: float, taken_mb: float) -> float:
    """MB that another instance may still take; below zero when instances grew beyond what was set aside."""
    return memory_share * device.memory_mb - taken_mb
