"""Plans of pipelines: what is deployed, what is refused with field and remedy, and what a plan outlives."""

from math import inf, nan
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import (
    AppRecord,
    Ensemble,
    PipelinePlan,
)
from bus.messages.public import AdminDone
from bus.messages.verbs import DeployPipeline, SetApp, SetTarget
from services.core.catalog import key_of
from services.registrar.changes import note_of, refusal
from services.registrar.commands import RefitPlan
from tests.support.data.events import catalog_of
from tests.support.simulated.registrations import (
    BOTH,
    CHECKS,
    DEPLOYED,
    EXP4,
    KNOWN,
    PLAN,
    RECORDS,
    SET,
    SUBJECTS,
    TWICE,
    WITH,
    Stage,
    app_record,
    changed,
    deploying,
    heartbeat,
    model_record,
    refused,
    setting,
    stage,
    variant_record,
)

# -- deploy-pipeline


def test_a_plan_gets_the_cheapest_sufficient_or_the_named_variant() -> None:
    assert DEPLOYED.plan is not None
    chosen = {name: (one.variant, one.accuracy) for name, one in DEPLOYED.plan.vertices.items()}
    assert chosen == {"first": ("mlp-v1-ort-fp32-t1-b8", 0.9), "second": ("exact-t2", 0.95)}
    assert replace(DEPLOYED, plan=None) == BOTH
    assert changed(DEPLOYED, deploying(None)) == BOTH
    told = "the plan of pipeline both has ended: it is served as any other app"
    assert note_of(DEPLOYED, BOTH, deploying(None), KNOWN) == told
    assert note_of(BOTH, BOTH, deploying(None), KNOWN) == ""  # there was none
    named = replace(PLAN, vertices=PLAN.vertices | {"second": stage(variant="exact-t4")})
    after = changed(BOTH, deploying(named))
    assert after.plan.vertices["second"].variant == "exact-t4"


def test_plans_take_the_variant_as_fast_as_planned_and_leave_others_to_themselves() -> None:
    profile = variant_record().profile
    slow = replace(profile, rows=[replace(row, p50_ms=10 * row.p50_ms) for row in profile.rows])
    known = catalog_of(*RECORDS, variant_record("exact-t1", model="exact", accuracy=0.95, profile=slow))
    after = changed(BOTH, deploying(PLAN), known)
    assert after.plan.vertices["second"].variant == "exact-t2", "exact-t1 is cheaper, but ten times slower than planned"
    known = catalog_of(*RECORDS, replace(CHECKS, selection=Ensemble(policy="majority")))
    for planned in (PLAN, replace(PLAN, vertices={"first": stage()})):
        after = changed(BOTH, deploying(planned), known)
        assert after.plan.vertices.keys() == {"first"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, status="infeasible", reason="too slow"), "plan.status: the plan is infeasible: too slow; plan"),
        (replace(PLAN, policy="best"), "plan.policy: there is no policy 'best'; there are: inferline, model-less"),
        (replace(PLAN, pipeline="other"), "plan.pipeline: the plan is for 'other', not for both"),
        (replace(PLAN, p99_ms=120.0), "plan.p99_ms: the plan keeps 120 ms, but the objective is 100 ms; plan again"),
        (replace(PLAN, p99_ms=nan), "plan.p99_ms: must be above 0"),
        (replace(PLAN, rate=0.0), "plan.rate: must be above 0"),
        (replace(PLAN, cost_per_s=inf), "plan.cost_per_s: must be"),
        (replace(PLAN, percentile=0.0), "plan.percentile: must be"),
        (replace(PLAN, dispersion=[]), "plan.dispersion: must have one value for each window"),
        (replace(PLAN, dispersion=[nan]), "plan.dispersion: must be at least 0"),
        (replace(PLAN, envelope=[(0.0, 1)]), "plan.envelope: must be pairs of a window above 0 s"),
        (replace(PLAN, vertices={"first": stage()}), "plan.vertices: lacks vertex second; plan again"),
        (
            replace(PLAN, vertices=PLAN.vertices | {"third": stage()}),
            "plan.vertices.third: there is no such vertex; there are: first, second",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: PipelinePlan, message: str) -> None:
    assert refused(BOTH, deploying(plan)).startswith(f"bad_request {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch: must be at least 1 and at most 1024, not 0"),
        ({"batch": 1025}, "batch: must be at least 1 and at most 1024, not 1025"),
        ({"batch": 9}, "batch: variants of app checks on cpu take at most 8 items, not 9"),
        ({"replicas": 0}, "replicas: must be at least 1 and at most 10000, not 0"),
        ({"replicas": 10_001}, "replicas: must be at least 1 and at most 10000"),
        ({"scale": -1.0}, "scale: must be at least 0, not -1"),
        ({"service_ms": inf}, "service_ms: must be above 0, not inf"),
        ({"service_ms": 0.0}, "service_ms: must be above 0, not 0"),
        (
            {"service_ms": 3.1},
            "service_ms: exact-t2 takes 4.05 ms for 4 items by its profile, which is more than 1.25 times the plan's 3.1",
        ),
        ({"rho": nan}, "rho: must be at least 0, not nan"),
        ({"hardware": "tpu"}, "hardware: app checks has no variant on 'tpu'; it has variants on: cpu, gpu; plan"),
        ({"variant": "none"}, "variant: app checks serves no 'none' on cpu; plan again, or leave variant empty"),
        ({"variant": "exact-gpu"}, "variant: app checks serves no 'exact-gpu' on cpu"),
        ({"variant": "check-t1"}, "accuracy: the vertex asks for 0.9, and the best variant on cpu has 0.8"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    plan = replace(PLAN, vertices=PLAN.vertices | {"second": stage(**changes)})
    assert refused(BOTH, deploying(plan)).startswith(f"bad_request plan.vertices.second.{message}")


@pytest.mark.parametrize(
    ("named", "who"), [("", "no variant on gpu answers"), ("exact-gpu", "exact-gpu does not answer")]
)
def test_a_planned_variant_answers_as_its_model_where_the_vertex_states_no_accuracy(named: str, who: str) -> None:
    """Else no query without an accuracy would come to its replicas."""
    worse = variant_record("exact-gpu", model="exact", accuracy=0.9, model_accuracy=0.95, hardware="gpu")
    free = replace(TWICE, vertices=[TWICE.vertices[0], replace(TWICE.vertices[1], accuracy=None)])
    record = replace(BOTH, pipeline=free)
    plan = replace(PLAN, vertices=PLAN.vertices | {"second": stage(hardware="gpu", variant=named)})
    text = refused(record, deploying(plan), catalog_of(*RECORDS, worse))
    assert (
        text
        == f"bad_request plan.vertices.second.accuracy: the vertex states none, and {who} as its model does; state one, such as 0.9"
    )


def test_only_pipelines_have_plans_and_plans_have_stages_of_their_own() -> None:
    assert refused(None, deploying(PLAN)).startswith("unknown_app")
    assert refused(CHECKS, deploying(None, "checks")).startswith("bad_request app: checks is no pipeline")
    voting = (replace(app_record(), selection=EXP4), replace(CHECKS, selection=EXP4))
    text = refused(BOTH, deploying(PLAN), catalog_of(*RECORDS, *voting))
    assert text.startswith("bad_request plan.vertices: each stage is a pipeline or an ensemble")


def test_hardware_that_no_worker_has_is_refused() -> None:
    one = Stage()
    for record in (*RECORDS, BOTH):
        one.put(SUBJECTS.catalog_bucket, key_of(record), encode(record))

    def ask(plan: PipelinePlan) -> Any:
        one.tell(Raw(encode(deploying(plan))), SUBJECTS.admin("deploy-pipeline"), "_INBOX.9")
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
        ({}, "plan: field `pipeline` is missing; give what `infaas pipeline plan"),
        (
            msgspec.to_builtins(PLAN) | {"vertices": {"first": {"hardware": 3}}},
            "plan: field `vertices[...].hardware` must be a text, not a whole number",
        ),
        (msgspec.to_builtins(PLAN) | {"rates": 3}, "plan.rates: plans have no such field; give what `infaas pipeline"),
        (
            msgspec.to_builtins(PLAN) | {"vertices": {"first": msgspec.to_builtins(stage()) | {"batches": 3}}},
            "plan.vertices.first.batches: plans have no such field",
        ),
    ],
)
def test_what_is_no_plan_is_refused(plan: dict[str, Any], message: str) -> None:
    error = refusal(DeployPipeline(app="both", plan=plan), WITH)
    assert error.message.startswith(message)


# -- plans that outlive what they were made for


def test_a_change_of_the_pipeline_drops_a_plan_that_does_not_fit_any_more() -> None:
    assert changed(DEPLOYED, SET).plan == DEPLOYED.plan
    assert changed(DEPLOYED, setting(latency_ms=85.0)).plan == DEPLOYED.plan
    assert changed(DEPLOYED, setting(latency_ms=70.0)).plan is None
    renamed = replace(TWICE.vertices[1], name="third")
    other = replace(TWICE, vertices=[TWICE.vertices[0], renamed], output={"s": "first.scores", "t": "third.scores"})
    assert changed(DEPLOYED, setting(other)).plan is None
    after = changed(DEPLOYED, setting(other))
    assert after.plan_ended.startswith("plan.vertices.second: there is no such vertex; there are: first, third")
    assert changed(after, deploying(None)).plan_ended == ""
    strict = replace(TWICE, vertices=[TWICE.vertices[0], replace(TWICE.vertices[1], accuracy=0.99)])
    best = variant_record("best-gpu", model="exact", accuracy=0.99, hardware="gpu")
    assert changed(DEPLOYED, setting(strict), catalog_of(*RECORDS, best)).plan is None


def test_a_shorter_objective_drops_a_plan_that_does_not_keep_it() -> None:
    assert changed(DEPLOYED, SetApp(app="both", latency_ms=90.0)).plan == DEPLOYED.plan
    after = changed(DEPLOYED, SetApp(app="both", latency_ms=70.0))
    assert (after.plan, after.plan_ended) == (
        None,
        "plan.p99_ms: the plan keeps 80 ms, but the objective is 70 ms; plan again",
    )


@pytest.mark.parametrize(
    "change",
    [
        SetApp(app="both", latency_ms=70.0),
        setting(latency_ms=70.0),
        setting(replace(TWICE, vertices=TWICE.vertices[:1], output={"scores": "first.scores"})),
    ],
)
def test_who_ends_a_plan_by_another_change_is_told(change: Any) -> None:
    after = changed(DEPLOYED, change)
    note = note_of(DEPLOYED, after, change, KNOWN)
    assert note == f"the plan of pipeline both has ended: {after.plan_ended}; plan and deploy again"
    assert note_of(after, after, change, KNOWN) == ""


def test_who_deploys_a_plan_for_much_slower_variants_is_told() -> None:
    # The profile says 4 ms for 4 items, and the plan says 12 ms.
    change = deploying(replace(PLAN, vertices={name: stage(service_ms=12.0) for name in PLAN.vertices}))
    note = note_of(BOTH, changed(BOTH, change), change, KNOWN)
    assert note.startswith(
        "plan.vertices.first.service_ms: mlp-v1-ort-fp32-t1-b8 takes 4.05 ms for 4 items by its profile"
    )
    assert "plan.vertices.second.service_ms: exact-t2 takes 4.05 ms" in note
    near = replace(PLAN, vertices={name: stage(service_ms=4.4) for name in PLAN.vertices})
    change = deploying(near)
    assert note_of(BOTH, changed(BOTH, change), change, KNOWN) == ""


def test_a_plan_follows_the_version_that_serves() -> None:
    newer = replace(CHECKS, links={"check": "1", "exact": "2"})
    second = [model_record("exact", "2"), variant_record("exact-2", model="exact", version="2", accuracy=0.95)]
    after = changed(DEPLOYED, RefitPlan(app="both"), catalog_of(*RECORDS, newer, *second))
    assert after.plan.vertices["second"].variant == "exact-2"
    assert after.plan.vertices["first"] == DEPLOYED.plan.vertices["first"]  # type: ignore[union-attr]
    voting = changed(DEPLOYED, RefitPlan(app="both"), catalog_of(*RECORDS, replace(CHECKS, selection=EXP4)))
    assert voting.plan.vertices.keys() == {"first"}
    without = catalog_of(*RECORDS, replace(CHECKS, links={"check": "1"}))
    assert changed(DEPLOYED, RefitPlan(app="both"), without).plan is None
    assert changed(BOTH, RefitPlan(app="both"), without) == BOTH


@pytest.mark.parametrize(
    ("target", "note"),
    [
        (
            0.999,
            "the plan of pipeline both goes on, and is for 99 % of the queries in time; plan and deploy again for 99.9 %",
        ),
        (0.99, ""),
    ],
)
def test_another_target_leaves_the_plan_and_says_that_it_is_for_another_one(target: float, note: str) -> None:
    change = SetTarget(app="both", slo_target=target)
    after = changed(DEPLOYED, change)
    assert (after.plan, after.slo_target) == (DEPLOYED.plan, target)
    assert note_of(DEPLOYED, after, change, KNOWN) == note
