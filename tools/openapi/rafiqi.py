"""The operations of Rafiqi's dialect. Pure."""

from collections.abc import Iterator

from services.gateway.rafiqi import RafiqiModel, Tuning
from tools.openapi.operation import FLAG, TEXT, WHOLE, Operation, Schema, array, properties, record, ref, schema

TAG = "Rafiqi"
_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "application/octet-stream")

SCHEMAS: dict[str, Schema] = {
    "Guess": record(
        "confidence", "label",
        confidence={"type": ["number", "null"]}, label=TEXT, default=FLAG, default_explanation={"type": ["string", "null"]},
    ),
}  # fmt: skip


def operations() -> Iterator[Operation]:
    """All operations."""
    guesses = array(ref("Guess"))
    changed = record("success", "error", "allModels", success=FLAG, error=TEXT, allModels=array(TEXT))
    yield Operation(
        "GET", "/change_params", TAG,
        "Batch by threshold from the next batch on: one model, or all that there are. quanta: ms over which arrivals are counted, 5 without"
        " it. batchSize: the most items of a batch, and of the threshold.",
        changed, statuses={404: "No such model."}, queries=properties(Tuning), operator=True,
    )  # fmt: skip
    yield Operation(
        "POST", "/classify", TAG, "The most likely classes of an image, of a .npy file's items, or of an array's own bytes.",
        {"oneOf": [guesses, array(guesses)]},
        body={"type": "array", "description": "One item, or several, as nested lists."},
        statuses={404: "No such model.", 422: "No variant can meet the app's objective.", 504: "The system did not answer."},
        raw=_IMAGES, queries={"model_name": TEXT}, headers={"traceparent": "W3C trace context."},
    )  # fmt: skip
    yield Operation(
        "GET", "/list", TAG, "The models.",
        array(record("name", "version", name=TEXT, version=TEXT, path=TEXT, size=WHOLE, format=TEXT, variants=array(TEXT), labels=WHOLE)),
    )  # fmt: skip
    yield Operation(
        "POST", "/register", TAG, "Register models, each as an app of its name, and measure them; replies when that is done.",
        changed,
        body=record("models", models={"type": "object", "additionalProperties": schema(RafiqiModel)}),
        statuses={422: "A model cannot be served.", 502: "A file cannot be fetched.", 504: "A file did not come in time."},
        operator=True,
    )  # fmt: skip
