"""Workers, devices, instances: heartbeats, loads, samples. Times are Unix seconds, memory MB, money US$ per hour."""

from typing import Literal

from msgspec import Struct

from bus.messages.catalog import VariantRecord

State = Literal["Inactive", "Loading", "Warm", "Active", "Overloaded", "Interfered", "Unloading"]


class DeviceStatus(Struct, frozen=True, kw_only=True, gc=False):
    """One device of a worker. kind: "cpu", "gpu", "inferentia". utilisation: 0..1 over the last period; offline: the part of it
    that offline work used, which makes way for queries.
    """

    device: str
    kind: str
    cores: int
    memory_mb: float
    memory_used_mb: float
    cores_used: float
    utilisation: float
    price_per_hour: float
    simulated: bool = False
    alive: bool = True
    incarnation: int = 0
    offline: float = 0.0


class InstanceStatus(Struct, frozen=True, kw_only=True, gc=False):
    """One loaded (or loading) variant on one device. app_states: state per app where it differs from `state`.

    queued: items waiting or running. load: items/s served over the last period. latency_ms: mean compute latency of a batch.
    factor: live correction of the profile (1.0 = as profiled).
    """

    instance: str
    variant: str
    device: str
    state: State
    since: float
    queued: int = 0
    load: float = 0.0
    latency_ms: float = 0.0
    mean_batch: float = 0.0
    factor: float = 1.0
    app_states: dict[str, State] = {}
    ready_at: float = 0.0


class WorkerHeartbeat(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.heartbeat.worker.<worker>`, every 0.5 s and at every change of state. incarnation grows at each restart.

    kind: of machine, as the VM-autoscaler counts them; empty = as `hardware` says. quarantined: variants that are not loaded
    here again until they are released, and why.
    """

    worker: str
    hardware: str
    incarnation: int
    at: float
    devices: list[DeviceStatus]
    instances: list[InstanceStatus]
    draining: bool = False
    leaving: bool = False
    kind: str = ""
    quarantined: dict[str, str] = {}


class DispatcherHeartbeat(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.heartbeat.dispatcher.<dispatcher>`. flushed: per executor queue, the highest done `seq` whose outcomes are on disk."""

    dispatcher: str
    incarnation: int
    at: float
    flushed: dict[str, int] = {}
    leaving: bool = False


class PlannedBy(Struct, frozen=True):
    """The solver behind an order, its time in ms, and the objective of its plan (services/core/planning)."""

    solver: str
    solve_ms: float
    objective: float


class EnsureLoaded(Struct, frozen=True, kw_only=True):
    """`infaas.worker.<worker>.load`: at least so many instances of this variant, please. Idempotent; the monitor alone admits.

    epoch and orderer say who asked (dispatcher id or controller), reason why. app: on whose behalf, for the events, which
    also show action (empty = "load", or "replicate" where one is there) and what it was planned by.
    """

    variant: VariantRecord
    at_least: int = 1
    app: str | None = None
    orderer: str = ""
    reason: str = ""
    epoch: int = 0
    action: str = ""
    planned: PlannedBy | None = None


class Release(Struct, frozen=True, kw_only=True):
    """`infaas.worker.<worker>.release`: unload instances of this variant down to `keep`."""

    variant: str
    keep: int = 0
    orderer: str = ""
    reason: str = ""
    epoch: int = 0
    planned: PlannedBy | None = None


class LoadRefused(Struct, frozen=True, kw_only=True):
    """The reply to an `EnsureLoaded` request that this worker cannot carry out, and why."""

    worker: str
    variant: str
    reason: str


class LoadAccepted(Struct, frozen=True, kw_only=True):
    """The reply to an `EnsureLoaded` that is under way or already true."""

    worker: str
    variant: str
    instances: list[str]


class LoadReply(Struct, frozen=True, kw_only=True):
    """`LoadAccepted` or `LoadRefused` as the one who asked reads it: reason is empty when it was accepted."""

    worker: str
    variant: str
    instances: list[str] = []
    reason: str = ""


class LoadInstance(Struct, frozen=True, kw_only=True):
    """`infaas.executor.<worker>.<device>.load`: monitor -> executor. price_per_s: US$ per second of this instance.

    cores: of the machine that it may run on; empty = any.
    """

    instance: str
    variant: VariantRecord
    price_per_s: float = 0.0
    cores: list[int] = []


class UnloadInstance(Struct, frozen=True, kw_only=True):
    """`infaas.executor.<worker>.<device>.unload`: finish what is queued, then let go."""

    instance: str


class MoveInstance(Struct, frozen=True, kw_only=True):
    """`infaas.executor.<worker>.<device>.move`: run this instance on these cores of the machine from now on; it serves meanwhile."""

    instance: str
    cores: list[int]


class InstanceMoved(Struct, frozen=True, kw_only=True):
    """`infaas.monitor.<worker>.moved`. proof: where its threads run now; error: why it could not, empty when it did."""

    instance: str
    variant: str
    device: str
    incarnation: int
    cores: list[int]
    proof: str = ""
    error: str = ""


class InstanceLoaded(Struct, frozen=True, kw_only=True):
    """`infaas.monitor.<worker>.loaded`. proof: where it really runs, as the framework reports it."""

    instance: str
    variant: str
    device: str
    incarnation: int
    load_ms: float
    memory_mb: float
    proof: str


class InstanceFailed(Struct, frozen=True, kw_only=True):
    """`infaas.monitor.<worker>.failed`: a load failed, or a loaded instance broke."""

    instance: str
    variant: str
    device: str
    incarnation: int
    reason: str


class InstanceUnloaded(Struct, frozen=True, kw_only=True):
    """`infaas.monitor.<worker>.unloaded`."""

    instance: str
    variant: str
    device: str
    incarnation: int


class AppSample(Struct, frozen=True, array_like=True, gc=False):
    """One app's share of an instance's last period: items, batches-weighted latency in s, slowest latency in s, errors."""

    app: str
    items: int
    latency_sum: float
    latency_max: float
    errors: int
    slo_s: float


class InstanceSample(Struct, frozen=True, array_like=True, gc=False):
    """What an executor measured of one instance since its last report. busy: seconds computing; predicted: same by profile.

    offline: how many of the items were offline work, which is no load to scale for; none of it is in `queued`.
    """

    instance: str
    variant: str
    queued: int
    oldest_wait: float
    items: int
    batches: int
    busy: float
    predicted: float
    apps: list[AppSample]
    offline: int = 0


class ExecutorReport(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.monitor.<worker>.report`, every 0.5 s: executor -> monitor. incarnation: this executor process's."""

    worker: str
    device: str
    incarnation: int
    at: float
    seconds: float
    samples: list[InstanceSample]
    memory_mb: float


class ExecutorExited(Struct, frozen=True, kw_only=True):
    """`infaas.exited.<worker>.<device>`: the supervisor saw the process end. To monitors and dispatchers, at once."""

    worker: str
    device: str
    at: float
    reason: str


# -- What dispatchers, which follow every worker, tell each worker's autoscaler of the others. These are sums, which grow with kinds of
# device and variants, not with workers.


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
