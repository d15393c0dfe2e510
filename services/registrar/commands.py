"""The commands of the registrar's actor to its edge, and their results. A command may be repeated: the second time changes nothing."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from bus.messages.catalog import (
    BatchingRule,
    Ensemble,
    ModelRecord,
    PipelinePlan,
    PipelineRecord,
    VariantRecord,
)
from bus.messages.public import Code, Register, RegistrationStatus
from services.core.placement import REMOTE


class RegistrationRecord(Struct, frozen=True, kw_only=True):
    """An unfinished registration, kept in the status bucket as `work.<id>` so that it outlives its registrar.

    hardware: the kind of device that its variants are for. cancelled: whoever carries it on ends it. arithmetic: of the CPUs that it is for, of a
    model that is registered already; model_accuracy: of that one, as uploaded.
    """

    registration: str
    request: Register
    registrar: str
    created: float
    version: str | None = None
    hardware: str = "cpu"
    cancelled: bool = False
    arithmetic: str = ""
    model_accuracy: float | None = None

    @property
    def extends(self) -> bool:
        """Whether the model is registered already, and gets variants for another kind of device (hardware.py)."""
        return bool(self.arithmetic) or self.hardware not in ("cpu", REMOTE)


class ClaimRegistration(Struct, frozen=True, kw_only=True):
    """Keep this registration and reserve its version; comes back as RegistrationClaimed or AlreadyTaken.

    next_version: the first number to try when the request names no version.
    """

    record: RegistrationRecord
    next_version: int


class RegistrationClaimed(Struct, frozen=True):
    """The registration is kept, with this version."""

    record: RegistrationRecord


class AlreadyTaken(Struct, frozen=True):
    """Another registration holds this id or version. field: "registration" or "version"."""

    field: str


class TakeOverRegistration(Struct, frozen=True, kw_only=True):
    """Make a registrar the owner of a registration whose owner `previous` is gone.

    Comes back as RegistrationRecord, or as None when another registrar was faster.
    """

    registration: str
    registrar: str
    previous: str


class MarkCancelled(Struct, frozen=True):
    """Mark an unfinished registration as cancelled, whoever carries it on; comes back as None, or as ChangeRefused when there is none."""

    registration: str


class PutStatus(Struct, frozen=True):
    """Keep a registration's status in the status bucket as `registration.<id>`."""

    status: RegistrationStatus


class LinkModel(Struct, frozen=True, kw_only=True):
    """Let an app serve this version of a model. record: of the version.

    create: add the app when it is not there. linked: refuse unless the app links the model already. latency_ms, default_output,
    slo_target, accuracy: new values of the app's settings, unless None.
    """

    app: str
    record: ModelRecord
    at: float
    create: bool = False
    linked: bool = False
    latency_ms: float | None = None
    default_output: Any = None
    slo_target: float | None = None
    accuracy: str | None = None


class AddApp(Struct, frozen=True, kw_only=True):
    """A new app without models; its first model fixes the signature."""

    app: str
    at: float
    latency_ms: float | None = None
    default_output: Any = None
    min_instances: int = 1
    input_type: str | None = None
    slo_target: float | None = None
    accuracy: str | None = None


class SetApp(Struct, frozen=True, kw_only=True):
    """Change settings of an app; what is UNSET stays as it is, what is None is taken back."""

    app: str
    latency_ms: float | UnsetType | None = UNSET
    default_output: Any = UNSET
    min_instances: int | UnsetType | None = UNSET
    input_type: str | UnsetType | None = UNSET
    slo_target: float | UnsetType | None = UNSET
    accuracy: str | UnsetType | None = UNSET


class SetSelection(Struct, frozen=True, kw_only=True):
    """Let several models of an app answer together, as `selection` says; None: one variant answers each query, as before."""

    app: str
    selection: Ensemble | None


class SetReplicas(Struct, frozen=True, kw_only=True):
    """The least number of instances of the best variant of a model that an app links; 0: none are kept for their own sake.

    model None: of the app, whichever model they are of (`min_instances`).
    """

    app: str
    model: str | None
    count: int


class SetPipeline(Struct, frozen=True, kw_only=True):
    """Let a graph of other apps answer the queries of an app, which is made if it is not there. slo_target None: as it is."""

    app: str
    pipeline: PipelineRecord
    latency_ms: float
    at: float
    slo_target: float | None = None


class DeployPipeline(Struct, frozen=True, kw_only=True):
    """Serve a pipeline by this plan; None: by none, as any other app. refit: it is deployed already, for profiles of other versions."""

    app: str
    plan: PipelinePlan | None
    refit: bool = False


class RefitPlan(Struct, frozen=True, kw_only=True):
    """Name other variants in a pipeline's plan where the apps of its vertices do not serve the planned ones any more."""

    app: str


class DeleteApp(Struct, frozen=True, kw_only=True):
    """Delete an app; its models stay, for other apps and for queries by model."""

    app: str


class UnlinkModel(Struct, frozen=True, kw_only=True):
    """Stop serving a model for an app."""

    app: str
    model: str


AppChange = LinkModel | AddApp | SetApp | SetSelection | SetReplicas
PipelineChange = SetPipeline | DeleteApp | UnlinkModel | DeployPipeline | RefitPlan
Change = AppChange | PipelineChange
DependentChange = LinkModel | PipelineChange  # the app's record after these depends on other records of the catalogue


class ChangeApp(Struct, frozen=True):
    """Carry out one change of an app's record; comes back as None, Noted or ChangeRefused."""

    change: Change


class ChangeApps(Struct, frozen=True):
    """Carry out one change each of several apps' records; comes back as None or the first ChangeRefused."""

    changes: tuple[Change, ...]


class ReleaseVariant(Struct, frozen=True, kw_only=True):
    """End a variant's quarantine on all workers, or on one; comes back as None or ChangeRefused."""

    variant: str
    worker: str | None = None


class ResetSelection(Struct, frozen=True, kw_only=True):
    """Forget what an app's selection policy has learnt, in one context or at all; comes back as ContextsDeleted."""

    app: str
    context: str | None = None


class ContextsDeleted(Struct, frozen=True):
    """What dispatchers must hear: the app's contexts are gone from the selection bucket, or the one with this key."""

    app: str
    key: str = ""


class SetBatching(Struct, frozen=True, kw_only=True):
    """Keep a rule of batching in the control bucket (rule None: remove it); comes back as None. scope: services/core/batching.py."""

    scope: str
    name: str
    rule: BatchingRule | None


class DeleteVersion(Struct, frozen=True, kw_only=True):
    """Delete a version of a model that no app serves, and its variants. Its number is never used again.

    Comes back as None or ChangeRefused.
    """

    model: str
    version: str


class PutRecords(Struct, frozen=True, kw_only=True):
    """Write a registration's result: variants, then the model, then the app's link; comes back as None or ChangeRefused.

    link None: the app stays as it is, because it serves a newer version already.
    """

    variants: tuple[VariantRecord, ...]
    model: ModelRecord
    link: LinkModel | None


class AddVariants(Struct, frozen=True, kw_only=True):
    """Write more variants of a registered version; comes back as None, or as ChangeRefused when the version was deleted."""

    model: str
    version: str
    variants: tuple[VariantRecord, ...]


class ChangeSimulated(Struct, frozen=True, kw_only=True):
    """Write the simulated variants in `add` that are not there yet, and delete those that `drop` names."""

    add: tuple[VariantRecord, ...]
    drop: tuple[str, ...]


class Noted(Struct, frozen=True):
    """The change was carried out, and the sender is to know what else became of it."""

    note: str


class ChangeRefused(Struct, frozen=True):
    """The catalogue does not allow the change; code and message are for the sender."""

    code: Code
    message: str


class Finish(Struct, frozen=True, kw_only=True):
    """Delete what an ended registration leaves: its uploads, its reserved version, its `work.<id>`. forget: its status, too."""

    registration: str
    model: str
    version: str | None
    uploads: tuple[str, ...]
    forget: bool = False


Command = (
    ClaimRegistration
    | TakeOverRegistration
    | MarkCancelled
    | PutStatus
    | ChangeApp
    | ChangeApps
    | ReleaseVariant
    | DeleteVersion
    | PutRecords
    | AddVariants
    | Finish
)
