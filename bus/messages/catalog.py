"""What is known of apps, models, variants and their profiles: records in the catalogue bucket, written by the registrar only.

Keys: `app.<app>`, `model.<model>.<version>`, `variant.<variant>`. A variant's name is unique in the cluster.
"""

from typing import Any

from msgspec import Struct


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One input or output of a model. shape excludes the batch axis; -1 marks a length that varies."""

    name: str
    datatype: str
    shape: list[int]


class Signature(Struct, frozen=True, kw_only=True):
    """A model's inputs and outputs; an app's first registration fixes its app's signature."""

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


class ProfileRow(Struct, frozen=True, kw_only=True):
    """One measured cell: latency of one batch, in ms. length: bucket of the varying axis, None when lengths are fixed."""

    batch: int
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    wall_over_cpu: float
    length: int | None = None


class Profile(Struct, frozen=True, kw_only=True):
    """What was measured once on real hardware. provenance: "measured" | "published: <citation>" | "synthetic"."""

    rows: list[ProfileRow]
    load_ms: float
    memory_mb: float
    saturation_qps: float
    provenance: str = "measured"
    disturbed: bool = False
    host: dict[str, str] = {}


class VariantRecord(Struct, frozen=True, kw_only=True):
    """One way to run one version of a model. artifact: object key (sha256) in the artifacts bucket.

    precision: fp32, int8 (static QDQ), int8-dynamic, fp16, bf16. hardware: device kind, "cpu", "gpu", ...
    memory_gb of the instance's share and threads decide its price, unless price_per_s (US$ per second of an instance) states it.
    agreement: share of answers equal to fp32's.
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
    """One registered version of a model. source and validation: object keys (sha256) of what was uploaded.

    inputs_key, labels_key: of the arrays in the validation set. labels: names of the classes; empty where nobody gave any.
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


class AppRecord(Struct, frozen=True, kw_only=True):
    """An application and its linked models: model name to the version that serves now.

    default_output: of one item, answered in place of a refusal once nothing better can come in time (docs/contract.md).
    input_type: what an item of its inputs is in Clipper's words: integers, floats, doubles, bytes or strings.
    """

    app: str
    links: dict[str, str]
    signature: Signature | None = None
    latency_ms: float | None = None
    default_output: Any = None
    min_instances: int = 1
    created: float = 0.0
    input_type: str | None = None
