"""What the registrar asks of its edge, and what comes back. Every command may be repeated: the second time changes nothing."""

from typing import Any

from msgspec import Struct

from bus.messages.catalog import ModelRecord, Signature, VariantRecord
from bus.messages.public import Code, Register, RegistrationStatus


class RegistrationRecord(Struct, frozen=True, kw_only=True):
    """An unfinished registration, kept in the status bucket as `work.<id>` so that it outlives its registrar.

    hardware: what its variants are for; another kind than the CPU means that the model is registered already (fitting.py).
    """

    registration: str
    request: Register
    registrar: str
    created: float
    version: str | None = None
    hardware: str = "cpu"


class ClaimRegistration(Struct, frozen=True, kw_only=True):
    """Keep this registration and reserve its version; comes back as RegistrationClaimed or AlreadyTaken.

    next_version: where to look for a free number when the request names no version.
    """

    work: RegistrationRecord
    next_version: int


class RegistrationClaimed(Struct, frozen=True):
    """The registration is kept, with this version."""

    work: RegistrationRecord


class AlreadyTaken(Struct, frozen=True):
    """Another registration holds this id or version. field: "registration" or "version"."""

    field: str


class TakeOverRegistration(Struct, frozen=True, kw_only=True):
    """Make an unfinished registration of a registrar that is gone ours; comes back as RegistrationRecord, or None when somebody was faster."""

    registration: str
    registrar: str
    previous: str


class PutStatus(Struct, frozen=True):
    """Keep a registration's status in the status bucket as `registration.<id>`."""

    status: RegistrationStatus


class LinkModel(Struct, frozen=True, kw_only=True):
    """Let an app serve this version of a model. create: add the app when it is not there. linked: only if the model already is.

    latency_ms and default_output are taken over unless None.
    """

    app: str
    model: str
    version: str
    signature: Signature
    at: float
    create: bool = False
    linked: bool = False
    latency_ms: float | None = None
    default_output: Any = None


class AddApp(Struct, frozen=True, kw_only=True):
    """A new app without models; its first model fixes the signature."""

    app: str
    at: float
    latency_ms: float | None = None
    default_output: Any = None
    min_instances: int = 1
    input_type: str | None = None


class SetApp(Struct, frozen=True, kw_only=True):
    """Other settings for an app that is there; what is None stays as it is."""

    app: str
    latency_ms: float | None = None
    default_output: Any = None
    min_instances: int | None = None
    input_type: str | None = None


class DeleteApp(Struct, frozen=True, kw_only=True):
    """Forget an app; its models stay, for other apps and for queries by model."""

    app: str


class UnlinkModel(Struct, frozen=True, kw_only=True):
    """An app serves this model no longer."""

    app: str
    model: str


Change = LinkModel | AddApp | SetApp | DeleteApp | UnlinkModel


class ChangeApp(Struct, frozen=True):
    """Carry out one change of an app's record; comes back as None or ChangeRefused."""

    change: Change


class ReleaseVariant(Struct, frozen=True, kw_only=True):
    """Let this variant be loaded again where it is quarantined, or on one worker only; comes back as None or ChangeRefused."""

    variant: str
    worker: str | None = None


class DeleteVersion(Struct, frozen=True, kw_only=True):
    """Forget a version of a model that no app serves, and its variants; its number is not given out again.

    Comes back as None or ChangeRefused.
    """

    model: str
    version: str


class PutRecords(Struct, frozen=True, kw_only=True):
    """Write a registration's result: variants, then the model, then the app's link; comes back as None or ChangeRefused.

    link None: a newer version has been linked meanwhile, the app stays as it is.
    """

    variants: tuple[VariantRecord, ...]
    model: ModelRecord
    link: LinkModel | None


class AddVariants(Struct, frozen=True, kw_only=True):
    """Write more variants of a version that is registered; comes back as None, or ChangeRefused when it is no longer."""

    model: str
    version: str
    variants: tuple[VariantRecord, ...]


class ChangeSimulated(Struct, frozen=True, kw_only=True):
    """Write these simulated variants unless they are there, and delete those with the names in drop."""

    add: tuple[VariantRecord, ...]
    drop: tuple[str, ...]


class ChangeRefused(Struct, frozen=True):
    """The catalogue does not allow it."""

    code: Code
    message: str


class Finish(Struct, frozen=True, kw_only=True):
    """Forget an ended registration: its uploads, its reserved version, its `work.<id>`."""

    registration: str
    model: str
    version: str | None
    uploads: tuple[str, ...]


Command = (
    ClaimRegistration
    | TakeOverRegistration
    | PutStatus
    | ChangeApp
    | ReleaseVariant
    | DeleteVersion
    | PutRecords
    | AddVariants
    | Finish
)
