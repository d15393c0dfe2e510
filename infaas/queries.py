"""The body of a query: inputs and requirements are encoded once, and each sending gets a fresh `retry_key`. Also its trace headers."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import msgspec

from bus.fields import meant
from bus.messages.catalog import METRICS, accuracy_of, is_error
from bus.messages.public import ObjectRef, Requirements
from bus.port import Buffer
from bus.subjects import valid_name
from bus.tensors import BadTensor, from_array
from infaas.errors import BadInput, Refused

KEY_BYTES = 16
MAX_INLINE = 2**20  # bytes of a body. Larger inputs are sent by reference.
DEADLINE = 30.0  # s within which the system answers or refuses a query without a deadline
# The client waits longer than the deadline, by this share and at least so many s, so that a refusal there still arrives, under overload, too.
GRACE, GRACE_SHARE = 1.0, 0.1
MAX_WAIT = 600.0  # s to wait for a reply, however late the deadline
LARGE = 32 * 1024  # bytes of a tensor. Larger ones are not copied into the body.
INPUTS = b"\xa6inputs"  # the name of the field in MessagePack


class Needs(TypedDict, total=False):
    """The requirements of a query. None, or a missing key: no such requirement.

    latency_ms: objective, > 0. accuracy: least accuracy, 0..1, or agreement. mae, f1_macro, ...: the least value of a model that was
    registered with this metric, of errors the largest; so is the name of a user's own metric. It is sent as the accuracy that it counts
    as (`accuracy_of`), with its name as `metric`. cost: limit in US$ per 1,000 queries. model, version, variant: only
    this one. context: key for personalised selection. confidence: least share of an ensemble's models that agree, 0..1. priority: 1
    (highest) .. 9. deadline: Unix time in seconds; the earlier of deadline and latency_ms counts. id: any text; the answer returns
    it. input_digest: name of the inputs, kept with the outcome.
    """

    latency_ms: float | None
    accuracy: float | None
    metric: str | None
    mae: float | None
    rmse: float | None
    r2: float | None
    f1_macro: float | None
    roc_auc: float | None
    average_precision: float | None
    log_loss: float | None
    ndcg: float | None
    agreement: float | None
    cost: float | None
    model: str | None
    version: str | None
    variant: str | None
    context: str | None
    confidence: float | None
    priority: int | None
    deadline: float | None
    id: str | None
    input_digest: str | None


class Prepared(NamedTuple):
    """A query that can be sent any number of times. Its body is `head`, a fresh key, then `rest`.

    timeout: seconds to wait for the reply. latency_ms: the objective, if any. upload: the inputs in the object store, if they are too
    large for one message. rest: inputs that are not copied into the body.
    """

    subject: str
    head: bytes
    timeout: float
    latency_ms: float | None
    upload: ObjectRef | None = None
    rest: Sequence[Buffer] = ()

    def body(self) -> bytes:
        """The bytes of one query, without `rest`. Sending the same bytes again repeats the same query."""
        return self.head + os.urandom(KEY_BYTES)


def encode_inputs(x: Any) -> bytes:
    """The field `inputs` in MessagePack: a tensor, or a map of names to tensors. The first axis counts items.

    x: an array (anything numpy understands), a nested list of numbers, or a map of input names to these. Raises BadInput.
    """
    if isinstance(x, Mapping) and not _is_tensor(x):
        return encode({str(name): _tensor(value, f"inputs.{name}") for name, value in x.items()}, "inputs")
    return encode(_tensor(x, "inputs"), "inputs")


def input_parts(x: Any) -> list[Buffer]:
    """The bytes of `encode_inputs` in pieces. The bytes of large tensors are not copied. Raises BadInput.

    A tensor's `data` may itself be a list of pieces.
    """
    if not isinstance(x, Mapping) or not any(map(_is_large, (x,) if _is_tensor(x) else x.values())):
        return [encode_inputs(x)]
    parts = _Parts()
    if _is_tensor(x):
        parts.tensor(x)
        return parts.done()
    if len(x) > 65_535:
        raise BadInput(f"inputs are {len(x)} tensors: no model takes so many")
    parts.small(b"\xde" + len(x).to_bytes(2, "big"))
    for name, value in x.items():
        parts.small(encode(str(name), "inputs"))
        value = _tensor(value, f"inputs.{name}")
        if _is_large(value):
            parts.tensor(value)
        else:
            parts.small(encode(value, "inputs"))
    return parts.done()


def items_of(x: Any) -> int:
    """How many items these inputs hold, as `encode_inputs` takes them."""
    first: Any = next(iter(x.values()), ()) if isinstance(x, Mapping) and not _is_tensor(x) else x
    shape = first["shape"] if _is_tensor(first) else getattr(first, "shape", None)
    return int(shape[0]) if shape else len(first) if isinstance(first, Sequence) else 0


class _Parts:
    """Collects MessagePack: small pieces are joined, large ones are kept as they are."""

    def __init__(self) -> None:
        self._done: list[Buffer] = []
        self._open = bytearray()

    def small(self, piece: Buffer) -> None:
        self._open += piece

    def tensor(self, tensor: Mapping[str, Any]) -> None:
        data = tensor["data"]
        pieces = data if isinstance(data, list) else [data]
        size = sum(map(len, pieces))
        if size >= 2**32:
            raise BadInput(f"a tensor of {size:,} bytes is more than a message can hold")
        front = encode({"datatype": tensor["datatype"], "shape": tensor["shape"], "data": None}, "inputs")
        self.small(front[:-1] + b"\xc6" + size.to_bytes(4, "big"))
        for piece in pieces:
            if len(piece) < LARGE:
                self.small(piece)
            else:
                self._close()
                self._done.append(piece)

    def _close(self) -> None:
        if self._open:
            self._done.append(bytes(self._open))
            self._open = bytearray()

    def done(self) -> list[Buffer]:
        self._close()
        return self._done


def head(fields: Mapping[str, Any], inputs: bytes | None) -> bytes:
    """The map of a query without the bytes of `retry_key`, which comes last."""
    present = {name: value for name, value in fields.items() if value is not None}
    if inputs is not None:
        present["inputs"] = msgspec.Raw(inputs)
    return encode({**present, "retry_key": bytes(KEY_BYTES)}, "the query")[:-KEY_BYTES]


def head_before(fields: Mapping[str, Any]) -> bytes:
    """The map of a query whose inputs come last: after the key follow INPUTS and the parts of the inputs."""
    present = {name: value for name, value in fields.items() if value is not None}
    whole = encode({**present, "retry_key": bytes(KEY_BYTES), "inputs": None}, "the query")
    return whole[: -KEY_BYTES - len(INPUTS) - 1]


def encode(value: Any, what: str) -> bytes:
    """A value of the caller in MessagePack. numpy scalars become plain numbers. Raises BadInput."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"{what} cannot be sent: {error}") from error


def check_name(name: Any, what: str) -> str:
    """`name`, if it is a valid subject token. Raises Refused, as the system itself would."""
    if not valid_name(name):
        raise Refused(
            "bad_request",
            f"field `{what}` is {str(name)[:80]!r}: names have 1 to 64 letters, digits, - or _, and start with a letter or digit",
        )
    return str(name)


def check_needs(needs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The requirements as they are sent. A misspelt name raises TypeError, as for any Python function. Raises Refused if a value is wrong."""
    if needs.keys() <= _PLAIN:
        return needs
    measures = {name: value for name, value in needs.items() if name not in _PLAIN and value is not None}
    for name in sorted((needs.keys() - _PLAIN) - METRICS.keys()):
        hint = meant(name, _PLAIN, 0.8)  # names of people's own metrics may be somewhat near
        if hint or not isinstance(needs[name], (int, float)) or _wrong(name, needs[name]):
            raise TypeError(
                f"no requirement {name}: use {', '.join((*_PLAIN, *METRICS))}, or the name of your own metric{hint}"
            )
    if not measures:
        return needs
    name, value = next(iter(measures.items()))
    if len(measures) > 1 or needs.get("accuracy") is not None:
        raise Refused("bad_request", f"{name}: give one of accuracy and {', '.join(measures)}")
    if wrong := _wrong(name, value):
        raise Refused("bad_request", f"{name} must be {wrong}, not {value!r}")
    kept = {key: one for key, one in needs.items() if key in _PLAIN}
    return {**kept, "accuracy": accuracy_of(value, name), "metric": name}


def check_seconds(timeout: Any) -> float:
    """A time to wait, as a number. Raises BadInput."""
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise BadInput(f"timeout: must be a number of seconds, above 0, not {timeout!r}")
    return timeout


_PLAIN = dict.fromkeys((*Requirements.__struct_fields__, "id", "input_digest")).keys()


def _wrong(name: str, value: Any) -> str:
    """What a value of this metric must be; empty: it is."""
    if not isinstance(value, (int, float)):
        return "a number"
    if name == "r2":
        return "" if float("-inf") < value <= 1.0 else "a number of at most 1"
    if is_error(name):
        return "" if 0.0 <= value < float("inf") else "a number of at least 0, less is better"
    return "" if 0.0 <= value <= 1.0 else "a number from 0 to 1"


def _tensor(x: Any, where: str) -> Any:
    if _is_tensor(x):
        return x
    if isinstance(x, (list, tuple)) and isinstance(_first(x), (bool, int, float, type(None))):
        return x  # a plain nested list travels as it is; the system converts and checks it
    import numpy as np  # noqa: PLC0415  (plain lists need no numpy)

    try:
        array = np.asarray(x)
        if array.ndim == 0:
            raise BadInput(f"{where} has no axis: the first axis counts the items, so one item is [item]")
        return from_array(array)
    except BadTensor as error:
        raise BadInput(f"{where}: {error}") from error
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, BadInput) else BadInput(f"{where} is no array: {error}") from error


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Mapping) and "datatype" in x and "shape" in x and "data" in x


def _is_large(x: Any) -> bool:
    """Whether x is a tensor whose bytes are not copied. It has exactly the three fields of the wire format."""
    if not isinstance(x, Mapping) or len(x) != 3 or "data" not in x:
        return False
    data = x["data"]
    return isinstance(data, list) or (isinstance(data, bytes | bytearray | memoryview) and len(data) >= LARGE)


def _first(x: Any) -> Any:
    while isinstance(x, (list, tuple)):
        if not x:
            return None
        x = x[0]
    return x


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)
    if item is None or getattr(value, "ndim", 0) != 0:
        raise TypeError(f"{type(value).__name__} is neither a number nor a text")
    return item()


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def current_traceparent() -> str | None:
    """The W3C traceparent of OpenTelemetry's current span. None if the program has not imported OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def trace_headers(traceparent: str | None) -> Mapping[str, str] | None:
    """NATS headers with this traceparent, or with that of the current span; None if there is neither. Raises BadInput."""
    if traceparent is None:
        traceparent = current_traceparent()
        if traceparent is None:
            return None
    elif not _TRACEPARENT.fullmatch(traceparent):
        raise BadInput(
            f"traceparent is {traceparent[:80]!r}; it is written 00-<32 hex digits>-<16 hex digits>-<2 hex digits>"
        )
    return {"traceparent": traceparent}


def reply_within(deadline: Any) -> float:
    """Seconds to wait for a reply: until shortly after the deadline, so that the system's own refusal arrives."""
    wait = DEADLINE if not isinstance(deadline, (int, float)) else min(deadline - time.time(), MAX_WAIT)
    return max(wait, 0.0) + max(GRACE, GRACE_SHARE * wait)


def as_number(value: Any) -> float | None:
    """A requirement as a number; None if it is no number, which the system then refuses."""
    with contextlib.suppress(TypeError, ValueError):
        return None if value is None else float(value)
    return None
