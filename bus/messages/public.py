"""What outsiders send and receive (docs/contract.md): queries, answers, refusals, registrations, lists.

Wire form: MessagePack maps with exactly these field names; unknown fields are ignored, a wrong type is a `bad_request`.
"""

from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

Code = Literal[
    "bad_request",
    "unknown_app",
    "unknown_model",
    "unsatisfiable",
    "deadline",
    "overloaded",
    "model_error",
    "too_large",
    "forbidden",
    "internal",
]


class Tensor(Struct, frozen=True, gc=False):
    """One array: Open Inference Protocol datatype name, shape (first axis = items), C-order little-endian bytes."""

    datatype: str
    shape: list[int]
    data: bytes


class TensorView(Struct, frozen=True, gc=False):
    """A `Tensor` decoded without copying its bytes; valid as long as the received message is."""

    datatype: str
    shape: list[int]
    data: memoryview


class TensorHead(Struct, frozen=True, gc=False):
    """A `Tensor` whose bytes are left undecoded: all that a dispatcher needs to know of it."""

    datatype: str
    shape: list[int]
    data: Raw


class ObjectRef(Struct, frozen=True, gc=False):
    """Where a body too large for one message lies in the object store."""

    bucket: str
    key: str


class Requirements(Struct, frozen=True, kw_only=True, gc=False):
    """What a query demands: the body of `infaas.explain.<app>`, and the part of a query that selection reads.

    latency_ms: > 0. accuracy: 0..1, at least. cost: US$ per 1,000 queries, at most. priority: 1 (highest) .. 9.
    deadline: absolute Unix time in seconds; wins over latency_ms where earlier.
    """

    latency_ms: float | None = None
    accuracy: float | None = None
    cost: float | None = None
    model: str | None = None
    version: str | None = None
    variant: str | None = None
    context: str | None = None
    priority: int | None = None
    deadline: float | None = None


class QueryHead(Requirements, frozen=True, kw_only=True, gc=False):
    """A query as the dispatcher reads it: everything but the tensors' bytes."""

    inputs: Raw = Raw()
    id: str | None = None
    retry_key: bytes | None = None
    input_digest: str | None = None
    inputs_ref: ObjectRef | None = None


class QueryInputs(Struct, frozen=True, kw_only=True, gc=False):
    """A query as the executor reads it: only what the model needs."""

    inputs: Raw = Raw()
    inputs_ref: ObjectRef | None = None


class Answer(Struct, frozen=True, gc=False):
    """The one good end of a query. Latencies in milliseconds, cost in US$ of this query."""

    id: str | None
    outputs: dict[str, Any]
    model: str
    version: str
    variant: str
    hardware: str
    worker: str
    accuracy: float | None
    latency_ms: float
    queue_ms: float
    compute_ms: float
    batch: int
    cached: bool
    simulated: bool
    cost: float
    missed: list[str]
    outputs_ref: ObjectRef | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    members: list[str] | UnsetType = UNSET
    missing: int | UnsetType = UNSET
    default: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class Closest(Struct, frozen=True, kw_only=True, gc=False):
    """The variant that comes nearest to what could not be met."""

    model: str
    variant: str
    accuracy: float | None
    latency_ms: float
    cost: float


class Error(Struct, frozen=True, kw_only=True, gc=False):
    """Why a request was refused; `message` names the field and the remedy."""

    code: Code
    message: str
    closest: Closest | UnsetType = UNSET
    retry_after_ms: float | UnsetType = UNSET


class Refusal(Struct, frozen=True, kw_only=True, gc=False):
    """The one bad end of a query or request."""

    error: Error
    id: str | None = None


class Register(Struct, frozen=True, kw_only=True):
    """`infaas.register`: a model file and its validation set, both already in the uploads bucket.

    app: "_" for a model on its own, which apps may link later. format: "onnx" | "pt2" | "torchscript". metric: "top1" | "top5" | "mae" | "rmse" (errors are turned into 1/(1+error)).
    latency_ms: the app's default latency objective. labels: names of the classes, in the order of the model's scores.
    registration: optional id chosen by the client.
    """

    app: str
    model: str
    format: str
    object: str
    validation: str
    version: str | None = None
    task: str | None = None
    metric: str = "top1"
    default_output: Any = None
    latency_ms: float | None = None
    inputs_key: str = "x"
    labels_key: str = "y"
    registration: str | None = None
    labels: list[str] = []


class RegistrationAccepted(Struct, frozen=True, kw_only=True):
    """The immediate reply to `Register`; progress follows on `infaas.registration.<id>`."""

    registration: str


class VariantFailure(Struct, frozen=True, kw_only=True):
    """A variant that could not be built or profiled, and why; the others went on."""

    variant: str
    reason: str


class RegistrationStatus(Struct, frozen=True, kw_only=True):
    """`infaas.registration.<id>`: progress until `state` is done or failed; a request there answers with the last one.

    progress: 0..1. step: what is being done now, for people.
    """

    registration: str
    state: Literal["accepted", "inspecting", "building", "profiling", "done", "failed"]
    app: str
    model: str
    version: str | None = None
    progress: float = 0.0
    step: str = ""
    reason: str | None = None
    variants: list[str] = []
    failures: list[VariantFailure] = []


class ListRequest(Struct, frozen=True, kw_only=True):
    """`infaas.list.<apps|models|variants|workers|jobs>`."""

    app: str | None = None
    model: str | None = None


class Listing(Struct, frozen=True, kw_only=True):
    """The reply to a list request: plain maps, since lists may grow fields."""

    items: list[dict[str, Any]]


class Candidate(Struct, frozen=True, kw_only=True):
    """One variant as `explain` saw it; `why_not` is empty for the one chosen."""

    model: str
    version: str
    variant: str
    hardware: str
    worker: str | None
    state: str
    accuracy: float | None
    latency_ms: float
    load_ms: float
    cost_per_1000: float
    simulated: bool
    why_not: str


class Explanation(Struct, frozen=True, kw_only=True):
    """The reply of `infaas.explain.<app>`: the decision a query would get now."""

    chosen: Candidate | None
    candidates: list[Candidate]
    refusal: Error | UnsetType = UNSET


class Feedback(Struct, frozen=True, kw_only=True):
    """`infaas.feedback.<app>`: the true label of an earlier query (by id) or of these inputs."""

    id: str | None = None
    inputs: Raw = Raw()
    label: Any = None
    context: str | None = None


class Accepted(Struct, frozen=True, kw_only=True):
    """Feedback was taken."""

    accepted: bool = True


class AdminRequest(Struct, frozen=True, kw_only=True):
    """`infaas.admin.<verb>`: the fields that the verbs of this version read. count: of `set-replicas`, least instances of an app."""

    app: str | None = None
    model: str | None = None
    version: str | None = None
    variant: str | None = None
    worker: str | None = None
    count: int | None = None
    latency_ms: float | None = None
    default_output: Any = None
    min_instances: int | None = None
    input_type: str | None = None


class AdminDone(Struct, frozen=True, kw_only=True):
    """An operator's verb was carried out."""

    done: bool = True
