"""What happened, for the record: `infaas.event.<kind>`, one map `{"id", "rows"}` a message, held by the sender until acknowledged.

Rows become rows of the SQL relations of the same meaning (docs/contract.md section 3). Times are Unix seconds, money US$.
"""

from typing import ClassVar

from msgspec import Struct


class Event(Struct, frozen=True, gc=False):
    """Base of all rows; `kind` names the subject's last token."""

    kind: ClassVar[str] = ""
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
    """How a query ended. time: arrival. outcome: ok, late, refused, error, default. Absent fields have their defaults."""

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


class CostEvent(Event, frozen=True, kw_only=True, gc=False):
    """One instance and period; the part of a worker that nobody used has app None. simulated: of a simulated device."""

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


class WorkerEvent(Event, frozen=True, kw_only=True, gc=False):
    kind: ClassVar[str] = "worker"
    worker: str
    hardware: str
    from_state: str
    to_state: str
    reason: str


class WorkerSample(Event, frozen=True, kw_only=True, gc=False):
    kind: ClassVar[str] = "worker-sample"
    worker: str
    device: str
    hardware: str
    utilisation: float
    memory_mb: float
    memory_used_mb: float
    load: float
    queue: int


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
    """An offline job as it is now. total, done, failed: items. created, started, finished: Unix seconds."""

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
    """What an answer should have been: of the query with this id, or of these inputs. label: JSON."""

    kind: ClassVar[str] = "feedback"
    app: str
    id: str | None
    context: str | None
    label: str
    input_digest: str | None


EVENTS: tuple[type[Event], ...] = (
    StateEvent,
    OutcomeEvent,
    CostEvent,
    ScalingEvent,
    WorkerEvent,
    WorkerSample,
    InstanceEventSample,
    RegistrationEvent,
    JobEvent,
    FeedbackEvent,
)
