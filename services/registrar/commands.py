"""The commands of the registrar's actor to its edge, and their results. A command may be repeated: the second time changes nothing.

Operators' verbs (bus/messages/verbs.py) are commands as they are. They come back as None, Noted, ContextsDeleted or Error.
"""

from typing import Any

from msgspec import Struct

from bus.messages.catalog import ModelRecord, VariantRecord
from bus.messages.public import Code, Error, Register, RegistrationStatus
from bus.messages.quality import ReleaseFigures, ReleaseState, VersionRelease
from bus.messages.work import ArtifactsKept
from services.core.placement import REMOTE

MOST_DEFAULT = 64 * 1024  # bytes of a default output: every service keeps the whole catalogue in memory


def error_of(message: str, code: Code = "bad_request") -> Error:
    """Why a request or a change is refused."""
    return Error(code=code, message=message)


class RegistrationRecord(Struct, frozen=True, kw_only=True):
    """An unfinished registration, kept in the status bucket as `work.<id>` so that it outlives its registrar.

    hardware: the kind of device that its variants are for. cancelled: whoever carries it on ends it. arithmetic: of the CPUs that it is for, of a
    model that is registered already; model_accuracy: of that one, as uploaded. joins: it is for a cascade alone.
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
    joins: bool = False

    @property
    def extends(self) -> bool:
        """Whether the model is registered already, and gets variants for another kind of device, or a cascade (hardware.py)."""
        return bool(self.arithmetic) or self.joins or self.hardware not in ("cpu", REMOTE)


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


class MarkCancelled(Struct, frozen=True):
    """Mark an unfinished registration as cancelled, whoever carries it on; comes back as None, or as Error when there is none."""

    registration: str


class PutStatus(Struct, frozen=True):
    """Keep a registration's status in the status bucket as `registration.<id>`; None: delete that of one that has ended."""

    registration: str
    status: RegistrationStatus | None


class LinkVersion(Struct, frozen=True, kw_only=True):
    """Let an app serve this version of a model. record: of the version.

    create: add the app when it is not there. latency_ms, default_output, slo_target, accuracy: new values of the app's settings, unless None.
    """

    app: str
    record: ModelRecord
    create: bool = False
    latency_ms: float | None = None
    default_output: Any = None
    slo_target: float | None = None
    accuracy: str | None = None


class RefitPlan(Struct, frozen=True, kw_only=True):
    """Name other variants in a pipeline's plan where the apps of its vertices do not serve the planned ones any more."""

    app: str


class StepRelease(Struct, frozen=True, kw_only=True):
    """Let an app's release go over to another state or step, if it is as it was: release, state and step. Comes back as ReleaseMoved, or None."""

    app: str
    was: tuple[str, str, int]
    state: ReleaseState
    step: int
    reason: str


class ReleaseMoved(Struct, frozen=True):
    """An app's release has changed. note: as of `Noted`."""

    app: str
    release: VersionRelease
    note: str = ""


class PutFigures(Struct, frozen=True, kw_only=True):
    """Keep what was counted of an app's release in the control bucket."""

    app: str
    figures: ReleaseFigures


class ContextsDeleted(Struct, frozen=True):
    """What dispatchers must hear: the app's contexts are gone from the selection bucket, or the one with this key."""

    app: str
    key: str = ""


class PutRecords(Struct, frozen=True, kw_only=True):
    """Write a registration's result: variants, then the model, then the app's link; comes back as None or Error.

    link None: the app stays as it is, because it serves a newer version already.
    """

    variants: tuple[VariantRecord, ...]
    model: ModelRecord
    link: LinkVersion | None


class AddVariants(Struct, frozen=True, kw_only=True):
    """Write more variants of a registered version, or one that was measured anew; comes back as None, or as Error when the version was deleted.

    distribution: an upload, which becomes that of the first variant; empty: it has one.
    """

    model: str
    version: str
    variants: tuple[VariantRecord, ...]
    distribution: str = ""


class ChangeSimulated(Struct, frozen=True, kw_only=True):
    """Write the simulated variants in `add` that are not there yet, and delete those that `drop` names."""

    add: tuple[VariantRecord, ...]
    drop: tuple[str, ...]


class Noted(Struct, frozen=True):
    """The change was carried out, and the sender is to know what else became of it."""

    note: str


class Pruned(Struct, frozen=True):
    """What became of `Prune`, or of a deletion after which it was done. kept: what workers hear; None: nothing was deleted."""

    note: str
    kept: ArtifactsKept | None = None


class Finish(Struct, frozen=True, kw_only=True):
    """Delete what an ended registration leaves: its uploads, its reserved version, its `work.<id>`. forget: its status, too.

    withdraw: what it has written into the catalogue as well, if the app can do without.
    """

    registration: str
    model: str
    version: str
    uploads: tuple[str, ...]
    forget: bool = False
    withdraw: bool = False
