"""One registration on its way to the catalogue: its orders to workers, their results, and the records that it becomes.

The last status of each is published at each step, and kept in the status bucket at most once a second, the last one always.
"""

import hashlib
from collections.abc import Iterable
from math import isfinite
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from bus.codec import decode_kept
from bus.fields import filled
from bus.messages.catalog import AppRecord, ModelRecord, VariantRecord
from bus.messages.public import ContainerReport, RegistrationStatus, VariantFailure
from bus.messages.work import (
    BuildVariants,
    CascadePlan,
    InspectModel,
    ModelInspected,
    VariantBuilt,
    VariantFailed,
    VariantPlan,
    WorkProgress,
)
from bus.subjects import WITHOUT_APP, Subjects
from services.core.actor import NOTHING, Do, Effect, Publish
from services.core.catalog import Catalog
from services.core.placement import REMOTE, container_kind
from services.core.requests import Commands
from services.core.settings import RegistrarSettings
from services.registrar.checks import CONTAINER
from services.registrar.commands import (
    AddVariants,
    LinkVersion,
    PutRecords,
    PutStatus,
    RegistrationRecord,
)
from services.registrar.policy import (
    CASCADE,
    NATIVE,
    adds_integers,
    cascades,
    defect,
    mark_dominated,
    named_for,
    simulated_variants,
    variant_name,
)

INSPECTED_AT = 0.1  # share of the whole that inspection counts for
BUILT_AT = 0.98

Ended = Literal["failed", "cancelled"]
Phase = Literal["waiting", "inspect", "build", "write", "over"]


class Registration:
    """The state of one registration; only the registrar changes it.

    phase: what is under way; "waiting": no worker has an order. worker: who has the order; avoid: who had the last one. heard_at: Unix
    seconds at which that worker last reported (while waiting: at which any worker was last alive). attempts: orders given for this phase.
    first: whether its first variant is in the catalogue, so that the app answers while the others are built. withdrawn: it is cancelled as soon as
    that is known.
    """

    def __init__(self, record: RegistrationRecord, now: float) -> None:
        request = record.request
        self.record = record
        self.phase: Phase = "waiting"
        self.worker: str | None = None
        self.avoid: str | None = None
        self.heard_at = now
        self.attempts = 0
        self.undelivered_since: float | None = None  # since when no workshop takes the order
        self.inspected: ModelInspected | None = None
        self.built: dict[str, VariantBuilt] = {}
        self.failures: dict[str, str] = {}
        self.plans: dict[str, VariantPlan] = {}
        self.simulated: tuple[VariantRecord, ...] = ()
        self.recorded = ("", "")  # state and step that an event was recorded of last
        self.first: Literal["", "writing", "written"] = ""
        self.withdrawn = False
        self.cascades: list[CascadePlan] | None = None  # to try; None: not known yet
        self.status = RegistrationStatus(
            registration=record.registration,
            state="accepted",
            app=request.app,
            model=request.model,
            version=record.version,
            step="waiting for a worker",
            dry_run=request.dry_run,
        )

    @property
    def id(self) -> str:
        return self.record.registration

    @property
    def version(self) -> str:
        assert self.record.version is not None, "a registration is claimed with its version"
        return self.record.version

    @property
    def hardware(self) -> str:
        """The kind of device that its variants are for."""
        return self.record.hardware

    @property
    def extends(self) -> bool:
        """Whether the model is registered already, and gets variants for another kind of device."""
        return self.record.extends

    @property
    def remaining(self) -> list[VariantPlan]:
        """Plans without a result yet."""
        return [plan for name, plan in self.plans.items() if name not in self.built and name not in self.failures]

    # -- orders

    def order(self, worker: str, now: float, settings: RegistrarSettings) -> InspectModel | BuildVariants:
        """Assign it to this worker; returns the order to send."""
        self.worker, self.heard_at = worker, now
        self.attempts += 1
        request = self.record.request
        if self.inspected is None:
            self.phase = "inspect"
            self._advance("inspecting", f"inspecting on {worker}", self.status.progress)
            return filled(
                InspectModel,
                request,
                registration=self.id,
                allow_torchscript=settings.allow_torchscript,
                stored=self.extends or request.remeasures is not None,
                hardware=self.hardware,
                keep=not request.dry_run,
            )
        self.phase = "build"
        step = "looking for a cascade" if self.cascades else f"building {len(self.remaining)} variants"
        self._advance("building", f"{step} on {worker}", INSPECTED_AT)
        return filled(
            BuildVariants,
            self.inspected,
            request,
            registration=self.id,
            version=self.version,
            plans=[] if self.cascades else self.remaining,
            cascades=self.cascades or [],
            allow_torchscript=settings.allow_torchscript,
        )

    def wait(self, step: str, now: float) -> None:
        """Take the order back: another worker gets it, or the same one later."""
        self.avoid, self.worker, self.phase, self.heard_at = self.worker, None, "waiting", now
        self.status = replace(self.status, step=step)

    # -- reports

    def set_inspection(self, inspected: ModelInspected, plans: list[VariantPlan]) -> None:
        """The model was inspected; these variants are to be built."""
        self.inspected = inspected
        self.plans = {plan.variant: plan for plan in plans}
        self.attempts = 0

    def set_container(self, report: ContainerReport, settings: RegistrarSettings) -> None:
        """A user's own process has measured itself: its only variant needs no work of a worker."""
        request = self.record.request
        hardware = container_kind(request.model, self.version)
        plan = VariantPlan(
            variant=variant_name(request.model, self.version, CONTAINER, NATIVE, 1, report.max_batch),
            framework=CONTAINER,
            precision=NATIVE,
            threads=1,
            max_batch=report.max_batch,
            format=CONTAINER,
            hardware=hardware,
        )
        self.set_inspection(
            ModelInspected(
                registration=self.id,
                worker="",
                hardware=hardware,
                source=request.object,
                validation="",
                signature=report.signature,
                operators=[],
                fixed_batch=report.max_batch == 1,
                samples=0,
                baseline_accuracy=report.accuracy,
                frameworks={},
            ),
            [plan],
        )
        where = {"registration": self.id, "worker": "", "hardware": hardware}
        built = filled(VariantBuilt, report, plan=plan, artifact=request.object, agreement=1.0, **where)
        self.add_result(built, settings)

    def set_progress(self, report: WorkProgress) -> None:
        share = min(1.0, max(0.0, report.progress)) if isfinite(report.progress) else 0.0
        if self.phase == "inspect":
            self._advance("inspecting", report.step, share * INSPECTED_AT)
        else:
            done = 1 - len(self.remaining) / max(1, len(self.plans))
            self._advance(
                "profiling" if "profil" in report.step.lower() else "building",
                report.step,
                INSPECTED_AT + max(share, done) * (BUILT_AT - INSPECTED_AT),
            )

    def add_result(self, report: VariantBuilt | VariantFailed, settings: RegistrarSettings) -> bool:
        """One variant was built or failed; False when it was not ordered, or its result is known."""
        name = report.plan.variant
        if self.plans.get(name) not in self.remaining:
            return False
        reason = report.reason if isinstance(report, VariantFailed) else defect(report, settings)
        if reason is None and isinstance(report, VariantBuilt):
            self.built[name] = report
        else:
            self.failures[name] = reason or "it failed without a reason"
        done = 1 - len(self.remaining) / len(self.plans)
        self._advance("profiling", self.ready(), INSPECTED_AT + done * (BUILT_AT - INSPECTED_AT))
        return True

    def ready(self) -> str:
        """How many variants there are, and whether they answer."""
        count = f"{len(self.built)} of {len(self.plans)} variants ready"
        return f"{self.status.app} answers queries: {count}" if self.first == "written" else count

    def fail_remaining(self, reason: str) -> None:
        """A cascade that was not found is no failure."""
        for plan in self.remaining:
            if plan.precision == CASCADE:
                del self.plans[plan.variant]
            else:
                self.failures[plan.variant] = reason

    def add_cascades(self, catalog: Catalog, settings: RegistrarSettings) -> bool:
        """Once its own variants are measured: whether cascades of them, and of those of the app's other models, are to be tried."""
        app, inspected = catalog.app(self.record.request.app), self.inspected
        if not settings.cascades or self.cascades is not None or inspected is None:
            return False
        if self.record.joins:
            model = catalog.model(self.record.request.model, self.version)
            self.cascades = [] if app is None or model is None else rejoined(catalog, app, model)
        elif self.extends or not self.built:
            return False
        else:
            self.cascades = _pairs(catalog, app, self._model(inspected), self._measured())
        self.plans |= {one.plan.variant: one.plan for one in self.cascades}
        self.attempts = 0
        return bool(self.cascades)

    def end(self, reason: str | None = None, state: Ended = "failed") -> None:
        """It is done, or failed or cancelled with this reason."""
        self.phase, self.worker = "over", None
        if reason is None:
            self.status = replace(self._results(), state="done", progress=1.0, step="done")
        else:
            self.status = replace(self._results(), state=state, step=state, reason=reason, variants=[])

    def end_dry_run(self, inspected: ModelInspected, plans: list[VariantPlan]) -> None:
        """The inspection succeeded, and nothing is to be kept."""
        self.end()
        self.status = replace(
            self.status,
            variants=[plan.variant for plan in plans],
            signature=inspected.signature,
            accuracy=inspected.baseline_accuracy,
            samples=inspected.samples,
        )

    def _advance(self, state: Literal["inspecting", "building", "profiling"], step: str, progress: float) -> None:
        """State and progress never go back, even when a step is repeated."""
        order = ("accepted", "inspecting", "building", "profiling")
        self.status = replace(
            self._results(),
            state=max(self.status.state, state, key=order.index),
            step=step,
            progress=max(self.status.progress, progress),
        )

    def _results(self) -> RegistrationStatus:
        return replace(
            self.status,
            variants=[*dict.fromkeys(map(self._name, self.built)), *(record.variant for record in self.simulated)],
            failures=[VariantFailure(variant=name, reason=reason) for name, reason in self.failures.items()],
        )

    def _name(self, planned: str) -> str:
        """The name of a variant that was built. One that computes items alone has it from that, too."""
        most = self.plans[planned].max_batch
        return f"{planned.removesuffix(f'-b{most}')}-b1" if self.built[planned].alone else planned

    # -- reasons of failure

    def no_worker(self) -> str:
        """Why no worker gets the order."""
        if self.hardware == REMOTE:
            return "no worker may use remote engines; have the operator name their hosts in executor.remote_hosts"
        if self.extends:
            return f"no worker with a {self.hardware} is alive any more"
        return "no worker is alive that could build it; start one with `infaas run monitor executor`"

    def no_variant(self) -> str | None:
        """Why not one variant works, in one line; None: it has only looked for a cascade."""
        if self.record.joins:
            return None
        reasons = list(dict.fromkeys(self.failures.values()))
        more = f" (and {len(reasons) - 3} more reasons)" if len(reasons) > 3 else ""
        return f"no variant works: {'; '.join(reasons[:3])}{more}"

    # -- records

    def add_simulated(self, kinds: set[str]) -> None:
        """Derive the variants for simulated devices of these kinds from those that were measured."""
        self.simulated = simulated_variants(self._measured(), kinds)

    def _measured(self) -> tuple[VariantRecord, ...]:
        inspected, request = self.inspected, self.record.request
        assert inspected is not None, "records follow an inspection"
        own = self.record.model_accuracy
        own = inspected.baseline_accuracy if own is None else own
        built_names = {self._name(planned): planned for planned in self.built}
        found = [
            filled(
                VariantRecord,
                built,
                plan,
                inspected,
                request,
                variant=variant,
                version=self.version,
                max_batch=1 if built.alone else plan.max_batch,
                model_accuracy=own,
                arithmetic=built.profile.host.get("arithmetic", "") if adds_integers(plan, inspected) else "",
                alone=built.alone or inspected.alone,
                remeasured=self.record.created if request.container and request.remeasures else 0.0,
            )
            for variant, name in built_names.items()
            for built, plan in ((self.built[name], self.plans[name]),)
        ]
        joined = {(*one.cascade.parts, one.plan.variant): one for one in self.cascades or ()}
        made = [
            filled(VariantRecord, joined[*one.cascade.parts, one.variant], one, cascade=one.cascade)
            for one in found
            if one.cascade is not None
        ]
        return (*mark_dominated(one for one in found if one.cascade is None), *made)

    def records(self, newest: bool, *, held: bool) -> PutRecords:
        """The records for the catalogue. newest: the app serves no later version of the model. held: it is not linked yet."""
        assert self.inspected is not None, "records follow an inspection"
        variants = (*self._measured(), *self.simulated)
        link = self.link(self.inspected) if newest and not held else None
        return PutRecords(variants=variants, model=replace(self._model(self.inspected), held=held), link=link)

    def _model(self, inspected: ModelInspected) -> ModelRecord:
        names = {"version": self.version, "created": self.record.created, "registration": self.id}
        return filled(ModelRecord, inspected, self.record.request, **names)

    def additions(self) -> AddVariants:
        """The records for the catalogue, of a model that is there already."""
        request, variants = self.record.request, (*self._measured(), *self.simulated)
        distribution = request.validation if request.container is not None and variants[0].distribution else ""
        return AddVariants(model=request.model, version=self.version, variants=variants, distribution=distribution)

    def link(self, inspected: ModelInspected) -> LinkVersion | None:
        """The change of the app's record that was asked for; None for a model without an app."""
        request = self.record.request
        if request.app == WITHOUT_APP:
            return None
        return filled(LinkVersion, request, record=self._model(inspected), create=True)


def _pairs(
    catalog: Catalog, app: AppRecord | None, model: ModelRecord, own: Iterable[VariantRecord]
) -> list[CascadePlan]:
    """Cascades to try of this version's own variants and those of the app's other models."""
    links = [] if app is None else [link for link in sorted(app.links.items()) if link[0] != model.model]
    alike = [link for link in links if (one := catalog.model(*link)) is not None and _measured_alike(one, model)]
    others = [one for link in alike for one in catalog.variants_at(*link)]
    if app is not None:  # one with another version of this model serves no more once this one does
        stay = set(app.links.items()) - {(model.model, app.links.get(model.model))}
        others += [one for one in catalog.cascades_of(app) if stay >= set(one.versions)]
    return cascades(model.model, model.version, own, others)


def rejoined(catalog: Catalog, app: AppRecord, model: ModelRecord) -> list[CascadePlan]:
    """The same of a version that is registered: its name may be that of a cascade with another version, so each has one of its own."""
    found = _pairs(catalog, app, model, catalog.variants_at(model.model, model.version))
    marks = [hashlib.sha256(str(one.cascade.versions).encode()).hexdigest()[:6] for one in found]
    return [
        replace(one, plan=replace(one.plan, variant=named_for(mark, one.plan)))
        for one, mark in zip(found, marks, strict=True)
    ]


def _measured_alike(one: ModelRecord, other: ModelRecord) -> bool:
    """Whether the variants of two versions were measured on the same samples, in the same way."""
    names = ("validation", "inputs_key", "labels_key", "metric", "labels", "allow_nan", "contended", "contexts")
    return all(getattr(one, name) == getattr(other, name) for name in names)


PREFIX = "registration."
SAVE_EVERY_S = 1.0
TIMEOUT_S = 10.0
OVER = ("done", "failed", "cancelled")
KEPT = 1000  # of those that have ended: the latest,
KEPT_OF_EACH = 4  # and so many for each registered version: what failed on a kind of device is not tried again
AT_ONCE = 100  # are forgotten


class RegistrationStatuses(Struct, eq=False):
    """The last status of each registration, this registrar's and others'.

    Its own it saves: one write at a time for each registration, the newest status last.
    """

    subjects: Subjects
    commands: Commands
    _last: dict[str, RegistrationStatus] = {}  # what changed last comes last, as in the bucket
    _own: set[str] = set()
    _saving: dict[str, RegistrationStatus] = {}
    _wanted: dict[str, tuple[float, RegistrationStatus]] = {}  # when it was to be saved, and what

    def last(self, registration: str) -> RegistrationStatus | None:
        return self._last.get(registration)

    def apply(self, registration: str, value: bytes | None) -> None:
        """Take what the bucket holds. Of its own registrations this registrar knows newer statuses."""
        if registration in self._own:
            return
        self._last.pop(registration, None)
        if (status := decode_kept(RegistrationStatus, value)) is not None:
            self._last[registration] = status

    def forget(self, registration: str) -> None:
        """The bucket has it no more."""
        self._own.discard(registration)
        self._last.pop(registration, None)

    def forget_oldest(self, catalog: Catalog) -> list[Effect]:
        """Of those that have ended only the latest are remembered."""
        ended = [one for one, status in self._last.items() if status.state in OVER and one not in self._wanted]
        beyond = len(ended) - KEPT - KEPT_OF_EACH * sum(1 for _ in catalog.models)
        oldest = ended[: max(0, min(beyond, AT_ONCE))]
        for one in oldest:
            self.forget(one)
        return [Do(("forget", one), PutStatus(one, None), TIMEOUT_S) for one in oldest]

    def publish(self, status: RegistrationStatus, now: float) -> tuple[Effect, ...]:
        """Publish a status of this registrar's, and save it when the state is new or the last save is old."""
        registration = status.registration
        self._own.add(registration)
        self._last.pop(registration, None)
        self._last[registration] = status
        effect = Publish(self.subjects.registration(registration), status)
        wanted = self._wanted.get(registration)
        if wanted is None or wanted[1].state != status.state or now - wanted[0] >= SAVE_EVERY_S:
            self._wanted[registration] = (now, status)
            if registration not in self._saving:
                return effect, self._save(status)
        return (effect,)

    def saved(self, registration: str) -> tuple[Effect, ...]:
        """A save has ended; another one begins if there is something newer to save."""
        newest = self._wanted[registration][1]
        if self._saving.pop(registration) is not newest:
            return (self._save(newest),)
        self.commands.ended(("status", registration))
        if newest.state in OVER:
            del self._wanted[registration]
        return NOTHING

    def _save(self, status: RegistrationStatus) -> Effect:
        self._saving[status.registration] = status
        return self.commands.start(
            Do(("status", status.registration), PutStatus(status.registration, status), TIMEOUT_S)
        )
