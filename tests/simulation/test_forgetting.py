"""Apps, models, variants, jobs and workers come and go: no actor keeps what is gone."""

from typing import Any

import msgspec
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, Ensemble, VariantRecord
from bus.messages.jobs import Checkpoint, Chunk, JobRecord, SubmitJob
from bus.messages.public import Tensor
from bus.messages.scaling import DemandHistory
from services.autoscaler.models.actor import ModelAutoscaler
from services.core.actor import Changed
from services.core.catalog import key_of, quality_key
from services.core.requests import TakeOver
from services.core.settings import AutoscalerSettings, JobsSettings
from services.gateway.actor import make_gateway
from services.jobs.actor import Coordinator
from services.jobs.commands import (
    Accept,
    Assemble,
    Assembled,
    ChunkRange,
    Feed,
    ForgetJob,
    Keep,
    Read,
    Resume,
    Resumed,
    WasRead,
)
from services.jobs.runner.actor import Runner
from services.jobs.runner.chunks import StorePart, TakeChunk
from services.monitor.effects import MachineSample
from services.recorder.actor import Count, Ingest, Ingested, KeepFiles, ReadDemand, make_recorder
from tests.support.data.events import model_record
from tests.support.simulated import registrations
from tests.support.simulated.fleet import PRICES, SIGNATURE, Fleet, variant
from tests.support.simulated.planned_fleet import ONE, PipelineFleet, plan
from tests.support.simulated.remembered import remembered

GONE = "gone-"  # all that comes and goes has it in its name
# Tables of the last so many, or so many bytes, whoever they were of; whatever is in one has no other way to it.
BOUNDED = {
    "dispatcher": (".composites.answered.",),
    "monitor": ("._table._ended", "._table.removed"),
    "executor": (".tallies",),
    "registrar": ("._closed", "._statuses."),
}


def kept(role: str, actor: Any, *but: Any) -> list[str]:
    """The ways to what an actor keeps of them."""
    return [way for way in remembered(actor, GONE, *but) if not way.startswith(BOUNDED.get(role, ()))]


def recorded(command: Any) -> tuple[float, Any]:
    """The edge of a recorder to which nothing comes but the catalogue, and of a gateway that nobody calls."""
    if isinstance(command, ReadDemand):
        return 1.0, DemandHistory(app=command.app)
    return 1.0, {Ingest: Ingested(0), KeepFiles: 0, Count: {}}.get(type(command))


class Visited(PipelineFleet):
    """A fleet to which others come, and from which they go."""

    def __init__(self) -> None:
        super().__init__(dispatchers=2, workers=2)
        for worker in ("w0", "w1"):
            actor = ModelAutoscaler(worker, self.subjects, PRICES, AutoscalerSettings())
            self.stage.enter(f"model-{worker}", actor)
            self.follow(f"model-{worker}")
        for name, actor in (("gateway", make_gateway(self.settings)), ("recorder", make_recorder(self.subjects))):
            self.stage.enter(name, actor, recorded)
            self.follow(name)

    def delete(self, *records: Any) -> None:
        """As the registrar deletes them from the catalogue, with what labels say of apps."""
        keys = [key for one in records for key in (key_of(one), quality_key(getattr(one, "app", "")))]
        self.records = [one for one in self.records if key_of(one) not in keys]
        for name in [name for name, one in self.stage.members.items() if one.actor.watches]:
            for key in keys:
                self.stage.send(name, Changed("infaas-catalog", key, None))

    def visit(self, name: str) -> list[VariantRecord]:
        """A worker, two models, and apps of them: they serve, learn, and go. Returns the variants."""
        a, b, worker = (f"{name}-{each}" for each in ("a", "b", "worker"))
        self.start_worker(worker, 1.0)
        variants = [variant(f"{model}-v1-ort-fp32-t1-b8", model=model) for model in (a, b)]
        models = [model_record(model=model, version="1", signature=SIGNATURE) for model in (a, b)]
        learns = Ensemble(policy="exp4", contextual=True, cache_mb=1.0)
        apps = [
            AppRecord(app=a, links={a: "1"}, signature=SIGNATURE),
            AppRecord(app=f"{a}-first", links={"first": "1"}, signature=SIGNATURE),  # of a model that stays
            AppRecord(app=f"{a}-{b}", links={a: "1", b: "1"}, signature=SIGNATURE, selection=learns),
            AppRecord(
                app=f"{a}-line",
                links={},
                signature=SIGNATURE,
                latency_ms=2000.0,
                pipeline=replace(ONE, output={"y": "a.y"}, vertices=[replace(ONE.vertices[0], app=a)]),
                plan=plan({"a": 1}, {"a": variants[0].variant}),
            ),
        ]
        self.add(*variants, *models, *apps)
        for turn in range(4):
            for app in apps:
                context = {"context": f"{app.app}-context"} if app.selection is not None else {}
                label = self.ask(app.app, id=f"{app.app}-{turn}", seconds=1.0, latency_ms=2000.0, **context)
                assert "outputs" in self.replies(label)[0], "it serves before it goes"
                told = {"label": 0, "id": label, **context}
                self.stage.publish(self.subjects.feedback(app.app), told, f"_INBOX.test.{label}-told", 0.3)
                assert self.replies(f"{label}-told") == [{"accepted": True}]
        self.delete(*apps, *models, *variants)
        self.stage.run(1.0)
        self.stop_worker(worker)
        self.stage.run(20.0)
        return variants


def test_no_actor_of_a_fleet_keeps_what_is_gone() -> None:
    fleet = Visited()
    for number in range(3):
        late = fleet.visit(f"{GONE}{number}")
        fleet.asks(50, "first", seconds=1.0)
    for record in late:  # an order that was on its way
        fleet.order(record, "w0", seconds=1.0)
    fleet.stage.run(60.0)
    fleet.visit("last")  # with the next ones goes what was told late of those before
    fleet.asks(50, "first", seconds=60.0)
    roles = {"w": "monitor", "d": "dispatcher"}
    found = {
        name: ways
        for name, one in fleet.stage.members.items()
        if not name.startswith("listener")
        and (ways := kept("executor" if "/" in name else roles.get(name[0], ""), one.actor, fleet))
    }
    assert found == {}


def test_a_registrar_keeps_nothing_but_the_last_registrations() -> None:
    stage = registrations.Stage()
    for number in range(3):
        name = f"{GONE}{number}"
        files = {"object": f"{name}.model", "validation": f"{name}.validation"}
        request = replace(registrations.REQUEST, app=name, model=name, registration=name, **files)
        registrations.complete(stage, registrations.to_building(stage, request))
        stage.tell(registrations.heartbeat(f"{name}-worker"))
        stage.pass_time(5.0, ["w1"])
        assert stage.ends(name) == ["done"]
        for key in list(stage.catalog):
            stage.put(registrations.SUBJECTS.catalog_bucket, key, None)
    stage.pass_time(700.0, ["w1"])
    assert kept("registrar", stage.registrar, stage) == []


class Jobs:
    """The edges of coordinators and of a runner: each job has one chunk, and its output is nowhere."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.bucket = fleet, fleet.subjects.jobs_bucket
        self.chunks: list[Chunk] = []
        self.stored: set[str] = set()

    def put(self, job: str, record: JobRecord | None) -> None:
        self.fleet.stage.kernel.put(self.bucket, job, None if record is None else encode(record))

    def coordinated(self, command: Any) -> tuple[float, Any]:
        match command:
            case Accept() | Keep():
                self.put(command.record.status.job, command.record)
                return 0.01, type(command) is Keep or None
            case Read():
                return 0.01, WasRead(4, "")
            case Resume():
                return 0.01, Resumed(True, frozenset({0} if command.route.job in self.stored else ()))
            case Feed():
                body = encode({"inputs": Tensor("FP32", [4, 2], bytes(32))})
                self.chunks.append(Chunk(command.route.job, 0, 0, 4, msgspec.Raw(body)))
                return 0.01, [ChunkRange(0, 0, 4, command.position, command.position)]
            case Assemble():
                return 0.01, Assembled(Checkpoint(chunks=1, items=4), 0.1, [])
            case TakeOver():
                before = decode(JobRecord, self.fleet.stage.kernel.get(self.bucket, command.work) or b"")
                self.put(command.work, after := replace(before, owner=command.owner))
                return 0.01, after
            case ForgetJob():
                self.put(command.job, None)
        return 0.01, None

    def run(self, command: Any) -> tuple[float, Any]:
        if isinstance(command, StorePart):
            self.stored.add(command.part.job)
        return 0.01, self.chunks.pop() if self.chunks and isinstance(command, TakeChunk) else None


def test_coordinators_and_runners_keep_nothing_but_the_last_jobs() -> None:
    """Of every second job another coordinator takes hold, as after a silence."""
    fleet = Fleet()
    stage, jobs = fleet.stage, Jobs(fleet)
    stage.members["w0"].edge = lambda _: (0.0, MachineSample(utilisation=0.1, memory_used_mb=500.0))
    settings, subjects = JobsSettings(keep=1), fleet.subjects
    stage.enter("runner", Runner("runner", "w0", subjects, PRICES, settings), jobs.run)
    for name in ("c0", "c1"):
        stage.enter(name, Coordinator(name, subjects, settings, PRICES, lambda: "made"), jobs.coordinated)
    for name in ("runner", "c0", "c1"):
        fleet.follow(name)
    for number, app in enumerate([f"{GONE}{number}" for number in range(4)] + ["last"]):
        models = [
            variant(f"{app}-v1-ort-fp32-t1-b8", model=app),
            model_record(model=app, version="1", signature=SIGNATURE),
        ]
        records = (*models, AppRecord(app=app, links={app: "1"}, signature=SIGNATURE))
        fleet.add(*records)
        job = f"{app}-job"
        ask = SubmitJob(input=f"file:///{app}.npy", output=f"file:///{app}-out.npy", job=job)
        stage.publish(subjects.job(app), encode(ask), f"_INBOX.test.{job}", 1.0)
        record = decode(JobRecord, stage.kernel.get(jobs.bucket, job) or b"")
        if number % 2:
            jobs.put(job, replace(record, owner="c1" if record.owner == "c0" else "c0"))
        stage.run(60.0)
        record = decode(JobRecord, stage.kernel.get(jobs.bucket, job) or b"")
        assert record.status.state == "done", record
        for key in map(key_of, records):
            for name in [name for name, one in stage.members.items() if one.actor.watches]:
                stage.send(name, Changed(subjects.catalog_bucket, key, None))
    stage.run(60.0)
    assert {name: ways for name in ("runner", "c0", "c1") if (ways := kept("", stage.members[name].actor, fleet))} == {}
