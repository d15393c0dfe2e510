"""Operators' verbs: changes of one app's record in the catalogue, the end of a version, the release of a quarantined variant."""

from bus.messages.public import AdminRequest, Error
from services.core.catalog import Catalog
from services.registrar.checks import app_fields, names
from services.registrar.commands import (
    AddApp,
    Change,
    DeleteApp,
    DeleteVersion,
    LinkModel,
    ReleaseVariant,
    SetApp,
    UnlinkModel,
)

NEEDS = {
    "add-app": ("app",),
    "set-app": ("app",),
    "delete-app": ("app",),
    "link-model": ("app", "model"),
    "unlink-model": ("app", "model"),
    "set-version": ("app", "model", "version"),
    "set-replicas": ("app",),
    "delete-version": ("model", "version"),
    "release-variant": ("variant",),
}
SETTINGS = ("latency_ms", "default_output", "min_instances", "input_type")


def change_for(
    verb: str, request: AdminRequest, catalog: Catalog, now: float
) -> Change | ReleaseVariant | DeleteVersion | Error:
    """What an operator asks for, or what is wrong with the request."""
    needs = NEEDS.get(verb)
    if needs is None:
        return Error(code="bad_request", message=f"verb: {verb!r} is not known here; known are {', '.join(NEEDS)}")
    given = {field: getattr(request, field) for field in ("app", "model", "version", "variant", "worker")}
    wrong = names(**{field: value for field, value in given.items() if field in needs or value is not None})
    wrong += app_fields(request.latency_ms, request.default_output, request.input_type)
    wrong += [
        f"{field}: must be 0 or more"
        for field in ("min_instances", "count")
        if (value := getattr(request, field)) is not None and value < 0
    ]
    if verb == "set-replicas" and request.count is None:
        wrong.append("count: must be the least number of instances that the app keeps")
    if verb == "set-app" and all(getattr(request, field) is None for field in SETTINGS):
        wrong.append(f"set-app: give at least one of {', '.join(SETTINGS)}")
    if wrong:
        return Error(code="bad_request", message="; ".join(wrong))
    if verb == "release-variant":
        return ReleaseVariant(variant=request.variant or "", worker=request.worker)
    app, model = request.app or "", request.model or ""
    if verb == "add-app":
        return AddApp(
            app=app,
            at=now,
            latency_ms=request.latency_ms,
            default_output=request.default_output,
            min_instances=1 if request.min_instances is None else request.min_instances,
            input_type=request.input_type,
        )
    if verb == "set-app":
        return SetApp(app=app, **{field: getattr(request, field) for field in SETTINGS})
    if verb == "set-replicas":
        return SetApp(app=app, min_instances=request.count)
    if verb == "delete-app":
        return DeleteApp(app=app)
    if verb == "unlink-model":
        return UnlinkModel(app=app, model=model)
    record = catalog.model(model, request.version)
    if record is None:
        return Error(code="unknown_model", message=_unknown(model, request.version, catalog))
    if verb == "delete-version":
        return DeleteVersion(model=model, version=record.version)
    return LinkModel(
        app=app,
        model=model,
        version=record.version,
        signature=record.signature,
        at=now,
        linked=verb == "set-version",
        latency_ms=request.latency_ms,
        default_output=request.default_output,
    )


def _unknown(model: str, version: str | None, catalog: Catalog) -> str:
    known = sorted(catalog.versions(model))
    if not known:
        return f"model: there is no model {model}"
    return f"version: model {model} has no version {version}, only {', '.join(known)}"
