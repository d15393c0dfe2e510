"""What dispatchers, who follow every worker, tell each worker's autoscaler of the others: sums, so that it grows with kinds of
device and variants and not with workers. Times are Unix seconds, memory MB.
"""

from msgspec import Struct


class PoolDigest(Struct, frozen=True, array_like=True, gc=False):
    """All living devices of one kind, on workers that take new work.

    first: the first two workers that have one, in order of their names. shapes: (cores, memory) of the different ones.
    cores, memory_mb, memory_used_mb: of all together.
    """

    kind: str
    simulated: bool
    first: list[str]
    workers: int
    cores: float
    memory_mb: float
    memory_used_mb: float
    shapes: list[tuple[int, float]]


class VariantDigest(Struct, frozen=True, array_like=True, gc=False):
    """One variant's instances on living devices of one kind, on workers that take new work.

    holders: the first two workers that have one or are loading it, in order of their names; instances: all of them. running:
    instances with room for more load, loading ones too; serving: those of them that can answer. busy: cores that these use;
    busy_full: that the others use. answering: instances that can answer, with room or without; factors: the sum of their live
    corrections; best: the most items/s that one of them serves. overloaded, young: there is one that has been Overloaded for a
    while; that has only just come.
    """

    variant: str
    kind: str
    simulated: bool
    holders: list[str]
    running: int = 0
    serving: int = 0
    busy: float = 0.0
    busy_full: float = 0.0
    answering: int = 0
    factors: float = 0.0
    best: float = 0.0
    overloaded: bool = False
    young: bool = False
    instances: int = 0


class FleetDigest(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.fleet.digest`, every 0.5 s: a dispatcher -> the autoscalers of all workers. workers: that take new work."""

    dispatcher: str
    at: float
    workers: int
    pools: list[PoolDigest]
    variants: list[VariantDigest]


class PoolRoster(Struct, frozen=True, array_like=True, gc=False):
    """Names, in order, of the workers with a living device of this kind that take new work."""

    kind: str
    simulated: bool
    workers: list[str]


class FleetRoster(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.fleet.roster`, every 0.5 s: a dispatcher -> autoscalers whose policy deals instances out by name ("static")."""

    dispatcher: str
    at: float
    pools: list[PoolRoster]
