"""Registration work on a worker. The registrar orders it. The worker's workshop builds and profiles variants in a sandbox."""

from msgspec import Struct

from bus.messages.catalog import Functions, Profile, Signature, VariantRecord
from bus.messages.public import Register
from bus.messages.quality import Cascade


class VariantPlan(Struct, frozen=True, kw_only=True):
    """One variant to build, as the generator planned it. Plans that differ only in threads or max_batch share an artifact.

    hardware: the kind of device on which the variant is measured and runs.
    """

    variant: str
    framework: str
    precision: str
    threads: int
    max_batch: int
    format: str
    hardware: str = "cpu"


class CascadePlan(Struct, frozen=True, kw_only=True):
    """A cascade that may be worth building. artifacts: of its parts. costs: of an item in each part, and `most`: the most that it may cost in both,
    in seconds of a core. model_accuracy, arithmetic: as in its record.
    """

    plan: VariantPlan
    cascade: Cascade
    artifacts: list[str]
    costs: tuple[float, float]
    most: float
    model_accuracy: float | None = None
    arithmetic: str = ""


class InspectModel(Struct, frozen=True, kw_only=True):
    """`infaas.workshop.<worker>`: inspect a model file. Check its format, check that it runs, and find its signature.

    object, validation: object keys in the uploads bucket. stored: the keys are in the artifacts bucket instead, since the model is already
    registered. hardware: the worker also checks the frameworks for this kind of device. keep: store the files in the artifacts bucket.
    remeasures: a registered version, whose file `object` is: the validation set is in the uploads bucket all the same. An empty object: the
    file is not there yet, and the workshop imports what its format needs.
    """

    registration: str
    format: str
    object: str
    validation: str
    inputs_key: str
    labels_key: str
    metric: str
    allow_nan: bool = False
    allow_torchscript: bool = False
    stored: bool = False
    hardware: str = "cpu"
    keep: bool = True
    functions: Functions | None = None
    remeasures: str | None = None


class BuildVariants(Struct, frozen=True, kw_only=True):
    """`infaas.workshop.<worker>`: build, verify and profile these variants of an inspected model. contended: as in `Register`.

    cascades: of which the best is built, if any is worth it, and no other variant.
    """

    registration: str
    model: str
    version: str
    format: str
    source: str
    validation: str
    inputs_key: str
    labels_key: str
    metric: str
    signature: Signature
    plans: list[VariantPlan]
    allow_torchscript: bool = False
    contended: bool = False
    contexts: int = 1
    allow_nan: bool = False
    functions: Functions | None = None
    cascades: list[CascadePlan] = []


class CancelWork(Struct, frozen=True, kw_only=True):
    """`infaas.workshop.<worker>.cancel`: stop what is being done for this registration. Nothing more is reported of it."""

    registration: str


class ModelInspected(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.inspected`: the result of an inspection.

    source, validation: content-addressed keys in the artifacts bucket. fixed_batch: the model takes only batches of 1. most_batch: items of
    a batch at most; 0: not known. alone: why the model takes one item at a time; empty: it takes batches.
    operators: operator types, for the generator's rules. frameworks: for each backend name, why this worker cannot run it; empty if it can.
    """

    registration: str
    worker: str
    hardware: str
    source: str
    validation: str
    signature: Signature
    operators: list[str]
    fixed_batch: bool
    samples: int
    baseline_accuracy: float
    frameworks: dict[str, str]
    most_batch: int = 0
    alone: str = ""
    functions: Functions | None = None


class VariantBuilt(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.built`: one variant was built, verified and profiled. accuracy_low, accuracy_high, contexts,
    alone, differing, functions, distribution, cascade: as in its record; where items are computed alone, the record's largest batch is 1, whatever was planned.
    """

    registration: str
    worker: str
    hardware: str
    plan: VariantPlan
    artifact: str
    accuracy: float
    agreement: float | None
    profile: Profile
    differing: dict[str, float] = {}
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    contexts: int = 1
    alone: str = ""
    functions: Functions | None = None
    distribution: str = ""
    cascade: Cascade | None = None


class VariantFailed(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.variant-failed`: this variant could not be built. The work on other variants continues."""

    registration: str
    worker: str
    plan: VariantPlan
    reason: str


class WorkProgress(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.progress`: the progress of the current order. progress: 0..1."""

    registration: str
    worker: str
    step: str
    progress: float


class WorkFinished(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.finished`: the order ended. reason: why it failed as a whole; None if it did not.

    lost: the worker gave up the order without a failure, so another worker may carry it out.
    """

    registration: str
    worker: str
    order: str
    reason: str | None = None
    lost: bool = False


class RegistrarHeartbeat(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.registrar.alive`, every second: registrar -> registrars. When it stops, another registrar takes over its registrations."""

    registrar: str
    leaving: bool = False


class ArtifactsKept(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.kept`: registrar -> executors. All files of versions that were registered at this time, by digest: older copies of others go."""

    artifacts: list[str]
    time: float


class PlaceContainer(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.container`: is this process, which nobody has measured yet, a new version or a replica? The reply: `ContainerPlace`.

    request: what it would be registered with. metric: as its user has given it; None: not given.
    """

    request: Register
    metric: str | None = None


class ContainerPlace(Struct, frozen=True, kw_only=True):
    """The place of a process. variant: it is one more replica of this one; None: it is a new version.

    signature: of its app; None: its app is new. reference: key in the artifacts bucket of the answers of the version's first process, with
    which a replica must agree to a share of `agreement` at least.
    """

    version: str
    signature: Signature | None
    agreement: float
    variant: VariantRecord | None = None
    reference: str = ""
