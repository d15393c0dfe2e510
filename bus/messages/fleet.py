"""Workers, devices and instances: heartbeats, orders to load, samples.

Times are Unix seconds. Memory is MB. Prices are US$ per hour unless a name says otherwise.
"""

from typing import Literal

from msgspec import Struct

from bus.messages.catalog import VariantRecord

Tier = Literal["device", "host"]  # where a loaded model is; in host memory its instance is Warm
State = Literal["Inactive", "Loading", "Warm", "Active", "Overloaded", "Interfered", "Unloading"]


class DeviceStatus(Struct, frozen=True, kw_only=True, gc=False):
    """One device of a worker.

    kind: "cpu", "gpu", "inferentia". memory_used_mb, cores_used: what instances that somebody needs have been promised; of CPU
    cores, what they are measured to compute. memory_reclaimable_mb, cores_reclaimable: what reclaimable instances take; it counts as free. utilisation: 0..1 over the last
    period. host_used_mb: host memory of its Warm instances. offline: the part of the utilisation that offline work used; queries have priority over offline work.
    foreign_use: the part that no executor of this worker used: other processes did. exclusive: no batches of several instances overlap.
    arithmetic: of a CPU, how it adds small integers: "exact" or "saturating"; empty: not known.
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
    memory_reclaimable_mb: float = 0.0
    cores_reclaimable: float = 0.0
    host_used_mb: float = 0.0
    foreign_use: float = 0.0
    exclusive: bool = True
    arithmetic: str = ""


class InstanceStatus(Struct, frozen=True, kw_only=True, gc=False):
    """One variant that is loaded, or is being loaded, on one device.

    queued: items that wait or run. load: items/s served over the last period. latency_ms: mean compute latency of a batch.
    factor: the live correction of the profile (1.0 = as profiled). app_states: the state for each app where it differs from `state`.
    reclaimable: nobody needs it. It serves until somebody else needs its place. batching: the policy that forms its batches.
    batch_limit: the most items of a batch now; 0: the variant's largest batch. contexts: how many batches it computes at a time.
    ready_at: when it has loaded, or, Unloading, is Warm; 0: neither is coming.
    busy_factor: as factor, of the time for which an item keeps the instance busy: batches at a time share it.
    levels: items that wait, by priority.
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
    reclaimable: bool = False
    batching: str = "edf"
    batch_limit: int = 0
    contexts: int = 1
    busy_factor: float = 1.0
    levels: dict[int, int] = {}


class WorkerHeartbeat(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.heartbeat.worker.<worker>`, every 0.5 s and at every change of state.

    incarnation: grows at each restart. kind: the kind of machine, as the VM-autoscaler counts them; empty = the same as `hardware`.
    quarantined: variants that this worker does not load again until they are released, each with the reason.
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
    """`infaas.heartbeat.dispatcher.<dispatcher>`.

    at: Unix seconds; while it does not hear itself, when it last did: what was over then has ended. flushed: for each executor queue, the highest
    `seq` up to which all its DoneBatches have come, and their outcomes are on disk. adopts: it starts queries with parts again whose dispatcher is gone. missing: what it lacks to have
    queries answered, in words.
    """

    dispatcher: str
    incarnation: int
    at: float
    flushed: dict[str, int] = {}
    leaving: bool = False
    adopts: bool = False
    missing: str = ""


class PlannedBy(Struct, frozen=True):
    """The solver that made the plan behind an order, its time in ms, and the objective of the plan (services/core/planning)."""

    solver: str
    solve_ms: float
    objective: float


class EnsureLoaded(Struct, frozen=True, kw_only=True):
    """`infaas.worker.<worker>.load`: have at least `at_least` instances of this variant. Idempotent. Only the monitor admits loads.

    Reclaimable instances do not count. Those that are needed again lose their mark first, then others are loaded.
    orderer, epoch: who ordered it (dispatcher id or controller). reason: why. The events show app, action and planned.
    app: the app that needs the variant. action: empty = "load", or "replicate" if the worker already has an instance.
    planned: the solver that planned it.
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
    """`infaas.worker.<worker>.release`: unload instances of this variant until `keep` are left. Idempotent.

    reclaim: the surplus is marked as reclaimable instead. It serves until its place is needed.
    """

    variant: str
    keep: int = 0
    reclaim: bool = False
    orderer: str = ""
    reason: str = ""
    epoch: int = 0
    planned: PlannedBy | None = None


class LoadRefused(Struct, frozen=True, kw_only=True):
    """The reply to an `EnsureLoaded` request that this worker cannot carry out. reason: why it cannot. lasting: asking again helps only after
    something has been changed: it fits on no empty device here, or is quarantined.
    """

    worker: str
    variant: str
    reason: str
    lasting: bool = False


class LoadAccepted(Struct, frozen=True, kw_only=True):
    """The reply to an `EnsureLoaded` request that is in progress or already fulfilled. instances: fewer than asked while an order waits until
    an instance is idle and makes room.
    """

    worker: str
    variant: str
    instances: list[str]


class LoadReply(Struct, frozen=True, kw_only=True):
    """`LoadAccepted` or `LoadRefused`, as the requester decodes it. reason: empty if the request was accepted."""

    worker: str
    variant: str
    instances: list[str] = []
    reason: str = ""
    lasting: bool = False


class LoadInstance(Struct, frozen=True, kw_only=True):
    """`infaas.executor.<worker>.<device>.load`: monitor -> executor. An order for a Warm instance brings it to the device.

    price_per_s: US$ per second of this instance. cores: the machine's cores that the instance may run on; empty = any. tier: "host" leaves
    it in host memory (preloading).
    """

    instance: str
    variant: VariantRecord
    price_per_s: float = 0.0
    cores: list[int] = []
    tier: Tier = "device"


class SucceedExecutor(Struct, frozen=True, kw_only=True):
    """`infaas.executor.<worker>.<device>.succeed`: a new executor process asks the present one, which it is to succeed, for its `HeldInstances`."""


class HeldInstances(Struct, frozen=True, kw_only=True):
    """What an executor process has loaded, as orders to load the same; and its incarnation, which its successor goes on with."""

    incarnation: int
    instances: list[LoadInstance]


class DemoteInstance(Struct, frozen=True, kw_only=True):
    """`infaas.executor.<worker>.<device>.demote`: finish the queued work, then keep the model in host memory only.

    The executor answers `InstanceLoaded` with tier "host", or `InstanceUnloaded` if its backend cannot keep it there.
    """

    instance: str


class UnloadInstance(Struct, frozen=True, kw_only=True):
    """`infaas.executor.<worker>.<device>.unload`: finish the queued work, then unload the instance.

    tier: "host" drops only the copy of its model in host memory; the executor answers `InstanceLoaded`, and the instance serves on.
    """

    instance: str
    tier: Tier | None = None


class MoveInstance(Struct, frozen=True, kw_only=True):
    """`infaas.executor.<worker>.<device>.move`: run this instance on these cores of the machine from now on.

    The instance serves during the move.
    """

    instance: str
    cores: list[int]


class InstanceMoved(Struct, frozen=True, kw_only=True):
    """`infaas.monitor.<worker>.moved`. proof: where its threads run now. error: why the move failed; empty if it succeeded."""

    instance: str
    variant: str
    device: str
    incarnation: int
    cores: list[int]
    proof: str = ""
    error: str = ""


class InstanceLoaded(Struct, frozen=True, kw_only=True):
    """`infaas.monitor.<worker>.loaded`. proof: where the instance really runs, as the framework reports it.

    load_ms: of this step alone; of a Warm instance that comes to the device, the transfer. memory_mb: in the memory of `tier`. copied: host
    memory has the model, too.
    """

    instance: str
    variant: str
    device: str
    incarnation: int
    load_ms: float
    memory_mb: float
    proof: str
    tier: Tier = "device"
    copied: bool = False


class InstanceFailed(Struct, frozen=True, kw_only=True):
    """`infaas.monitor.<worker>.failed`: a load failed, or a loaded instance failed."""

    instance: str
    variant: str
    device: str
    incarnation: int
    reason: str


class InstanceUnloaded(Struct, frozen=True, kw_only=True):
    """`infaas.monitor.<worker>.unloaded`: an instance is unloaded. variant: empty of one that was ordered to go and is not there."""

    instance: str
    variant: str
    device: str
    incarnation: int


class AppSample(Struct, frozen=True, array_like=True, gc=False):
    """One app's share of an instance's last period.

    items: how many ended. slo_s: the app's latency objective, in s.
    """

    app: str
    items: int
    slo_s: float


class InstanceSample(Struct, frozen=True, array_like=True, gc=False):
    """What an executor measured of one instance since its last report.

    busy: seconds of computing. predicted: the same work in seconds, by the profile. offline: how many of the items were offline work.
    Scaling ignores offline work. `queued` excludes it. batching: the policy that forms its batches. batch_limit: their most items now.
    contexts: how many batches it computes at a time. begun: when its last batch began, in Unix seconds; 0: none has. computed: seconds in
    which it computed at least one batch. copied: it is on the device, and host memory has its model, too. payers: items by the app that pays
    for them, as far as that is another one than they are asked of. levels: items that wait, without offline work, by priority.
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
    batching: str = "edf"
    batch_limit: int = 0
    tier: Tier = "device"
    contexts: int = 1
    begun: float = 0.0
    computed: float = 0.0
    copied: bool = False
    payers: dict[str, dict[str, int]] = {}
    levels: dict[int, int] = {}


class ExecutorReport(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.monitor.<worker>.report`, every 0.5 s: executor -> monitor. incarnation: that of this executor process.

    cpu_s: CPU seconds that the process has used since it began; None: not measured. exclusive: batches of several instances never
    overlap. computed: seconds of the period in which it computed at least one batch.
    """

    worker: str
    device: str
    incarnation: int
    at: float
    seconds: float
    samples: list[InstanceSample]
    memory_mb: float
    cpu_s: float | None = None
    exclusive: bool = True
    computed: float = 0.0


class ExecutorExited(Struct, frozen=True, kw_only=True):
    """`infaas.exited.<worker>.<device>`: the executor process ended. The supervisor tells monitors and dispatchers at once.

    running: uids of the queries in the batches that it computed then, for all its devices; any other query had no part in its end. None: not known.
    succeeded: another process goes on as the same executor, with the same incarnation.
    """

    worker: str
    device: str
    at: float
    reason: str
    running: list[bytes] | None = None
    succeeded: bool = False
