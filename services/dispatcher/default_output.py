"""Apps with a default output: what such a query waits for, when the default is given, and with which reason. Pure.

Clipper's rule (section 5.2.2): at the deadline the application gets its default, and is told that it is one.
"""

import heapq
import math
import struct
from typing import Any

import msgspec
from msgspec import Struct

from bus.messages.catalog import Signature, TensorSpec
from bus.messages.flow import HandBack
from bus.messages.public import Answer, Error, Tensor
from services.core.actor import After, Effect
from services.core.outcomes import default_at
from services.core.selection.eligibility import INFINITE
from services.dispatcher.query import Query

WORTH_WAITING = frozenset({"deadline", "overloaded", "unsatisfiable"})  # something better may come before the deadline
FEW = 1024  # deadlines that are kept whatever became of their queries
REPLACED = WORTH_WAITING | {"model_error", "internal", "unknown_model"}
OF_THE_QUERY = frozenset({"unsatisfiable", "unknown_model"})  # its own fault where it demands something itself


class DefaultDue(Struct, frozen=True):
    """Timer: the first of the queries that wait for their app's default has come to its deadline."""


def falls_back(query: Query, error: Error) -> bool:
    """Whether its app's default is answered instead of this refusal."""
    if query.fallback is None or error.code not in REPLACED:
        return False
    head = query.head
    demands = (head.latency_ms, head.accuracy, head.cost, head.model, head.version, head.variant)
    return error.code not in OF_THE_QUERY or all(demand is None for demand in demands)


def default_answer(query: Query, error: Error, now: float) -> Answer | None:
    """The app's default for all items of the query, with the reason why it is nothing better; None where no message can hold it."""
    app, ask, head = query.fallback, query.ask, query.head
    assert app is not None, "it falls back"
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
        reason="unknown_model: the app serves no model now"
        if error.code == "unknown_model"
        else f"{error.code}: {error.message}",
    )


def ended(back: HandBack) -> Error | None:
    """How an executor ended a query that has a default, instead of telling its client; None: it did not."""
    if back.reason == "late":
        return Error(code="deadline", message="the model had not answered when the time was up")
    if back.reason == "failed":
        return Error(code="model_error", message=back.text)
    return None


def expired(query: Query) -> Error:
    """Why it was not answered before its deadline."""
    text = "no worker could answer this query before its deadline"
    return query.why or Error(code="deadline", message=text, retry_after_ms=1000.0)


class DefaultDeadlines:
    """Queries that wait until their deadline for something better than the default, the first due first."""

    def __init__(self) -> None:
        self._due: list[tuple[float, bytes]] = []
        self._known: set[bytes] = set()

    def holds(self, query: Query, error: Error, now: float) -> bool:
        """Whether it waits instead of ending with this; the last reason is kept."""
        held = error.code in WORTH_WAITING and now < _due_at(query) and falls_back(query, error)
        query.why = error if held else None
        return held

    def __len__(self) -> int:
        return len(self._due)

    def hold(self, query: Query, now: float, waiting: dict[bytes, Query]) -> tuple[Effect, ...]:
        """It waits from now on: wake up at its deadline. waiting: all that do."""
        if query.fallback is None or query.uid in self._known:
            return ()
        if len(self._due) > FEW + 2 * len(waiting):  # mostly of queries that were served long before a late deadline
            self._due = [entry for entry in self._due if entry[1] in waiting]
            self._known = {uid for _, uid in self._due}
            heapq.heapify(self._due)
        entry = (_due_at(query), query.uid)
        self._known.add(query.uid)
        heapq.heappush(self._due, entry)
        return self._wake(now) if self._due[0] == entry else ()

    def due(self, now: float, waiting: dict[bytes, Query]) -> tuple[list[Query], tuple[Effect, ...]]:
        """Take out of `waiting` what has come to its deadline."""
        found = []
        while self._due and self._due[0][0] <= now:
            uid = heapq.heappop(self._due)[1]
            self._known.discard(uid)
            query = waiting.get(uid)
            if query is None:
                continue  # it was served, or is on its way
            if _due_at(query) <= now:
                found.append(waiting.pop(uid))
            else:  # the same came again, with more time
                self.hold(query, now, waiting)
        return found, self._wake(now)

    def _wake(self, now: float) -> tuple[Effect, ...]:
        return (After("default", max(0.0, self._due[0][0] - now), DefaultDue()),) if self._due else ()


def _due_at(query: Query) -> float:
    return default_at(query.arrived, query.ask.deadline)


# -- An app's default output as an answer's outputs: one item's value, given to every item of the query. Pure.

_CODES = {
    "BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I",
    "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
MOST_BYTES = 2**20 - 2**14  # of an answer's outputs, so that NATS takes it with what else it says
_UNFIT = (struct.error, OverflowError, TypeError, ValueError)


def default_outputs(value: Any, signature: Signature | None, items: int) -> dict[str, Tensor] | None:
    """Output name to tensor, `items` long; None where they are more than MOST_BYTES together.

    value: a map of output names to values, else the first output's. A number fills the output's shape, a nested list must have as
    many numbers as it. What does not fit the signature, or fills more than a message, comes as it is: numbers as INT64 or FP64, all
    else as BYTES (JSON where it is no text).
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
    """Of one item."""
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
    """All numbers of a number or nested list; None when there is anything else, or nothing."""
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
    """An output's shape with its open axes settled; None when `count` numbers do not fill it."""
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
