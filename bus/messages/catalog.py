"""Records of apps, models, variants and their profiles in the catalogue bucket. Only the registrar writes them.

Keys: `app.<app>`, `model.<model>.<version>`, `variant.<variant>`. A variant's name is unique in the cluster.
"""

from typing import Any

from msgspec import Struct


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One input or output of a model. shape: without the batch axis; -1 marks an axis of variable length."""

    name: str
    datatype: str
    shape: list[int]


class Signature(Struct, frozen=True, kw_only=True):
    """The inputs and outputs of a model. The first model registered for an app fixes the signature of the app."""

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


class ProfileRow(Struct, frozen=True, kw_only=True):
    """The measured latency, in ms, of one batch size at one input length.

    length: the bucket of the variable axis; None if all lengths are fixed.
    """

    batch: int
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    wall_over_cpu: float
    length: int | None = None


class Profile(Struct, frozen=True, kw_only=True):
    """The profile of a variant. It is measured once, on real hardware.

    provenance: "measured" | "published: <citation>" | "synthetic".
    """

    rows: list[ProfileRow]
    load_ms: float
    memory_mb: float
    saturation_qps: float
    provenance: str = "measured"
    disturbed: bool = False
    host: dict[str, str] = {}


class VariantRecord(Struct, frozen=True, kw_only=True):
    """One way to run one version of a model.

    artifact: object key (sha256) in the artifacts bucket. precision: fp32, int8 (static QDQ), int8-dynamic, fp16, bf16.
    hardware: device kind, "cpu", "gpu", ... agreement: the share of answers that equal those of the fp32 variant.
    price_per_s: US$ per second of an instance; if None, the instance's share of the device's memory and its threads decide the price.
    """

    variant: str
    model: str
    version: str
    framework: str
    precision: str
    threads: int
    max_batch: int
    hardware: str
    artifact: str
    format: str
    accuracy: float | None
    agreement: float | None
    profile: Profile
    signature: Signature
    dominated: bool = False
    simulated: bool = False
    batching: str = "edf"
    attributes: dict[str, str] = {}
    price_per_s: float | None = None


class ModelRecord(Struct, frozen=True, kw_only=True):
    """One registered version of a model.

    source, validation: object keys (sha256) of the uploaded files. inputs_key, labels_key: names of the arrays in the validation set.
    labels: names of the classes; empty if none were given.
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


class ModelSelection(Struct, frozen=True, kw_only=True):
    """How several models of an app answer one query together (Clipper, paper 002, section 5). docs/ensembles.md.

    policy: "exp3", "exp4", "majority", "weighted" or "module:Class"; None: one variant answers, as where an app has no such record.
    members: model names; None: all that are linked. eta: the learning rate. contextual: weights of their own for each context.
    confidence: below it the app's default output is given, 0..1. wait_share: of the latency objective, the time after which the answer is
    made of what is there. cache_mb: MB of answers that each dispatcher keeps for equal queries; 0: none, and equal queries are not joined.
    """

    policy: str | None = None
    members: list[str] | None = None
    eta: float = 0.1
    contextual: bool = False
    confidence: float = 0.0
    wait_share: float = 0.97
    cache_mb: float = 0.0


class BatchingRule(Struct, frozen=True, kw_only=True):
    """How an instance forms batches. Key in the control bucket: `batching.<app|model|variant>.<name>`; the narrowest one counts.

    policy: "edf", "fixed", "aimd", "quantile", "delayed" or "threshold". batch: items, of fixed the size, of others the most; None:
    the variant's own. slo_ms: the latency that a batch must keep; None: the queries' deadlines say it. wait_ms: of delayed, how long
    a batch waits for more. quantum_ms: of threshold. contexts: batches of an instance at once.
    """

    policy: str = "edf"
    batch: int | None = None
    slo_ms: float | None = None
    wait_ms: float | None = None
    quantum_ms: float | None = None
    contexts: int | None = None


class AppRecord(Struct, frozen=True, kw_only=True):
    """An application and its linked models.

    links: model name to the version that serves now. default_output: the output for one item, sent instead of a refusal if no answer can
    come in time (docs/contract.md). input_type: the type of one input item in Clipper's terms: integers, floats, doubles, bytes or
    strings. slo_target: the share of queries to be answered in time, above 0 and below 1; None: that of the settings.
    selection: how several models answer together; None: one variant answers each query. replicas: by linked model, the least number of
    instances of its best variant.
    """

    app: str
    links: dict[str, str]
    signature: Signature | None = None
    latency_ms: float | None = None
    default_output: Any = None
    min_instances: int = 1
    created: float = 0.0
    input_type: str | None = None
    slo_target: float | None = None
    selection: ModelSelection | None = None
    replicas: dict[str, int] = {}
