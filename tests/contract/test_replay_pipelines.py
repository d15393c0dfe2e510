"""`infaas replay` of apps that other apps or several models answer: their queries are sent, and the parts follow."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import (
    EdgeCondition,
    Ensemble,
    PipelineEdge,
    PipelinePlan,
    PipelineRecord,
    PipelineVertex,
    PlannedStage,
)
from bus.messages.events import OutcomeEvent
from infaas.cli import main
from services.recorder.catalog import CatalogWriter
from services.shell.store import Store
from tests.support.data.events import VARIANT, app_record, event
from tests.support.data.recorded_history import BEGINS, MINUTE, OTHER, PRICES, bills, catalogue, record, samples

HOUR = ("--from", "2025-11-17T08:00Z", "--to", "2025-11-17T09:00Z")
UNSURE = EdgeCondition(output="scores", reduce="max", op="<", value=0.9)
GRAPH = PipelineRecord(
    vertices=[
        PipelineVertex(name="quick", app="digits", inputs={"image": "$.picture"}),
        PipelineVertex(name="exact", app="faces", inputs={"image": "$.picture"}, accuracy=0.9),
    ],
    edges=[PipelineEdge(source="quick", target="exact", when=UNSURE)],
    output={"scores": "exact.scores | quick.scores"},
)
SHARE = 0.25  # of the queries that visited the second stage
COUNT = 600

Run = Callable[..., Any]


def write_app(dsn: str, **fields: Any) -> None:
    store = Store(dsn, "test")
    one = app_record(**fields)
    CatalogWriter(store, PRICES, 0.95).write({f"app.{one.app}": encode(one)}, None)
    store.close()


def asked(app: str, **fields: Any) -> list[OutcomeEvent]:
    return [
        event(
            OutcomeEvent, time=BEGINS + MINUTE * i / COUNT, uid=(10_000 + i).to_bytes(16, "big"), app=app, model=None,
            version=None, variant=None, slo_ms=100.0, accuracy=0.97, latency_ms=3.0, **fields,
        )
        for i in range(COUNT)
    ]  # fmt: skip


def visits() -> list[OutcomeEvent]:
    return [
        event(
            OutcomeEvent, time=BEGINS + MINUTE * i / COUNT, uid=(k * 100_000 + i).to_bytes(16, "big"), app=app, stage=name,
            parent=(10_000 + i).to_bytes(16, "big"), variant=variant, latency_ms=1.0,
        )
        for i in range(COUNT)
        for k, (name, app, variant) in enumerate((("quick", "digits", VARIANT), ("exact", "faces", OTHER)), 1)
        if name == "quick" or i % round(1 / SHARE) == 0
    ]  # fmt: skip


@pytest.fixture
def replay(reader_dsn: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on the test's database: a document, or with people=True what they read; with code, what it says on stderr."""
    directory = tmp_path_factory.mktemp("system")
    (directory / "endpoints.json").write_text(
        json.dumps({"nats": "nats://127.0.0.1:1", "sql": reader_dsn, "running": True})
    )

    def run(*arguments: object, people: bool = False, code: int = 0) -> Any:
        shown = [] if people else ["--json"]
        done = main(["replay", "--data-dir", str(directory), *map(str, arguments), *shown])
        printed = capsys.readouterr()
        assert done == code, printed.err
        return printed.err if code else printed.out if people else json.loads(printed.out)

    return run


def test_a_pipeline_is_asked_and_its_stages_follow(database_dsn: str, replay: Run, tmp_path: Path) -> None:
    catalogue(database_dsn)
    write_app(database_dsn, app="social", links={}, pipeline=GRAPH, latency_ms=100.0)
    record(database_dsn, asked("social", accuracy_required=0.9), visits(), bills(), samples())
    past = tmp_path / "past.mp"
    replay(*HOUR, "--export", past)
    for source in (HOUR, ("--file", past)):
        found = replay(*source)
        [run] = found["policies"]
        assert (run["policy"], run["queries"], found["recorded"]["queries"]) == ("infaas", COUNT, COUNT)
        assert run["answered"] == COUNT, run["refusals"]
        stages = run["apps"]["social"]["pipeline"]["vertices"]
        assert stages["quick"]["visits"] == COUNT
        # How often the condition held is recorded, and what decides it is not.
        assert stages["exact"]["visits"] == pytest.approx(SHARE * COUNT, abs=60)
        assert found["cost"]["comparable"]
        [note] = found["notes"]
        assert (
            note
            == "static and replicate choose for apps by their own load, and the stages of social have none: left out"
        )
    assert replay(*HOUR, people=True).startswith("infaas would have cost as much as was paid and missed ")
    alone = replay(*HOUR, "--app", "social")
    assert alone["policies"][0]["answered"] == COUNT
    assert set(alone["recorded"]["variants"]) == set()


def test_the_deployed_plan_serves_it(database_dsn: str, replay: Run) -> None:
    stage = PlannedStage(
        hardware="cpu", batch=4, replicas=1, scale=1.0, service_ms=8.0, rho=0.1, variant=VARIANT, accuracy=0.97
    )
    plan = PipelinePlan(
        pipeline="social", policy="inferline", status="feasible", cost_per_s=0.0, p99_ms=50.0,
        vertices={"quick": stage, "exact": replace(stage, variant=OTHER, scale=SHARE)},
        envelope=[(1.0, 20)], dispersion=[1.0], steps=[], rate=10.0, latency_ms=100.0,
    )  # fmt: skip
    catalogue(database_dsn)
    write_app(database_dsn, app="social", links={}, pipeline=GRAPH, latency_ms=100.0, plan=plan)
    record(database_dsn, asked("social"), visits(), bills(), samples())
    run = replay(*HOUR)["policies"][0]
    assert run["answered"] == COUNT
    planned = run["apps"]["social"]["pipeline"]
    assert planned["plan"]["policy"] == "inferline"
    assert {name: one["replicas"] for name, one in planned["vertices"].items()} == {"quick": 1, "exact": 1}


def test_policies_that_choose_for_apps_alone_are_refused(database_dsn: str, replay: Run) -> None:
    catalogue(database_dsn)
    write_app(database_dsn, app="social", links={}, pipeline=GRAPH, latency_ms=100.0)
    record(database_dsn, asked("social"), visits(), bills(), samples())
    for name, said in (
        ("static", "it chooses for apps by their own load, and the stages of pipeline social have none: leave it out"),
        ("inferline", "plans the pipelines of a scenario; a replay serves them by the plans that are deployed: use"),
    ):
        assert f"--policy {name}: {said}" in replay(*HOUR, "--policy", name, code=2)


def test_several_models_answer_together(database_dsn: str, replay: Run) -> None:
    catalogue(database_dsn)
    votes = Ensemble(policy="majority")
    write_app(database_dsn, app="votes", links={"mlp": "1", "big": "1"}, latency_ms=100.0, selection=votes)
    parts = [replace(one, stage=None, app="votes") for one in visits()]
    record(database_dsn, asked("votes"), parts, bills(), samples())
    found = replay(*HOUR, "--policy", "infaas")
    [run] = found["policies"]
    assert (run["queries"], run["answered"]) == (COUNT, COUNT)
    members = run["apps"]["votes"]["ensemble"]["members"]
    assert {name: one["answers"] for name, one in members.items()} == {"mlp": COUNT, "big": COUNT}
    assert found["notes"] == ["the policies of votes begin without what feedback had taught them"]


def test_savings_are_told_of_a_run_only_that_answers_what_was_answered(database_dsn: str, replay: Run) -> None:
    catalogue(database_dsn, max_batch=1)
    hopeless = [replace(one, slo_ms=0.0001) for one in asked("digits")]  # answered then, and no variant can
    record(database_dsn, hopeless, bills(), samples())
    text = replay(*HOUR, "--policy", "infaas", people=True)
    assert text.startswith("infaas would have missed 100.00 % of the queries instead of 0.00 %. ")
    assert f"It answers 0 of the {COUNT} queries that were answered then: its cost is not compared" in text
    assert "was paid" not in text


def test_queries_by_model_are_those_of_an_app_that_links_it(database_dsn: str, replay: Run) -> None:
    catalogue(database_dsn)
    by_model = [replace(one, model=model) for one, model in zip(asked("_"), ["mlp", "big", "gone"] * 200, strict=True)]
    record(database_dsn, by_model, bills(), samples())
    found = replay(*HOUR, "--policy", "infaas")
    assert {app: one["queries"] for app, one in found["recorded"]["apps"].items()} == {"digits": 200, "faces": 200}
    assert found["notes"] == [
        "200 queries of apps that are not in the catalogue any more are left out: models by themselves that no app links"
    ]
    assert not found["cost"]["comparable"]
    assert "200 queries of apps" in found["cost"]["text"]


def test_answers_have_as_many_items_as_they_had(database_dsn: str, replay: Run) -> None:
    """Every fourth query had a box, and four of them."""
    box = PipelineVertex(name="exact", app="faces", inputs={"image": "quick.scores"})
    handed = PipelineEdge(source="quick", target="exact", items="scores", items_max=50)
    record_ = PipelineRecord(vertices=[GRAPH.vertices[0], box], edges=[handed], output={"scores": "exact.scores"})
    catalogue(database_dsn)
    write_app(database_dsn, app="social", links={}, pipeline=record_, latency_ms=100.0)
    parts = [
        replace(one, uid=(k * 1_000_000).to_bytes(8, "big") + one.uid[8:])
        for one in visits()
        for k in range(1 if one.stage == "quick" else 4)
    ]
    record(database_dsn, asked("social"), parts, bills(), samples())
    [run] = replay(*HOUR)["policies"]
    assert run["answered"] == COUNT, run["refusals"]
    stages = run["apps"]["social"]["pipeline"]["vertices"]
    assert stages["quick"]["visits"] == COUNT
    assert stages["exact"]["visits"] == pytest.approx(4 * SHARE * COUNT, rel=0.2)
