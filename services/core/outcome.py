"""How a query ended, as an event: one definition for dispatchers (which write outcomes) and executors (for a dead dispatcher)."""

from bus.messages.catalog import VariantRecord
from bus.messages.events import OutcomeEvent
from bus.messages.flow import Route


def answered(
    route: Route,
    record: VariantRecord,
    *,
    worker: str,
    finished: float,
    batch: int,
    cost_per_item: float,
    code: str = "",
) -> OutcomeEvent:
    """The outcome of a query that an executor ended: ok, late, or error when `code` is set."""
    if code:
        outcome = "refused" if code in ("deadline", "overloaded") else "error"
    else:
        late = finished > route.deadline or (
            route.latency_ms is not None and (finished - route.arrived) * 1000.0 > route.latency_ms
        )
        outcome = "late" if late else "ok"
    # One for every query: by position it costs a tenth of what keywords cost.
    return OutcomeEvent(
        route.arrived,
        route.uid,
        route.id,
        route.app,
        outcome,
        record.model,
        record.variant,
        worker,
        record.hardware,
        code or None,
        (finished - route.arrived) * 1000.0,
        route.latency_ms,
        record.accuracy,
        route.accuracy,
        route.cost,
        route.priority,
        route.items,
        batch,
        False,  # cached
        record.simulated,
        0.0 if code else cost_per_item * route.items,
        record.version,
        route.policy,
        route.context,
        route.input_digest,
        route.parent,
        route.stage,
    )


def refused(route: Route, code: str, now: float, *, default: bool = False) -> OutcomeEvent:
    """The outcome of a query that was refused before any executor ended it. default: it got its app's default output instead."""
    return OutcomeEvent(
        time=route.arrived,
        uid=route.uid,
        id=route.id,
        app=route.app,
        outcome="default" if default else "error" if code in ("model_error", "internal") else "refused",
        model=route.model,
        variant=route.variant,
        version=route.version,
        code=code,
        latency_ms=(now - route.arrived) * 1000.0,
        slo_ms=route.latency_ms,
        accuracy_required=route.accuracy,
        cost_limit=route.cost,
        priority=route.priority,
        items=route.items,
        policy=route.policy,
        context=route.context,
        input_digest=route.input_digest,
        parent=route.parent,
        stage=route.stage,
    )
