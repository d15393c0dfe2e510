"""The outcome of a query as an event, and what was said to its client. Dispatchers write outcomes. Executors write them in place of a dead
dispatcher.
"""

from collections import deque
from collections.abc import Container
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, field

from bus.messages.catalog import VariantRecord
from bus.messages.events import CLIENT_ERRORS, Event, OutcomeEvent
from bus.messages.fleet import DispatcherHeartbeat
from bus.messages.flow import DoneBatch, Route
from bus.messages.jobs import OFFLINE
from bus.messages.public import Answer, Error, Refusal
from services.core.actor import Record

CANCELLED = Error(code="cancelled", message="its client has taken it back: ask again with another retry_key")

_WITHOUT_ANSWER = dict.fromkeys(("deadline", "overloaded", "unsatisfiable"), "refused") | {"cancelled": "cancelled"}


def latency_of(arrived: float, started: float, finished: float) -> float:
    """A query's latency in ms. started, finished: of its batch, by the executor's clock, which may be behind the dispatcher's by more than the way there."""
    return (finished - min(arrived, started)) * 1000.0


def answered(
    route: Route,
    record: VariantRecord,
    *,
    worker: str,
    started: float,
    finished: float,
    batch: int,
    cost_per_item: float,
    code: str = "",
    items: int = 0,
) -> OutcomeEvent:
    """The outcome of a query that an executor ended: ok or late. If `code` is set: refused, cancelled or error. items: 0: as its route says."""
    items = items or route.items
    latency_ms = latency_of(route.arrived, started, finished)
    if code:
        outcome = _WITHOUT_ANSWER.get(code, "error")
    else:
        late = finished > route.deadline or (route.latency_ms is not None and latency_ms > route.latency_ms)
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
        latency_ms,
        route.latency_ms,
        record.accuracy if route.live is None else route.live[0],
        route.accuracy,
        route.cost,
        route.priority,
        items,
        batch,
        False,  # cached
        record.simulated,
        0.0 if code else cost_per_item * items,
        record.version,
        route.policy,
        route.context,
        route.input_digest,
        route.parent,
        route.stage,
        None,  # confidence
        None,  # missing
        route.payer,
    )


def _asked(route: Route) -> dict[str, Any]:
    """What an outcome says of its query, whatever became of it."""
    same = ("uid", "id", "app", "priority", "items", "policy", "context", "input_digest", "parent", "stage", "payer")
    return {
        "time": route.arrived,
        "slo_ms": route.latency_ms,
        "accuracy_required": route.accuracy,
        "cost_limit": route.cost,
        **{name: getattr(route, name) for name in same},
    }


def refused(
    route: Route,
    code: str,
    now: float,
    *,
    default: bool = False,
    cost: float = 0.0,
    confidence: float | None = None,
    missing: int | None = None,
    mistake: bool = False,
) -> OutcomeEvent:
    """The outcome of a query that was refused before an executor ended it. mistake: as in the event. default: the query got its app's default output instead.

    Of a query with parts: cost: US$ of those that were computed. confidence, missing: as in the event.
    """
    return OutcomeEvent(
        **_asked(route),
        outcome="default"
        if default
        else "error"
        if code in ("model_error", "internal")
        else _WITHOUT_ANSWER.get(code, "refused"),
        model=route.model,
        variant=route.variant,
        version=route.version,
        code=code,
        cost=cost,
        latency_ms=(now - route.arrived) * 1000.0,
        confidence=confidence,
        missing=missing,
        mistake=mistake,
    )


def joined(route: Route, answer: Answer, now: float) -> OutcomeEvent:
    """The outcome of a query that its dispatcher answered from the answers to its parts: ok or late."""
    latency_ms = (now - route.arrived) * 1000.0
    late = now > route.deadline or (route.latency_ms is not None and latency_ms > route.latency_ms)
    return OutcomeEvent(
        **_asked(route),
        outcome="late" if late else "ok",
        model=answer.model or None,
        variant=answer.variant or None,
        version=answer.version or None,
        worker=answer.worker or None,
        hardware=answer.hardware or None,
        latency_ms=latency_ms,
        accuracy=answer.accuracy,
        batch=answer.batch or None,
        cached=answer.cached,
        simulated=answer.simulated,
        cost=answer.cost,
        confidence=None if answer.confidence is UNSET else answer.confidence,
        missing=answer.missing or 0,
    )


def meaning(outcome: str) -> str:
    """What its client got, by the outcome of a query: an answer, in time or not, a default output or a refusal."""
    return {"ok": "answer", "late": "answer", "default": "default"}.get(outcome, "refusal")


def is_client_error(event: OutcomeEvent) -> bool:
    """Whether the query was wrong itself. Then it counts in `client_errors`, and not among the outcomes of its app."""
    # Most queries have no code. A part was asked by a dispatcher, an offline chunk by a job.
    return (
        # Executors refuse as unsatisfiable only what costs more than the query's own limit.
        (event.code in CLIENT_ERRORS or event.mistake or (event.code == "unsatisfiable" and event.worker is not None))
        and event.outcome in ("refused", "error")
        and event.parent is None
        and event.policy != OFFLINE
    )


MISSING = (
    10.0  # s until a batch counts as lost that did not come with those after it: its executor's own connection broke
)


class OutcomeLog(Struct, eq=False):
    """Counts the events that a dispatcher records. From it, executors learn for which of their batches the outcomes are on disk.

    flushed: by executor queue, the highest `seq` up to which all its DoneBatches have come, and whose outcomes are all on disk. What is above it executors
    say again, and record if this dispatcher dies. workers: those that are there.
    """

    workers: Container[str]
    flushed: dict[str, int] = {}
    _came: dict[str, int] = {}  # by queue: the seq up to which all have come
    _beyond: dict[str, tuple[float, set[int]]] = {}  # by queue: since when one is missing, and those after it
    _recorded: int = 0
    _stored: int = 0
    _open: deque[tuple[int, str, int]] = field(default_factory=deque)

    def record(self, event: Event) -> Record:
        self._recorded += 1
        return Record(event)

    @property
    def recorded(self) -> int:
        """The number of events recorded so far. `on_disk` tells whether all events up to a number are on disk."""
        return self._recorded

    def on_disk(self, number: int) -> bool:
        return number <= self._stored

    def covers(self, batch: DoneBatch, now: float) -> None:
        """Note that all outcomes of this batch have been recorded."""
        queue, came = batch.queue, self._came.get(batch.queue, -1)
        if came < 0:
            came = self._came[queue] = 0
            self._forget(queue.rpartition("/")[0])
        if batch.seq <= came:
            return  # it is said again
        if batch.seq == came + 1 and queue not in self._beyond:
            self._all_came(queue, batch.seq)
            return
        since, beyond = self._beyond.setdefault(queue, (now, set()))
        beyond.add(batch.seq)
        through = came if now < since + MISSING else min(beyond) - 1
        while through + 1 in beyond:
            through += 1
            beyond.remove(through)
        if not beyond:
            del self._beyond[queue]
        elif through > came:
            self._beyond[queue] = now, beyond
        if through > came:
            self._all_came(queue, through)

    def _forget(self, device: str) -> None:
        """A new executor has come. Of this device's, named by worker and device, only the one before may still end; those of workers that are gone say
        nothing again.
        """
        former = [queue for queue in self._came if queue.rpartition("/")[0] == device][:-2]
        for queue in former + [queue for queue in self._came if queue.partition("/")[0] not in self.workers]:
            for table in (self.flushed, self._came, self._beyond):
                table.pop(queue, None)

    def _all_came(self, queue: str, through: int) -> None:
        self._came[queue] = through
        if self._recorded <= self._stored:
            self.flushed[queue] = through
        else:
            self._open.append((self._recorded, queue, through))

    def stored(self, through: int) -> None:
        self._stored = through
        while self._open and self._open[0][0] <= through:
            _, queue, seq = self._open.popleft()
            if queue in self._came:
                self.flushed[queue] = seq

    def heartbeat(
        self, dispatcher: str, now: float, missing: str = "", *, leaving: bool, adopts: bool = False
    ) -> DispatcherHeartbeat:
        return DispatcherHeartbeat(
            dispatcher=dispatcher,
            incarnation=0,
            at=now,
            flushed=dict(self.flushed),
            leaving=leaving,
            adopts=adopts,
            missing=missing,
        )


# -- Who ends a query that has no answer at its deadline. Dispatchers and executors both use these definitions.
# One of them speaks: the executor that has the query, up to GRACE + SPEAKS after the deadline by the time of its turn, or the dispatcher. That hears
# itself first (services/core/line.py): by then it has heard all that the executor had said. So no refusal comes later than 0.1 s after the
# deadline, none crosses an answer, and the row is what the client got.

GRACE = 0.04  # s past its deadline in which a query is still answered, late. Then its executor refuses it
SPEAKS = 0.02  # s past that from which an executor that comes to it only then leaves it to the dispatcher
SILENT = 0.075  # s past it at which the dispatcher asks for an echo. If its executor is silent when that comes, the dispatcher refuses
CUT_OFF = 60.0  # s that a process waits for an echo while none comes back: its connection is held up, or broken
ECHO_LOST = 10.0  # s that the dispatcher waits for the echo, since the executor's answer may be on the same way
LAST_WORDS = 0.01  # s until a supervisor says that an executor has ended: what that said last is read before
PART_GRACE = 2.0  # s past it in which the answer to a part is still of use. The query that it belongs to ends in time all the same
NOT_ANSWERED = "the model had not answered when the time was up"
NOT_STORED = "the outputs were not in the object store when the time was up"


# -- When an app's default output is sent

DEFAULT_SHARE = 0.03  # of the time from the query's arrival to its deadline
DEFAULT_MOST = 0.02  # s


def default_at(arrived: float, deadline: float) -> float:
    """When to send the default output, in Unix seconds. It is before the deadline by the time that an answer may take to reach its client."""
    return deadline - min(DEFAULT_MOST, DEFAULT_SHARE * max(0.0, deadline - arrived))


KEPT = 8192
KEPT_BYTES = 2**26
SAME_S = 0.01  # by which the times of one sending differ at most, of two at least
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
        self._again: dict[bytes, float] = {}  # when the client of those that were said again had sent its query

    def get(self, key: Key) -> SentAnswer | None:
        body = self._young.get(key) or self._old.get(key)
        return None if body is None else SentAnswer(body, self._codes.get(key, ""))

    def repeats(self, uid: bytes, sent: float) -> bool:
        """Whether the answer was said again for this sending of its query already, of which two dispatchers may ask.

        sent: Unix seconds, to some ms; 0: nobody knows.
        """
        before, self._again[uid] = self._again.get(uid, 0.0), sent
        return sent > 0 and abs(sent - before) < SAME_S

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
            self._again = {uid: sent for uid, sent in self._again.items() if (uid, 0) in self._old}
        return body
