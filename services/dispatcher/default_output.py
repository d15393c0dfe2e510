"""Apps with a default output: when a query waits for a better answer, when the default is given, and with which reason. Pure.

Clipper's rule (section 5.2.2): at the deadline the application gets its default, and learns that it is one.
"""

import math
import struct
from typing import Any

import msgspec

from bus.messages.catalog import Signature, TensorSpec
from bus.messages.flow import HandBack
from bus.messages.public import Answer, Error, Tensor
from services.core.outcomes import NOT_ANSWERED, default_at
from services.core.selection.eligibility import INFINITE
from services.dispatcher.query import Query

WORTH_WAITING = frozenset({"deadline", "overloaded", "unsatisfiable"})  # something better may come before the deadline
REPLACED = WORTH_WAITING | {"model_error", "internal", "unknown_model"}
OF_THE_QUERY = frozenset({"unsatisfiable", "unknown_model"})  # its own fault where it has requirements of its own


def default_due(query: Query) -> float:
    """When the default of a waiting query's app is given, in Unix seconds."""
    return default_at(query.arrived, query.ask.deadline)


def may_wait(query: Query, error: Error, now: float) -> bool:
    """Whether the query waits for a better answer instead of ending with this error. `query.why` keeps the last such error."""
    waits = error.code in WORTH_WAITING and now < default_due(query) and gets_default(query, error)
    query.why = error if waits else None
    return waits


def gets_default(query: Query, error: Error) -> bool:
    """Whether the query gets its app's default instead of this refusal."""
    if query.fallback is None or error.code not in REPLACED:
        return False
    head = query.head
    demands = (head.latency_ms, head.accuracy, head.cost, head.model, head.version, head.variant)
    return error.code not in OF_THE_QUERY or all(demand is None for demand in demands)


def reason_of(error: Error) -> str:
    """Why a query gets its app's default instead of this refusal, as the answer tells it."""
    return (
        "unknown_model: the app serves no model now"
        if error.code == "unknown_model"
        else f"{error.code}: {error.message}"
    )


def default_answer(query: Query, reason: str, now: float) -> Answer | None:
    """The app's default for all items of the query, with the reason. None if no message can hold it."""
    app, ask, head = query.fallback, query.ask, query.head
    assert app is not None, "its app has a default output"
    outputs = default_outputs(app.default_output, app.signature, query.items)
    if outputs is None:
        return None
    seconds = now - query.arrived
    missed = ["latency"] if ask.latency_s < INFINITE and seconds > ask.latency_s else []
    if head.accuracy:
        missed.append("accuracy")
    return Answer(
        id=head.id,
        outputs=outputs,
        model="",
        version="",
        variant="",
        hardware="",
        worker="",
        accuracy=None,
        latency_ms=seconds * 1000.0,
        queue_ms=seconds * 1000.0,
        compute_ms=0.0,
        batch=0,
        cached=False,
        simulated=False,
        cost=0.0,
        missed=missed,
        default=True,
        reason=reason,
        query=query.uid.hex(),
    )


def executor_error(back: HandBack) -> Error | None:
    """How a query ended at its executor, which leaves the reply to us since the app has a default. None: it has not ended."""
    if back.reason == "late":
        return Error(code="deadline", message=NOT_ANSWERED)
    if back.reason == "failed":
        return Error(code="model_error", message=back.text)
    return None


def expiry_error(query: Query) -> Error:
    """Why the query was not answered before its deadline."""
    text = "no worker could answer this query before its deadline"
    return query.why or Error(code="deadline", message=text, retry_after_ms=1000.0)


# -- the default output as tensors: one item's value, repeated for every item of the query

_CODES = {
    "BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I",
    "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
MOST_BYTES = 2**20 - 2**14  # of an answer's outputs; the rest of the answer fits into NATS' message beside them
_UNFIT = (struct.error, OverflowError, TypeError, ValueError)


def default_outputs(value: Any, signature: Signature | None, items: int) -> dict[str, Tensor] | None:
    """Output name to tensor of `items` rows. None if together they have more than MOST_BYTES.

    value: a map of output names to values; anything else is the first output's value. A number fills the output's shape. A nested
    list must have as many numbers as the shape. A value that does not fit the signature comes as it is: numbers as INT64 or FP64,
    everything else as BYTES (JSON unless it is a text).
    """
    specs = [] if signature is None else signature.outputs
    named = {spec.name: spec for spec in specs}
    if isinstance(value, dict) and value and value.keys() <= named.keys():
        one = {name: _tensor(part, named[name]) for name, part in value.items()}
    else:
        first = specs[0] if specs else TensorSpec(name="output", datatype="", shape=[])
        one = {first.name: _tensor(value, first)}
    if items * sum(len(tensor.data) for tensor in one.values()) > MOST_BYTES:
        return None
    return {
        name: Tensor(tensor.datatype, [items, *tensor.shape[1:]], tensor.data * items) for name, tensor in one.items()
    }


def _tensor(value: Any, spec: TensorSpec) -> Tensor:
    """The tensor of one item."""
    code = _CODES.get(spec.datatype)
    flat = _numbers(value)
    if code is not None and flat is not None:
        shape = _shape(spec.shape, len(flat), scalar=not isinstance(value, list))
        if shape is not None and math.prod(shape) * struct.calcsize(f"<{code}") <= MOST_BYTES:
            whole = code not in "efd"
            filled = flat * (math.prod(shape) // len(flat))
            try:
                numbers = [_whole(number) for number in filled] if whole else filled
                packed = struct.pack(f"<{len(numbers)}{code}", *numbers)
            except _UNFIT:
                return _as_it_is(value, flat)
            return Tensor(spec.datatype, [1, *shape], packed)
    return _as_it_is(value, flat)


def _as_it_is(value: Any, flat: list[Any] | None) -> Tensor:
    if flat is not None:
        shape = [1, len(flat)] if isinstance(value, list) else [1]
        for datatype in ("INT64", "FP64"):
            if datatype == "INT64" and any(isinstance(number, float) for number in flat):
                continue
            try:
                packed = struct.pack(f"<{len(flat)}{_CODES[datatype]}", *flat)
            except _UNFIT:
                continue
            return Tensor(datatype, shape, packed)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    piece = text.encode()
    return Tensor("BYTES", [1], len(piece).to_bytes(4, "little") + piece)


def _numbers(value: Any) -> list[Any] | None:
    """All numbers of a number or nested list. None if there is anything else, or nothing."""
    flat: list[Any] = []
    level = [value]
    while level:
        part = level.pop()
        if isinstance(part, list):
            level.extend(reversed(part))
        elif isinstance(part, (int, float)):
            flat.append(part)
        else:
            return None
    return flat or None


def _shape(axes: list[int], count: int, *, scalar: bool) -> list[int] | None:
    """An output's shape with lengths for its open axes. None if `count` numbers do not fill it."""
    if scalar:
        return [1 if axis == -1 else axis for axis in axes]
    known = math.prod(axis for axis in axes if axis != -1)
    if -1 not in axes:
        return list(axes) if count == known else None
    if known == 0 or count % known:
        return None
    open_at = axes.index(-1)
    return [count // known if at == open_at else (1 if axis == -1 else axis) for at, axis in enumerate(axes)]


def _whole(number: Any) -> int:
    if isinstance(number, float) and not number.is_integer():
        raise ValueError(number)
    return int(number)
