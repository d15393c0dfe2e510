"""Messages that clients send and receive (docs/contract.md): queries, answers, refusals, registrations, lists.

Wire format: MessagePack maps with exactly these field names. Unknown fields are ignored. A field of the wrong type is a `bad_request`.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from bus.fields import SHARE, TARGET, TOKEN, TOKEN_OR_NONE, Length, Number, Text, choice
from bus.messages.catalog import LARGEST_BATCH, METRICS, MOST_CONTEXTS, Functions, Profile, Signature

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
    "cancelled",
]

RESENT = (
    "Infaas-Resent"  # header of a request that its client sends again for want of a reply: ms since it sent it first
)
MOST_TEXT = 1000  # characters of a context, an id, a label as JSON: such texts stay in memory, and in the database


METRIC = Text(r"[A-Za-z_][A-Za-z0-9_]{0,63}", "the name of a metric: 1 to 64 letters, digits and _, no digit first")


class Tensor(Struct, frozen=True, gc=False):
    """One array: Open Inference Protocol datatype name, shape (first axis = items), C-order little-endian bytes."""

    datatype: str
    shape: list[int]
    data: bytes


class TensorView(Struct, frozen=True, gc=False):
    """A `Tensor` that is decoded without a copy of its bytes. It is valid as long as the received message is."""

    datatype: str
    shape: list[int]
    data: memoryview


class TensorHead(Struct, frozen=True, gc=False):
    """A `Tensor` whose bytes stay undecoded. A dispatcher needs no more of it."""

    datatype: str
    shape: list[int]
    data: Raw


class ObjectRef(Struct, frozen=True, gc=False):
    """A reference to an object in the object store. It replaces a body that is too large for one message. bytes: its size; items: of a query's inputs,
    by which a variant is chosen. 0: not said.
    """

    bucket: str
    key: str
    bytes: int = 0
    items: int = 0


class Requirements(Struct, frozen=True, kw_only=True, gc=False):
    """The requirements of a query. They are the body of `infaas.explain.<app>`, and the part of a query that selection reads.

    The gateway's parameters, the command line's options, scenarios and the OpenAPI document have them from here.
    """

    latency_ms: Annotated[
        float | None, Number(above=0, unit="milliseconds"), "Latency objective of a query, in milliseconds."
    ] = None
    accuracy: Annotated[float | None, SHARE, "Least accuracy of the variant, 0 to 1, as measured at registration."] = (
        None
    )
    metric: Annotated[
        str | None,
        METRIC,
        "Metric that accuracy is stated in, where models are measured by another one than top1, top5 or agreement.",
    ] = None
    cost: Annotated[float | None, Number(unit="US$ per 1,000 queries"), "Highest cost, in US$ per 1,000 queries."] = (
        None
    )
    model: Annotated[str | None, TOKEN, "Use only this model."] = None
    version: Annotated[str | None, TOKEN, "Use only this version of the model."] = None
    variant: Annotated[str | None, TOKEN, "Use only this variant."] = None
    context: Annotated[str | None, Length(MOST_TEXT), "Key for personalised selection."] = None
    priority: Annotated[
        int | None,
        Number(1, 9),
        "Priority, 1 (highest) to 9. Where not all queries can be in time, those with the larger number give way.",
    ] = None
    deadline: Annotated[
        float | None,
        Number(above=0, unit="a Unix time in seconds"),
        "Unix time in seconds until which an answer is of use. The earlier of deadline and latency_ms counts.",
    ] = None
    confidence: Annotated[
        float | None, SHARE, "Least share of an ensemble's models that agree with the answer, 0 to 1."
    ] = None


class QueryHead(Requirements, frozen=True, kw_only=True, gc=False):
    """A query as the dispatcher reads it: all fields. The bytes of the tensors stay undecoded."""

    inputs: Raw = Raw()
    id: str | None = None
    retry_key: bytes | None = None
    input_digest: str | None = None
    inputs_ref: ObjectRef | None = None


class QueryInputs(Struct, frozen=True, kw_only=True, gc=False):
    """A query as the executor reads it: only the fields that the model needs."""

    inputs: Raw = Raw()
    inputs_ref: ObjectRef | None = None


class Answer(Struct, frozen=True, gc=False):
    """The reply to a query that succeeds. Latencies are in milliseconds. cost: US$ for this query. query: its uid, hexadecimal.

    Of an app with several models: members: `model@version` of those whose output is in the answer. missing: how many of the asked ones are not.
    confidence: the share of the asked members that agree with the answer, the least of all items; confidences: of each item, where there are several.
    labels: the name of each item's class, if the model has names of its classes. zeros: whether a simulated device has made up the outputs, which are
    zeros; `reason` says why. target, unit: of a regressor's numbers, as given at registration. metric: that `accuracy` counts for, where it is no
    share of right answers. accuracy_source: what `accuracy` was measured by: "registered" on the validation set, or "labels" in production.
    """

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
    query: str | UnsetType = UNSET
    confidences: list[float] | UnsetType = UNSET
    labels: list[str] | UnsetType = UNSET
    zeros: bool | UnsetType = UNSET
    target: str | UnsetType = UNSET
    unit: str | UnsetType = UNSET
    metric: str | UnsetType = UNSET
    accuracy_source: str = "registered"


class Closest(Struct, frozen=True, kw_only=True, gc=False):
    """The variant that comes closest to requirements that no variant meets. metric: of its accuracy. unit: of an error."""

    model: str
    variant: str
    accuracy: float | None
    latency_ms: float
    cost: float
    metric: str = "top1"
    unit: str = ""


class Error(Struct, frozen=True, kw_only=True, gc=False):
    """Why a request was refused. message: names the field and the remedy. field: it, where programs go by it."""

    code: Code
    message: str
    closest: Closest | UnsetType = UNSET
    retry_after_ms: float | UnsetType = UNSET
    field: str | UnsetType = UNSET


class Refusal(Struct, frozen=True, kw_only=True, gc=False):
    """The reply to a query or request that fails."""

    error: Error
    id: str | None = None


class ContainerReport(Struct, frozen=True, kw_only=True):
    """What `infaas container` measured of the user's class in its own process. accuracy_low, accuracy_high, distribution: as in the variant's record."""

    signature: Signature
    accuracy: float
    max_batch: Annotated[int, Number(1, LARGEST_BATCH)]
    profile: Profile
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    alone: str = ""
    distribution: str = ""


MOST_TASK = 200  # characters
_OBJECT = Text(
    r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._=-]{0,254}",
    "letters, digits and . _ - = only, a letter or digit first, without '..'",
)
_ARRAY = Text(
    r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}",
    "1 to 64 letters, digits and . _ - only, no . or - first, without '..'",
)


class Register(Struct, frozen=True, kw_only=True):
    """`infaas.register`: register a model file and its validation set. Both are already in the uploads bucket. With an empty `object`, and
    no reply subject, it announces that such a file is being made. container: of the format "container". Then `object` is a key in the artifacts bucket: answers that a further container must agree with;
    there is no validation set. None in slo_target and accuracy: the app keeps what it has.
    """

    app: Annotated[
        str, TOKEN_OR_NONE, "App that the model serves; _ for a model without an app. Apps may link it later."
    ]
    model: Annotated[str, TOKEN, "Name of the model, unique in the cluster."]
    format: Annotated[str, choice("onnx", "pt2", "torchscript", "remote", "container"), "Format of the model file."]
    object: Annotated[str, _OBJECT, "The model file's key in the bucket."]
    validation: Annotated[str, Text(f"({_OBJECT.pattern})?", _OBJECT.words), "The validation set's key in the bucket."]
    version: Annotated[str | None, TOKEN, "Name of this version. Default: the next number."] = None
    task: Annotated[str | None, Length(MOST_TASK, least=1), "What the model is for, in your own words."] = None
    metric: Annotated[
        str,
        METRIC,
        f"How outputs are scored against the labels: {', '.join(METRICS)}, or the name of a function of your own, whose file is in the "
        "validation set. Where less is better, an error e counts as the accuracy 1 / (1 + e).",
    ] = "top1"
    default_output: Annotated[Any, "What the app answers for an item if no model can answer in time."] = None
    latency_ms: Annotated[
        float | None, Number(above=0, unit="milliseconds"), "The app's default latency objective, in milliseconds."
    ] = None
    inputs_key: Annotated[str, _ARRAY, "The array of inputs in the .npz file."] = "x"
    labels_key: Annotated[str, _ARRAY, "The array of labels in the .npz file."] = "y"
    registration: Annotated[str | None, TOKEN, "An id that the client may choose."] = None
    labels: Annotated[list[str], "Names of the classes, in the order of the model's scores."] = []
    slo_target: Annotated[
        float | None,
        TARGET,
        "The share of the app's queries to be answered in time, above 0 and below 1. Default: what the app has, at first "
        "autoscaler.slo_target of the settings.",
    ] = None
    dry_run: Annotated[
        bool, "Have a worker inspect the model and run it, print what would be registered, and keep nothing."
    ] = False
    contended: Annotated[
        bool,
        "Measure latencies beside further instances of each variant that compute all the time, as many as the cores have room for, "
        "at most 7; on an accelerator beside one. Plans then count on what a busy machine gives, not on an idle one.",
    ] = False
    contexts: Annotated[
        int,
        Number(1, MOST_CONTEXTS),
        "Batches that an instance computes at a time, on one copy of the weights, 1 to 64. Latencies are measured with as many.",
    ] = 1
    allow_nan: Annotated[
        bool,
        "Inputs may hold NaN and infinite values, those of the validation set and of queries. Without it they are refused.",
    ] = False
    container: ContainerReport | None = None
    accuracy: Annotated[
        str | None,
        choice("own", "any"),
        "What a query gets that states no accuracy: own, a variant at most 0.5 points below its model, or any. Default: what the app "
        "has, at first own.",
    ] = None
    target: Annotated[
        str | None, Length(MOST_TASK, least=1), "What a regressor's number is, as price. Answers and lists then say so."
    ] = None
    unit: Annotated[str | None, Length(MOST_TASK, least=1), "Its unit, as EUR. Answers and lists say so."] = None
    columns: Annotated[
        list[str],
        "Names of the columns of a table that is the model's only input, in their order. Queries may then name them.",
    ] = []
    release: Annotated[
        str,
        choice("at-once", "hold", "mirror", "steps"),
        "How the app's queries get a new version of a model that it serves: at-once (the default), steps (a release as of `infaas release "
        "start`), mirror (the same after a mirror of 0.1), or hold: not until you release or set it.",
    ] = "at-once"
    functions: Annotated[
        Functions | None, "Functions of your own before and after the model, which run in the sandbox beside it."
    ] = None
    remeasures: Annotated[
        str | None, TOKEN, "A version whose file, and what was said of it, are taken again, on another validation set."
    ] = None


class RegistrationAccepted(Struct, frozen=True, kw_only=True):
    """The immediate reply to `Register`. Progress follows on `infaas.registration.<id>`."""

    registration: str


class VariantFailure(Struct, frozen=True, kw_only=True):
    """A variant that could not be built or profiled, and the reason. The work on other variants continues."""

    variant: str
    reason: str


class RegistrationStatus(Struct, frozen=True, kw_only=True):
    """`infaas.registration.<id>`: published until `state` is done, failed or cancelled. A request on this subject gets the latest status.

    progress: 0..1. step: the present step, for people. Of a dry run: `variants` are those that would be built, accuracy: of the model as
    uploaded, on so many samples of the validation set.
    """

    registration: str
    state: Literal["accepted", "inspecting", "building", "profiling", "done", "failed", "cancelled"]
    app: str
    model: str
    version: str | None = None
    progress: float = 0.0
    step: str = ""
    reason: str | None = None
    variants: list[str] = []
    failures: list[VariantFailure] = []
    dry_run: bool = False
    signature: Signature | None = None
    accuracy: float | None = None
    samples: int | None = None


class CancelQuery(Struct, frozen=True, kw_only=True):
    """`infaas.cancel.<app>`: the client that sent a query with this `retry_key` (16 bytes) takes it back."""

    retry_key: bytes


class QueryCancelled(Struct, frozen=True, kw_only=True):
    """The reply to `infaas.cancel.<app>`. cancelled: it had not begun, costs nothing, and was refused as `cancelled`. False: all else."""

    cancelled: bool


class CancelRegistration(Struct, frozen=True, kw_only=True):
    """`infaas.registration-cancel.<id>`: cancel the registration that the subject names, or forget that it failed. The body may be empty."""


class RegistrationCancelled(Struct, frozen=True, kw_only=True):
    """The reply to `infaas.registration-cancel.<id>`: its work stops, or a failed one is listed no more. If its variants are being written already, it still ends
    as done.
    """

    cancelled: bool = True


class ListRequest(Struct, frozen=True, kw_only=True):
    """`infaas.list.<apps|models|variants|workers|jobs|selection>`. app, model: optional filters. version: of variants that may not serve.

    context: of selection, and of the variants of an app with contexts of their own.
    """

    app: str | None = None
    model: str | None = None
    version: str | None = None
    context: str | None = None


class Listing(Struct, frozen=True, kw_only=True):
    """The reply to a list request. The items are plain maps, since later versions may add fields."""

    items: list[dict[str, Any]]


class Candidate(Struct, frozen=True, kw_only=True):
    """One variant that `explain` considered. why_not: the reason why it was not chosen; empty for the chosen one. fits: it is Active and in time, and
    meets all needs, chosen or not. stage: of a pipeline, the vertex for which it was considered. metric, accuracy_source: of the accuracy, as of an
    answer; accuracy_low, accuracy_high, samples: its 95 % interval, and of how many; error: that it stands for, in the unit of the labels (`unit`),
    if the metric is mae or rmse. cost_per_1000: US$ for 1,000 items in its usual batches, by which variants are ordered. cost: US$ per 1,000 such
    queries that are each alone in their batch, which a query's `cost` limits. functions, cascade: in words.
    """

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
    stage: str | UnsetType = UNSET
    metric: str = "top1"
    error: float | None = None
    cost: float = 0.0
    fits: bool = False
    unit: str = ""
    functions: str = ""
    cascade: str = ""
    accuracy_source: str = "registered"
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    samples: int = 0


class MemberShare(Struct, frozen=True, kw_only=True):
    """A model of an app whose models answer together, and why a query would ask it.

    member: `model@version`. probability: of being asked, 0..1; weight: its share of all weights; None: not known. variant: that would
    answer for it; None: it is not asked, or would be refused. why: says which.
    """

    member: str
    probability: float | None
    weight: float | None
    variant: str | None
    why: str


class StageShare(Struct, frozen=True, kw_only=True):
    """A vertex of a pipeline, and what would answer for it.

    accuracy: the least that it needs; None: any. share_ms: of the latency objective; None: there is none. when: what must hold for a query
    to visit it, one of several; empty: each query visits it. planned: whether a plan provides for it, with instances that serve. waiting: items in
    this dispatcher's queue for them. variant: that would answer; None: several models do, or it would be refused, which `refused` says. why: says why.
    """

    vertex: str
    app: str
    accuracy: float | None
    share_ms: float | None
    when: list[str]
    planned: bool
    waiting: int
    variant: str | None
    why: str
    refused: bool = False


class Explanation(Struct, frozen=True, kw_only=True):
    """The reply of `infaas.explain.<app>`: the decision that a query with these requirements would get now.

    members: where several models answer together, a row for each. chosen is the variant of the likeliest one then, and each candidate without a
    `why_not` would answer for its model. stages: of a pipeline, a row for each vertex. chosen is then the variant of the first one, and each
    candidate without a `why_not` would answer for its stage. refusal: of a stage that each query visits.
    """

    chosen: Candidate | None
    candidates: list[Candidate]
    refusal: Error | UnsetType = UNSET
    members: list[MemberShare] | UnsetType = UNSET
    stages: list[StageShare] | UnsetType = UNSET


class Feedback(Struct, frozen=True, kw_only=True):
    """`infaas.feedback.<app>`: the true label of an earlier query, or of these inputs.

    query: the uid that the answer named. id: the client's own; the latest query that had it. item: which item of the query.
    retry_key: 16 random bytes; what comes again with the same key counts once. items: many feedbacks at once, instead of all other fields.
    """

    id: str | None = None
    inputs: Raw = Raw()
    label: Any = None
    context: str | None = None
    query: str | None = None
    item: int = 0
    retry_key: bytes | None = None
    items: "list[Feedback] | None" = None


class RefusedItem(Struct, frozen=True, kw_only=True):
    """Of many feedbacks, one that was refused. item: its place in the list, from 0."""

    item: int
    error: Error


class Accepted(Struct, frozen=True, kw_only=True):
    """The reply to `Feedback`: it was accepted, and of `items` all but those that are named in `refused`."""

    accepted: bool = True
    refused: list[RefusedItem] | UnsetType = UNSET


class AdminDone(Struct, frozen=True, kw_only=True):
    """The reply to `infaas.admin.<verb>`: the verb was carried out. note: what else became of it, such as a plan that it ended."""

    done: bool = True
    note: str | UnsetType = UNSET
