"""Records of apps, models, variants and their profiles in the catalogue bucket. Only the registrar writes them.

Keys: `app.<app>`, `model.<model>.<version>`, `variant.<variant>`. A variant's name is unique in the cluster.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from bus.fields import KIND, PART, SHARE, TARGET, TOKEN, Named, Number
from bus.messages.quality import Cascade, LiveAccuracy, VersionRelease
from bus.messages.scaling import Expectation


class TensorSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One input or output of a model. shape: without the batch axis; -1 marks an axis of variable length.

    In its owner's words: columns: names along the last axis, of a table that is one input, or of a regressor's target. unit: of its numbers.
    bare: the model gives this output of one item without a batch axis, which is added; so it takes one item a call.
    binary: of BYTES: its elements are bytes, as of a picture's file, and no texts.
    """

    name: str
    datatype: str
    shape: list[int]
    columns: list[str] = []
    unit: str = ""
    bare: bool = False
    binary: bool = False


class Signature(Struct, frozen=True, kw_only=True):
    """The inputs and outputs of a model. The first model registered for an app fixes the signature of the app."""

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]

    @property
    def target(self) -> tuple[str, str]:
        """The name and the unit of what a regressor predicts; empty where its owner has given none."""
        found = next((one for one in self.outputs if one.columns or one.unit), None)
        return ("", "") if found is None else (", ".join(found.columns), found.unit)


class Functions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Functions of the model's owner that each item of a query goes through, in a sandboxed process beside the model (bus/functions.py).

    before, after: as FILE:FUNCTION; empty: there is none. sources: the files' texts, by FILE. model: what the model itself takes and gives, between
    them; None: it is not inspected yet. ms: that they take of one item beside one of the model's variants, as it was measured; None: it was not.
    """

    before: str = ""
    after: str = ""
    sources: dict[str, str] = {}
    model: Signature | None = None
    ms: float | None = None

    @property
    def words(self) -> str:
        """Which there are, and how long they take, for people."""
        around = {"before": self.before, "after": self.after}
        said = " and ".join(f"{when} {name}" for when, name in around.items() if name)
        return said if self.ms is None else f"{said} ({self.ms:.3g} ms)"


class ProfileRow(Struct, frozen=True, kw_only=True):
    """The measured latency, in ms, of one batch size at one input length: the bucket of the variable axis; None if all are fixed.

    p50_ms: of a cascade the mean, since costs and rates follow from it. p99_ms: of one, with as many items that go on as 99 % of batches have at most.
    p99_low_ms, p99_high_ms: its 95 % confidence interval, by the order of so many calls; None: not known, the upper one below 368 calls.
    """

    batch: Annotated[int, Number(1)]
    p50_ms: Annotated[float, Number(above=0)]
    p99_ms: float
    cpu_ms: float
    wall_over_cpu: float
    length: int | None = None
    p99_low_ms: float | None = None
    p99_high_ms: float | None = None


class Profile(Struct, frozen=True, kw_only=True):
    """The profile of a variant. It is measured once, on real hardware.

    provenance: "measured" | "measured: beside N further instances" (all computing) | "published: <citation>" | "synthetic". init_ms, transfer_ms: the
    parts of load_ms: making the model in host memory, and bringing it to the device. host_mb: what it takes there while it is Warm; None: it cannot be.
    """

    rows: list[ProfileRow]
    load_ms: Annotated[float, Number()]
    memory_mb: Annotated[float, Number()]
    saturation_qps: float
    provenance: str = "measured"
    disturbed: bool = False
    host: dict[str, str] = {}
    init_ms: Annotated[float | None, Number()] = None
    transfer_ms: Annotated[float | None, Number()] = None
    host_mb: Annotated[float | None, Number()] = None


class VariantRecord(Struct, frozen=True, kw_only=True, weakref=True):
    """One way to run one version of a model.

    accuracy: on the whole validation set, 0..1, of so many samples (0: not known). accuracy_low, accuracy_high: its 95 % confidence interval: Wilson's
    of a share of right answers, the normal one of a mean error; None: it was not measured. artifact: object key (sha256) in the artifacts bucket.
    precision: fp32, int8 (static QDQ), fp16, bf16, cascade. hardware: device kind, "cpu", "gpu", ... agreement: the share of answers that equal those of
    the model as it came, of every output. differing: outputs that are not scored and differ from the model's in more than FLOOR of the answers, with the
    share that agrees. price_per_s: US$ per second of an instance; None: its share of the device's memory and its threads decide. metric, labels,
    allow_nan, functions: as in `Register`. model_accuracy: of the model as it came; None: not known. alone: why each item is computed alone: its
    answer would depend on others in its batch; empty: it does not. arithmetic: of the CPU on which it was measured, "exact" or "saturating", where its
    accuracy depends on that; it runs on such ones only. distribution: object key in the artifacts bucket of how the validation set, and its answers to
    it, are distributed; empty: not known. live, registered: `Catalog.seen` adds what labels say, and the accuracy. remeasured: Unix seconds; 0: never.
    """

    variant: Named
    model: Named
    version: Named
    framework: str
    precision: str
    threads: Annotated[int, Number(1)]
    max_batch: Annotated[int, Number(1, 10**6)]
    hardware: Annotated[str, KIND]
    artifact: str
    format: str
    accuracy: Annotated[float | None, SHARE]
    agreement: float | None
    profile: Profile
    signature: Signature
    dominated: bool = False
    simulated: bool = False
    batching: str = "edf"
    attributes: dict[str, str] = {}
    price_per_s: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    samples: int = 0
    contexts: int = 1
    metric: str = "top1"
    labels: list[str] = []
    allow_nan: bool = False
    model_accuracy: float | None = None
    alone: str = ""
    arithmetic: str = ""
    differing: dict[str, float] = {}
    functions: Functions | None = None
    distribution: str = ""
    live: LiveAccuracy | None = None
    registered: float | None = None
    cascade: Cascade | None = None
    remeasured: float = 0.0

    @property
    def versions(self) -> list[tuple[str, str]]:
        """The models whose answers it gives, with their versions. An app that links all of them answers with it."""
        return [(self.model, self.version)] if self.cascade is None else self.cascade.versions

    @property
    def twins(self) -> str:
        """The same for all variants that answer alike, in whatever threads and batches."""
        return "/".join((self.model, self.version, self.hardware, self.framework, self.precision, self.artifact[:12]))

    @property
    def measured(self) -> float | None:
        """The accuracy that was measured at registration."""
        return self.accuracy if self.registered is None else self.registered

    @property
    def truth(self) -> LiveAccuracy | None:
        """What it reaches in production, where that has left what was measured at registration."""
        return self.live if self.live and self.live.excludes(self.measured) else None

    @property
    def production(self) -> tuple[float, str] | None:
        """The accuracy of `truth`, and what that was measured by; else one that was measured anew."""
        anew = (self.measured or 0.0, "registered") if self.remeasured else None
        return anew if self.truth is None else (self.truth.accuracy, self.truth.source)

    @property
    def says_class(self) -> bool:
        """Whether a text that comes out is the name of an item's class."""
        return self.functions is not None and bool(self.functions.after) and self.metric in ("top1", "f1_macro")


MOST_SOURCE = 64 * 1024  # bytes of a file of functions
LARGEST_BATCH = 1024  # items
MOST_FANNED = 1024  # items of an answer that go on, each as a query
MOST_REPLICAS = 10_000  # of a stage
LONGEST_MS = 600_000  # that a batch may take, or wait
MOST_CONTEXTS = 64  # batches that an instance computes at a time
FLOOR = 0.005  # of a share of answers: a variant that is no more below its model answers as that does
TOLERANCE = 0.005  # of a number, or of its output's spread: what agrees with the model as it was uploaded

# What outputs are judged by. The names are scikit-learn's where it has one.
METRICS = {
    "top1": "the share of right answers",
    "top5": "the share of labels among the five best scores",
    "mae": "the mean absolute error, in the unit of the labels",
    "rmse": "the root of the mean squared error, in the unit of the labels",
    "r2": "the share of the targets' variance that is explained",
    "f1_macro": "the mean over the classes of the F1 score",
    "roc_auc": "the area under the ROC curve, the mean over the classes",
    "average_precision": "the average precision, the mean over the classes",
    "log_loss": "the mean negative logarithm of the right class' probability",
    "ndcg": "the normalised discounted cumulative gain of the ranking",
    "agreement": f"the share of answers within {100 * TOLERANCE:g} % of those of the model as it came",
}
AGREEMENT = "agreement"
ACCURACIES = frozenset({"top1", "top5", AGREEMENT})  # what a need `accuracy` means; the others are asked for by name
SHARES = frozenset({"top1", "top5"})  # of right answers, which need no name
TARGETS = frozenset({"mae", "rmse", "r2"})  # metrics of numbers


def is_error(metric: str) -> bool:
    """Whether less is better: of a user's own metric its name says so, by scikit-learn's rule. An error e counts as the accuracy 1 / (1 + e)."""
    return metric in ("mae", "rmse", "log_loss") or (metric not in METRICS and metric.endswith(("_error", "_loss")))


def error_of(accuracy: float | None, metric: str) -> float | None:
    """The error that an accuracy stands for, in the metric's unit. None: the metric is no error, or there is no accuracy."""
    return 1.0 / accuracy - 1.0 if accuracy and is_error(metric) else None


def accuracy_of(value: float, metric: str) -> float:
    """What a metric's value counts as: 0..1, more is better. r2, which has no least value, counts as the error 1 - r2."""
    if metric == "r2":
        return 1.0 / (1.0 + max(0.0, 1.0 - value))
    return 1.0 / (1.0 + max(0.0, value)) if is_error(metric) else value


def value_of(accuracy: float, metric: str) -> float:
    """The metric's value that an accuracy stands for."""
    if metric == "r2":
        return 2.0 - 1.0 / max(accuracy, 1e-300)
    return 1.0 / max(accuracy, 1e-300) - 1.0 if is_error(metric) else accuracy


def in_metric(accuracy: float | None, metric: str, unit: str = "") -> str:
    """An accuracy in words, by its metric: "accuracy 0.97", "mae 43.2 EUR"; None: nobody has measured it. unit: of an error."""
    more = f" {unit}" if unit and is_error(metric) else ""
    return f"{metric} unknown" if accuracy is None else f"{called(metric)} {value_of(accuracy, metric):.4g}{more}"


def called(metric: str) -> str:
    """What people call an accuracy that is measured so."""
    return "accuracy" if metric in SHARES else metric


def named_metric(metrics: Collection[str]) -> str:
    """The metric that an answer names, of its models'; empty: its accuracy is a share of right answers, or they have several."""
    return next((one for one in metrics if one not in SHARES), "") if len(metrics) == 1 else ""


class ModelRecord(Struct, frozen=True, kw_only=True, weakref=True):
    """One registered version of a model.

    source, validation: object keys (sha256) of the uploaded files. inputs_key, labels_key: names of the arrays in the validation set.
    labels: names of the classes; empty if none were given. contended: its variants are measured beside further instances.
    contexts: batches that an instance of its variants computes at a time. allow_nan: its inputs may hold NaN and infinite values.
    app: for which it was registered; "_": for none. held: no query gets it until an app links it. functions: before and after it; `signature` is then what queries give and get.
    """

    model: str
    version: str
    task: str | None
    metric: str
    format: str
    source: str
    validation: str
    signature: Signature
    created: float
    registration: str
    inputs_key: str = "x"
    labels_key: str = "y"
    labels: list[str] = []
    contended: bool = False
    contexts: int = 1
    allow_nan: bool = False
    app: str = "_"
    functions: Functions | None = None
    held: bool = False


class Ensemble(Struct, frozen=True, kw_only=True):
    """How several models of an app answer one query together (Clipper, paper 002, section 5). docs/ensembles.md."""

    policy: Annotated[
        str | None,
        "How several models answer a query together: exp3, exp4, majority, weighted, or a class of your own as module:Class."
        " Left out: one variant answers.",
    ] = None
    members: Annotated[list[str] | None, TOKEN, "The models that are asked. Default: all that the app links."] = None
    eta: Annotated[float, SHARE, "Learning rate of exp3 and exp4, 0 to 1. Default: 0.1."] = 0.1
    contextual: Annotated[bool, "Weights of their own for each `context` of the app's queries."] = False
    confidence: Annotated[
        float,
        SHARE,
        "Share of the members that must agree, 0 to 1. Below it the app's default output is given. Default: 0.",
    ] = 0.0
    wait_share: Annotated[
        float,
        PART,
        "Share of the latency objective after which the answer is made of what is there, above 0 and at most 1. Default: 0.97.",
    ] = 0.97
    cache_mb: Annotated[
        float, Number(), "MB of answers that each dispatcher keeps for equal queries. Default: 0, none."
    ] = 0.0


class BatchingFields(Struct, frozen=True, kw_only=True):
    """What a rule of batching says beside its policy. services/core/batching.py says which policy reads which."""

    batch: Annotated[
        int | None,
        Number(1, LARGEST_BATCH),
        "Items of a batch: of fixed the size, of the others the most. By default the variant's own largest.",
    ] = None
    slo_ms: Annotated[
        float | None,
        Number(above=0, most=LONGEST_MS),
        "Milliseconds that a batch may take (aimd, quantile). By default half of what its most urgent query allows.",
    ] = None
    wait_ms: Annotated[
        float | None, Number(most=LONGEST_MS), "Milliseconds that a batch waits for more queries (delayed)."
    ] = None
    quantum_ms: Annotated[
        float | None,
        Number(0.5, 10_000),
        "Milliseconds over which arrivals are counted (threshold), 0.5 to 10,000. Default: 5.",
    ] = None
    contexts: Annotated[
        int | None, Number(1, MOST_CONTEXTS), "Batches of one instance at a time, 1 to 64. Default 1."
    ] = None


class BatchingRule(BatchingFields, frozen=True, kw_only=True):
    """How an instance forms batches. Key in the control bucket: `batching.<app|model|variant>.<name>`; the narrowest one counts.

    policy: "edf", "fixed", "aimd", "quantile", "delayed" or "threshold".
    """

    policy: str = "edf"


class EdgeCondition(Struct, frozen=True, kw_only=True):
    """When an edge is followed: `reduce(output) op value` of its source's answer.

    reduce: "first" element, "max" of all, or "argmax" of the first item. op: "==", "!=", "<", ">" or "in". value: a number, a text; of "in", a list.
    """

    output: str
    op: str
    value: Any
    reduce: str = "first"


class PipelineVertex(Struct, frozen=True, kw_only=True):
    """A stage of a pipeline: an app that is asked.

    inputs: of the app, by name, as "$.input of the pipeline" or "vertex.output", or several with "|" between, the first that was visited, or as
    "any(a.x, b.y)", the first that answers. accuracy: the least of a variant; None: any. optional: the query goes on where it fails or is late.
    """

    name: str
    app: str
    inputs: dict[str, str] = {}
    accuracy: float | None = None
    optional: bool | UnsetType = UNSET


class PipelineEdge(Struct, frozen=True, kw_only=True):
    """The target is asked once the source has answered. Neither `when` nor `probability`: always.

    when: only if this holds for the source's answer. probability: the share of queries that follow it, above 0; for planning, and without `when` a
    hash of the query decides by it. items: an output of the source. The target is asked once for each of its items, none or many, and its answers are
    put together in their order. items_max: that one answer may have; what has more is refused, with `items_cut` asked for the first ones. items_mean,
    items_dispersion: mean number of an answer's items, and variance over mean (1: Poisson's), for planning.
    """

    source: str = field(name="from")
    target: str = field(name="to")
    when: EdgeCondition | None = None
    probability: float | None = None
    items: str | UnsetType = UNSET
    items_mean: Annotated[float | UnsetType, Number(above=0, most=MOST_FANNED)] = UNSET
    items_dispersion: Annotated[float | UnsetType, Number(most=MOST_FANNED)] = UNSET
    items_max: Annotated[int | UnsetType, Number(1, MOST_FANNED)] = UNSET
    items_cut: bool | UnsetType = UNSET


Outputs = Annotated[dict[str, str], "Where each output comes from: [output] in the file."]


class PipelineRecord(Struct, frozen=True, kw_only=True):
    """A directed acyclic graph of apps that answers the queries of an app (InferLine, paper 004, section 2). docs/contract.md.

    A vertex without incoming edges is asked at once; any other once it is known which of its edges are followed, if one is. output: by name, where it
    comes from, as inputs of vertices.
    """

    vertices: Annotated[list[PipelineVertex], "The stages: [[vertex]] in the file."] = field(name="vertex")
    edges: Annotated[list[PipelineEdge], "What follows what: [[edge]] in the file."] = field(
        name="edge", default_factory=list
    )
    output: Outputs = {}


class PlannedStage(Struct, frozen=True, kw_only=True):
    """How a vertex is served. batch: the largest. scale: visits for each query. service_ms: of a largest batch. rho: load over what the replicas can
    serve, 0..1. variant: the planned one; empty: any on this hardware. accuracy: its own, if known. price_per_hour: US$ of a replica.
    """

    hardware: str
    batch: Annotated[int, Number(1, LARGEST_BATCH)]
    replicas: Annotated[int, Number(1, MOST_REPLICAS)]
    scale: Annotated[float, Number()]
    service_ms: Annotated[float, Number(above=0)]
    rho: Annotated[float, Number()]
    variant: str = ""
    accuracy: float | None = None
    price_per_hour: float = 0.0


class PipelinePlan(Struct, frozen=True, kw_only=True):
    """How to serve a pipeline (paper 004, section 4).

    status: optimal (no cheaper configuration meets the objective by the estimator), feasible, infeasible (`reason` says why). envelope: the most queries
    of the sample trace in any window of so many seconds. dispersion: of each window, variance over mean of its queries. steps: what the planner
    did. rate: queries/s of the sample. p99_ms: the estimated latency at `percentile`. hop_ms: of a stage beyond its batch's time. accuracy: if
    stages are right independently; None: not known of all. budget_per_hour: US$ of all replicas, the tuner's too; None: any.
    """

    pipeline: str
    policy: str
    status: Literal["optimal", "feasible", "infeasible"]
    cost_per_s: Annotated[float, Number()]
    p99_ms: Annotated[float, Number(above=0)]
    vertices: dict[str, PlannedStage]
    envelope: list[tuple[float, int]]
    dispersion: Annotated[list[float], Number()]
    steps: list[str]
    rate: Annotated[float, Number(above=0)]
    latency_ms: float
    percentile: Annotated[float, Number(above=0, most=1)] = 0.99
    hop_ms: float = 0.0
    reason: str = ""
    accuracy: Annotated[float | None, SHARE] = None
    budget_per_hour: float | None = None


class AppRecord(Struct, frozen=True, kw_only=True, weakref=True):
    """An application and its linked models.

    links: model name to the version that serves now. default_output: the output for one item, sent instead of a refusal if no answer can come in time
    (docs/contract.md). input_type: the type of one input item in Clipper's terms: integers, floats, doubles, bytes or strings. slo_target: the share
    of queries to be answered in time, above 0 and below 1; None: that of the settings. accuracy_mean: 0 to 1, wanted in the mean over the answers, at
    least cost; worth: US$ per 1,000 answers for a point of accuracy more; None: those of the settings. selection: how several models answer together;
    None: one variant answers each query. replicas: by linked model, the least number of instances of its best variant. pipeline: the graph of other
    apps that answers; such an app links no models. plan: of the pipeline, that is deployed. accuracy: what a query without one gets: "own", a variant at
    most 0.5 points below its model, or "any". expects: what an operator has said of its load. plan_ended: why the last plan was ended by a change that
    it does not fit; empty: none was. quality_act, payloads: as `set-app` says. release: the last; None: there was none.
    """

    app: Named
    links: dict[str, str]
    signature: Signature | None = None
    latency_ms: float | None = None
    default_output: Any = None
    min_instances: int = 1
    created: float = 0.0
    input_type: str | None = None
    slo_target: Annotated[float | None, TARGET] = None
    selection: Ensemble | None = None
    replicas: dict[str, int] = {}
    pipeline: PipelineRecord | None = None
    plan: PipelinePlan | None = None
    accuracy: str = "own"
    plan_ended: str = ""
    expects: list[Expectation] = []
    quality_act: str = "select"
    payloads: float = 0.0
    release: VersionRelease | None = None
    accuracy_mean: float | None = None
    worth: float | None = None

    @property
    def releasing(self) -> VersionRelease | None:
        """The release that is under way."""
        return self.release if self.release is not None and self.release.active else None

    @property
    def released(self) -> dict[str, str]:
        """The links of queries that get the new version of a release; empty: there is none under way."""
        new = self.releasing
        return {} if new is None else {**self.links, new.model: new.version}

    def serves(self, model: str, version: str) -> bool:
        """Whether queries that name no version may get this one."""
        return version in (self.links.get(model), self.released.get(model))
