"""Queries in flight, and how each ends: its reply, its recorded outcome, its span."""

from collections import deque
from collections.abc import Callable, Iterable
from heapq import nlargest

from bus.messages.catalog import VariantRecord
from bus.messages.events import OutcomeEvent
from bus.messages.flow import DoneBatch, Route
from bus.messages.public import Answer, Error, Refusal
from services.core.actor import Effect, Envelope, Publish
from services.core.outcomes import OutcomeLog, answered, joined, refused
from services.core.selection.instances import Instance
from services.dispatcher.default_output import default_answer, gets_default, reason_of
from services.dispatcher.query import Query, spans_of

LAST = 64  # waiting queries that are found at a time to give way
LOOK_AGAIN = 0.25  # s between two searches, each of which looks at all that wait


def urgency(query: Query) -> tuple[int, float]:
    """Where not all can be in time: the smaller is served first."""
    return query.ask.priority, query.ask.deadline


class InFlight:
    """The queries in flight. Each is in exactly one of `dispatched`, `waiting`, `retries`."""

    def __init__(self) -> None:
        self.dispatched: dict[bytes, Query] = {}
        self.waiting: dict[bytes, Query] = {}  # nobody can serve them at the moment
        self.retries: deque[Query] = deque()  # their executor died; they are dispatched again one by one
        self.retrying: bytes | None = None
        self._last: list[Query] = []  # waiting ones that give way first, the very first one at the end
        self._look_again = 0.0
        self.begun_alone: dict[bytes, int] = {}  # retries that an executor has begun to run alone, and their attempt

    def __contains__(self, uid: bytes) -> bool:
        if uid in self.dispatched or uid in self.waiting:
            return True
        return bool(self.retries) and any(q.uid == uid for q in self.retries)

    def find(self, uid: bytes) -> Query | None:
        """The query in flight with this uid."""
        found = self.dispatched.get(uid) or self.waiting.get(uid)
        return found or next((query for query in self.retries if query.uid == uid), None)

    def __len__(self) -> int:
        return len(self.dispatched) + len(self.waiting) + len(self.retries)

    def gives_way(self, priority: int, now: float) -> Query | None:
        """Of the waiting queries, the one that gives way first to one of this priority. None if none does, or none was found of late."""
        while True:
            while self._last:
                query = self._last[-1]
                if self.waiting.get(query.uid) is query:
                    return query if query.ask.priority > priority else None
                self._last.pop()
            if now < self._look_again or not self.waiting:
                return None
            self._look_again = now + LOOK_AGAIN
            self._last = sorted(nlargest(LAST, self.waiting.values(), key=urgency), key=urgency)

    def dispatch(self, query: Query, instance: Instance, now: float) -> None:
        query.instance = instance
        query.attempt += 1
        instance.take(query.items, now, query.ask.deadline, query.ask.priority)
        self.dispatched[query.uid] = query

    def remove(self, uid: bytes) -> Query | None:
        """Remove a dispatched query. None if it is not, or no longer, ours."""
        query = self.dispatched.pop(uid, None)
        if query is not None and query.instance is not None:
            query.instance.release(query.items, query.ask.priority)
            query.instance = None
        if uid == self.retrying:
            self.retrying = None
        return query

    def undelivered(self, reply_subject: str) -> Query | None:
        """The query that was dispatched with this reply subject, whose last token is uid and attempt. None if it is elsewhere by now."""
        token = reply_subject.rpartition(".")[2]
        try:
            query = self.dispatched.get(bytes.fromhex(token[:32]))
            return query if query is not None and query.attempt == int(token[33:]) else None
        except ValueError:
            return None

    def remove_dispatched_to(self, lost: list[Instance], worker: str = "", device: str = "") -> list[Query]:
        """Remove, in order of arrival, the queries dispatched to these instances, or to a device that is gone as a whole.

        Instances are compared by id: the view may have removed one and added it again since.
        """
        gone = {instance.id for instance in lost}
        found = [
            query
            for query in self.dispatched.values()
            if (on := query.instance) is not None
            and (on.id in gone or (on.worker.name == worker and on.device == device))
        ]
        for query in found:
            self.remove(query.uid)
        return found

    def counts_against(self, query: Query) -> bool:
        """Whether the death of the query's executor counts against the query.

        The first one does, for all queries of the batch. After that the query runs alone, and only a death while it ran counts.
        """
        return self.begun_alone.pop(query.uid, None) == query.attempt or not query.crashes

    def remove_expired(self, now: float, grace: float) -> list[Query]:
        """Remove the queries that wait beyond their deadline, and those dispatched `grace` seconds beyond it."""
        late = [q for q in self.waiting.values() if q.ask.deadline <= now]
        for query in late:
            del self.waiting[query.uid]
        kept = [q for q in self.retries if q.ask.deadline > now]
        if len(kept) < len(self.retries):
            late += [q for q in self.retries if q.ask.deadline <= now]
            self.retries = deque(kept)
        if self.begun_alone:
            self.begun_alone = {uid: attempt for uid, attempt in self.begun_alone.items() if uid in self.dispatched}
        lost = [q for q in self.dispatched.values() if q.ask.deadline + grace <= now]
        for query in lost:
            self.remove(query.uid)
        return late + lost


class Retries:
    """Queries whose executor died. They are dispatched again one by one, so that one that kills executors harms no other.

    most: crashes that a query may see. decide, refuse: what to do with a query.
    """

    def __init__(
        self,
        in_flight: InFlight,
        most: int,
        decide: Callable[[Query, float], Iterable[Effect]],
        refuse: Callable[[Query, Error, float], Iterable[Effect]],
    ) -> None:
        self._in_flight = in_flight
        self._most = most
        self._decide = decide
        self._refuse = refuse

    def lost(self, queries: list[Query], now: float) -> list[Effect]:
        """The instances of these queries died."""
        effects: list[Effect] = []
        for query in queries:
            query.crashes += self._in_flight.counts_against(query)
            effects.extend(self._again(query, "the model's process ended each time this query was in its batch", now))
        effects.extend(self.next(now))
        return effects

    def crashed(self, query: Query, now: float) -> list[Effect]:
        """An executor says that the batch of this query crashed."""
        query.crashes += 1
        refused = self._again(query, "the model failed each time this query was in its batch", now)
        return refused or self.next(now)

    def _again(self, query: Query, text: str, now: float) -> list[Effect]:
        if query.crashes > self._most:
            return list(self._refuse(query, Error(code="model_error", message=text), now))
        self._in_flight.retries.append(query)
        return []

    def next(self, now: float) -> list[Effect]:
        """Send the next retry once the one before has ended. A query that cannot be served yet waits with the others."""
        effects: list[Effect] = []
        queue = self._in_flight.retries
        while queue and self._in_flight.retrying is None:
            query = queue.popleft()
            effects.extend(self._decide(query, now))
            if query.uid in self._in_flight.dispatched:
                self._in_flight.retrying = query.uid
        return effects


# -- how queries end


MISSES = frozenset({"deadline", "overloaded", "model_error"})  # errors that count against an app's objective


class OutcomeRecorder:
    """Makes the reply, the outcome event and the span of every query that ends. log: counts the events.

    observe: of a user's own policy, called with each outcome.
    """

    def __init__(
        self,
        dispatcher: str,
        policy: str,
        new_uid: Callable[[], bytes],
        observe: Callable[[OutcomeEvent], None] | None = None,
    ) -> None:
        self.log = OutcomeLog()
        self._observe = observe
        self._record = self.log.record if observe is None else self._observed
        self._served: dict[
            str, list[int]
        ] = {}  # by app: items that ended since the last report, and those of them not in time
        self._dispatcher = dispatcher
        self._policy = policy
        self._new_uid = new_uid

    def take_served(self) -> dict[str, tuple[int, int]]:
        """By app: items that ended since the last call, and how many of them were not answered in time."""
        served, self._served = self._served, {}
        return {app: (ended, missed) for app, (ended, missed) in served.items()}

    def _observed(self, event: OutcomeEvent) -> Effect:
        assert self._observe is not None, "there is one"
        self._observe(event)
        return self.log.record(event)

    def _count(self, app: str, items: int, *, missed: bool) -> None:
        known = self._served.get(app)
        if known is None:
            known = self._served[app] = [0, 0]
        known[0] += items
        if missed:
            known[1] += items

    def refused(self, query: Query, error: Error, now: float, *, cost: float = 0.0, missing: int = 0) -> list[Effect]:
        """The query ends here: with its app's default output if it gets that, else with a refusal.

        cost: US$ of its parts. missing: how many of the asked ones were not answered.

        Who asked for a part is its join, which its caller tells.
        """
        route = self._route(query)
        if query.part is not None:
            return [self._record(refused(route, error.code, now, cost=cost)), *spans_of(query, now, error.code)]
        if error.code in MISSES:
            self._count(query.ask.app, query.ask.items, missed=True)
        default = default_answer(query, reason_of(error), now) if gets_default(query, error) else None
        reply = Refusal(id=query.head.id, error=error) if default is None else default
        return [
            Publish(query.reply, reply, "", query.headers),
            self._record(
                refused(
                    route,
                    error.code,
                    now,
                    default=default is not None,
                    cost=cost,
                    missing=None if query.selection is None else missing,
                )
            ),
            *spans_of(query, now, error.code if default is None else ""),
        ]

    def unsure(self, query: Query, answer: Answer, reason: str, now: float) -> list[Effect]:
        """The query ends here with its app's default output, since its models do not agree enough. Nothing if no message can hold it.

        answer: what it would have been.
        """
        default = default_answer(query, reason, now)
        if default is None:
            return []
        return [
            Publish(query.reply, default, "", query.headers),
            self._record(
                refused(
                    self._route(query),
                    "confidence",
                    now,
                    default=True,
                    cost=answer.cost,
                    confidence=answer.confidence or 0.0,
                    missing=answer.missing or 0,
                )
            ),
            *spans_of(query, now, ""),
        ]

    def joined(self, query: Query, answer: Answer, now: float) -> list[Effect]:
        """The query ends here with an answer made of the answers to its parts. Who asked for a part is its join, which its caller tells."""
        event = joined(self._route(query), answer, now)
        ended: list[Effect] = [self._record(event), *spans_of(query, now, "")]
        if query.part is not None:
            return ended
        self._count(query.ask.app, query.ask.items, missed=event.outcome != "ok")
        return [Publish(query.reply, answer, "", query.headers), *ended]

    def _route(self, query: Query) -> Route:
        rules = query.selection
        return query.route(self._dispatcher, "", self._policy if rules is None else rules.policy or self._policy)

    def refused_unadmitted(self, app: str, envelope: Envelope, label: str | None, error: Error) -> list[Effect]:
        """Refuse a message that was not admitted as a query; its outcome is recorded all the same. label: the client's id for it."""
        now = envelope.now
        route = Route(self._new_uid(), 0, 0, envelope.reply, now, now, self._dispatcher, "", app[:64], 1, label)
        return [
            Publish(envelope.reply, Refusal(id=label, error=error)),
            self._record(refused(route, error.code, now)),
        ]

    def not_adopted(self, route: Route, now: float) -> list[Effect]:
        """Refuse a query of another dispatcher, whose app is not there any more."""
        error = Error(code="unknown_app", message=f"the app {route.app!r} is not there any more: see infaas.list.apps")
        return [
            Publish(route.reply_to, Refusal(id=route.id, error=error)),
            self._record(refused(route, error.code, now)),
        ]

    def done(
        self, batch: DoneBatch, record: VariantRecord | None, remove: Callable[[bytes], Query | None]
    ) -> list[Effect]:
        """An executor ended these queries and replied to their clients: record how. remove: removes a dispatched query."""
        effects: list[Effect] = []
        codes = batch.codes
        for i, uid in enumerate(batch.uids):
            query = remove(uid)
            if query is None or record is None:
                continue
            assert query.sent is not None  # it was dispatched
            event = answered(
                query.sent,
                record,
                worker=batch.worker,
                finished=batch.finished,
                batch=batch.batch,
                cost_per_item=batch.cost,
                code=codes[i] if codes is not None else "",
            )
            effects.append(self._record(event))
            if query.part is None and (event.code is None or event.code in MISSES):
                self._count(event.app, event.items, missed=event.outcome != "ok")
            if query.trace is not None:
                effects.extend(spans_of(query, batch.finished, codes[i] if codes is not None else ""))
        self.log.covers(batch)
        return effects
