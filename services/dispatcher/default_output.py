"""Apps with a default output: when a query waits for a better answer, when the default is given, and with which reason. Pure.

Clipper's rule (section 5.2.2): at the deadline the application gets its default, and learns that it is one.
"""

from contextlib import suppress
from math import prod
from typing import Any

import msgspec

from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.flow import HandBack
from bus.messages.public import Answer, Error, Tensor
from bus.values import filled, leaves, packed
from services.core.outcomes import NOT_ANSWERED, default_at
from services.core.selection.eligibility import INFINITE
from services.dispatcher.query import Query, answer_of_none

WORTH_WAITING = frozenset({"deadline", "overloaded", "unsatisfiable"})  # something better may come before the deadline
REPLACED = WORTH_WAITING | {"model_error", "internal", "unknown_model"}
OF_THE_QUERY = frozenset({"unsatisfiable", "unknown_model"})  # its own fault where it has requirements of its own


def default_due(query: Query) -> float:
    """When the default of a waiting query's app is given, in Unix seconds."""
    return default_at(query.arrived, query.ask.deadline)


def may_wait(query: Query, error: Error, now: float) -> bool:
    """Whether the query waits for a better answer instead of ending with this error. `query.why` keeps the last such error."""
    better = error.code in WORTH_WAITING and now < default_due(query) and gets_default(query, error)
    waits = better or query.owed(now)
    query.why = error if waits else None
    return waits


def gets_default(query: Query, error: Error) -> bool:
    """Whether the query gets its app's default instead of this refusal."""
    if query.fallback is None or error.code not in REPLACED:
        return False
    return error.code not in OF_THE_QUERY or not demands(query)


def demands(query: Query) -> bool:
    """Whether the query states needs itself, beside those of its app."""
    head = query.head
    stated = (head.latency_ms, head.accuracy, head.cost, head.model, head.version, head.variant)
    return any(one is not None for one in stated)


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
    outputs = default_outputs(app.default_output, app.signature, query.ask.items)
    if outputs is None:
        return None
    seconds = now - query.arrived
    missed = ["latency"] if ask.latency_s < INFINITE and seconds > ask.latency_s else []
    missed += [need for need in ("accuracy", "confidence") if getattr(head, need)]
    waited = {"accuracy": None, "queue_ms": 1000.0 * seconds, "compute_ms": 0.0}
    return answer_of_none(query, outputs, seconds, missed=missed, default=True, reason=reason, **waited)


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

_NUMBERS = {int, float, bool}
MOST_BYTES = 2**20 - 2**14  # of an answer's outputs; the rest of the answer fits into NATS' message beside them


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
    row = DATATYPES.get(spec.datatype)
    flat = leaves(value)
    if not flat or not set(map(type, flat)) <= _NUMBERS:
        return _as_it_is(value, None)
    if row is not None and row.kind != "O":
        shape = filled(spec.shape, len(flat)) if isinstance(value, list) else [abs(axis) for axis in spec.shape]
        if shape is not None and prod(shape) * row.size <= MOST_BYTES:
            with suppress(OverflowError):
                numbers = flat if row.kind == "f" else list(map(_whole, flat))
                return Tensor(spec.datatype, [1, *shape], packed(spec.datatype, numbers * (prod(shape) // len(flat))))
    return _as_it_is(value, flat)


def _as_it_is(value: Any, flat: list[Any] | None) -> Tensor:
    if flat is not None:
        shape = [1, len(flat)] if isinstance(value, list) else [1]
        for datatype in ("FP64",) if float in map(type, flat) else ("INT64", "FP64"):
            with suppress(OverflowError):
                return Tensor(datatype, shape, packed(datatype, flat))
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return Tensor("BYTES", [1], packed("BYTES", [text]))


def _whole(number: float) -> int:
    if isinstance(number, float) and not number.is_integer():
        raise OverflowError(number)
    return int(number)
