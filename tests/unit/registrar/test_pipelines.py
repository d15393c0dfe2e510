"""Pipelines as operators set, plan and remove them: what is stored, and what is refused with field and remedy."""

from collections.abc import Iterable
from math import inf, nan
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import (
    AppRecord,
    ModelRecord,
    ModelSelection,
    PipelinePlan,
    PipelineRecord,
    PipelineVertex,
    PlannedStage,
    Signature,
    TensorSpec,
    VariantRecord,
)
from bus.messages.public import AdminDone, AdminRequest, Error
from services.core.catalog import Catalog, key_of
from services.registrar.changes import amend, change_for
from services.registrar.commands import (
    Change,
    ChangeRefused,
    DeleteApp,
    DeployPipeline,
    LinkModel,
    RefitPlan,
    SetApp,
    SetPipeline,
    SetReplicas,
    SetSelection,
    UnlinkModel,
)
from tests.support.simulated.registrations import (
    REQUEST,
    SIGNATURE,
    SUBJECTS,
    Stage,
    app_record,
    heartbeat,
    model_record,
    variant_record,
)

TWICE = PipelineRecord(
    vertices=[
        PipelineVertex(name="first", app="digits", inputs={"x": "$.image"}),
        PipelineVertex(name="second", app="checks", inputs={"x": "$.image"}, accuracy=0.9),
    ],
    edges=[],
    output={"scores": "first.scores", "check": "second.scores"},
)
SET = SetPipeline(app="both", pipeline=TWICE, latency_ms=100.0, at=7.0)
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


def catalog_of(records: Iterable[Any] = RECORDS) -> Catalog:
    found = Catalog()
    for record in records:
        found.apply(key_of(record), encode(record))
    return found


KNOWN = catalog_of()
EXP4 = ModelSelection(policy="exp4")


def changed(record: AppRecord | None, change: Change, catalog: Catalog = KNOWN) -> AppRecord:
    after = amend(record, change, catalog)
    assert isinstance(after, AppRecord), after
    return after


def refused(record: AppRecord | None, change: Change, catalog: Catalog = KNOWN) -> str:
    after = amend(record, change, catalog)
    assert isinstance(after, ChangeRefused), after
    return f"{after.code} {after.message}"


BOTH = changed(None, SET)
WITH = catalog_of([*RECORDS, BOTH])


def stage(**changes: Any) -> PlannedStage:
    made = PlannedStage(hardware="cpu", batch=4, replicas=2, scale=1.0, service_ms=8.0, rho=0.5)
    return replace(made, **changes)


PLAN = PipelinePlan(
    pipeline="both",
    policy="inferline",
    status="feasible",
    cost_per_s=0.001,
    p99_ms=80.0,
    vertices={"first": stage(), "second": stage()},
    envelope=[(1.0, 20)],
    dispersion=[1.0],
    steps=[],
    rate=10.0,
    latency_ms=100.0,
)
DEPLOYED = changed(BOTH, DeployPipeline(app="both", plan=PLAN))


# -- set-pipeline


def test_a_pipeline_is_an_app_with_the_signature_of_its_references() -> None:
    assert (
        AppRecord(
            app="both",
            links={},
            signature=Signature(
                inputs=[TensorSpec(name="image", datatype="FP32", shape=[64])],
                outputs=[TensorSpec(name=name, datatype="FP32", shape=[10]) for name in ("scores", "check")],
            ),
            latency_ms=100.0,
            created=7.0,
            pipeline=TWICE,
            min_instances=0,
        )
        == BOTH
    )


def test_a_pipeline_that_is_set_again_keeps_what_it_does_not_name() -> None:
    before = replace(BOTH, slo_target=0.9, created=3.0)
    assert changed(before, SET) == before
    assert changed(before, replace(SET, slo_target=0.95, latency_ms=50.0)) == replace(
        before, slo_target=0.95, latency_ms=50.0
    )


def test_the_body_is_the_file() -> None:
    body = {
        "pipeline": {"name": "both", "latency_ms": 100, "slo_target": 0.9, "more": 1},
        **msgspec.to_builtins(TWICE),
        "plan": {"percentile": 0.99},
        "load": [{"rate": 5}],
        "option": [{}],
    }
    request = decode(AdminRequest, encode(body))
    assert change_for("set-pipeline", request, KNOWN, 7.0) == replace(SET, slo_target=0.9)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "pipeline: must say name and latency_ms: [pipeline] in the file"),
        ({"pipeline": {"name": "a b", "latency_ms": 1}}, "pipeline.name: must be 1 to 64"),
        ({"pipeline": {"name": "a", "latency_ms": -1}}, "pipeline.latency_ms: must be a number above 0"),
        ({"pipeline": {"name": "a", "latency_ms": 1, "slo_target": 2}}, "pipeline.slo_target: must be"),
    ],
)
def test_a_head_that_is_wrong_is_refused(body: dict[str, Any], message: str) -> None:
    error = change_for("set-pipeline", decode(AdminRequest, encode(body)), KNOWN, 7.0)
    assert isinstance(error, Error)
    assert error.message.startswith(message)


def vertices(**changes: Any) -> PipelineRecord:
    first, second = TWICE.vertices
    return replace(TWICE, vertices=[replace(first, **changes), second])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace(SET, pipeline=PipelineRecord(vertices=[])), "vertex: must name at least one stage"),
        (replace(SET, pipeline=vertices(app="none")), "vertex[first].app: there is no app 'none'; register a model"),
        (replace(SET, pipeline=vertices(app="both")), "vertex[first].app: the pipeline contains itself"),
        (replace(SET, pipeline=vertices(inputs={"y": "$.image"})), "vertex[first].inputs: lacks x"),
        (replace(SET, latency_ms=0.15), "latency_ms: must be above 0.2 ms"),
    ],
)
def test_what_is_wrong_with_a_pipeline_is_refused(change: SetPipeline, message: str) -> None:
    text = refused(None, change)
    assert text.startswith("bad_request ")
    assert message in text


def test_an_app_with_models_is_no_pipeline() -> None:
    text = refused(app_record(), replace(SET, app="digits", pipeline=vertices(app="checks")))
    assert "pipeline.name: app digits exists already and has models of its own; give the pipeline another name" in text


def test_a_pipeline_within_another_is_changed_only_so_that_the_other_fits() -> None:
    outer = changed(
        None,
        SetPipeline(
            app="outer",
            pipeline=PipelineRecord(
                vertices=[PipelineVertex(name="inner", app="both", inputs={"image": "$.x"})],
                output={"scores": "inner.check"},
            ),
            latency_ms=200.0,
            at=8.0,
        ),
        WITH,
    )
    known = catalog_of([*RECORDS, BOTH, outer])
    narrow = replace(TWICE, vertices=TWICE.vertices[:1], output={"scores": "first.scores"})
    text = refused(BOTH, replace(SET, pipeline=narrow), known)
    assert text.startswith("bad_request pipeline outer, which contains both, would not fit any more: output.scores")
    assert text.endswith("change outer first")
    around = replace(TWICE.vertices[0], app="outer")
    assert "the pipeline contains itself by way of outer" in refused(
        BOTH, replace(SET, pipeline=replace(TWICE, vertices=[around, TWICE.vertices[1]])), known
    )


# -- apps that are pipelines, and apps that pipelines name


def test_an_app_that_a_pipeline_names_is_not_deleted_nor_emptied() -> None:
    text = refused(CHECKS, DeleteApp(app="checks"), WITH)
    assert text == (
        "bad_request app: checks is a stage of pipeline both; change that pipeline (infaas pipeline add) or remove it"
        " (infaas pipeline remove both) first"
    )
    assert changed(CHECKS, UnlinkModel(app="checks", model="check"), WITH).links == {"exact": "1"}
    last = replace(CHECKS, links={"exact": "1"})
    text = refused(last, UnlinkModel(app="checks", model="exact"), WITH)
    assert text.startswith(
        "bad_request model: exact is the last model of app checks, which is a stage of pipeline both"
    )
    assert "infaas pipeline remove both" in text
    assert amend(CHECKS, DeleteApp(app="checks"), KNOWN) is None
    assert changed(last, UnlinkModel(app="checks", model="exact"), KNOWN).links == {}
    assert amend(BOTH, DeleteApp(app="both"), WITH) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            LinkModel(app="both", model="mlp", version="1", signature=SIGNATURE, at=1.0),
            "app: both is a pipeline and has no models of its own; register the model under the app of one",
        ),
        (
            SetSelection(app="both", selection=ModelSelection(policy="exp4")),
            "app: both is a pipeline, whose stages answer; use set-selection on the app of a stage",
        ),
        (SetReplicas(app="both", model="mlp", count=1), "app: both is a pipeline and has no instances of its own"),
        (SetApp(app="both", min_instances=1), "min_instances: both is a pipeline and has no instances of its own"),
    ],
)
def test_what_makes_no_sense_for_a_pipeline_is_refused(change: Change, message: str) -> None:
    assert refused(BOTH, change, WITH).startswith(f"bad_request {message}")


def test_registering_into_a_pipeline_is_refused_at_once() -> None:
    one = Stage()
    one.tell(heartbeat())
    one.put(SUBJECTS.catalog_bucket, "app.both", encode(BOTH))
    answer: Any = one.register(replace(REQUEST, app="both"))
    assert answer.error.code == "bad_request"
    assert answer.error.message.startswith("app: both is a pipeline and has no models of its own")


# -- deploy-pipeline


def test_a_plan_gets_the_cheapest_variant_that_is_accurate_enough() -> None:
    assert DEPLOYED.plan is not None
    chosen = {name: (one.variant, one.accuracy) for name, one in DEPLOYED.plan.vertices.items()}
    assert chosen == {"first": ("mlp-v1-ort-fp32-t1-b8", 0.9), "second": ("exact-t2", 0.95)}
    assert replace(DEPLOYED, plan=None) == BOTH
    assert changed(DEPLOYED, DeployPipeline(app="both", plan=None)) == BOTH


def test_a_named_variant_is_kept() -> None:
    named = replace(PLAN, vertices=PLAN.vertices | {"second": stage(variant="exact-t4")})
    after = changed(BOTH, DeployPipeline(app="both", plan=named))
    assert after.plan is not None
    assert after.plan.vertices["second"].variant == "exact-t4"


def test_of_several_the_one_that_is_as_fast_as_planned_is_taken() -> None:
    profile = variant_record().profile
    slow = replace(profile, rows=[replace(row, p50_ms=10 * row.p50_ms) for row in profile.rows])
    known = catalog_of([*RECORDS, variant_record("exact-t1", model="exact", accuracy=0.95, profile=slow)])
    after = changed(BOTH, DeployPipeline(app="both", plan=PLAN), known)
    assert after.plan is not None
    assert after.plan.vertices["second"].variant == "exact-t2", "exact-t1 is cheaper, but ten times slower than planned"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, status="infeasible", reason="too slow"), "plan.status: the plan is infeasible: too slow; plan"),
        (replace(PLAN, pipeline="other"), "plan.pipeline: the plan is for 'other', not for both"),
        (replace(PLAN, p99_ms=120.0), "plan.p99_ms: the plan keeps 120 ms, but the objective is 100 ms; plan again"),
        (replace(PLAN, p99_ms=nan), "plan.p99_ms: must be above 0"),
        (replace(PLAN, rate=0.0), "plan.rate: must be above 0"),
        (replace(PLAN, cost_per_s=inf), "plan.cost_per_s: must be"),
        (replace(PLAN, percentile=0.0), "plan.percentile: must be"),
        (replace(PLAN, dispersion=[]), "plan.dispersion: must have one value for each window"),
        (replace(PLAN, dispersion=[nan]), "plan.dispersion: must be 0 or more"),
        (replace(PLAN, envelope=[(0.0, 1)]), "plan.envelope: must be pairs of a window above 0 s"),
        (replace(PLAN, vertices={"first": stage()}), "plan.vertices: lacks vertex second; plan again"),
        (
            replace(PLAN, vertices=PLAN.vertices | {"third": stage()}),
            "plan.vertices.third: there is no such vertex; there are: first, second",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: PipelinePlan, message: str) -> None:
    assert refused(BOTH, DeployPipeline(app="both", plan=plan)).startswith(f"bad_request {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch: must be from 1 to 1024, not 0"),
        ({"batch": 1025}, "batch: must be from 1 to 1024, not 1025"),
        ({"batch": 9}, "batch: variants of app checks on cpu take at most 8 items, not 9"),
        ({"replicas": 0}, "replicas: must be from 1 to 10000, not 0"),
        ({"replicas": 10_001}, "replicas: must be from 1 to 10000"),
        ({"scale": -1.0}, "scale: must be 0 or more, not -1"),
        ({"service_ms": inf}, "service_ms: must be 0 or more, not inf"),
        ({"rho": nan}, "rho: must be 0 or more, not nan"),
        ({"hardware": "tpu"}, "hardware: app checks has no variant on 'tpu'; it has variants on: cpu, gpu; plan"),
        ({"variant": "none"}, "variant: app checks serves no 'none' on cpu; plan again, or leave variant empty"),
        ({"variant": "exact-gpu"}, "variant: app checks serves no 'exact-gpu' on cpu"),
        ({"variant": "check-t1"}, "accuracy: the vertex asks for 0.9, and the best variant on cpu has 0.8"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    plan = replace(PLAN, vertices=PLAN.vertices | {"second": stage(**changes)})
    assert refused(BOTH, DeployPipeline(app="both", plan=plan)).startswith(
        f"bad_request plan.vertices.second.{message}"
    )


def test_only_pipelines_have_plans() -> None:
    assert refused(None, DeployPipeline(app="both", plan=PLAN)).startswith("unknown_app")
    assert refused(CHECKS, DeployPipeline(app="checks", plan=None)).startswith("bad_request app: checks is no pipeline")


def test_stages_that_see_to_themselves_are_not_planned() -> None:
    voting = replace(CHECKS, selection=ModelSelection(policy="majority"))
    known = catalog_of([*RECORDS, voting])
    for planned in (PLAN, replace(PLAN, vertices={"first": stage()})):
        after = changed(BOTH, DeployPipeline(app="both", plan=planned), known)
        assert after.plan is not None
        assert after.plan.vertices.keys() == {"first"}


def test_a_plan_without_stages_of_its_own_is_refused() -> None:
    voting = (replace(app_record(), selection=EXP4), replace(CHECKS, selection=EXP4))
    text = refused(BOTH, DeployPipeline(app="both", plan=PLAN), catalog_of([*RECORDS, *voting]))
    assert text.startswith("bad_request plan.vertices: each stage is a pipeline or an ensemble")


def test_hardware_that_no_worker_has_is_refused() -> None:
    one = Stage()
    for record in (*RECORDS, BOTH):
        one.put(SUBJECTS.catalog_bucket, key_of(record), encode(record))

    def ask(plan: PipelinePlan) -> Any:
        body = decode(AdminRequest, encode({"app": "both", "plan": msgspec.to_builtins(plan)}))
        one.tell(body, SUBJECTS.admin("deploy-pipeline"), "_INBOX.9")
        one.perform()
        return one.sent[-1][1]

    on_gpu = replace(PLAN, vertices=PLAN.vertices | {"second": stage(hardware="gpu")})
    assert ask(on_gpu) == AdminDone(), "it has heard no worker yet, so it does not know"
    one.tell(heartbeat())
    error = ask(on_gpu).error
    assert error.code == "unsatisfiable"
    assert error.message.startswith("plan.vertices.second.hardware: no worker has 'gpu'; there are: cpu; start such")
    assert ask(PLAN) == AdminDone()
    assert decode(AppRecord, one.catalog["app.both"]) == DEPLOYED


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, "plan: Object missing required field `pipeline`; give what `infaas pipeline plan"),
        (
            msgspec.to_builtins(PLAN) | {"vertices": {"first": {"hardware": 3}}},
            "plan.vertices[...].hardware: Expected `str`, got `int`",
        ),
    ],
)
def test_what_is_no_plan_is_refused(plan: dict[str, Any], message: str) -> None:
    error = change_for("deploy-pipeline", AdminRequest(app="both", plan=plan), WITH, 7.0)
    assert isinstance(error, Error)
    assert error.message.startswith(message)


# -- plans that outlive what they were made for


def test_a_change_of_the_pipeline_drops_a_plan_that_does_not_fit_any_more() -> None:
    assert changed(DEPLOYED, SET).plan == DEPLOYED.plan
    assert changed(DEPLOYED, replace(SET, latency_ms=85.0)).plan == DEPLOYED.plan
    assert changed(DEPLOYED, replace(SET, latency_ms=70.0)).plan is None
    renamed = replace(TWICE.vertices[1], name="third")
    other = replace(TWICE, vertices=[TWICE.vertices[0], renamed], output={"s": "first.scores", "t": "third.scores"})
    assert changed(DEPLOYED, replace(SET, pipeline=other)).plan is None
    strict = replace(TWICE, vertices=[TWICE.vertices[0], replace(TWICE.vertices[1], accuracy=0.99)])
    assert changed(DEPLOYED, replace(SET, pipeline=strict)).plan is None


def test_a_shorter_objective_drops_a_plan_that_does_not_keep_it() -> None:
    assert changed(DEPLOYED, SetApp(app="both", latency_ms=90.0)).plan == DEPLOYED.plan
    assert changed(DEPLOYED, SetApp(app="both", latency_ms=70.0)).plan is None


def test_a_plan_follows_the_version_that_serves() -> None:
    newer = replace(CHECKS, links={"check": "1", "exact": "2"})
    second = [model_record("exact", "2"), variant_record("exact-2", model="exact", version="2", accuracy=0.95)]
    after = changed(DEPLOYED, RefitPlan(app="both"), catalog_of([*RECORDS, newer, *second]))
    assert after.plan is not None
    assert after.plan.vertices["second"].variant == "exact-2"
    assert after.plan.vertices["first"] == DEPLOYED.plan.vertices["first"]  # type: ignore[union-attr]
    voting = changed(DEPLOYED, RefitPlan(app="both"), catalog_of([*RECORDS, replace(CHECKS, selection=EXP4)]))
    assert voting.plan is not None
    assert voting.plan.vertices.keys() == {"first"}
    without = catalog_of([*RECORDS, replace(CHECKS, links={"check": "1"})])
    assert changed(DEPLOYED, RefitPlan(app="both"), without).plan is None
    assert changed(BOTH, RefitPlan(app="both"), without) == BOTH
