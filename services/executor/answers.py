"""Answers: made from a computed batch, kept for a client that asks again, and traced. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from bus.messages.flow import Route
from bus.messages.public import Answer, Error, Refusal
from services.core.trace import Span, read, span_id
from services.executor.commands import BatchResult
from services.executor.instances import Loaded
from services.executor.queue import QueuedQuery

KEPT = 8192
KEPT_BYTES = 2**26
_encode = msgspec.msgpack.Encoder().encode
Key = tuple[bytes, int]


class SentAnswer(NamedTuple):
    """An answer as it was sent. code: of a refusal, else ""."""

    body: bytes
    code: str


class RecentAnswers:
    """The last answers by (uid, part): at least KEPT of them or KEPT_BYTES, at most twice as many.

    They are kept encoded: at 20,000 answers a second, one object each instead of a dozen is measurably faster.
    """

    def __init__(self) -> None:
        # Two generations: dropping the older one whole is cheaper than dropping one at a time.
        self._young: dict[Key, bytes] = {}
        self._old: dict[Key, bytes] = {}
        self._bytes = 0  # of the young ones
        self._codes: dict[Key, str] = {}  # of those that were refused

    def get(self, key: Key) -> SentAnswer | None:
        body = self._young.get(key) or self._old.get(key)
        return None if body is None else SentAnswer(body, self._codes.get(key, ""))

    def keep(self, route: Route, answer: Answer | Refusal) -> bytes:
        """Remember an answer; returns it encoded."""
        key = (route.uid, route.part)
        body = self._young[key] = _encode(answer)
        if type(answer) is Refusal:
            self._codes[key] = answer.error.code
        self._bytes += len(body)
        if len(self._young) >= KEPT or self._bytes >= KEPT_BYTES:
            self._old, self._young, self._bytes = self._young, {}, 0
            self._codes = {known: code for known, code in self._codes.items() if known in self._old}
        return body


# -- from a computed batch to each query's answer


def answer_of(
    loaded: Loaded, worker: str, query: QueuedQuery, result: BatchResult, i: int, batch: int, cost: float
) -> Answer:
    """The i-th query's answer. batch: items computed together; cost: US$ per item."""
    record = loaded.record
    route = query.route
    latency_ms = (result.finished - route.arrived) * 1000.0
    missed = route.missed or []
    if route.latency_ms is not None and latency_ms > route.latency_ms:
        missed = [*missed, "latency"]
    if route.cost is not None and cost * 1000.0 > route.cost:
        missed = [*missed, "cost"]  # more than its profile promised: the batch was small, or disturbed
    # Made for every query: positional arguments cost a tenth of keywords.
    return Answer(
        route.id,
        result.outputs[i],
        record.model,
        record.version,
        record.variant,
        record.hardware,
        worker,
        record.accuracy,
        latency_ms,
        (result.started - route.arrived) * 1000.0,  # queued
        (result.finished - result.started) * 1000.0,  # computed
        batch,
        False,  # cached
        record.simulated,
        cost * query.items,
        missed,
        UNSET,  # outputs_ref
        UNSET,  # confidence
        UNSET,  # members
        UNSET,  # missing
        UNSET,  # default
        result.note or UNSET,  # reason
        route.uid.hex(),
        UNSET,  # confidences
        UNSET if result.labels is None else result.labels[i],
    )


def model_error(route: Route, reason: str) -> Refusal:
    """The model failed on this very query."""
    return Refusal(id=route.id, error=Error(code="model_error", message=f"the model failed on these inputs: {reason}"))


def bad_inputs(route: Route, reason: str) -> Refusal:
    """The query's inputs do not fit the model, which only their values tell."""
    return Refusal(id=route.id, error=Error(code="bad_request", message=reason))


def output_bytes(answer: Answer) -> int:
    return sum(len(tensor.data) for tensor in answer.outputs.values())


# -- tracing: one span from taking a query to answering it, and within it one for the batch that computed it

SPAN_PART, SPAN_BATCH = "execute", "compute"


def answer_headers(query: QueuedQuery) -> Mapping[str, str] | None:
    """The headers of the query's answer. None if the query is not traced."""
    trace = read(query.headers)
    return None if trace is None else trace.headers(span_id(query.route.uid, SPAN_PART))


def spans_of(query: QueuedQuery, where: Mapping[str, str], result: BatchResult, batch: int) -> list[Span]:
    """The spans of a query that was computed in a batch of so many items, if its trace is recorded. where: worker, device, variant."""
    trace = read(query.headers)
    if trace is None or not trace.recorded:
        return []
    uid = query.route.uid
    whole, inner = span_id(uid, SPAN_PART), span_id(uid, SPAN_BATCH)
    about = {f"infaas.{key}": value for key, value in where.items()}
    error = "" if result.errors is None else "bad_request" if result.unfit else "model_error"
    more = {"infaas.app": query.route.app, "infaas.query.uid": uid.hex(), "infaas.query.items": query.items}
    return [
        Span(
            trace=trace,
            span=whole,
            name="infaas execute",
            kind="consumer",
            start=query.taken,
            end=result.finished,
            attributes={**about, **more},
            error=error,
        ),
        Span(
            trace=type(trace)(trace.trace, whole, trace.flags, trace.state),
            span=inner,
            name="infaas compute",
            kind="internal",
            start=result.started,
            end=result.finished,
            attributes={**about, "infaas.batch.items": batch},
            error=error,
        ),
    ]
