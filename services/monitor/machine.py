"""What a monitor asks of its edge. Pure."""

from msgspec import Struct


class SampleMachine(Struct, frozen=True):
    """How busy is this machine? The answer is a `MachineSample`."""


class MachineSample(Struct, frozen=True, kw_only=True):
    """utilisation: of the worker's cores since the sample before, 0..1. memory_used_mb: of the machine, by everybody."""

    utilisation: float
    memory_used_mb: float
