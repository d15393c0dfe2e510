"""What a monitor asks of its edge. Pure."""

from msgspec import Struct


class SampleMachine(Struct, frozen=True):
    """How busy is this machine? The answer is a `MachineSample`."""


class MachineSample(Struct, frozen=True, kw_only=True):
    """utilisation: of the worker's cores since the sample before, 0..1. memory_used_mb: of the machine, by everybody.

    cores: utilisation of each core that this worker may use, by its number.
    """

    utilisation: float
    memory_used_mb: float
    cores: dict[int, float] = {}


class KeepQuarantine(Struct, frozen=True):
    """Write down that this variant is not to be loaded on this worker, and why: it outlives this process."""

    worker: str
    variant: str
    reason: str
