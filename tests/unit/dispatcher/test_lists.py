"""Lists: workers with the state that people are shown, apps with what holds for them, pipelines with their stages."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import (
    AppRecord,
    Ensemble,
    PipelineEdge,
    PipelinePlan,
    PipelineRecord,
    PipelineVertex,
    PlannedStage,
)
from bus.messages.fleet import WorkerHeartbeat
from bus.messages.public import ListRequest, Requirements
from bus.messages.scaling import PipelineReplicas
from services.core.actor import Changed
from services.core.selection.cluster import ClusterView
from services.dispatcher.lists import Lists
from tests.support.data.events import beat, catalog_of, change_of, device
from tests.support.data.pipelines import deployed
from tests.support.simulated.fleet import PRICES, SIGNATURE, Fleet, catalogue, variant


def listed(what: str, *records: Any, view: ClusterView | None = None) -> Any:
    """The list of all of this kind, of a system whose target is 95 %."""
    return Lists(ListRequest(), 0.0, catalog_of(*records), view or ClusterView(PRICES), 0.95).of(what)


def shown(*beats: WorkerHeartbeat) -> tuple[str, str]:
    view = ClusterView(PRICES)
    for each in beats:
        view.heartbeat(each, 0.0)
    [item] = listed("workers", view=view).items
    return item["kind"], item["state"]


def test_workers_and_apps_are_listed_with_what_holds_for_them() -> None:
    silent, alive = beat(devices=[device(alive=False)], kind="big"), beat(kind="big")
    assert (shown(silent), shown(silent, alive)) == (("big", "Booting"), ("big", "Ready"))
    assert shown(alive, silent) == ("big", "Down")
    assert shown(alive, beat(kind="big", draining=True)) == ("big", "Draining")
    assert shown(alive, beat(kind="big", draining=True, leaving=True)) == ("big", "Draining")
    assert shown(beat()) == ("cpu", "Ready")
    found = listed("apps", AppRecord(app="own", links={}, slo_target=0.999), AppRecord(app="usual", links={}))
    assert {item["app"]: item["slo_target"] for item in found.items} == {"own": 0.999, "usual": 0.95}
    keeps = AppRecord(app="two", links={}, selection=Ensemble(cache_mb=8))
    one, two = (item["selection"] for item in listed("apps", AppRecord(app="one", links={}), keeps).items)
    assert one is None
    assert (two["policy"], two["members"], two["cache_mb"]) == (None, None, 8.0)


def foreign(fleet: Fleet, **changes: Any) -> None:
    """Version 2 of the app's model is registered for the app `health`, and then the app's record changes in some way."""
    record = replace(catalogue(VARIANT)[1], version="2", app="health", created=2.0, **changes)
    fleet.add(replace(VARIANT, variant="theirs", version="2"), record, AppRecord(app="health", links={"m": "2"}))
    fleet.change(latency_ms=5000.0)


@pytest.mark.parametrize("pin", [{"version": "2"}, {"variant": "theirs"}, {"model": "m", "version": "2"}])
@pytest.mark.parametrize(("labels", "fits"), [(["healthy", "sick"], False), ([], True)])
def test_an_app_neither_lists_nor_asks_another_apps_version_that_means_something_else(
    pin: dict[str, str], labels: list[str], fits: bool
) -> None:
    fleet = Fleet(VARIANT)
    foreign(fleet, labels=labels)
    of_app, of_health = (
        fleet.request(fleet.subjects.list("models"), ListRequest(app=app))["items"] for app in ("app", "health")
    )
    assert [item["version"] for item in of_app] == ["1", "2"][: 1 + fits]
    assert [(item["version"], item["app"]) for item in of_health if item["app"]] == [("2", "health")]
    found = fleet.request(fleet.subjects.explain("app"), Requirements(**pin))
    assert found.get("refusal", {}).get("code") == (None if fits else "unknown_model")


# -- pipelines

VARIANT = variant()
PIPELINE = PipelineRecord(
    vertices=[
        PipelineVertex(name="first", app="app", inputs={"x": "$.x"}),
        PipelineVertex(name="second", app="app", inputs={"x": "$.x"}, accuracy=0.9),
    ],
    edges=[PipelineEdge(source="first", target="second", probability=0.3)],
    output={"y": "second.y | first.y"},
)
STAGE = PlannedStage(
    hardware="cpu", batch=4, replicas=2, scale=1.0, service_ms=30.0, rho=0.5, variant=VARIANT.variant, accuracy=0.9
)
PLAN = PipelinePlan(
    pipeline="twice", policy="inferline", status="optimal", cost_per_s=0.001, p99_ms=90.0,
    vertices={"first": STAGE, "second": replace(STAGE, service_ms=10.0, replicas=1, scale=0.3)},
    envelope=[(1.0, 20)], dispersion=[1.0], steps=["a", "b"], rate=10.0, latency_ms=100.0,
)  # fmt: skip
APP = AppRecord(app="twice", links={}, signature=SIGNATURE, latency_ms=100.0, pipeline=PIPELINE)


def pipelines(record: AppRecord, *, loaded: int = 0, **ask: str) -> list[dict[str, Any]]:
    fleet = Fleet(VARIANT)
    fleet.tell(record)
    if loaded:
        fleet.order(VARIANT, at_least=loaded, app=None)
    fleet.stage.run(2.0)
    return fleet.request(fleet.subjects.list("pipelines"), ListRequest(**ask))["items"]


def test_a_pipeline_is_listed_with_its_graph_and_without_a_plan() -> None:
    [item] = pipelines(APP)
    assert (item["app"], item["latency_ms"], item["plan"], item["slo_target"]) == ("twice", 100.0, None, 0.99)
    assert item["plan_ended"] is None
    [ended] = pipelines(replace(APP, plan_ended="plan.p99_ms: too slow"))
    assert ended["plan_ended"] == "plan.p99_ms: too slow"
    assert item["edges"] == [{"from": "first", "to": "second", "when": None, "probability": 0.3}]
    assert item["output"] == {"y": "second.y | first.y"}
    assert [spec["name"] for spec in item["inputs"] + item["outputs"]] == ["x", "y"]
    first, second = item["vertices"]
    assert (first["vertex"], first["app"], first["inputs"]) == ("first", "app", {"x": "$.x"})
    assert (first["accuracy_required"], second["accuracy_required"]) == (None, 0.9)
    for field in ("variant", "hardware", "batch", "replicas", "scale", "rho", "accuracy"):
        assert second[field] is None
    assert (first["share"], second["share"]) == (0.5, 0.5), "by the variant that would be chosen"
    assert (second["service_ms"], second["instances"], second["queued"]) == (pytest.approx(2.5), 0, 0)


def test_a_planned_pipeline_is_listed_with_what_is_planned_and_what_lives() -> None:
    [item] = pipelines(replace(APP, plan=PLAN), loaded=2)
    assert item["plan"] == {
        "policy": "inferline", "status": "optimal", "cost_per_s": 0.001, "p99_ms": 90.0, "percentile": 0.99,
        "rate": 10.0, "latency_ms": 100.0, "hop_ms": 0.0, "accuracy": None,
    }  # fmt: skip
    first, second = item["vertices"]
    assert (first["variant"], first["hardware"], first["batch"], first["replicas"]) == (VARIANT.variant, "cpu", 4, 2)
    assert (second["replicas"], second["scale"], second["service_ms"], second["rho"]) == (1, 0.3, 10.0, 0.5)
    assert (first["share"], second["share"]) == (0.5, 0.5), "an item takes as long in both: they have the same variant"
    assert (first["instances"], first["loading"], first["queued"]) == (2, 0, 0)


def test_only_the_lists_and_pipelines_that_there_are() -> None:
    assert (pipelines(APP, app="other"), pipelines(replace(APP, pipeline=None))) == ([], [])
    message = "there is no list of 'spoons': ask for apps, models, variants, workers, pipelines or releases"
    assert listed("spoons").error.message == message


def test_variants_and_apps_are_listed_with_batches_and_stages() -> None:
    fleet = Fleet(VARIANT)
    [item] = fleet.request(fleet.subjects.list("variants"), ListRequest())["items"]
    assert list(item["p99_ms"]) == ["1", "2", "4", "8"]
    assert item["batch_latency_ms"] == pytest.approx({"1": 2.55, "2": 3.05, "4": 4.05, "8": 6.05}), "with 0.05 ms each"
    plain = [AppRecord(app=name, links={}) for name in ("app", "free")]
    items = {item["app"]: item for item in listed("apps", APP, replace(APP, app="other"), *plain).items}
    assert items["app"]["stage_of"] == ["other", "twice"]
    assert items["twice"]["stage_of"] == items["free"]["stage_of"] == []
    assert [vertex["name"] for vertex in items["twice"]["pipeline"]["vertex"]] == ["first", "second"]


def test_stages_show_what_the_leader_keeps_and_why_some_of_it_is_missing() -> None:
    fleet = Fleet(VARIANT)
    record = deployed({"a": 2, "b": 1}, {"a": VARIANT.variant, "b": VARIANT.variant})
    state = PipelineReplicas(
        pipeline="p", epoch=1, plan="", replicas={"a": 4, "b": 2}, variants={}, lambda_max=300.0, at=1.0,
        missing={"a": "no worker has gpu"},
    )  # fmt: skip
    fleet.stage.send("d0", change_of(record))
    for key, value in (("pipeline.p", state), ("pipeline.q", state), ("leader", state)):
        fleet.stage.send("d0", Changed("infaas-control", key, encode(value)))
    fleet.stage.send("d0", Changed("infaas-control", "pipeline.q", None))
    [item] = fleet.request(fleet.subjects.list("pipelines"), ListRequest())["items"]
    rows = [(row["vertex"], row["replicas"], row["wanted"], row["missing"]) for row in item["vertices"]]
    assert rows == [("a", 2, 4, "no worker has gpu"), ("b", 1, 2, None)]
    first, second = fleet.request(fleet.subjects.explain("p"), Requirements())["stages"]
    assert first["why"].endswith("; no worker has gpu")
    assert "no worker" not in second["why"]
