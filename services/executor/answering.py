"""From a computed batch to each query's answer."""

from msgspec.structs import replace

from bus.messages.flow import Route
from bus.messages.public import Answer, Error, Refusal
from services.executor.instances import Loaded
from services.executor.work import BatchResult, Work


def answer_of(loaded: Loaded, worker: str, work: Work, result: BatchResult, i: int, batch: int, cost: float) -> Answer:
    """The i-th query's answer. batch: items computed together; cost: US$ per item."""
    record = loaded.record
    route = work.route
    latency_ms = (result.finished - route.arrived) * 1000.0
    missed = route.missed or []
    if route.latency_ms is not None and latency_ms > route.latency_ms:
        missed = [*missed, "latency"]
    if route.cost is not None and cost * 1000.0 > route.cost:
        missed = [*missed, "cost"]  # dearer than its profile promised: a small batch, or a disturbed one
    # One for every query: by position it costs a tenth of what keywords cost.
    answer = Answer(
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
        cost * work.items,
        missed,
    )
    return replace(answer, reason=result.note) if result.note else answer


def model_error(route: Route, reason: str) -> Refusal:
    """The model failed on this very query."""
    return Refusal(id=route.id, error=Error(code="model_error", message=f"the model failed on these inputs: {reason}"))


def output_bytes(answer: Answer) -> int:
    return sum(len(tensor.data) for tensor in answer.outputs.values())
