"""Scaling: demand that dispatchers measure, instances that should move, orders of the controller, machines.

Times are Unix seconds. `epoch` is that of the controller. It grows with every change of leader. A receiver refuses a message with a
smaller epoch than it has seen, so that a leader that has lost its lease cannot act.
"""

from msgspec import Struct

from bus.messages.events import AppObjective


class Expectation(Struct, frozen=True):
    """Load that an operator knows of: from `at` (Unix seconds) on, so many queries/s come. weekly: every seven days."""

    at: float
    qps: float
    weekly: bool = False


class ClassDemand(Struct, frozen=True, array_like=True, gc=False):
    """How many items went to one worker in queries of one app with the same requirements. All counts are of the report's period.

    worker: "" = no worker could take them, "*" = any worker. items: those that went to this worker. refused: those that no worker
    could take; in a worker's report its part of them, as it has of those that were taken. latency_ms, cost (US$ per 1,000): None =
    no limit. accuracy: 0 = any. new: of queries that get the new version of a release.
    """

    app: str
    worker: str
    items: int
    latency_ms: float | None = None
    accuracy: float = 0.0
    cost: float | None = None
    model: str | None = None
    version: str | None = None
    variant: str | None = None
    refused: int = 0
    new: bool = False


class DemandReport(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.demand.<dispatcher>`, every 0.5 s: the demand since the last report, by class. seconds: since the last report.

    Each worker gets a report of its own on `infaas.worker.<worker>.demand`: what it took, and its part of what nobody could take.

    served: by app, how many items ended since the last report, and how many of them were not answered in time. It is in the report of all
    demand only.
    """

    dispatcher: str
    at: float
    seconds: float
    rows: list[ClassDemand]
    served: dict[str, tuple[int, int]] = {}


class QueriesSampled(Struct, frozen=True, kw_only=True):
    """`infaas.controller.sampled`, from executors: how many sampled items of an app's queries fell into each cell of a distribution.

    start, end: when the first and the last one was computed, Unix seconds. counts: of each column's cells, int64, compressed by zlib.
    items: bits of the items, by which those that differ are counted, compressed; empty: all differ.
    """

    app: str
    model: str
    distribution: str
    start: float
    end: float
    counts: bytes
    items: bytes = b""


class OpenDrift(Struct, frozen=True, kw_only=True):
    """A column that has drifted. size: of the window that showed it, and so of those that may show that it has ended. back: when
    the last one began, if it did so.
    """

    model: str
    column: str
    since: float
    distance: float
    size: int
    distribution: str
    back: float = 0.0


class DriftRecord(Struct, frozen=True, kw_only=True):
    """An app's drift, for the next leader. Key in the control bucket: `drift.<app>`. tests: made so far by distribution and size of window, or more."""

    app: str
    tests: dict[str, list[int]] = {}
    open: list[OpenDrift] = []


class PipelineArrivals(Struct, frozen=True, array_like=True):
    """`infaas.pipeline.arrivals`, every 0.1 s in which there were some: the queries that came to a pipeline with a plan.

    start: of the first bin, Unix seconds. counts: of bins of 10 ms, one after the other. asked: of each vertex that is asked for items of answers,
    for how many since the last report, and the sum of the squares of each query's.
    """

    dispatcher: str
    pipeline: str
    start: float
    counts: list[int]
    asked: dict[str, tuple[int, int]] = {}


class PipelineReplicas(Struct, frozen=True, kw_only=True):
    """Key `pipeline.<pipeline>` of the control bucket: the replicas that the leader keeps for a deployed pipeline. The next leader goes on
    with them.

    plan: a digest of the plan that they belong to. replicas: by vertex. variants: by vertex, what serves it; without those that nothing
    can serve. lambda_max: queries/s that the replicas are for. at: since when. missing: by vertex, why not all of its replicas are there.
    target: the app's own `slo_target`, as it was last heard.
    """

    pipeline: str
    epoch: int
    plan: str
    replicas: dict[str, int]
    variants: dict[str, str]
    lambda_max: float
    at: float
    missing: dict[str, str] = {}
    target: float | None = None


class AskToMove(Struct, frozen=True, kw_only=True):
    """`infaas.controller.ask`: a monitor -> the controller. An instance of this variant is slowed down, and its worker has no idler
    cores and no other device for it. app: the one that it was loaded for. reason: in words.
    """

    worker: str
    at: float
    app: str
    variant: str
    reason: str = ""


class ObjectiveReport(Struct, frozen=True, kw_only=True):
    """`infaas.controller.objectives`: the controller publishes the objectives of all apps whenever it has planned for all workers.

    Workers' autoscalers leave to it the load that they have when they hear it. apps: in order of their names. machines: of each
    kind that the plan wants. instances: of each variant, on the machines that work now.
    """

    at: float
    epoch: int
    apps: list[AppObjective]
    machines: dict[str, int] = {}
    instances: dict[str, int] = {}


class AskForHistory(Struct, frozen=True, kw_only=True):
    """`infaas.recorder.demand`: the controller -> a recorder. The reply on `infaas.controller.history.<controller>` is DemandHistory."""

    app: str


class DemandHistory(Struct, frozen=True, kw_only=True):
    """What an app was asked for in the last seven days, online, as far as the database knows.

    start: when the first minute began, Unix seconds. items: of each minute from there to the last one with a query. error: empty, or why
    the database did not answer.
    """

    app: str
    start: float = 0.0
    items: list[float] = []
    error: str = ""


class Drain(Struct, frozen=True, kw_only=True):
    """`infaas.worker.<worker>.drain`: take no new work, and finish the queued work. resume: True cancels an earlier order to drain."""

    epoch: int
    reason: str = ""
    resume: bool = False
    orderer: str = ""


class StartMachine(Struct, frozen=True, kw_only=True):
    """`infaas.machines.start`: start one more worker of this kind, under this name. The process that can start workers replies.

    Idempotent by name. The reply is MachineReply. boot_s: seconds to wait before the start (simulated machines). order: "EPOCH-NUMBER",
    identifies this life of the machine, since a name may have several. bought: no machine has this name yet, so one must be created.
    """

    worker: str
    kind: str
    epoch: int
    boot_s: float = 0.0
    simulated: bool = False
    order: str = ""
    bought: bool = False


class StopMachine(Struct, frozen=True, kw_only=True):
    """`infaas.machines.stop`: stop this worker. It is already drained. Idempotent. The reply is MachineReply.

    kind, order, bought: those of its StartMachine; empty if no order started it.
    """

    worker: str
    epoch: int
    kind: str = ""
    order: str = ""
    bought: bool = False


class MachineReply(Struct, frozen=True, kw_only=True):
    """The reply to `StartMachine` and `StopMachine`. error: empty if the order is done or in progress."""

    worker: str
    error: str = ""


class LeaderRecord(Struct, frozen=True, kw_only=True):
    """Key `controller` of the control bucket: the leader. until: when its lease ends, in Unix seconds, unless it is renewed."""

    holder: str
    epoch: int
    until: float


class MachineRecord(Struct, frozen=True, kw_only=True):
    """Key `machine.<worker>` of the control bucket. The leader writes it before it acts, so that its successor can continue.

    state: "Booting" (ordered), "Ready", "Draining" (an order to stop follows once it has no work left), "Stopping" (no longer used; the
    order to stop is repeated until it is carried out). at: since when it has this state. place: the pairs (variant, app) that this
    machine was added for. order, bought: as in StartMachine.
    """

    worker: str
    kind: str
    epoch: int
    state: str
    at: float
    reason: str = ""
    place: list[tuple[str, str]] = []
    order: str = ""
    bought: bool = False
