"""Answers: made from a computed batch, and traced. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from bus.messages.flow import Route
from bus.messages.public import Answer, Error, Refusal
from services.core.trace import Span, read, span_id
from services.executor.commands import BatchResult
from services.executor.instances import HeldInstance
from services.executor.queue import QueuedQuery

MOST_TOLD = 4096  # bytes of outputs that a dispatcher hears of, for a label that may come

# -- from a computed batch to each query's answer


def answer_of(
    loaded: HeldInstance, worker: str, query: QueuedQuery, result: BatchResult, i: int, batch: int, cost: float
) -> Answer:
    """The i-th query's answer. batch: items computed together; cost: US$ per item."""
    record = loaded.record
    route = query.route
    latency_ms = (result.finished - route.arrived) * 1000.0
    missed = route.missed or []
    if result.finished > route.deadline or (route.latency_ms is not None and latency_ms > route.latency_ms):
        missed = [*missed, "latency"]
    if route.accuracy is not None and (record.accuracy is None or record.accuracy < route.accuracy):
        missed = [*missed, "accuracy"]  # it was never measured
    if route.cost is not None and cost * query.items * 1000.0 > route.cost:
        missed = [*missed, "cost"]  # more than its profile promised: the batch was disturbed
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
        UNSET if route.confidence is None else 1.0,  # one model agrees with itself
        UNSET,  # members
        UNSET,  # missing
        UNSET,  # default
        result.note or UNSET,  # reason
        route.uid.hex(),
        UNSET,  # confidences
        UNSET if result.labels is None else result.labels[i],
        True if result.note else UNSET,  # zeros
        loaded.target[0] or UNSET,
        loaded.target[1] or UNSET,  # its unit
        loaded.metric or UNSET,
    )


def too_dear(loaded: HeldInstance, query: QueuedQuery) -> str:
    """Why a query whose items nobody had counted before exceeds its limit of cost. Empty if it does not."""
    route = query.route
    cost = 1000.0 * loaded.price_per_s * loaded.table.at(route.length).charged_seconds(query.items)
    if route.cost is None or cost <= route.cost:
        return ""
    each = f"US$ {cost:.6g} per 1,000 queries, more than {route.cost:.6g}"
    return f"cost: {query.items} items cost {each}: allow more, or send fewer items"


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
    before_s, after_s = result.functions_s or (0.0, 0.0)

    def part(name: str, parent: str, start: float, end: float, attributes: dict[str, Any]) -> Span:
        return Span(
            trace=replace(trace, parent=parent),
            span=span_id(uid, name),
            name=f"infaas {name}",
            kind="internal",
            start=start,
            end=end,
            attributes=attributes,
            error=error,
        )

    found = [
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
        part(SPAN_BATCH, whole, result.started, result.finished, {**about, "infaas.batch.items": batch}),
    ]
    if before_s:
        found.append(part("before", inner, result.started, result.started + before_s, about))
    if after_s:
        found.append(part("after", inner, result.finished - after_s, result.finished, about))
    return found
