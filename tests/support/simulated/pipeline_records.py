"""Records of a pipeline, of the apps of its stages and of a plan, and what the registrar makes of changes to them."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import (
    AppRecord,
    Ensemble,
    ModelRecord,
    PipelinePlan,
    PipelineRecord,
    PipelineVertex,
    PlannedStage,
    VariantRecord,
)
from bus.messages.verbs import DeployPipeline, PipelineHead, SetPipeline
from services.core.catalog import Catalog, key_of
from services.registrar.changes import amend
from services.registrar.commands import ChangeRefused
from tests.support.simulated.registrations import (
    app_record,
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


def catalog_of(records: Iterable[Any] = RECORDS) -> Catalog:
    found = Catalog()
    for record in records:
        found.apply(key_of(record), encode(record))
    return found


KNOWN = catalog_of()
EXP4 = Ensemble(policy="exp4")


def changed(record: AppRecord | None, change: Any, catalog: Catalog = KNOWN) -> AppRecord:
    after = amend(record, change, catalog)
    assert isinstance(after, AppRecord), after
    return after


def refused(record: AppRecord | None, change: Any, catalog: Catalog = KNOWN) -> str:
    after = amend(record, change, catalog)
    assert isinstance(after, ChangeRefused), after
    return f"{after.code} {after.message}"


BOTH = changed(None, SET)
WITH = catalog_of([*RECORDS, BOTH])


def stage(**changes: Any) -> PlannedStage:
    made = PlannedStage(hardware="cpu", batch=4, replicas=2, scale=1.0, service_ms=8.0, rho=0.5)
    return replace(made, **changes)


PLAN = PipelinePlan(
    pipeline="both", policy="inferline", status="feasible", cost_per_s=0.001, p99_ms=80.0,
    vertices={"first": stage(), "second": stage()}, envelope=[(1.0, 20)], dispersion=[1.0], steps=[], rate=10.0,
    latency_ms=100.0,
)  # fmt: skip
DEPLOYED = changed(BOTH, deploying(PLAN))
