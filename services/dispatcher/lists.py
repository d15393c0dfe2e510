"""Lists: the replies to `infaas.list.<what>`, with the numbers that decisions use. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import asdict

from bus.messages.catalog import AppRecord, ModelRecord, PipelineRecord, error_of
from bus.messages.public import Error, Listing, ListRequest, Refusal
from bus.messages.scaling import PipelineReplicas
from bus.subjects import WITHOUT_APP
from services.core.catalog import Catalog, target_of
from services.core.cost import HANDLING_MS
from services.core.pipelines.estimator import MeasuredHop
from services.core.pipelines.graph import PipelineGraph
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import AppView, VariantInstances
from services.core.selection.instances import Worker
from services.core.validation import WrongField, check_name
from services.dispatcher.stages import service_seconds


def listing(
    what: str,
    ask: ListRequest,
    now: float,
    catalog: Catalog,
    view: ClusterView,
    slo_target: float,
    kept: Mapping[str, PipelineReplicas] = {},
    hops: Mapping[str, MeasuredHop] = {},
    unserved: Callable[[str], str] = lambda _: "",
) -> Listing | Refusal:
    """The items of one kind. An unknown kind is a bad_request that names the known ones.

    kept: replicas of deployed pipelines. hops: by planned variant, what a batch was measured to take beyond its profile. unserved: why nobody can serve
    an app.
    """
    try:
        check_name(ask.app, "app")
        check_name(ask.model, "model")
    except WrongField as error:
        return Refusal(error=Error(code="bad_request", message=str(error)))
    if what == "apps":
        return Listing(items=_apps(ask, catalog, slo_target, unserved))
    if what == "models":
        return Listing(items=_models(ask, catalog))
    if what == "variants":
        return Listing(items=_variants(ask, view, hops))
    if what == "workers":
        return Listing(items=_workers(now, view))
    if what == "pipelines":
        return Listing(items=_pipelines(ask, catalog, view, slo_target, kept))
    text = f"there is no list of {what!r}: ask for apps, models, variants, workers or pipelines"
    return Refusal(error=Error(code="bad_request", message=text))


def _apps(
    ask: ListRequest, catalog: Catalog, slo_target: float, unserved: Callable[[str], str]
) -> list[dict[str, Any]]:
    """stage_of: the pipelines of which it is a vertex. Their visits are parts of queries, which no figure of the app counts as queries."""
    stages: dict[str, set[str]] = {}
    for app in catalog.apps:
        for vertex in app.pipeline.vertices if app.pipeline is not None else ():
            stages.setdefault(vertex.app, set()).add(app.app)
    return [
        {
            "app": app.app,
            "models": sorted(app.links),
            "versions": dict(app.links),
            "variants": len(catalog.variants_of(app.app)),
            "latency_ms": app.latency_ms,
            "slo_target": target_of(app, slo_target),
            "accuracy": app.accuracy,
            "default_output": app.default_output,
            "min_instances": app.min_instances,
            "replicas": app.replicas,
            "selection": None if app.selection is None else asdict(app.selection),
            "pipeline": None if app.pipeline is None else msgspec.to_builtins(app.pipeline),
            "unserved": unserved(app.app) or None,
            "stage_of": sorted(stages.get(app.app, ())),
            "inputs": _specs(app.signature.inputs) if app.signature else [],
            "outputs": _specs(app.signature.outputs) if app.signature else [],
            "labels": catalog.classes_of(app),
            "created": app.created,
        }
        for app in sorted(catalog.apps, key=lambda app: app.app)
        if ask.app in (None, app.app) and (ask.model is None or ask.model in app.links)
    ]


def _specs(specs: list[Any]) -> list[dict[str, Any]]:
    """columns, unit: as its owner has named them, where it has."""
    return [msgspec.to_builtins(spec) for spec in specs]


def _models(ask: ListRequest, catalog: Catalog) -> list[dict[str, Any]]:
    items = []
    for model in sorted(catalog.models, key=lambda m: (m.model, m.created)):
        apps = sorted(catalog.apps_linking(model.model))
        if ask.model not in (None, model.model) or (ask.app is not None and not _concerns(model, ask.app, catalog)):
            continue
        serving = [a for a in apps if (record := catalog.app(a)) and record.links[model.model] == model.version]
        items.append(
            {
                "model": model.model,
                "version": model.version,
                "app": None if model.app == WITHOUT_APP else model.app,
                "apps": apps,
                "serving": serving,
                "task": model.task,
                "metric": model.metric,
                "inputs": _specs(model.signature.inputs),
                "outputs": _specs(model.signature.outputs),
                "labels": model.labels,
                "format": model.format,
                "functions": "" if model.functions is None else model.functions.words,
                "variants": len(catalog.variants_at(model.model, model.version)),
                "created": model.created,
            }
        )
    return items


def _concerns(model: ModelRecord, app: str, catalog: Catalog) -> bool:
    """Whether a version was made for this app, or may answer for it, of a model that it links."""
    record = catalog.app(app)
    linked = record is not None and model.model in record.links
    return model.app == app or (
        record is not None and linked and model.version in catalog.versions_for(record, model.model)
    )


def _variants(ask: ListRequest, view: ClusterView, hops: Mapping[str, MeasuredHop]) -> list[dict[str, Any]]:
    items = []
    for name, app in sorted(view.apps.items()):
        if name.startswith("_") or ask.app not in (None, name):
            continue
        for i, group in enumerate(app.groups):
            record = group.record
            hop = hops.get(record.variant)
            if ask.model not in (None, record.model) or not app.current[i]:
                continue
            instances = (*group.active, *group.loading, *group.troubled)
            hourly = view.nominal_price_per_s(record) * 3600.0
            items.append(
                {
                    "app": name,
                    "model": record.model,
                    "version": record.version,
                    "variant": record.variant,
                    "hardware": record.hardware,
                    "framework": record.framework,
                    "engine": record.profile.host.get("engine"),
                    "precision": record.precision,
                    "threads": record.threads,
                    "max_batch": record.max_batch,
                    "alone": record.alone,
                    "functions": "" if record.functions is None else record.functions.words,
                    "arithmetic": record.arithmetic,
                    "batching": "+".join(sorted({one.status.batching for one in instances})) or record.batching,
                    "accuracy": record.accuracy,
                    "accuracy_low": record.accuracy_low,
                    "accuracy_high": record.accuracy_high,
                    "model_accuracy": record.model_accuracy,
                    "metric": record.metric,
                    "error": error_of(record.accuracy, record.metric),
                    "unit": record.signature.target[1],
                    "contexts": record.contexts,
                    "agreement": record.agreement,
                    "differing": record.differing,
                    "load_ms": record.profile.load_ms,
                    "init_ms": record.profile.init_ms,
                    "transfer_ms": record.profile.transfer_ms,
                    "host_mb": record.profile.host_mb,
                    "latency_ms": group.table.seconds(1) * 1000.0,
                    "batch_latency_ms": _by_batch(group),
                    "hop_ms": None if hop is None else hop.ms,
                    "hop_quantiles_ms": None if hop is None else hop.quantiles_ms,
                    "provenance": record.profile.provenance,
                    "memory_mb": record.profile.memory_mb,
                    "saturation_qps": record.profile.saturation_qps,
                    "price_per_hour": hourly,
                    "cost_per_1000": float(app.cost[i]),
                    "state": state_of(group, app, view),
                    "quarantined": view.quarantines(record.variant),
                    "instances": len(instances),
                    "reclaimable": sum(one.status.reclaimable for one in instances),
                    "dominated": record.dominated,
                    "simulated": record.simulated,
                }
            )
    return items


def _by_batch(group: VariantInstances) -> dict[str, float]:
    """Milliseconds of a batch, with its overhead, by the sizes that were measured, which are texts: not all clients take other keys."""
    sizes = {min(row.batch, group.record.max_batch) for row in group.record.profile.rows}
    return {str(size): group.table.seconds(size) * 1000.0 + HANDLING_MS for size in sorted(sizes)}


def _pipelines(
    ask: ListRequest, catalog: Catalog, view: ClusterView, slo_target: float, kept: Mapping[str, PipelineReplicas]
) -> list[dict[str, Any]]:
    found = []
    for app in sorted(catalog.apps, key=lambda app: app.app):
        if app.pipeline is None or ask.app not in (None, app.app):
            continue
        plan = app.plan
        summary = ("policy", "status", "cost_per_s", "p99_ms", "percentile", "rate", "latency_ms", "hop_ms")
        found.append(
            {
                "app": app.app,
                "latency_ms": app.latency_ms,
                "slo_target": target_of(app, slo_target),
                "plan": None if plan is None else {name: getattr(plan, name) for name in summary},
                "plan_ended": app.plan_ended or None,
                "vertices": _stages(app, app.pipeline, view, kept.get(app.app)),
                "edges": msgspec.to_builtins(app.pipeline.edges),
                "output": app.pipeline.output,
                "inputs": _specs(app.signature.inputs) if app.signature else [],
                "outputs": _specs(app.signature.outputs) if app.signature else [],
                "created": app.created,
            }
        )
    return found


def _stages(
    app: AppRecord, pipeline: PipelineRecord, view: ClusterView, kept: PipelineReplicas | None
) -> list[dict[str, Any]]:
    """service_ms: as planned, else of the variant that would be chosen without a limit of latency. share: of the objective, by the service
    times on the longest path through the stage. instances, loading, queued: of the planned variant, else of the vertex's app.
    replicas, wanted: as planned, and as the leading VM-autoscaler keeps them now; missing: why not all of them are there.
    """
    planned = {} if app.plan is None else app.plan.vertices
    graph = PipelineGraph(pipeline)
    service = service_seconds(app, view.apps)
    before, behind = graph.before(service), graph.behind(service)
    rows = []
    for vertex in pipeline.vertices:
        stage, name = planned.get(vertex.name), vertex.name
        served = view.apps.get(vertex.app)
        groups = [
            group
            for group in (served.groups if served is not None else ())
            if stage is None or group.record.variant == stage.variant
        ]
        instances = [one for group in groups for one in (*group.active, *group.troubled)]
        longest = before[name] + service[name] + behind[name]
        rows.append(
            {
                "vertex": name,
                "app": vertex.app,
                "inputs": vertex.inputs,
                "accuracy_required": vertex.accuracy,
                "variant": None if stage is None else stage.variant,
                "hardware": None if stage is None else stage.hardware,
                "batch": None if stage is None else stage.batch,
                "replicas": None if stage is None else stage.replicas,
                "wanted": None if stage is None or kept is None else kept.replicas.get(name),
                "missing": None if stage is None or kept is None else kept.missing.get(name),
                "scale": None if stage is None else stage.scale,
                "service_ms": 1000.0 * service[name] or None if stage is None else stage.service_ms,
                "rho": None if stage is None else stage.rho,
                "accuracy": None if stage is None else stage.accuracy,
                "share": service[name] / longest if longest else None,
                "instances": len(instances),
                "loading": sum(len(group.loading) for group in groups),
                "queued": sum(one.own + one.others for one in instances),
            }
        )
    return rows


def _workers(now: float, view: ClusterView) -> list[dict[str, Any]]:
    return [
        {
            "worker": worker.name,
            "hardware": worker.hardware,
            "kind": worker.kind,
            "state": _state_of(worker),
            "incarnation": worker.incarnation,
            "last_seen_s": round(now - worker.seen, 3),
            "clock_skew_ms": round(worker.skew * 1000.0, 3),
            "devices": [
                {
                    "device": d.device,
                    "kind": d.kind,
                    "alive": d.alive,
                    "cores": d.cores,
                    "cores_used": d.cores_used,
                    "memory_mb": d.memory_mb,
                    "memory_used_mb": d.memory_used_mb,
                    "cores_reclaimable": d.cores_reclaimable,
                    "memory_reclaimable_mb": d.memory_reclaimable_mb,
                    "utilisation": d.utilisation,
                    "foreign_use": d.foreign_use,
                    "host_used_mb": d.host_used_mb,
                    "price_per_hour": d.price_per_hour,
                    "simulated": d.simulated,
                }
                for d in worker.devices.values()
            ],
            "instances": [
                {
                    "instance": i.id,
                    "variant": i.record.variant,
                    "device": i.device,
                    "state": i.status.state,
                    "reclaimable": i.status.reclaimable,
                    "queued": i.own + i.others,
                    "load": i.status.load,
                    "latency_ms": i.status.latency_ms,
                    "mean_batch": i.status.mean_batch,
                    "batching": i.status.batching,
                    "batch_limit": i.most,
                    "contexts": i.contexts,
                    "factor": i.factor,
                }
                for i in worker.instances.values()
            ],
            "simulated": all(d.simulated for d in worker.devices.values()),
        }
        for worker in sorted(view.workers.values(), key=lambda w: w.name)
    ]


def _state_of(worker: Worker) -> str:
    """The state that people see. Booting: its monitor sends heartbeats, but none of its executors has been alive yet."""
    if worker.draining:
        return "Draining"
    if any(device.alive for device in worker.devices.values()):
        return "Ready"
    return "Down" if worker.was_alive else "Booting"


def state_of(group: VariantInstances, app: AppView, view: ClusterView) -> str:
    """The best state of any instance of a variant, for this app. Quarantined if no worker would load it."""
    if group.active:  # where accuracy is the goal, Overloaded ones are among them
        return "Active" if any(i.state_for(app.app.app) == "Active" for i in group.active) else "Overloaded"
    if group.troubled:
        return group.troubled[0].state_for(app.app.app)
    if group.loading:
        return "Loading"
    if group.warm:
        return "Warm"
    shut = frozenset(view.quarantines(group.record.variant))
    if not shut:
        return "Inactive"
    record = group.record
    free = view.least_utilised(record.hardware, shut, simulated=record.simulated)
    return "Quarantined" if free is None else "Inactive"
