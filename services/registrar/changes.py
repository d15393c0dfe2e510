"""What becomes of an app's record: pure, so that the edge can repeat it when somebody else was faster (compare and set)."""

from msgspec.structs import replace

from bus.messages.catalog import AppRecord
from services.registrar.checks import signature_difference
from services.registrar.commands import AddApp, Change, DeleteApp, LinkModel, Refused, SetApp


def amend(record: AppRecord | None, change: Change) -> AppRecord | Refused | None:
    """The app's record after this change; None when the app is to go; Refused when the change is not allowed."""
    if isinstance(change, AddApp):
        return _add(record, change)
    if isinstance(change, LinkModel):
        return _link(record, change)
    if record is None:
        return _unknown(change.app)
    if isinstance(change, DeleteApp):
        return None
    if isinstance(change, SetApp):
        return _set(record, change)
    if change.model not in record.links:
        return Refused("unknown_model", f"model: app {change.app} does not link {change.model}")
    return replace(record, links={model: at for model, at in record.links.items() if model != change.model})


def _add(record: AppRecord | None, change: AddApp) -> AppRecord | Refused:
    if record is not None:
        return Refused("bad_request", f"app: {change.app} exists already")
    return AppRecord(
        app=change.app,
        links={},
        latency_ms=change.latency_ms,
        default_output=change.default_output,
        min_instances=change.min_instances,
        created=change.at,
        input_type=change.input_type,
    )


def _set(record: AppRecord, change: SetApp) -> AppRecord:
    fields = ("latency_ms", "default_output", "min_instances", "input_type")
    return replace(record, **{field: value for field in fields if (value := getattr(change, field)) is not None})


def _link(record: AppRecord | None, change: LinkModel) -> AppRecord | Refused:
    if record is None:
        if not change.create:
            return _unknown(change.app)
        record = AppRecord(app=change.app, links={}, created=change.at)
    if change.linked and change.model not in record.links:
        return Refused("unknown_model", f"model: app {change.app} does not link {change.model}; use link-model first")
    if record.signature is not None:
        difference = signature_difference(record.signature, change.signature)
        if difference is not None:
            return Refused(
                "bad_request",
                f"the model does not fit app {change.app}, whose first registration fixed its signature: {difference};"
                " export the model with the app's names and shapes, or register it under another app",
            )
    return replace(
        record,
        links={**record.links, change.model: change.version},
        signature=record.signature or change.signature,
        latency_ms=record.latency_ms if change.latency_ms is None else change.latency_ms,
        default_output=record.default_output if change.default_output is None else change.default_output,
    )


def _unknown(app: str) -> Refused:
    return Refused("unknown_app", f"app: there is no app {app}")
