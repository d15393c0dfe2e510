"""Registration work done on a worker: the registrar orders, the worker's workshop builds and profiles in a sandbox."""

from msgspec import Struct

from bus.messages.catalog import Profile, Signature


class VariantPlan(Struct, frozen=True, kw_only=True):
    """One variant to build: what the generator decided. Plans that differ only in threads or max_batch share an artifact.

    hardware: the kind of device that it is measured on and runs on.
    """

    variant: str
    framework: str
    precision: str
    threads: int
    max_batch: int
    format: str
    hardware: str = "cpu"


class InspectModel(Struct, frozen=True, kw_only=True):
    """`infaas.workshop.<worker>`: is this file what it says, does it run, what does it take?

    Object keys are in the uploads bucket; stored: in the artifacts bucket, since the model is registered already. hardware: the
    kind of device for whose frameworks the worker is to look as well.
    """

    registration: str
    format: str
    object: str
    validation: str
    inputs_key: str
    labels_key: str
    metric: str
    allow_torchscript: bool = False
    stored: bool = False
    hardware: str = "cpu"


class BuildVariants(Struct, frozen=True, kw_only=True):
    """`infaas.workshop.<worker>`: build, prove and profile these variants of an inspected model."""

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


class ModelInspected(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.inspected`: source and validation are the content-addressed keys in the artifacts bucket.

    fixed_batch: the model takes no batch but 1, whatever was tried. operators: op types, for the generator's rules.
    frameworks: what this worker can run, by backend name, and why not otherwise.
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


class VariantBuilt(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.built`: one variant was built, proved and profiled."""

    registration: str
    worker: str
    hardware: str
    plan: VariantPlan
    artifact: str
    accuracy: float
    agreement: float
    profile: Profile


class VariantFailed(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.variant-failed`: this one could not be built; the others go on."""

    registration: str
    worker: str
    plan: VariantPlan
    reason: str


class WorkProgress(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.progress`: 0..1 of the current order."""

    registration: str
    worker: str
    step: str
    progress: float


class WorkFinished(Struct, frozen=True, kw_only=True):
    """`infaas.registrar.finished`: the order is done; reason is set when it failed as a whole.

    lost: it was laid down, not failed; somebody else may carry it out.
    """

    registration: str
    worker: str
    order: str
    reason: str | None = None
    lost: bool = False


class RegistrarHeartbeat(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.registrar.alive`, every second: registrar -> registrars. When it stops, another one takes its registrations over."""

    registrar: str
    leaving: bool = False
