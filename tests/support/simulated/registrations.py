"""Plausible messages for the registrar's tests, and a stage on which its actor plays without a bus."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import (
    AppRecord,
    Ensemble,
    ModelRecord,
    PipelinePlan,
    PipelineRecord,
    PipelineVertex,
    PlannedStage,
    Profile,
    ProfileRow,
    VariantRecord,
)
from bus.messages.fleet import WorkerHeartbeat
from bus.messages.public import Error, Register, RegistrationStatus
from bus.messages.verbs import DeployPipeline, PipelineHead, Prune, ResetSelection, SetPipeline
from bus.messages.work import (
    ArtifactsKept,
    BuildVariants,
    ModelInspected,
    VariantBuilt,
    VariantFailed,
    VariantPlan,
    WorkFinished,
)
from bus.subjects import Subjects
from services.core.actor import (
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Publish,
    Record,
    Recorded,
    Started,
    Synced,
    Tick,
)
from services.core.catalog import Catalog, key_of, selection_key
from services.core.requests import TakeOver
from services.core.settings import RegistrarSettings
from services.registrar.actor import Registrar
from services.registrar.changes import amend
from services.registrar.commands import (
    AddVariants,
    ChangeSimulated,
    ClaimRegistration,
    ContextsDeleted,
    Finish,
    MarkCancelled,
    Pruned,
    PutRecords,
    PutStatus,
    RegistrationClaimed,
    RegistrationRecord,
    error_of,
)
from services.registrar.registration import OVER
from services.registrar.releases import stamped
from tests.support.data import events
from tests.support.data.events import beat, catalog_of, device, floats

SUBJECTS = Subjects("t")
SIGNATURE = floats({"x": [64]}, {"scores": [10]})
REQUEST = Register(
    app="digits", model="mlp", format="onnx", object="r1.model", validation="r1.validation", registration="r1"
)
PROFILE = Profile(
    rows=[ProfileRow(batch=n, p50_ms=1.0 * n, p99_ms=2.0 * n, cpu_ms=1.0 * n, wall_over_cpu=1.0) for n in (1, 8)],
    load_ms=10.0,
    memory_mb=20.0,
    saturation_qps=1000.0,
)


def variant_record(variant: str = "mlp-v1-ort-fp32-t1-b8", **changes: Any) -> VariantRecord:
    given = {"max_batch": 8, "artifact": "aa", "accuracy": 0.9, "profile": PROFILE, "signature": SIGNATURE}
    return events.variant_record(variant=variant, **(given | changes))


def model_record(model: str = "mlp", version: str = "1", **changes: Any) -> ModelRecord:
    given = {"source": "aa", "validation": "bb", "signature": SIGNATURE, "created": 1.0, "registration": "r0"}
    return events.model_record(model=model, version=version, **(given | changes))


def app_record(app: str = "digits", **changes: Any) -> AppRecord:
    return replace(AppRecord(app=app, links={"mlp": "1"}, signature=SIGNATURE), **changes)


def inspected(registration: str = "r1", worker: str = "w1", **changes: Any) -> ModelInspected:
    fact = ModelInspected(
        registration=registration, worker=worker, hardware="cpu", source="aa", validation="bb", signature=SIGNATURE,
        operators=["Gemm", "Relu"], fixed_batch=False, samples=500, baseline_accuracy=0.9,
        frameworks={"ort": "", "torch": "torch is not installed"},
    )  # fmt: skip
    return replace(fact, **changes)


def built(plan: VariantPlan, registration: str = "r1", worker: str = "w1", **changes: Any) -> VariantBuilt:
    fact = VariantBuilt(
        registration=registration, worker=worker, hardware="cpu", plan=plan, artifact="cc", accuracy=0.9,
        agreement=1.0, profile=PROFILE,
    )  # fmt: skip
    return replace(fact, **changes)


def failed(plan: VariantPlan, registration: str = "r1", worker: str = "w1", reason: str = "no luck") -> VariantFailed:
    return VariantFailed(registration=registration, worker=worker, plan=plan, reason=reason)


def finished(
    order: str, registration: str = "r1", worker: str = "w1", reason: str | None = None, lost: bool = False
) -> WorkFinished:
    return WorkFinished(registration=registration, worker=worker, order=order, reason=reason, lost=lost)


def heartbeat(worker: str = "w1", utilisation: float = 0.1, cores: int = 2, **changes: Any) -> WorkerHeartbeat:
    figures = {"memory_mb": 8000, "memory_used_mb": 100, "cores_used": utilisation * cores, "utilisation": utilisation}
    return replace(beat(worker=worker, devices=[device(cores=cores, **figures)]), **changes)


class Stage:
    """One registrar, a clock, what it published, and its edge's commands waiting to be carried out by `perform`."""

    def __init__(
        self, name: str = "a", settings: RegistrarSettings | None = None, buckets: "Stage | None" = None
    ) -> None:
        self.now = 1000.0
        self.sent: list[tuple[str, Any]] = []
        self.records: list[Record] = []
        self.timers: dict[Any, tuple[float, Any]] = {}
        self.commands: list[Do] = []
        # what the two buckets hold
        self.catalog: dict[str, bytes] = {} if buckets is None else buckets.catalog
        self.status: dict[str, bytes] = {} if buckets is None else buckets.status
        self.forgotten: list[Finish] = []
        self.ids = iter(f"made-{n}" for n in range(1000))
        self.registrar = Registrar(name, SUBJECTS, settings or RegistrarSettings(), lambda: next(self.ids))
        self.tell(Started())
        buckets_held = (SUBJECTS.catalog_bucket, self.catalog), (SUBJECTS.status_bucket, self.status)
        for bucket, held in (*buckets_held, (SUBJECTS.control_bucket, {})):
            for key, value in held.items():
                self.tell(Changed(bucket, key, value))
            self.tell(Synced(bucket))

    def tell(self, message: Any, subject: str = "", reply: str = "") -> list[Effect]:
        """Hand one message over; effects go where they belong."""
        effects = list(self.registrar.handle(Envelope(self.now, message, subject, reply)))
        for effect in effects:
            match effect:
                case Publish():
                    self.sent.append((effect.subject, effect.message))
                case Record():
                    self.records.append(effect)
                case After():
                    self.timers[effect.key] = (self.now + effect.delay, effect.message)
                case Do():
                    self.commands.append(effect)
                case _:
                    raise AssertionError(f"unexpected effect {effect}")
        return effects

    def hear(self, *messages: Any) -> None:
        """Hand these over, one after the other."""
        for message in messages:
            self.tell(message)

    def settle(self, *messages: Any) -> None:
        """Hand these over, and carry out what they need."""
        self.hear(*messages)
        self.perform()

    def register(self, request: Register = REQUEST, reply: str = "_INBOX.1") -> Any:
        """Send a registration and carry out what it needs; returns the reply."""
        before = len(self.sent)
        self.tell(request, SUBJECTS.register(), reply)
        self.perform()
        return next((message for subject, message in self.sent[before:] if subject == reply), None)

    def perform(self) -> None:
        """Carry out all commands, also those that follow from their results."""
        while self.commands:
            command = self.commands.pop(0)
            self.tell(Done(command.id, self.carry_out(command.command)))
        self.tell(Recorded(len(self.records)))

    def carry_out(self, command: Any) -> Any:
        """What the edge would do, in one step and without failing."""
        match command:
            case ClaimRegistration(record=record):
                version = record.version or record.request.version or str(command.next_version)
                claimed = replace(record, version=version)
                self.put(SUBJECTS.status_bucket, f"work.{record.registration}", encode(claimed))
                return RegistrationClaimed(claimed)
            case TakeOver():
                record = self.registrar._records[command.work]
                if record.registrar != command.previous:
                    return None
                ours = replace(record, registrar=command.owner)
                self.put(SUBJECTS.status_bucket, f"work.{record.registration}", encode(ours))
                return ours
            case MarkCancelled(registration=registration):
                key = f"work.{registration}"
                if key not in self.status:
                    return error_of("registration: not under way any more")
                marked = replace(decode(RegistrationRecord, self.status[key]), cancelled=True)
                self.put(SUBJECTS.status_bucket, key, encode(marked))
            case PutStatus(registration=registration, status=status):
                self.put(SUBJECTS.status_bucket, f"registration.{registration}", status and encode(status))
            case PutRecords():
                for record in (*command.variants, command.model):
                    self.put(SUBJECTS.catalog_bucket, key_of(record), encode(record))
                return self.change(command.link) if command.link is not None else None
            case AddVariants():
                for record in command.variants:
                    self.put(SUBJECTS.catalog_bucket, key_of(record), encode(record))
            case ChangeSimulated():
                for record in command.add:
                    self.put(SUBJECTS.catalog_bucket, key_of(record), encode(record))
                for name in command.drop:
                    self.put(SUBJECTS.catalog_bucket, f"variant.{name}", None)
            case ResetSelection():
                return ContextsDeleted(
                    command.app, selection_key(command.app, command.context) if command.context is not None else ""
                )
            case Finish():
                self.forgotten.append(command)
                for key in [*self.catalog] if command.withdraw else ():  # all of it is of this registration
                    self.put(SUBJECTS.catalog_bucket, key, None)
                for prefix in ["work"] + ["registration"] * command.forget:
                    self.put(SUBJECTS.status_bucket, f"{prefix}.{command.registration}", None)
            case Prune():
                return Pruned("nothing was deleted", ArtifactsKept(artifacts=[], time=self.now))
            case _:
                return self.change(command)
        return None

    def change(self, change: Any) -> Error | None:
        """By AMENDMENTS, as the edge does."""
        before = self.registrar._catalog.app(change.app)
        after = amend(before, change, self.registrar._catalog)
        if isinstance(after, Error):
            return after
        after = None if after is None else stamped(before, after, self.now)
        self.put(SUBJECTS.catalog_bucket, f"app.{change.app}", None if after is None else encode(after))
        return None

    def put(self, bucket: str, key: str, value: bytes | None) -> None:
        held = self.catalog if bucket == SUBJECTS.catalog_bucket else self.status
        if value is None:
            held.pop(key, None)
        else:
            held[key] = value
        self.tell(Changed(bucket, key, value))

    def ring(self) -> None:
        """Hand over the timers that are due."""
        for key, (at, message) in list(self.timers.items()):
            if at <= self.now and self.timers.get(key) == (at, message):
                del self.timers[key]
                self.tell(message)

    def pass_time(self, seconds: float, heartbeats: Iterable[str] = ()) -> None:
        """Let time pass a second at a time, with heartbeats of these workers; commands are carried out."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            for worker in heartbeats:
                self.tell(heartbeat(worker))
            self.ring()
            self.perform()

    def tick(self) -> None:
        self.tell(Tick())

    def statuses(self, registration: str = "r1") -> list[RegistrationStatus]:
        """All statuses published of one registration."""
        return [message for subject, message in self.sent if subject == SUBJECTS.registration(registration)]

    def last(self, registration: str = "r1") -> RegistrationStatus:
        return self.statuses(registration)[-1]

    @property
    def variants(self) -> list[VariantRecord]:
        """Of the catalogue."""
        return [decode(VariantRecord, value) for key, value in self.catalog.items() if key.startswith("variant.")]

    def ends(self, registration: str = "r1") -> list[str]:
        """The final states published of one registration."""
        return [status.state for status in self.statuses(registration) if status.state in OVER]

    def orders(self, worker: str = "w1") -> list[Any]:
        """All orders given to a worker's workshop."""
        subjects = {SUBJECTS.workshop(worker, "inspect"), SUBJECTS.workshop(worker, "build")}
        return [message for subject, message in self.sent if subject in subjects]


def build_order(stage: Stage, worker: str = "w1") -> BuildVariants:
    order = stage.orders(worker)[-1]
    assert isinstance(order, BuildVariants)
    return order


def to_building(stage: Stage, request: Register = REQUEST) -> BuildVariants:
    """Register, have it inspected, and return the build order."""
    stage.tell(heartbeat())
    stage.register(request)
    stage.settle(inspected(request.registration or ""))
    return build_order(stage)


def complete(stage: Stage, order: BuildVariants, worker: str = "w1") -> None:
    for plan in order.plans:
        stage.tell(built(plan, order.registration, worker))
    stage.settle(finished("build", order.registration, worker))


def registering(request: Register = REQUEST) -> Stage:
    """A registration that a worker inspects."""
    stage = Stage()
    stage.tell(heartbeat())
    stage.register(request)
    return stage


def building(request: Register = REQUEST) -> tuple[Stage, BuildVariants]:
    """A registration whose variants a worker builds, and its order."""
    stage = Stage()
    return stage, to_building(stage, request)


def registered() -> Stage:
    """A registration that is done."""
    stage, order = building()
    complete(stage, order)
    return stage


# -- Records of a pipeline, of the apps of its stages and of a plan, and what the registrar makes of changes to them.
TWICE = PipelineRecord(
    vertices=[
        PipelineVertex(name="first", app="digits", inputs={"x": "$.image"}),
        PipelineVertex(name="second", app="checks", inputs={"x": "$.image"}, accuracy=0.9),
    ],
    edges=[],
    output={"scores": "first.scores", "check": "second.scores"},
)


def setting(graph: PipelineRecord = TWICE, name: str = "both", latency_ms: float = 100.0, **more: Any) -> SetPipeline:
    head = PipelineHead(name=name, latency_ms=latency_ms, **more)
    return SetPipeline(pipeline=head, vertices=graph.vertices, edges=graph.edges, output=graph.output)


def deploying(plan: PipelinePlan | None, app: str = "both") -> DeployPipeline:
    return DeployPipeline(app=app, plan=msgspec.to_builtins(plan))


SET = setting()
CHECKS = app_record("checks", links={"check": "1", "exact": "1"})
RECORDS: list[AppRecord | ModelRecord | VariantRecord] = [
    app_record(),
    CHECKS,
    model_record(),
    model_record("check"),
    model_record("exact"),
    variant_record(),
    variant_record("check-t1", model="check", accuracy=0.8),
    variant_record("exact-t4", model="exact", accuracy=0.95, threads=4),
    variant_record("exact-t2", model="exact", accuracy=0.95, threads=2),
    variant_record("exact-gpu", model="exact", accuracy=0.95, hardware="gpu", max_batch=32),
]


KNOWN = catalog_of(*RECORDS)
EXP4 = Ensemble(policy="exp4")


def changed(record: AppRecord | None, change: Any, catalog: Catalog = KNOWN) -> AppRecord:
    after = amend(record, change, catalog)
    assert isinstance(after, AppRecord), after
    return after


def refused(record: AppRecord | None, change: Any, catalog: Catalog = KNOWN) -> str:
    after = amend(record, change, catalog)
    assert isinstance(after, Error), after
    return f"{after.code} {after.message}"


BOTH = changed(None, SET)
WITH = catalog_of(*RECORDS, BOTH)


def stage(**changes: Any) -> PlannedStage:
    made = PlannedStage(hardware="cpu", batch=4, replicas=2, scale=1.0, service_ms=8.0, rho=0.5)
    return replace(made, **changes)


PLAN = PipelinePlan(
    pipeline="both", policy="inferline", status="feasible", cost_per_s=0.001, p99_ms=80.0,
    vertices={"first": stage(), "second": stage()}, envelope=[(1.0, 20)], dispersion=[1.0], steps=[], rate=10.0,
    latency_ms=100.0,
)  # fmt: skip
DEPLOYED = changed(BOTH, deploying(PLAN))
