"""The operations of Clipper's dialect: of its management as the endpoints' bodies, replies and docstrings say. Pure."""

import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from msgspec.structs import fields

from bus.messages.verbs import verb_of
from services.gateway.clipper.admin import OWN, ClipperAdminApi, form_of, verb_body
from services.gateway.clipper.bodies import ClipperPrediction, PredictBody, UpdateBody
from services.gateway.clipper.rest import VERBS
from tools.openapi.operation import TEXT, Operation, Schema, array, record, ref, schema

TAG = "Clipper"
SCHEMAS: dict[str, Schema] = {
    "ClipperError": record("error", error=TEXT, cause=TEXT),
    "ClipperMetrics": record(
        counters=array({"type": "object"}), ratio_counters=array({"type": "object"}), histograms=array({"type": "object"})
    ),
}  # fmt: skip

_UNKNOWN = {404: "No such app."}
_LATE = {504: "The system did not answer in time."}
_FAILED = {
    "add_model": {
        422: "The model cannot be served; the reason names what is wrong.",
        502: "The file cannot be fetched.",
    }
}


def operations() -> Iterator[Operation]:
    """All operations."""
    error, metrics, one = ref("ClipperError"), ref("ClipperMetrics"), schema(ClipperPrediction)
    yield Operation(
        "POST", "/{app}/predict", TAG, "One query or a batch: the outputs of the app's models, or its default output with the reason.",
        {"oneOf": [one, record("batch_predictions", batch_predictions=array(one))]},
        body=schema(PredictBody), statuses={**_UNKNOWN, **_LATE}, error=error, headers={"traceparent": "W3C trace context."},
    )  # fmt: skip
    yield Operation(
        "POST", "/{app}/update", TAG, "The true label of an input, or of an earlier query.",
        {"type": "string", "description": "Feedback received? 1"},
        body=schema(UpdateBody), statuses={**_UNKNOWN, **_LATE}, error=error, raw_replies=("text/plain",),
    )  # fmt: skip
    yield Operation(
        "GET", "/clipper/metrics", TAG, "Counts of the predictions of this gateway, by app.", metrics, error=error
    )
    yield Operation(
        "POST", "/admin/metrics", TAG, "The same.", metrics, body=record(), error=error, operator=True, optional_body=True
    )  # fmt: skip
    yield Operation(
        "GET", "/admin/ping", TAG, "PONG.", TEXT, error=error, operator=True, raw_replies=("text/plain",)
    )  # fmt: skip
    for verb in VERBS:
        work = getattr(ClipperAdminApi, verb)
        yield _admin(verb, work, form_of(verb), get_type_hints(work)["return"])
    for kind in OWN:
        yield _admin(verb_of(kind).replace("-", "_"), kind, verb_body(kind), str)


def _admin(verb: str, described: Any, body: Any, reply: Any) -> Operation:
    kinds = get_args(reply) if get_args(reply) and reply.__class__.__name__ == "UnionType" else (reply,)
    found = [schema(kind) for kind in kinds]
    says: Schema = (
        {"type": "string", "description": "Success!"} if reply is str else {"anyOf": found} if found[1:] else found[0]
    )
    return Operation(
        "POST", f"/admin/{verb}", TAG, str(inspect.getdoc(described)).partition("\n")[0], says, body=schema(body),
        statuses={404: "No such app or model.", **_LATE, **_FAILED.get(verb, {})}, error=ref("ClipperError"), operator=True,
        raw_replies=("text/plain",) if reply is str else (),
        optional_body=not any(field.required for field in fields(body)),
    )  # fmt: skip
