"""The outcome of a query as an event. Dispatchers write outcomes. Executors write them in place of a dead dispatcher."""

from collections import deque

from msgspec import UNSET

from bus.messages.catalog import VariantRecord
from bus.messages.events import CLIENT_ERRORS, Event, OutcomeEvent
from bus.messages.fleet import DispatcherHeartbeat
from bus.messages.flow import DoneBatch, Route
from bus.messages.jobs import OFFLINE
from bus.messages.public import Answer
from services.core.actor import Record


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
    """The outcome of a query that an executor ended: ok or late. If `code` is set: refused or error."""
    if code:
        outcome = "refused" if code in ("deadline", "overloaded") else "error"
    else:
        late = finished > route.deadline or (
            route.latency_ms is not None and (finished - route.arrived) * 1000.0 > route.latency_ms
        )
        outcome = "late" if late else "ok"
    # This runs for every query. Positional arguments take a tenth of the time of keyword arguments.
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


def refused(
    route: Route,
    code: str,
    now: float,
    *,
    default: bool = False,
    cost: float = 0.0,
    confidence: float | None = None,
    missing: int | None = None,
) -> OutcomeEvent:
    """The outcome of a query that was refused before an executor ended it. default: the query got its app's default output instead.

    Of a query with parts: cost: US$ of those that were computed. confidence, missing: as in the event.
    """
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
        cost=cost,
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
        confidence=confidence,
        missing=missing,
    )


def joined(route: Route, answer: Answer, now: float) -> OutcomeEvent:
    """The outcome of a query that its dispatcher answered from the answers to its parts: ok or late."""
    latency_ms = (now - route.arrived) * 1000.0
    late = now > route.deadline or (route.latency_ms is not None and latency_ms > route.latency_ms)
    return OutcomeEvent(
        time=route.arrived,
        uid=route.uid,
        id=route.id,
        app=route.app,
        outcome="late" if late else "ok",
        model=answer.model or None,
        variant=answer.variant or None,
        version=answer.version or None,
        worker=answer.worker or None,
        hardware=answer.hardware or None,
        latency_ms=latency_ms,
        slo_ms=route.latency_ms,
        accuracy=answer.accuracy,
        accuracy_required=route.accuracy,
        cost_limit=route.cost,
        priority=route.priority,
        items=route.items,
        batch=answer.batch or None,
        cached=answer.cached,
        simulated=answer.simulated,
        cost=answer.cost,
        policy=route.policy,
        context=route.context,
        input_digest=route.input_digest,
        confidence=None if answer.confidence is UNSET else answer.confidence,
        missing=answer.missing or 0,
        parent=route.parent,
        stage=route.stage,
    )


def is_client_error(event: OutcomeEvent) -> bool:
    """Whether the query was wrong itself. Then it counts in `client_errors`, and not among the outcomes of its app."""
    # Most queries have no code. A part was asked by a dispatcher, an offline chunk by a job.
    return (
        event.code in CLIENT_ERRORS
        and event.outcome in ("refused", "error")
        and event.parent is None
        and event.policy != OFFLINE
    )


class OutcomeLog:
    """Counts the events that a dispatcher records. From it, executors learn for which of their batches the outcomes are on disk.

    flushed: by executor queue, the highest `seq` of a DoneBatch whose outcomes are all on disk.
    """

    def __init__(self) -> None:
        self.flushed: dict[str, int] = {}
        self._recorded = 0
        self._stored = 0
        self._open: deque[tuple[int, str, int]] = deque()

    def record(self, event: Event) -> Record:
        self._recorded += 1
        return Record(event)

    @property
    def recorded(self) -> int:
        """The number of events recorded so far. `on_disk` tells whether all events up to a number are on disk."""
        return self._recorded

    def on_disk(self, number: int) -> bool:
        return number <= self._stored

    def covers(self, batch: DoneBatch) -> None:
        """Note that all outcomes of this batch have been recorded."""
        if self._recorded <= self._stored:
            self.flushed[batch.queue] = batch.seq
        else:
            self._open.append((self._recorded, batch.queue, batch.seq))

    def stored(self, through: int) -> None:
        self._stored = through
        while self._open and self._open[0][0] <= through:
            _, queue, seq = self._open.popleft()
            self.flushed[queue] = seq

    def heartbeat(self, dispatcher: str, now: float, *, leaving: bool, adopts: bool = False) -> DispatcherHeartbeat:
        return DispatcherHeartbeat(
            dispatcher=dispatcher, incarnation=0, at=now, flushed=dict(self.flushed), leaving=leaving, adopts=adopts
        )


# -- When an app's default output is sent. Dispatchers and executors both use this definition.

DEFAULT_SHARE = 0.03  # of the time from the query's arrival to its deadline
DEFAULT_MOST = 0.02  # s


def default_at(arrived: float, deadline: float) -> float:
    """When to send the default output, in Unix seconds. It is before the deadline by the time that an answer may take to reach its client."""
    return deadline - min(DEFAULT_MOST, DEFAULT_SHARE * max(0.0, deadline - arrived))
