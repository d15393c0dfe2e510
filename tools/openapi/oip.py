"""The operations of the Open Inference Protocol, with the extensions of Triton that are served. Pure."""

from collections.abc import Iterator

from bus.datatypes import DATATYPES
from bus.messages.public import Requirements
from services.gateway.oip.infer import InferJson
from services.gateway.oip.parameters import NEEDS
from tools.openapi.operation import (
    FLAG,
    FOUND,
    NUMBER,
    TEXT,
    WHOLE,
    Operation,
    Schema,
    array,
    properties,
    record,
    ref,
    schema,
)

TAG = "Open Inference Protocol"
_UNKNOWN = {404: "No such app, model, version or variant."}
_ENDS = {
    **_UNKNOWN,
    422: "No variant can meet the requirements.",
    504: "It could not be answered in time.",
}
_BINARY = {
    "Inference-Header-Content-Length": "Bytes of JSON at the beginning of the body, where raw tensor data follows them.",
    "traceparent": "W3C trace context.",
}
_SPENT = record("count", "ns", count=WHOLE, ns=WHOLE)
_DATATYPES = list(DATATYPES)

_TENSOR_DATA: Schema = {
    "type": "array",
    "description": "The elements, flat in row-major order or nested as the shape says; left out where "
    "parameters.binary_data_size says how many raw bytes after the JSON are this tensor's.",
}
_NEEDS = {name: properties(Requirements)[name] for name in NEEDS}
_REQUIREMENTS: Schema = {
    "type": ["object", "null"],
    "description": "Requirements of the query (extension `modelless`) and Triton's `priority` and `timeout`.",
    "properties": {
        **_NEEDS,
        "priority": {**_NEEDS["priority"], "minimum": 0, "description": "1 (highest) to 9; 0: the default."},
        "timeout": {
            **WHOLE,
            "minimum": 0,
            "description": "Microseconds after which the answer is useless; 0: default.",
        },
        "binary_data_output": {**FLAG, "description": "All outputs as raw bytes after the JSON."},
    },
    "additionalProperties": True,
}

SCHEMAS: dict[str, Schema] = {
    "Error": record("error", error=TEXT),
    "TensorMetadata": record("name", "datatype", "shape", name=TEXT, datatype={"enum": _DATATYPES}, shape=array(WHOLE)),
    "ModelMetadata": record(
        "name", "versions", "platform", "inputs", "outputs",
        name=TEXT, versions=array(TEXT), platform=TEXT,
        inputs=array(ref("TensorMetadata")), outputs=array(ref("TensorMetadata")),
    ),
    "ServerMetadata": record("name", "version", "extensions", name=TEXT, version=TEXT, extensions=array(TEXT)),
    "Output": record(
        "name", "datatype", "shape",
        name=TEXT, datatype={"enum": _DATATYPES}, shape=array(WHOLE),
        data={"type": "array", "description": "The elements, flat; left out where they follow the JSON as raw bytes."},
        parameters={"type": "object"},
    ),
    "AnswerParameters": {
        **record(
            model=TEXT, variant=TEXT, hardware=TEXT, accuracy=NUMBER, latency_ms=NUMBER, queue_ms=NUMBER,
            compute_ms=NUMBER, batch=WHOLE, cost=NUMBER, cached=FLAG, simulated=FLAG,
            missed={"type": "string", "description": "The requirements that were not met, of latency, accuracy, cost and confidence, separated by commas."},
            query=TEXT, confidence=NUMBER, confidences=TEXT, members=TEXT, missing=WHOLE, default=FLAG, reason=TEXT, ignored=TEXT,
        ),
        "description": "What answered, and how (extension `modelless`). cost: US$ of this query. accuracy: of the variant, as measured. query: names it, for feedback. Of several models: members and confidences, separated by commas.",
    },
    "InferenceResponse": record(
        "model_name", "outputs",
        id=TEXT, model_name=TEXT, model_version=TEXT, parameters=ref("AnswerParameters"), outputs=array(ref("Output")),
    ),
    "ModelStatistics": record(
        "name", "version", "inference_count", "execution_count", "inference_stats", "batch_stats",
        name=TEXT, version=TEXT, last_inference=WHOLE, inference_count=WHOLE, execution_count=WHOLE,
        inference_stats={"type": "object", "additionalProperties": _SPENT},
        batch_stats=array({"type": "object"}), memory_usage=array({"type": "object"}),
    ),
}  # fmt: skip


def operations() -> Iterator[Operation]:
    """All operations below /v2."""
    request = schema(InferJson)
    FOUND["InferJson"]["properties"] |= {"parameters": _REQUIREMENTS}
    FOUND["GivenInput"]["properties"] |= {
        "shape": array({**WHOLE, "minimum": 0}), "datatype": {"enum": _DATATYPES}, "data": _TENSOR_DATA,
    }  # fmt: skip
    stats = record("model_stats", model_stats=array(ref("ModelStatistics")))
    live, ready = record("live", live=FLAG), record("ready", ready=FLAG, missing=TEXT)
    yield _get("/v2", "The server's name, version and extensions.", ref("ServerMetadata"))
    yield _get("/v2/health/live", "The gateway runs.", live)._replace(open=True)
    yield _get(
        "/v2/health/ready", "Queries can be answered; else 503. missing: what the system lacks.", ready
    )._replace(open=True)
    yield _get("/v2/models/stats", "Statistics of the queries, by app.", stats)
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        one = record("name", "ready", name=TEXT, ready=FLAG, missing=TEXT)
        yield _get(path, "The model's inputs and outputs.", ref("ModelMetadata"), _UNKNOWN)
        yield _get(f"{path}/ready", "The model can answer; else 503.", one, _UNKNOWN)
        yield _get(f"{path}/config", "Its configuration, in Triton's words.", {"type": "object"}, _UNKNOWN)
        yield _get(f"{path}/stats", "Statistics of its queries.", stats, _UNKNOWN)
        yield Operation(
            "POST",
            f"{path}/infer",
            TAG,
            "One query: to a model, or to an app with requirements of the answer.",
            ref("InferenceResponse"),
            body=request,
            statuses=_ENDS,
            raw=("application/octet-stream",),
            raw_replies=("application/octet-stream",),
            headers=_BINARY,
        )
    names = array(record("name", "version", "state", name=TEXT, version=TEXT, state=TEXT, reason=TEXT))
    yield _get(
        "/v2/models", "Every name that may be queried: apps, which have no version, their models and variants.", names
    )
    yield Operation(
        "POST",
        "/v2/repository/index",
        TAG,
        "The same.",
        names,
        body=record(ready=FLAG),
        optional_body=True,
    )


def _get(path: str, summary: str, reply: Schema, statuses: dict[int, str] | None = None) -> Operation:
    return Operation("GET", path, TAG, summary, reply, statuses=statuses or {})
