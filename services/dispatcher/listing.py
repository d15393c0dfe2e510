"""What there is, with the numbers that decisions use: the replies to `infaas.list.<what>`."""

from typing import Any

from bus.messages.public import Error, Listing, ListRequest, Refusal
from services.core.catalog import Catalog
from services.core.cluster import ClusterView, Worker
from services.core.intake import BadRequest, check_name
from services.dispatcher.explaining import state_of


def listing(what: str, ask: ListRequest, now: float, catalog: Catalog, view: ClusterView) -> Listing | Refusal:
    """The items of one kind; unknown kinds are a bad_request that names the known ones."""
    try:
        check_name(ask.app, "app")
        check_name(ask.model, "model")
    except BadRequest as error:
        return Refusal(error=Error(code="bad_request", message=str(error)))
    if what == "apps":
        return Listing(items=_apps(ask, catalog))
    if what == "models":
        return Listing(items=_models(ask, catalog))
    if what == "variants":
        return Listing(items=_variants(ask, view))
    if what == "workers":
        return Listing(items=_workers(now, view))
    text = f"there is no list of {what!r}: ask for apps, models, variants or workers"
    return Refusal(error=Error(code="bad_request", message=text))


def _apps(ask: ListRequest, catalog: Catalog) -> list[dict[str, Any]]:
    return [
        {
            "app": app.app,
            "models": sorted(app.links),
            "versions": dict(app.links),
            "variants": len(catalog.variants_of(app.app)),
            "latency_ms": app.latency_ms,
            "default_output": app.default_output,
            "min_instances": app.min_instances,
            "inputs": _specs(app.signature.inputs) if app.signature else [],
            "outputs": _specs(app.signature.outputs) if app.signature else [],
            "created": app.created,
        }
        for app in sorted(catalog.apps, key=lambda app: app.app)
        if ask.app in (None, app.app) and (ask.model is None or ask.model in app.links)
    ]


def _specs(specs: list[Any]) -> list[dict[str, Any]]:
    return [{"name": s.name, "datatype": s.datatype, "shape": s.shape} for s in specs]


def _models(ask: ListRequest, catalog: Catalog) -> list[dict[str, Any]]:
    items = []
    for model in sorted(catalog.models, key=lambda m: (m.model, m.created)):
        apps = sorted(catalog.apps_linking(model.model))
        if (ask.app is not None and ask.app not in apps) or ask.model not in (None, model.model):
            continue
        serving = [a for a in apps if (record := catalog.app(a)) and record.links[model.model] == model.version]
        items.append(
            {
                "model": model.model,
                "version": model.version,
                "apps": apps,
                "serving": serving,
                "task": model.task,
                "metric": model.metric,
                "format": model.format,
                "variants": len(catalog.variants_at(model.model, model.version)),
                "created": model.created,
            }
        )
    return items


def _variants(ask: ListRequest, view: ClusterView) -> list[dict[str, Any]]:
    items = []
    for name, app in sorted(view.apps.items()):
        if name.startswith("_") or ask.app not in (None, name):
            continue
        for i, group in enumerate(app.groups):
            record = group.record
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
                    "precision": record.precision,
                    "threads": record.threads,
                    "max_batch": record.max_batch,
                    "accuracy": record.accuracy,
                    "agreement": record.agreement,
                    "load_ms": record.profile.load_ms,
                    "latency_ms": group.table.seconds(1) * 1000.0,
                    "memory_mb": record.profile.memory_mb,
                    "saturation_qps": record.profile.saturation_qps,
                    "price_per_hour": hourly,
                    "cost_per_1000": float(app.cost[i]),
                    "state": state_of(group, app, view),
                    "quarantined": view.quarantines(record.variant),
                    "instances": len(instances),
                    "dominated": record.dominated,
                    "simulated": record.simulated,
                }
            )
    return items


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
                    "utilisation": d.utilisation,
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
                    "queued": i.own + i.others,
                    "load": i.status.load,
                    "latency_ms": i.status.latency_ms,
                    "mean_batch": i.status.mean_batch,
                    "factor": i.factor,
                }
                for i in worker.instances.values()
            ],
            "simulated": all(d.simulated for d in worker.devices.values()),
        }
        for worker in sorted(view.workers.values(), key=lambda w: w.name)
    ]


def _state_of(worker: Worker) -> str:
    """As people are shown it. Booting: its monitor speaks, and none of its executors has yet."""
    if worker.draining:
        return "Draining"
    if any(device.alive for device in worker.devices.values()):
        return "Ready"
    return "Down" if worker.was_alive else "Booting"
