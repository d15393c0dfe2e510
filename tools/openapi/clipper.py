"""The operations of Clipper's dialect. Pure."""

import inspect
from collections.abc import Iterator
from typing import Any, get_origin

from msgspec import NODEFAULT

from bus.fields import Field
from bus.messages.verbs import INPUT_TYPES, verb_of
from services.gateway.clipper.admin import OWN, fields_called
from tools.openapi.operation import FLAG, NUMBER, OBJECT, TEXT, WHOLE, Operation, Schema, array, record, ref
from tools.openapi.operation import fields as plain_fields

TAG = "Clipper"
_LABEL: Schema = {"type": ["number", "string", "array"]}
_VERSION: Schema = {"type": ["string", "integer"]}
_INPUT: Schema = {
    "type": ["array", "string", "number"],
    "description": "One item: a list of numbers (integers, floats, doubles), base64 (bytes), or a text (strings), as the app was registered.",
}
_INPUT_TYPE: Schema = {"enum": [*INPUT_TYPES]}
_FILE = ref("File")
_DONE: Schema = {"type": "string", "description": "Success!"}

SCHEMAS: dict[str, Schema] = {
    "ClipperError": record("error", error=TEXT, cause=TEXT),
    "File": {
        "description": "A file, inline or from a host that gateway.register_hosts names.",
        "oneOf": [record("blob", blob={**TEXT, "contentEncoding": "base64"}), record("URL", URL=TEXT)],
    },
    "Prediction": record(
        "query_id", "output", "default",
        query_id=WHOLE, output={"description": "Of this item; a map of names where the model has several outputs."}, default=FLAG,
        default_explanation={**TEXT, "description": "Why the output is the default."}, model=TEXT, version=TEXT, variant=TEXT,
    ),
    "ClipperApplication": record(
        name=TEXT, input_type=_INPUT_TYPE, default_output=TEXT, latency_slo_micros=WHOLE, linked_models=array(TEXT)
    ),
    "ClipperModel": record(
        model_name=TEXT, model_version=TEXT, is_current_version=FLAG, input_type=_INPUT_TYPE, labels=array(TEXT),
        container_name=TEXT, model_data_path=TEXT, batch_size=WHOLE, serving=array(TEXT), variants=array(TEXT),
    ),
    "ClipperContainer": record(
        model_id=TEXT, model_name=TEXT, model_version=TEXT, model_replica_id=WHOLE, batch_size=WHOLE, variant=TEXT,
        worker=TEXT, device=TEXT, state=TEXT,
    ),
    "ClipperMetrics": record(
        counters=array({"type": "object"}), ratio_counters=array({"type": "object"}), histograms=array({"type": "object"})
    ),
}  # fmt: skip

_UNKNOWN = {404: "No such app."}
_LATE = {504: "The system did not answer in time."}


def operations() -> Iterator[Operation]:
    """All operations."""
    error = ref("ClipperError")
    metrics = ref("ClipperMetrics")
    yield Operation(
        "POST", "/{app}/predict", TAG, "One query or a batch: the outputs of the app's models, or its default output with the reason.",
        {"oneOf": [ref("Prediction"), record("batch_predictions", batch_predictions=array(ref("Prediction")))]},
        body=record(input=_INPUT, input_batch=array(_INPUT), version=_VERSION), statuses={**_UNKNOWN, **_LATE}, error=error,
        headers={"traceparent": "W3C trace context."},
    )  # fmt: skip
    yield Operation(
        "POST", "/{app}/update", TAG, "The true label of an input, or of an earlier query.",
        {"type": "string", "description": "Feedback received? 1"},
        body=record("label", uid=_VERSION, input=_INPUT, query_id=_VERSION, label=_LABEL),
        statuses={**_UNKNOWN, **_LATE}, error=error, raw_replies=("text/plain",),
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
    model = {"model_name": TEXT, "model_version": _VERSION}
    links = record("app_name", "model_names", app_name=TEXT, model_names=array(TEXT))
    yield _change(
        "add_app", "A new application.",
        record("name", "input_type", "latency_slo_micros", name=TEXT, input_type=_INPUT_TYPE, default_output={}, latency_slo_micros=NUMBER),
    )  # fmt: skip
    yield _change("delete_app", "Delete an application; its models stay.", record("name", name=TEXT))
    yield _change("add_model_links", "Let an application serve models, in their newest versions.", links)
    yield _change("delete_model_links", "Stop an application from serving these models.", links)
    yield _change(
        "add_model", "Register a version of a model and measure it; replies when that is done.",
        record(
            "model_name", "validation",
            **model, labels=array(TEXT), input_type=_INPUT_TYPE, container_name=TEXT, model_data_path=TEXT, batch_size=WHOLE,
            model=_FILE, validation=_FILE, format=TEXT, metric=TEXT, inputs_key=TEXT, labels_key=TEXT, task=TEXT,
        ),
        {422: "The model cannot be served; the reason names what is wrong.", 502: "The file cannot be fetched."},
    )  # fmt: skip
    one = record("model_name", "model_version", **model)
    yield _change("delete_versioned_model", "Delete a version that no application serves.", one)
    for kind in OWN:
        verb, summary = verb_of(kind).replace("-", "_"), str(inspect.getdoc(kind)).partition("\n")[0]
        fields = {called: one for called, (_, one) in fields_called(kind).items()}
        plain = plain_fields(kind)
        needed = [called for called, one in fields.items() if one.default is NODEFAULT]
        yield _change(
            verb,
            summary,
            record(*needed, **{called: plain.get(one.name) or _schema(one) for called, one in fields.items()}),
        )
    yield _change("set_model_version", "Let every application that links the model serve this version.", one)
    verbose = record(verbose=FLAG)
    yield _look(
        "get_all_applications",
        "Their names, or all about them.",
        array({"anyOf": [TEXT, ref("ClipperApplication")]}),
        verbose,
    )
    yield _look(
        "get_application",
        "One of them; an empty object where there is none.",
        ref("ClipperApplication"),
        record("name", name=TEXT),
        needed=True,
    )
    yield _look(
        "get_linked_models", "What an application serves.", array(TEXT), record("app_name", app_name=TEXT), needed=True
    )
    yield _look(
        "get_all_models",
        "`model:version` of each, or all about them.",
        array({"anyOf": [TEXT, ref("ClipperModel")]}),
        verbose,
    )
    yield _look("get_model", "One version; an empty object where there is none.", ref("ClipperModel"), one, needed=True)
    yield _look(
        "get_all_containers", "The loaded instances.", array({"anyOf": [TEXT, ref("ClipperContainer")]}), verbose
    )
    yield _look(
        "get_container", "One of them; an empty object where there is none.", ref("ClipperContainer"),
        record("model_name", "model_version", "replica_id", **model, replica_id=WHOLE), needed=True,
    )  # fmt: skip
    learnt = record("member", "weight", "probability", "n", member=TEXT, weight=NUMBER, probability=NUMBER, n=WHOLE)
    yield _look(
        "get_state", "What feedback has taught about the models of an application, for all users or for one; empty without a policy.",
        array(learnt), record("app_name", app_name=TEXT, uid={"type": ["string", "integer"]}), needed=True,
    )  # fmt: skip


def _schema(field: Field) -> Schema:
    """A field of a verb of ours that is not plain."""
    kind: Schema = {} if field.type is Any else array(OBJECT) if get_origin(field.type) is list else OBJECT
    return {**kind, "description": field.meaning}


def _change(verb: str, summary: str, body: Schema, statuses: dict[int, str] | None = None) -> Operation:
    return Operation(
        "POST", f"/admin/{verb}", TAG, summary, _DONE, body=body, statuses={404: "No such app or model.", **_LATE, **(statuses or {})},
        error=ref("ClipperError"), raw_replies=("text/plain",), operator=True,
    )  # fmt: skip


def _look(verb: str, summary: str, reply: Schema, body: Schema, *, needed: bool = False) -> Operation:
    return Operation(
        "POST", f"/admin/{verb}", TAG, summary, reply, body=body, statuses=_LATE, error=ref("ClipperError"), operator=True,
        optional_body=not needed,
    )  # fmt: skip
