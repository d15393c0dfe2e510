"""What becomes of the records of pipelines, and of the apps that they name. Pure."""

from collections.abc import Iterable
from math import isfinite
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from bus.codec import encode, explain
from bus.fields import faults
from bus.messages.catalog import AppRecord, PipelinePlan, PipelineRecord, PipelineVertex, PlannedStage, VariantRecord
from bus.messages.public import Error
from bus.messages.verbs import (
    DeleteApp,
    DeployPipeline,
    Expect,
    LinkModel,
    SetApp,
    SetPipeline,
    SetReplicas,
    SetSelection,
    SetVersion,
    StartRelease,
    UnlinkModel,
)
from services.core.catalog import Catalog
from services.core.cost import HANDLING_MS, PER_CORE, latency_ms
from services.core.demand import meeting
from services.core.pipelines.checks import pipeline_errors, signature_of
from services.core.pipelines.planners import POLICIES
from services.registrar.commands import MOST_DEFAULT, LinkVersion, RefitPlan, error_of

HOP_MS = 0.1  # a message between two processes of one machine takes no less
SLOWER = 1.25  # times the planned service time, which a variant may take by its profile
NOTABLE_MS = 5.0  # that a plan may count with above a profile, for messages and batching
NO_MODELS = (
    "is a pipeline and has no models of its own; register the model under the app of one of its stages, or a new one"
)
MOST_SHOWN = 8  # errors of one pipeline


# -- pipelines


def set_pipeline(record: AppRecord | None, change: SetPipeline, catalog: Catalog) -> AppRecord | Error:
    """The app with this pipeline. A plan that does not fit it any more is dropped."""
    if record is not None and record.pipeline is None and (record.links or record.signature is not None):
        return error_of(
            f"pipeline.name: app {change.app} exists already and has models of its own; give the pipeline another name"
        )
    apps = {app.app: app for app in catalog.apps}
    graph, head = change.graph, change.pipeline
    wrong = pipeline_errors(change.app, head.latency_ms, graph, apps, HOP_MS)
    wrong = wrong or [*_sizes(graph), *_floors(graph, catalog)]
    if wrong:
        more = f"; and {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
        return error_of("; ".join(wrong[:MOST_SHOWN]) + more)
    before = record or AppRecord(app=change.app, links={})
    after = replace(
        before,
        pipeline=graph,
        signature=signature_of(graph, apps),
        latency_ms=head.latency_ms,
        slo_target=before.slo_target if head.slo_target is None else head.slo_target,
        min_instances=0,
    )
    for outer in _containing(change.app, catalog):
        assert outer.pipeline is not None
        broken = pipeline_errors(outer.app, outer.latency_ms, outer.pipeline, {**apps, change.app: after})
        if broken:
            return error_of(
                f"pipeline {outer.app}, which contains {change.app}, would not fit any more: {broken[0]}; change {outer.app} first"
            )
    return _with_plan(after, after.plan, catalog)


def with_settings(after: AppRecord) -> AppRecord | Error:
    """A pipeline with other settings, which `set_pipeline` would refuse alike. A plan that does not keep its objective is dropped."""
    assert after.pipeline is not None, "it is a pipeline"
    wrong = pipeline_errors(after.app, after.latency_ms, after.pipeline, None, HOP_MS)
    if wrong:
        return error_of("; ".join(wrong))
    late = [] if after.plan is None else [*_late(after.plan, after)]
    return _without_plan(after, late[0]) if late else after


def _sizes(pipeline: PipelineRecord) -> Iterable[str]:
    size = len(encode(pipeline))
    if size > MOST_DEFAULT:
        text = f"pipeline: takes {size:,} bytes, and at most {MOST_DEFAULT:,} are allowed, since each service keeps it"
        yield f"{text}; shorten the lists of values in [[edge]] when, or make a pipeline of a part of it"


def _floors(pipeline: PipelineRecord, catalog: Catalog, unlinked: tuple[str, str] = ("", "")) -> Iterable[str]:
    """Accuracies that vertices ask for and nothing has. unlinked: an app, and a model that it links and is not to count."""
    for vertex in pipeline.vertices:
        best = _best_accuracy(vertex.app, catalog, unlinked)
        if vertex.accuracy is not None and vertex.accuracy > best:
            text = f"vertex[{vertex.name}].accuracy: no variant of app {vertex.app} has {vertex.accuracy:g}; the best has {best:.4g}"
            yield f"{text}; ask for less, or register a more accurate model for {vertex.app} first"


def _best_accuracy(app: str, catalog: Catalog, unlinked: tuple[str, str]) -> float:
    """The highest floor that an app's queries can have. What was not measured is as good as any, as in selection."""
    record = catalog.app(app)
    if record is not None and record.pipeline is not None:
        return min((_best_accuracy(one.app, catalog, unlinked) for one in record.pipeline.vertices), default=1.0)
    known = [one.measured for one in catalog.variants_of(app) if (app, one.model) != unlinked]
    return max((1.0 if one is None else one for one in known), default=1.0)


def change_of_pipeline(change: Any) -> Error | None:
    """Why an app that is a pipeline does not get a change that other apps may get; None: it does."""
    remedy = "deploy a plan (infaas.admin.deploy-pipeline), or use set-replicas on the app of a stage"
    match change:
        case LinkModel() | SetVersion() | LinkVersion() | StartRelease():
            text = f"app: {change.app} {NO_MODELS}"
        case SetSelection():
            text = f"app: {change.app} is a pipeline, whose stages answer; use set-selection on the app of a stage"
        case Expect():
            text = f"app: {change.app} is a pipeline; use expect on the apps of its stages"
        case SetReplicas():
            text = f"app: {change.app} is a pipeline and has no instances of its own; {remedy}"
        case SetApp(latency_ms=None):
            text = f"latency_ms: {change.app} is a pipeline, which needs an objective; give another one"
        case SetApp() if change.min_instances not in (UNSET, 0):
            text = f"min_instances: {change.app} is a pipeline and has no instances of its own; {remedy}"
        case _:
            return None
    return error_of(text)


def in_use(record: AppRecord, change: DeleteApp | UnlinkModel, catalog: Catalog) -> Error | None:
    """Why an app cannot be deleted, or a model of it unlinked: a pipeline needs it."""
    outer = next(iter(_naming(change.app, catalog)), None)
    if outer is None:
        return None
    remedy = f"change pipeline {outer.app} (infaas.admin.set-pipeline) or delete it (infaas.admin.delete-app) first"
    if isinstance(change, DeleteApp):
        return error_of(f"app: {change.app} is a stage of pipeline {outer.app}; {remedy}")
    if set(record.links) <= {change.model}:
        text = f"model: {change.model} is the last model of app {change.app}, which is a stage of pipeline {outer.app}"
        return error_of(f"{text}; link another model, or {remedy}")
    for one in _containing(change.app, catalog):
        assert one.pipeline is not None, "it contains the app"
        for short in _floors(one.pipeline, catalog, (change.app, change.model)):
            text = (
                f"model: without {change.model}, pipeline {one.app} would not fit any more: {short.rpartition(';')[0]}"
            )
            remedy = "link another model, or ask for less there (infaas.admin.set-pipeline), first"
            return error_of(f"{text}; {remedy}")
    return None


def _naming(app: str, catalog: Catalog) -> list[AppRecord]:
    """The pipelines that have this app as a stage."""
    found = [one for one in catalog.apps if one.pipeline and any(v.app == app for v in one.pipeline.vertices)]
    return sorted((one for one in found if one.app != app), key=lambda one: one.app)


def _containing(app: str, catalog: Catalog) -> list[AppRecord]:
    """The pipelines that have this app as a stage, or as a stage of a stage, and so on."""
    found: dict[str, AppRecord] = {}
    ahead = [app]
    while ahead:
        for outer in _naming(ahead.pop(), catalog):
            if outer.app not in found and outer.app != app:
                found[outer.app] = outer
                ahead.append(outer.app)
    return list(found.values())


# -- plans


def deploy(record: AppRecord, change: DeployPipeline, catalog: Catalog) -> AppRecord | Error:
    """The app with the plan that is asked for, in which each stage names a variant."""
    plan = plan_of(change.plan)
    return plan if isinstance(plan, Error) else planned(record, plan, catalog)


def planned(
    record: AppRecord, plan: PipelinePlan | None, catalog: Catalog, *, again: bool = False
) -> AppRecord | Error:
    """The app with this plan. again: it is deployed already, for profiles of other versions."""
    if record.pipeline is None:
        return error_of(f"app: {record.app} is no pipeline: see infaas.list.pipelines")
    if plan is None:
        return replace(record, plan=None, plan_ended="")
    wrong = [*_plan_errors(plan, record, record.pipeline, catalog)]
    if wrong:
        return error_of("; ".join(wrong))
    stages: dict[str, PlannedStage] = {}
    for vertex in record.pipeline.vertices:
        if not _planned(vertex, catalog):
            continue
        stage = plan.vertices[vertex.name]
        variant = _fitted(vertex, stage, catalog)
        if isinstance(variant, VariantRecord) and not again:
            variant = _slow(variant, stage) or variant
        if isinstance(variant, str):
            wrong.append(f"plan.vertices.{vertex.name}.{variant}")
        else:
            stages[vertex.name] = replace(stage, variant=variant.variant, accuracy=variant.accuracy)
    if not wrong and not stages:
        wrong.append("plan.vertices: each stage is a pipeline or an ensemble; deploy plans of those pipelines")
    if wrong:
        return error_of("; ".join(wrong))
    return replace(record, plan=replace(plan, vertices=stages), plan_ended="")


def other_speeds(record: AppRecord, catalog: Catalog) -> Iterable[str]:
    """Stages whose variant is much faster than its plan says: then the plan has more replicas than are needed."""
    for name, stage in record.plan.vertices.items() if record.plan is not None else ():
        variant = catalog.variant(stage.variant)
        if variant is None:
            continue
        took_ms = latency_ms(variant, stage.batch) + HANDLING_MS
        if stage.service_ms > max(SLOWER * took_ms, took_ms + NOTABLE_MS):
            text = f"plan.vertices.{name}.service_ms: {stage.variant} takes {took_ms:.4g} ms for {stage.batch} items by its profile"
            yield f"{text}, and the plan says {stage.service_ms:.4g}: plan again for fewer replicas"


def ended(before: AppRecord | None, after: AppRecord | None) -> str:
    """That a change has ended a pipeline's plan, and why; empty: it has not."""
    if before is None or after is None or before.plan is None or after.plan is not None:
        return ""
    return f"the plan of pipeline {after.app} has ended: {after.plan_ended}; plan and deploy again"


def retargeted(before: AppRecord | None, after: AppRecord | None) -> str:
    """That a change of its target leaves a pipeline with a plan for another one; empty: it does not."""
    if before is None or after is None or after.plan is None or after.slo_target in (None, before.slo_target):
        return ""
    if after.slo_target == after.plan.percentile:
        return ""
    text = (
        f"the plan of pipeline {after.app} goes on, and is for {100 * after.plan.percentile:g} % of the queries in time"
    )
    return f"{text}; plan and deploy again for {100 * after.slo_target:g} %"


def refit(record: AppRecord, _: RefitPlan, catalog: Catalog) -> AppRecord:
    """The app with variants in its plan that the apps of its stages serve now; without its plan if they have none that fits."""
    if record.plan is None or record.pipeline is None:
        return record
    stages = dict(record.plan.vertices)
    for vertex in record.pipeline.vertices:
        stage = stages.get(vertex.name)
        if stage is None or any(one.variant == stage.variant for one in catalog.variants_of(vertex.app)):
            continue
        stages[vertex.name] = replace(stage, variant="")
    return _with_plan(record, replace(record.plan, vertices=stages), catalog)


def _with_plan(record: AppRecord, plan: PipelinePlan | None, catalog: Catalog) -> AppRecord:
    """The app with this plan, or with none if it does not fit."""
    if plan is None:
        return record
    after = planned(record, plan, catalog, again=True)
    return _without_plan(record, after.message) if isinstance(after, Error) else after


def _without_plan(record: AppRecord, reason: str) -> AppRecord:
    return replace(record, plan=None, plan_ended=reason)


def plan_of(sent: dict[str, Any] | None) -> PipelinePlan | Error | None:
    """The plan in a request of `deploy-pipeline`; None: the one that is deployed ends."""
    if sent is None:
        return None
    remedy = "give what `infaas pipeline plan FILE.toml --json` prints"
    try:
        plan = msgspec.convert(sent, PipelinePlan)
    except msgspec.ValidationError as error:
        return error_of(f"plan: {explain(error)}; {remedy}")
    unknown = [f"plan.{key[:80]}" for key in sorted({*sent} - {*PipelinePlan.__struct_fields__})]
    for name, stage in sent["vertices"].items():
        more = sorted({*stage} - {*PlannedStage.__struct_fields__})
        unknown += [f"plan.vertices.{name[:80]}.{key[:80]}" for key in more]
    if unknown:
        return error_of(f"{', '.join(unknown[:MOST_SHOWN])}: plans have no such field; {remedy}")
    return plan


def absent_hardware(plan: PipelinePlan, kinds: set[str]) -> Error | None:
    """Hardware of stages that is not among these kinds of device, which workers have or machines may bring."""
    for name, stage in plan.vertices.items():
        if stage.hardware not in kinds:
            here = ", ".join(sorted(kinds))
            text = f"plan.vertices.{name}.hardware: no worker has {stage.hardware[:80]!r}; there are: {here}; start such a worker, or plan with [[option]]s on those"
            return error_of(text, "unsatisfiable")
    return None


def _plan_errors(plan: PipelinePlan, record: AppRecord, pipeline: PipelineRecord, catalog: Catalog) -> Iterable[str]:
    if plan.status == "infeasible":
        yield f"plan.status: the plan is infeasible: {plan.reason or 'it gives no reason'}; plan again with a longer objective, other options or less load"
        return
    if plan.policy not in POLICIES:
        yield f"plan.policy: there is no policy {plan.policy[:80]!r}; there are: {', '.join(POLICIES)}"
    if plan.pipeline != record.app:
        yield f"plan.pipeline: the plan is for {plan.pipeline[:80]!r}, not for {record.app}"
    yield from (f"{fault.key}: {fault.reason}" for fault in faults(plan, "plan"))
    yield from _late(plan, record)
    if len(plan.envelope) != len(plan.dispersion):
        yield "plan.dispersion: must have one value for each window of plan.envelope"
    if not all(isfinite(window) and window > 0 and count >= 0 for window, count in plan.envelope):
        yield "plan.envelope: must be pairs of a window above 0 s and a number of queries"
    names = [vertex.name for vertex in pipeline.vertices]
    for name in plan.vertices:
        if name not in names:
            yield f"plan.vertices.{name[:80]}: there is no such vertex; there are: {', '.join(names)}"
    for vertex in pipeline.vertices:
        if vertex.name not in plan.vertices and _planned(vertex, catalog):
            yield f"plan.vertices: lacks vertex {vertex.name}; plan again"


def _late(plan: PipelinePlan, record: AppRecord) -> Iterable[str]:
    if record.latency_ms is not None and plan.p99_ms > record.latency_ms:
        yield f"plan.p99_ms: the plan keeps {plan.p99_ms:.4g} ms, but the objective is {record.latency_ms:g} ms; plan again"


def _planned(vertex: PipelineVertex, catalog: Catalog) -> bool:
    """Whether a plan says which instances serve a stage. Pipelines and apps whose models answer together see to theirs themselves."""
    app = catalog.app(vertex.app)
    if app is None:
        return True
    return app.pipeline is None and (app.selection is None or app.selection.policy is None)


def _fitted(vertex: PipelineVertex, stage: PlannedStage, catalog: Catalog) -> VariantRecord | str:
    """The variant that serves a stage: the named one, else the cheapest that fits. A text says which field is wrong."""
    served = catalog.variants_of(vertex.app)
    here = [one for one in served if one.hardware == stage.hardware]
    if not here:
        kinds = ", ".join(sorted({one.hardware for one in served})) or "none"
        return f"hardware: app {vertex.app} has no variant on {stage.hardware[:80]!r}; it has variants on: {kinds}; plan with those"
    if stage.variant:
        here = [one for one in here if one.variant == stage.variant]
        if not here:
            return f"variant: app {vertex.app} serves no {stage.variant[:80]!r} on {stage.hardware}; plan again, or leave variant empty"
    floor = vertex.accuracy or 0.0
    suffice = meeting(served, floor, catalog.app(vertex.app))
    exact = [one for one in here if one in suffice]
    if not exact:
        best = max(one.accuracy or 0.0 for one in here)
        if not floor:
            who = f"{stage.variant} does not answer" if stage.variant else f"no variant on {stage.hardware} answers"
            return f"accuracy: the vertex states none, and {who} as its model does; state one, such as {best:.4g}"
        return f"accuracy: the vertex asks for {floor:g}, and the best variant on {stage.hardware} has {best:.4g}"
    wide = [one for one in exact if one.max_batch >= stage.batch]
    if not wide:
        most = max(one.max_batch for one in exact)
        return f"batch: variants of app {vertex.app} on {stage.hardware} take at most {most} items, not {stage.batch}"
    allowed_ms = SLOWER * stage.service_ms
    return min(
        wide,
        key=lambda one: (
            latency_ms(one, stage.batch) > allowed_ms,
            _price(one),
            latency_ms(one, stage.batch),
            one.variant,
        ),
    )


def _slow(variant: VariantRecord, stage: PlannedStage) -> str:
    """That the variant takes longer than the plan counts with; empty: it does not."""
    took_ms = latency_ms(variant, stage.batch) + HANDLING_MS
    if took_ms <= SLOWER * stage.service_ms:
        return ""
    text = f"service_ms: {variant.variant} takes {took_ms:.4g} ms for {stage.batch} items by its profile"
    return f"{text}, which is more than {SLOWER:g} times the plan's {stage.service_ms:.4g}; plan again"


def _price(record: VariantRecord) -> float:
    """A number by which instances of one kind of device compare as their prices do."""
    if record.price_per_s is not None:
        return record.price_per_s
    return float(record.threads) if record.hardware in PER_CORE else record.profile.memory_mb
