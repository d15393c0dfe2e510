"""Clipper's bodies: errors `{"error", "cause"}`, the JSON of requests, and descriptions of what there is. Pure."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from bus.messages.catalog import AppRecord, ModelRecord
from infaas.errors import Refused
from services.core.catalog import Catalog
from services.gateway.clipper.inputs import WrongInput, input_type_of
from services.gateway.errors import RequestFailed, retry_after, statuses_of, without_subjects
from services.gateway.json_checks import UNKNOWN, find_duplicate, may_have_more_names

JSON_ERROR = "Json error"
REQUEST_ERROR = "Request error"
PROCESSING_ERROR = "Query processing error"
_NAMES = {"internal": "Internal error", "unauthenticated": "Not allowed", "forbidden": "Not allowed"}


class ClipperError(RequestFailed):
    """A failure with Clipper's name for its kind."""

    def __init__(self, name: str, cause: str, status: int | None = 400, *, code: str = "bad_request") -> None:
        super().__init__(status, cause, code=code)
        self.name = name


def clipper_refusal(refusal: Refused, name: str = PROCESSING_ERROR) -> ClipperError:
    """The failure for a refusal of the system. What the client can correct has status 400, as in Clipper."""
    refusal = without_subjects(refusal)
    status = (
        400 if refusal.code in ("bad_request", "unknown_model", "unsatisfiable") else statuses_of(refusal.code).http
    )
    failure = ClipperError(name, refusal.message, status, code=refusal.code)
    failure.headers = retry_after(refusal.code, refusal.retry_after_ms)
    failure.passed_on = True
    return failure


def error_body(failure: RequestFailed) -> dict[str, Any]:
    """The body of a failure's reply."""
    name = failure.name if isinstance(failure, ClipperError) else _NAMES.get(failure.code, REQUEST_ERROR)
    return {"error": name, "cause": failure.message}


# -- Requests

_SCHEMA = '{"input": [double] | [int] | [string] | [byte] | [float]} or {"input_batch": [...]}'
_WORDS = {
    str: "a text", int: "a whole number", float: "a number", list: "a list", bool: "true or false", dict: "an object",
}  # fmt: skip
_decode = msgspec.json.Decoder().decode


def read_object(body: bytes, expected: str = _SCHEMA) -> dict[str, Any]:
    """The JSON object in a body. expected: its form, for the error. Raises ClipperError."""
    try:
        found = _decode(body)
    except RecursionError as error:
        raise _wrong("it is nested too deeply", expected) from error
    except UnicodeDecodeError as error:
        raise _wrong("it is not UTF-8", expected) from error
    except msgspec.DecodeError as error:
        raise _wrong(str(error), expected) from error
    if not isinstance(found, dict):
        raise _wrong("it is not an object", expected)
    if may_have_more_names(body, _quotes(found)) and (again := find_duplicate(body)):
        raise _wrong(again, expected)
    return found


def _quotes(found: dict[str, Any]) -> int:
    """The number of quotation marks in the text, where it holds only names, texts and lists of numbers; else UNKNOWN."""
    count = 0
    for value in found.values():
        if isinstance(value, dict):
            return UNKNOWN
        first = value
        while isinstance(first, list) and first:
            first = first[0]
        if isinstance(value, list) and not isinstance(first, (int, float)):
            return UNKNOWN
        count += 4 if isinstance(value, str) else 2
    return count


def _wrong(reason: str, expected: str) -> ClipperError:
    return ClipperError(JSON_ERROR, f"Error parsing JSON: {reason}. Expected JSON schema: {expected}")


def field(body: dict[str, Any], name: str, kind: type | tuple[type, ...], *, needed: bool = True) -> Any:
    """A field of the given type; None where it is missing and not `needed`. Raises ClipperError."""
    value = body.get(name)
    if value is None:
        if needed:
            raise ClipperError(JSON_ERROR, f"Error parsing JSON: field {name} is missing")
        return None
    wanted = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        shown = " or ".join(dict.fromkeys(_WORDS[one] for one in wanted))
        raise ClipperError(JSON_ERROR, f"Error parsing JSON: field {name} must be {shown}")
    return value


def read_version(body: dict[str, Any], name: str, *, needed: bool = True) -> str | None:
    """A version. Clipper's clients send a text or a number."""
    value = field(body, name, (str, int), needed=needed)
    return None if value is None else str(value)


# -- Descriptions


def describe_app(app: AppRecord) -> dict[str, Any]:
    """An application as it was registered. A latency that was not given is 0."""
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


def describe_model(record: ModelRecord, catalog: Catalog, loaded: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One version of a model. is_current_version: an application serves it, or no application serves the model and it is the newest.

    batch_size: of its instances; not there where none is loaded, or where they differ. loaded: all instances, as `list_containers` has them.
    """
    sizes = {one["batch_size"] for one in loaded if one["model_id"] == model_id(record)}
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
        **({"batch_size": sizes.pop()} if len(sizes) == 1 else {}),
        "serving": serving,
        "variants": [variant.variant for variant in catalog.variants_at(record.model, record.version)],
    }


def _links(catalog: Catalog, app: str, record: ModelRecord) -> bool:
    found = catalog.app(app)
    return found is not None and found.links.get(record.model) == record.version


def all_models(catalog: Catalog) -> Iterator[ModelRecord]:
    """All versions of all models, sorted."""
    yield from sorted(catalog.models, key=lambda record: (record.model, record.created, record.version))


def model_id(record: ModelRecord) -> str:
    """Clipper's id of a version."""
    return f"{record.model}:{record.version}"


def list_containers(catalog: Catalog, workers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every loaded instance, numbered within its version. workers: the rows of `infaas.list.workers`."""
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
                "batch_size": instance["batch_limit"] if instance.get("batching") == "fixed" else -1,
                "variant": variant.variant,
                "worker": where,
                "device": instance["device"],
                "state": instance["state"],
            }
        )
    return found
