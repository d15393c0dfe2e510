"""What there is, in Clipper's words: applications, models, versions and containers. Pure."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from bus.messages.catalog import AppRecord, ModelRecord
from services.core.catalog import Catalog
from services.gateway.clipper.inputs import WrongInput, input_type_of


def application(app: AppRecord) -> dict[str, Any]:
    """One application as it was registered; a latency that nobody stated is 0."""
    try:
        kind = input_type_of(app)
    except WrongInput:
        kind = "floats"
    return {
        "name": app.app,
        "input_type": kind,
        "default_output": _text(app.default_output),
        "latency_slo_micros": round((app.latency_ms or 0.0) * 1000.0),
        "linked_models": sorted(app.links),
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def model(record: ModelRecord, catalog: Catalog) -> dict[str, Any]:
    """One version of a model. is_current_version: an application serves it, or it is the newest where none serves the model."""
    serving = sorted(app for app in catalog.apps_linking(record.model) if _links(catalog, app, record))
    newest = catalog.model(record.model)
    current = bool(serving) or (not catalog.apps_linking(record.model) and newest is record)
    inputs = record.signature.inputs
    return {
        "model_name": record.model,
        "model_version": record.version,
        "is_current_version": current,
        "input_type": input_type_of(AppRecord(app="_", links={}, signature=record.signature))
        if len(inputs) == 1
        else "floats",
        "labels": record.labels,
        "container_name": record.format,
        "model_data_path": record.source,
        "batch_size": -1,
        "serving": serving,
        "variants": [variant.variant for variant in catalog.variants_at(record.model, record.version)],
    }


def _links(catalog: Catalog, app: str, record: ModelRecord) -> bool:
    found = catalog.app(app)
    return found is not None and found.links.get(record.model) == record.version


def models(catalog: Catalog) -> Iterator[ModelRecord]:
    """All versions of all models, in order."""
    yield from sorted(catalog.models, key=lambda record: (record.model, record.created, record.version))


def named(record: ModelRecord) -> str:
    """A version as Clipper names it."""
    return f"{record.model}:{record.version}"


def containers(catalog: Catalog, workers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every loaded instance, numbered within its version. workers: as `infaas.list.workers` tells them."""
    found: list[dict[str, Any]] = []
    counted: dict[str, int] = {}
    loaded = [(worker["worker"], instance) for worker in workers for instance in worker["instances"]]
    for where, instance in sorted(loaded, key=lambda pair: pair[1]["instance"]):
        variant = catalog.variant(instance["variant"])
        if variant is None:
            continue
        version = f"{variant.model}:{variant.version}"
        number = counted[version] = counted.get(version, -1) + 1
        found.append(
            {
                "model_id": version,
                "model_name": variant.model,
                "model_version": variant.version,
                "model_replica_id": number,
                "batch_size": -1,
                "variant": variant.variant,
                "worker": where,
                "device": instance["device"],
                "state": instance["state"],
            }
        )
    return found
