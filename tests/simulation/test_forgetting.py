"""Apps, models, variants and workers come and go: no actor keeps what is gone."""

from typing import Any

from msgspec.structs import replace

from bus.messages.catalog import AppRecord, Ensemble, VariantRecord
from services.autoscaler.models.actor import ModelAutoscaler
from services.core.actor import Changed
from services.core.catalog import key_of, quality_key
from services.core.settings import AutoscalerSettings
from tests.support.data.events import model_record
from tests.support.simulated import registrations
from tests.support.simulated.fleet import PRICES, SIGNATURE, variant
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


class Visited(PipelineFleet):
    """A fleet to which others come, and from which they go."""

    def __init__(self) -> None:
        super().__init__(dispatchers=2, workers=2)
        for worker in ("w0", "w1"):
            actor = ModelAutoscaler(worker, self.subjects, PRICES, AutoscalerSettings())
            self.stage.enter(f"model-{worker}", actor)
            self.follow(f"model-{worker}")

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
