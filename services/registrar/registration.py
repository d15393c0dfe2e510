"""One registration on its way: what was ordered, what came back, and what it becomes. Pure; only the registrar changes it."""

from math import isfinite
from typing import Literal

from msgspec.structs import replace

from bus.messages.catalog import ModelRecord, Signature, VariantRecord
from bus.messages.public import RegistrationStatus, VariantFailure
from bus.messages.work import (
    BuildVariants,
    InspectModel,
    ModelInspected,
    VariantBuilt,
    VariantFailed,
    VariantPlan,
    WorkProgress,
)
from bus.subjects import WITHOUT_APP
from services.core.catalog import mark_dominated
from services.registrar.commands import AddVariants, LinkModel, PutRecords, RegistrationRecord
from services.registrar.policy import Rules, simulated_variants, why_not

INSPECTED_AT = 0.1  # share of the whole that inspection counts for
BUILT_AT = 0.98

Phase = Literal["waiting", "inspect", "build", "write", "over"]


class Registration:
    """phase: what is under way; "waiting" for a worker to give the next order to.

    worker, heard: who has the order, and when it last said something (waiting: when a worker was last alive).
    attempts: orders given for this step.
    """

    def __init__(self, work: RegistrationRecord, now: float) -> None:
        request = work.request
        self.work = work
        self.phase: Phase = "waiting"
        self.worker: str | None = None
        self.avoid: str | None = None
        self.heard = now
        self.attempts = 0
        self.unheard_since: float | None = None  # first time that nobody took the order
        self.inspected: ModelInspected | None = None
        self.built: dict[str, VariantBuilt] = {}
        self.failures: dict[str, str] = {}
        self.plans: dict[str, VariantPlan] = {}
        self.simulated: tuple[VariantRecord, ...] = ()
        self.recorded = ""  # the last state that went into history
        self.status = RegistrationStatus(
            registration=work.registration,
            state="accepted",
            app=request.app,
            model=request.model,
            version=work.version,
            step="waiting for a worker",
        )

    @property
    def id(self) -> str:
        return self.work.registration

    @property
    def version(self) -> str:
        assert self.work.version is not None, "a registration is claimed with its version"
        return self.work.version

    @property
    def hardware(self) -> str:
        """The kind of device that its variants are for."""
        return self.work.hardware

    @property
    def fitting(self) -> bool:
        """Whether the model is registered already, and gets variants for another kind of device."""
        return self.work.hardware != "cpu"

    @property
    def remaining(self) -> list[VariantPlan]:
        """Plans without a result yet."""
        return [plan for name, plan in self.plans.items() if name not in self.built and name not in self.failures]

    # -- orders

    def order(self, worker: str, now: float, rules: Rules) -> InspectModel | BuildVariants:
        """The order to give to this worker now."""
        self.worker, self.heard = worker, now
        self.attempts += 1
        request = self.work.request
        if self.inspected is None:
            self.phase = "inspect"
            self._say("inspecting", f"inspecting on {worker}", self.status.progress)
            return InspectModel(
                registration=self.id,
                format=request.format,
                object=request.object,
                validation=request.validation,
                inputs_key=request.inputs_key,
                labels_key=request.labels_key,
                metric=request.metric,
                allow_torchscript=rules.allow_torchscript,
                stored=self.fitting,
                hardware=self.hardware,
            )
        self.phase = "build"
        self._say("building", f"building {len(self.remaining)} variants on {worker}", INSPECTED_AT)
        return BuildVariants(
            registration=self.id,
            model=request.model,
            version=self.version,
            format=request.format,
            source=self.inspected.source,
            validation=self.inspected.validation,
            inputs_key=request.inputs_key,
            labels_key=request.labels_key,
            metric=request.metric,
            signature=self.inspected.signature,
            plans=self.remaining,
            allow_torchscript=rules.allow_torchscript,
        )

    def wait(self, step: str, now: float) -> None:
        """Give the order up: another worker, or the same one later, gets it."""
        self.avoid, self.worker, self.phase, self.heard = self.worker, None, "waiting", now
        self.status = replace(self.status, step=step)

    # -- facts

    def take_inspection(self, inspected: ModelInspected, plans: list[VariantPlan]) -> None:
        """The model is what it says; these variants are to be tried."""
        self.inspected = inspected
        self.plans = {plan.variant: plan for plan in plans}
        self.attempts = 0

    def take_progress(self, fact: WorkProgress) -> None:
        share = min(1.0, max(0.0, fact.progress)) if isfinite(fact.progress) else 0.0
        if self.phase == "inspect":
            self._say("inspecting", fact.step, share * INSPECTED_AT)
        else:
            done = 1 - len(self.remaining) / max(1, len(self.plans))
            self._say(
                "profiling" if "profil" in fact.step.lower() else "building",
                fact.step,
                INSPECTED_AT + max(share, done) * (BUILT_AT - INSPECTED_AT),
            )

    def take_result(self, fact: VariantBuilt | VariantFailed, rules: Rules) -> bool:
        """One variant's end; False when it was not asked for or is known already."""
        name = fact.plan.variant
        if self.plans.get(name) not in self.remaining:
            return False
        reason = fact.reason if isinstance(fact, VariantFailed) else why_not(fact, rules)
        if reason is None and isinstance(fact, VariantBuilt):
            self.built[name] = fact
        else:
            self.failures[name] = reason or "it failed without a reason"
        done = 1 - len(self.remaining) / len(self.plans)
        self._say(
            "profiling",
            f"{len(self.built)} of {len(self.plans)} variants ready",
            INSPECTED_AT + done * (BUILT_AT - INSPECTED_AT),
        )
        return True

    def give_up_remaining(self, reason: str) -> None:
        for plan in self.remaining:
            self.failures[plan.variant] = reason

    def end(self, reason: str | None = None) -> None:
        """Done, or failed with this reason."""
        self.phase, self.worker = "over", None
        if reason is None:
            self.status = replace(self._results(), state="done", progress=1.0, step="done")
        else:
            self.status = replace(self._results(), state="failed", step="failed", reason=reason, variants=[])

    def _say(self, state: Literal["inspecting", "building", "profiling"], step: str, progress: float) -> None:
        """States and progress only ever go forward, also when a step is repeated."""
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
            variants=[*self.built, *(record.variant for record in self.simulated)],
            failures=[VariantFailure(variant=name, reason=reason) for name, reason in self.failures.items()],
        )

    # -- result

    def nobody(self) -> str:
        """Why it waits in vain."""
        if self.fitting:
            return f"no worker with a {self.hardware} is alive any more"
        return "no worker is alive that could build it; start one with `infaas run monitor executor`"

    def no_variant(self) -> str:
        """Why not a single variant works, in one line."""
        reasons = list(dict.fromkeys(self.failures.values()))
        more = f" (and {len(reasons) - 3} more reasons)" if len(reasons) > 3 else ""
        return f"no variant works: {'; '.join(reasons[:3])}{more}"

    def simulate(self, kinds: set[str]) -> None:
        """All variants are measured: those for simulated devices of these kinds follow from them."""
        self.simulated = simulated_variants(self._measured(), kinds)

    def _measured(self) -> tuple[VariantRecord, ...]:
        inspected, request = self.inspected, self.work.request
        assert inspected is not None, "records are written after the build"
        return mark_dominated(
            VariantRecord(
                variant=name,
                model=request.model,
                version=self.version,
                framework=self.plans[name].framework,
                precision=self.plans[name].precision,
                threads=self.plans[name].threads,
                max_batch=self.plans[name].max_batch,
                hardware=built.hardware,
                artifact=built.artifact,
                format=self.plans[name].format,
                accuracy=built.accuracy,
                agreement=built.agreement,
                profile=built.profile,
                signature=inspected.signature,
            )
            for name, built in self.built.items()
        )

    def records(self, now: float, newest: bool) -> PutRecords:
        """What goes into the catalogue. newest: no later version of the model serves the app already."""
        inspected, request = self.inspected, self.work.request
        assert inspected is not None, "records are written after the build"
        model = ModelRecord(
            model=request.model,
            version=self.version,
            task=request.task,
            metric=request.metric,
            format=request.format,
            source=inspected.source,
            validation=inspected.validation,
            signature=inspected.signature,
            created=self.work.created,
            registration=self.id,
            inputs_key=request.inputs_key,
            labels_key=request.labels_key,
            labels=request.labels,
        )
        variants = (*self._measured(), *self.simulated)
        return PutRecords(variants=variants, model=model, link=self.link(inspected.signature, now) if newest else None)

    def additions(self) -> AddVariants:
        """What goes into the catalogue of a model that is there already."""
        return AddVariants(model=self.work.request.model, version=self.version, variants=self._measured())

    def link(self, signature: Signature, now: float) -> LinkModel | None:
        """The change of the app's record that this registration asks for; none where the model stays on its own."""
        request = self.work.request
        if request.app == WITHOUT_APP:
            return None
        return LinkModel(
            app=request.app,
            model=request.model,
            version=self.version,
            signature=signature,
            at=now,
            create=True,
            latency_ms=request.latency_ms,
            default_output=request.default_output,
        )
