"""Events for the history, on `infaas.event.<kind>`. Each message is one map `{"id", "rows"}`.

The sender keeps a message until it is acknowledged. Each row becomes one row of the corresponding SQL relation
(docs/contract.md section 3). Times are Unix seconds. Money is US$.
"""

from typing import ClassVar

from msgspec import Struct


class Event(Struct, frozen=True, gc=False):
    """The base of all rows. kind: the last token of the subject. awaited: somebody waits until it is on disk."""

    kind: ClassVar[str] = ""
    awaited: ClassVar[bool] = False
    time: float


class StateEvent(Event, frozen=True, kw_only=True, gc=False):
    kind: ClassVar[str] = "state"
    app: str | None
    model: str
    variant: str
    worker: str
    device: str
    instance: str
    from_state: str
    to_state: str
    reason: str


class OutcomeEvent(Event, frozen=True, gc=False, omit_defaults=True):
    """The outcome of one query, or of one part of a query.

    time: when the query arrived. outcome: ok, late, refused, error, default, cancelled. parent, stage: of a part: the uid of its query, and which part
    it is. confidence, missing: of a query with parts: the share of the asked members that agree with the answer, 0..1, and how many of
    them are not in it; None for any other. payer: as in the Route. mistake: it asked for what no variant gives. An absent field has its default value.
    """

    kind: ClassVar[str] = "outcome"
    uid: bytes
    id: str | None
    app: str
    outcome: str
    model: str | None = None
    variant: str | None = None
    worker: str | None = None
    hardware: str | None = None
    code: str | None = None
    latency_ms: float | None = None
    slo_ms: float | None = None
    accuracy: float | None = None
    accuracy_required: float | None = None
    cost_limit: float | None = None
    priority: int | None = None
    items: int = 1
    batch: int | None = None
    cached: bool = False
    simulated: bool = False
    cost: float = 0.0
    version: str | None = None
    policy: str | None = None
    context: str | None = None
    input_digest: str | None = None
    parent: bytes | None = None
    stage: str | None = None
    confidence: float | None = None
    missing: int | None = None
    payer: str | None = None
    mistake: bool = False


class CostEvent(Event, frozen=True, kw_only=True, gc=False):
    """The cost of one instance in one period.

    app: None for the part of a worker that nobody used. simulated: whether the device is simulated.
    """

    kind: ClassVar[str] = "cost"
    seconds: float
    worker: str
    hardware: str
    app: str | None
    model: str | None
    variant: str | None
    busy_seconds: float
    cost: float
    simulated: bool = False


class ScalingEvent(Event, frozen=True, kw_only=True, gc=False):
    kind: ClassVar[str] = "scaling"
    scaler: str
    worker: str | None
    app: str | None
    model: str | None
    variant: str | None
    action: str
    count: int
    reason: str
    solver: str | None = None
    solve_ms: float | None = None
    objective: float | None = None


class ShadowEvent(Event, frozen=True, kw_only=True, gc=False):
    """What a policy that runs beside the system without acting would have done (`infaas shadow`).

    policy: its name, with the settings that differ from the system's. action: as of a ScalingEvent; `sample` for the rows that only tell
    the cost, every 10 s. cost_rate: US$ per hour of its machines after the action. apps_cost_rate: the part of it for its loaded
    instances.
    """

    kind: ClassVar[str] = "shadow"
    policy: str
    scaler: str
    worker: str | None
    app: str | None
    variant: str | None
    action: str
    count: int
    reason: str
    cost_rate: float
    apps_cost_rate: float


class WorkerEvent(Event, frozen=True, kw_only=True, gc=False):
    kind: ClassVar[str] = "worker"
    worker: str
    hardware: str
    from_state: str
    to_state: str
    reason: str


class WorkerSample(Event, frozen=True, kw_only=True, gc=False):
    """foreign_use: the part of the utilisation that processes used which are no executors of this worker. host_used_mb: host memory of the
    device's Warm instances.
    """

    kind: ClassVar[str] = "worker-sample"
    worker: str
    device: str
    hardware: str
    utilisation: float
    memory_mb: float
    memory_used_mb: float
    load: float
    queue: int
    foreign_use: float = 0.0
    host_used_mb: float = 0.0


class InstanceEventSample(Event, frozen=True, kw_only=True, gc=False):
    kind: ClassVar[str] = "instance-sample"
    worker: str
    device: str
    app: str | None
    model: str
    variant: str
    instance: str
    utilisation: float
    memory_mb: float
    load: float
    queue: int
    latency_ms: float
    mean_batch: float
    reclaimable: bool = False


class RegistrationEvent(Event, frozen=True, kw_only=True, gc=False):
    kind: ClassVar[str] = "registration"
    registration: str
    app: str
    model: str
    version: str | None
    state: str
    reason: str | None
    progress: float


class JobEvent(Event, frozen=True, kw_only=True, gc=False):
    """The present state of an offline job. total, done, failed: items. created, started, finished: Unix seconds."""

    kind: ClassVar[str] = "job"
    job: str
    app: str
    model: str | None
    variant: str | None
    accuracy: float | None
    input: str
    output: str
    state: str
    total: int | None
    done: int
    failed: int
    reason: str | None
    cost: float
    created: float
    started: float | None
    finished: float | None


class FeedbackEvent(Event, frozen=True, kw_only=True, gc=False):
    """The true label of an earlier query, or of given inputs.

    query: uid of the query. id: the id that its sender gave it. input_digest: the digest of the inputs. label: JSON. uid: the feedback's own:
    an event that comes again has the same. variant: that answered; None: several did, or nobody knows. score: how right the answer was, 0..1; None: it does
    not count, or is no matter of right and wrong. promised: the accuracy that it should have reached on average: that its query stated, else the
    registered one. item: of the query, from 0. asked: when the query came, Unix seconds; None: nobody knows.
    """

    kind: ClassVar[str] = "feedback"
    awaited: ClassVar[bool] = True
    app: str
    id: str | None
    context: str | None
    label: str
    input_digest: str | None
    query: bytes | None = None
    uid: bytes | None = None
    variant: str | None = None
    score: float | None = None
    promised: float | None = None
    item: int = 0
    asked: float | None = None


class SelectionEvent(Event, frozen=True, kw_only=True, gc=False):
    """What one feedback taught about one member of an app's selection.

    query: uid of the prediction. probability: that the member had then. loss: 0..1. weight: its share of the weights now, 0..1.
    reevaluated: the prediction was made again for this feedback.
    """

    kind: ClassVar[str] = "selection"
    app: str
    context: str | None
    query: bytes
    member: str
    probability: float
    loss: float
    weight: float
    reevaluated: bool = False


class AppObjective(Event, frozen=True, kw_only=True, gc=False):
    """One app's objective, what is reached, and what the autoscalers expect.

    slo_target: the share of queries to be answered in time. reached: the share of the last minutes; None if there were no queries.
    load: items/s now. forecast: items/s for the time when what is ordered now would be ready. capacity: items/s that the loaded instances
    carry in time. headroom: capacity/forecast; None if nothing is expected.
    """

    kind: ClassVar[str] = "objective"
    app: str
    slo_target: float
    reached: float | None
    load: float
    forecast: float
    capacity: float
    headroom: float | None


class PipelineEvent(Event, frozen=True, kw_only=True, gc=False):
    """How many replicas a vertex of a deployed pipeline is to have, from now on.

    action: deploy, up, down, end; target: they stay, and the plan is for another share of queries in time than the app's target is now. lambda_max: queries/s that they are for. window_s: the time in which that rate was seen; None: it is that
    of the plan. Both None: `end`.
    """

    kind: ClassVar[str] = "pipeline"
    pipeline: str
    vertex: str
    action: str
    from_replicas: int
    to_replicas: int
    lambda_max: float | None
    window_s: float | None
    reason: str


class DriftEvent(Event, frozen=True, kw_only=True, gc=False):
    """A column of an app's queries, or of a model's answers to them, is distributed otherwise than in its validation set; or is no more.

    time: when it was found, or found to have ended. distance: the share of items that would have to lie elsewhere, 0..1. since: when the first
    items came that show it. ended: when the first came that look like the validation set again; None: it goes on. cells: JSON with `edges` between cells,
    `expected` and `found`: numbers of items in each cell, the last one of NaN.
    """

    kind: ClassVar[str] = "drift"
    app: str
    model: str
    column_name: str
    distance: float
    since: float
    ended: float | None
    cells: str = ""


class ReleaseEvent(Event, frozen=True, kw_only=True, gc=False):
    """A release has gone over to another state or step. share: of the queries that the new version gets from now on."""

    kind: ClassVar[str] = "release"
    release: str
    app: str
    model: str
    version: str
    old_version: str
    share: float
    state: str
    reason: str


class ClientError(Event, frozen=True, kw_only=True, gc=False):
    """Requests that were wrong themselves, in one second.

    app: what was asked for, which may not exist; None: nothing was. code: one of `CLIENT_ERRORS`. count: of requests.
    """

    kind: ClassVar[str] = "client-error"
    app: str | None
    code: str
    count: int


# codes of refusals that are the client's mistake
CLIENT_ERRORS = frozenset({"bad_request", "unknown_app", "unknown_model"})


EVENTS: tuple[type[Event], ...] = (
    StateEvent,
    OutcomeEvent,
    CostEvent,
    ScalingEvent,
    ShadowEvent,
    WorkerEvent,
    WorkerSample,
    InstanceEventSample,
    RegistrationEvent,
    JobEvent,
    FeedbackEvent,
    SelectionEvent,
    AppObjective,
    PipelineEvent,
    DriftEvent,
    ReleaseEvent,
    ClientError,
)
