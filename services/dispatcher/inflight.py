"""Queries in flight, and how each ends: its reply, its recorded outcome, its span."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain

from bus.messages.catalog import VariantRecord
from bus.messages.events import OutcomeEvent
from bus.messages.flow import DoneBatch, Route, Trying
from bus.messages.public import Answer, Error, Refusal
from services.core.actor import NOTHING, Effect, Envelope, Publish
from services.core.deadlines import EarliestDeadline
from services.core.outcomes import ECHO_LOST, PART_GRACE, SILENT, OutcomeLog, RecentAnswers, answered, joined, refused
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import INFINITE
from services.core.selection.instances import Instance
from services.core.selection.refusals import NEEDS
from services.dispatcher.default_output import default_answer, default_due, demands, gets_default, reason_of
from services.dispatcher.query import Query, spans_of
from services.dispatcher.releases import Releases
from services.dispatcher.waiting import WaitingQueries, handed_back

LAST = 64  # waiting queries that are found at a time to give way
LOOK_AGAIN = 0.25  # s between two searches, each of which looks at all that wait
TOLD = 0.5  # s within which a supervisor says that an executor has ended, and what ran there
FIRST = 0.5  # s for which suspects let those go first that their executor had beside them
MOST_LOST = 4  # dispatches after which a lost query counts as suspect although nothing says that it ran


def urgency(query: Query) -> tuple[int, float]:
    """Where not all can be in time: the smaller is served first."""
    return query.ask.priority, query.ask.deadline


def ends(query: Query) -> float:
    """When a query in flight is looked at here if it has no answer by then, in Unix seconds. It ends, or if an executor has it, an echo is asked
    for; it ends without that if none comes.
    """
    if query.asked:
        return query.asked + ECHO_LOST
    due = query.ask.deadline if query.fallback is None else default_due(query)
    if query.instance is None and query.lent is None:
        return due
    return due + (SILENT if query.part is None else PART_GRACE + SILENT)


class InFlight:
    """The queries in flight. Each is in exactly one of `dispatched`, `waiting`, `retries`. earliest: when the first of them ends here.

    storing: dispatched ones that are computed, and whose outputs go to the object store. No other query waits for them.
    """

    def __init__(self) -> None:
        self.dispatched: dict[bytes, Query] = {}
        self.storing: set[bytes] = set()
        self.waiting = WaitingQueries()  # nobody can serve them at the moment
        self.retries: dict[bytes, Query] = {}  # their executor died; they are dispatched again one by one
        self.retrying: bytes | None = None
        self._last: list[Query] = []  # waiting ones that give way first, the very first one at the end
        self._look_again = 0.0
        self.begun_alone: dict[bytes, int] = {}  # retries that an executor has begun to run alone, and their attempt
        self._asked: dict[bytes, Query] = {}  # for which an echo was asked
        self._untold: dict[tuple[str, str], tuple[float, dict[bytes, int]]] = {}  # by device that nobody listens on
        self.earliest = EarliestDeadline()

    def __contains__(self, uid: bytes) -> bool:
        return uid in self.dispatched or uid in self.waiting or uid in self.retries

    def find(self, uid: bytes) -> Query | None:
        """The query in flight with this uid."""
        return self.dispatched.get(uid) or self.waiting.get(uid) or self.retries.get(uid)

    def __len__(self) -> int:
        return len(self.dispatched) + len(self.waiting) + len(self.retries)

    def gives_way(self, priority: int, now: float) -> Query | None:
        """Of the waiting queries that no executor may have, the one that gives way first to this priority. None: none does, or none was found of late."""
        while True:
            while self._last:
                query = self._last[-1]
                if self.waiting.get(query.uid) is query:
                    return query if query.ask.priority > priority else None
                self._last.pop()
            if now < self._look_again or not self.waiting:
                return None
            self._look_again = now + LOOK_AGAIN
            able = (query for query in self.waiting.values() if not query.owed(now))
            self._last = sorted(nlargest(LAST, able, key=urgency), key=urgency)

    def dispatch(self, query: Query, instance: Instance, now: float) -> None:
        query.instance = instance
        query.asked = 0.0
        query.attempt += 1
        instance.take(query.ask.items, now, query.ask.deadline, query.ask.priority)
        self.dispatched[query.uid] = query
        if query.part is not None:
            self.waiting.sent(query.part)
        if query.ask.deadline < self.earliest.at or query.fallback is not None:  # else it ends later
            self.earliest.at = min(self.earliest.at, ends(query))

    def wait(self, query: Query) -> tuple[Effect, ...]:
        """Nobody can serve it at the moment."""
        self.waiting[query.uid] = query
        self.earliest.at = min(self.earliest.at, ends(query))
        return NOTHING

    def tries(self, trying: Trying) -> Iterable[Effect]:
        """An executor begins to run a retry alone."""
        self.begun_alone[trying.uid] = trying.attempt
        return NOTHING

    def retry(self, query: Query) -> None:
        """It has lost its executor, and waits for its turn."""
        self.retries[query.uid] = query
        self.earliest.at = min(self.earliest.at, ends(query))

    def remove(self, uid: bytes, left: dict[Instance, None] | None = None) -> Query | None:
        """Remove a dispatched query. None if it is not, or no longer, ours. left: gets its instance, which the caller counts anew."""
        query = self.dispatched.pop(uid, None)
        if query is not None and (instance := query.instance) is not None:
            if uid in self.storing:
                self.storing.remove(uid)
            elif left is None:
                instance.release(query.ask.items, query.ask.priority)
            else:
                instance.ended(query.ask.items, query.ask.priority)
                left[instance] = None
            query.instance = None
        if uid == self.retrying:
            self.retrying = None
        return query

    def forget(self, uid: bytes, left: dict[Instance, None] | None = None) -> Query | None:
        """Another process ends this query, or has ended it, wherever it is here. None if it is not here. left: as of `remove`."""
        found = self.remove(uid, left) or self.waiting.pop(uid, None)
        if found is None and (found := self.retries.pop(uid, None)) is not None:
            self.waiting.went(found)
        return found

    def ended(self, uids: list[bytes]) -> list[Query | None]:
        """`forget` all of these, the queries of a batch: their instance is counted anew once."""
        left: dict[Instance, None] = {}
        found = [self.forget(uid, left) for uid in uids]
        for instance in left:
            instance.recount()
        return found

    def computed(self, uid: bytes) -> None:
        """Its executor has computed it, and stores its outputs: it takes no more of its instance's time, and is no suspect."""
        query = self.dispatched.get(uid)
        if query is not None and query.instance is not None and uid not in self.storing:
            query.instance.release(query.ask.items, query.ask.priority)
            self.storing.add(uid)
        if uid == self.retrying:
            self.retrying = None

    def undelivered(self, reply_subject: str) -> Query | None:
        """The query that was dispatched with this reply subject, whose last token is uid and attempt. None if it is elsewhere by now."""
        token = reply_subject.rpartition(".")[2]
        try:
            query = self.dispatched.get(bytes.fromhex(token[:32]))
            return query if query is not None and query.attempt == int(token[33:]) else None
        except ValueError:
            return None

    def dispatched_to(self, lost: list[Instance], worker: str = "", device: str = "") -> list[Query]:
        """In order of arrival, the queries dispatched to these instances, or to a device that is gone as a whole.

        Instances are compared by id: the view may have removed one and added it again since.
        """
        gone = {instance.id for instance in lost}
        return [
            query
            for query in self.dispatched.values()
            if (on := query.instance) is not None
            and (on.id in gone or (on.worker.name == worker and on.device == device))
        ]

    def hold(self, worker: str, device: str, now: float) -> None:
        """Nobody listens on this device any more. What its executor had stays with it, until its supervisor says what ran (or `not_told`)."""
        had = {
            query.uid: query.attempt
            for query in self.dispatched.values()
            if (on := query.instance) is not None and on.worker.name == worker and on.device == device
        }
        since, earlier = self._untold.get((worker, device), (now, {}))
        self._untold[worker, device] = (since, earlier | had)

    def told(self, worker: str, device: str) -> None:
        """Its supervisor has said that its executor ended."""
        self._untold.pop((worker, device), None)

    def not_told(self, now: float) -> list[Query]:
        """What those executors had of which nobody has said anything in time."""
        found: list[Query] = []
        for key in [key for key, (since, _) in self._untold.items() if now >= since + TOLD]:
            for uid, attempt in self._untold.pop(key)[1].items():
                query = self.dispatched.get(uid)
                if query is not None and query.attempt == attempt:
                    found.append(query)
        return found

    def counts_against(self, query: Query, running: Collection[bytes] | None) -> bool:
        """Whether the death of the query's executor counts against the query: it does if the query ran then.

        running: the queries that did. None: not known. Then the first one counts for all that the executor had; after that the query runs
        alone, and only a death while it ran counts.
        """
        began = self.begun_alone.pop(query.uid, None) == query.attempt
        if running is None or query.attempt >= MOST_LOST:
            return began or not query.crashes
        return query.uid in running

    def leave(self, dispatcher: str, policy: str, subject: str) -> list[Effect]:
        """This dispatcher stops: what waits goes to the others. subject: where they hear of it."""
        left = [query for query in (*self.waiting.values(), *self.retries.values()) if query.part is None]
        return [handed_back(query, dispatcher, policy, subject) for query in left]

    def remove_expired(self, now: float) -> tuple[list[Query], bool]:
        """Remove the queries that wait beyond their deadline; and whether an echo must be asked for, for those that executors are silent about."""
        items, earliest = len(self), float("inf")
        expired: list[Query] = []
        ask = False
        for query in chain(self.waiting.values(), self.retries.values(), self.dispatched.values()):
            due = ends(query)
            if due <= now and not query.asked and (query.instance is not None or query.lent is not None or query.moved):
                ask, query.asked = True, now
                self._asked[query.uid] = query
                due = ends(query)
            if due <= now:
                expired.append(query)
            elif due < earliest:
                earliest = due
        for query in expired:
            if self.waiting.pop(query.uid, None) is None and self.remove(query.uid) is None:
                self.waiting.went(self.retries.pop(query.uid))
        if self.begun_alone:
            self.begun_alone = {uid: attempt for uid, attempt in self.begun_alone.items() if uid in self.dispatched}
        self.earliest.looked(earliest, items, now)
        return expired, ask

    def ask_again(self, now: float) -> dict[tuple[str, str], str]:
        """Speak for no executor before another echo has come back. Returns the devices that have queries, or had what waits now, each with an instance."""
        for query in self._asked.values():
            query.asked = now
        queries = chain(self.dispatched.values(), self.waiting.values(), self.retries.values())
        instances = (query.instance or (query.lent and query.lent[0]) for query in queries)
        return {(on.worker.name, on.device): on.id for on in instances if on is not None}

    def remove_silent(self, echoed: float) -> list[Query]:
        """An echo of this time came back: remove the queries for which it was asked for, and whose executors have said nothing before it."""
        silent = [query for query in self._asked.values() if 0.0 < query.asked <= echoed]
        self._asked = {query.uid: query for query in self._asked.values() if query.asked > echoed}
        return [query for query in silent if self.find(query.uid) is query and self.forget(query.uid)]


@dataclass(slots=True, eq=False)
class Retries:
    """Queries whose executor died while they ran. They are dispatched again one by one, so that one that kills executors harms no other.

    most: crashes that a query may see. decide, refuse: what to do with a query.
    """

    in_flight: InFlight
    most: int
    decide: Callable[[Query, float], Iterable[Effect]]
    refuse: Callable[[Query, Error, float], Iterable[Effect]]
    _first: set[bytes] = field(default_factory=set)
    _first_until: float = 0.0

    def lost(self, queries: list[Query], now: float, running: Collection[bytes] | None = None) -> list[Effect]:
        """The instances of these queries died. running: those that ran then, if that is known; the others are dispatched at once."""
        effects: list[Effect] = []
        for query in queries:
            query.crashes += self.in_flight.counts_against(query, running)
        spared = sorted((one for one in queries if not one.crashes), key=urgency)
        if spared:
            self._first.update(query.uid for query in spared)
            self._first_until = now + FIRST
        for query in spared:
            effects.extend(self.decide(query, now))
        for query in [one for one in queries if one.crashes]:
            effects.extend(self._again(query, "the model's process ended each time this query was in its batch", now))
        effects.extend(self.next(now))
        return effects

    def crashed(self, query: Query, now: float) -> list[Effect]:
        """An executor says that the batch of this query crashed."""
        query.crashes += 1
        refused = self._again(query, "the model failed each time this query was in its batch", now)
        return refused or self.next(now)

    def _again(self, query: Query, text: str, now: float) -> list[Effect]:
        if query.crashes > self.most:
            query.why = Error(code="model_error", message=text)
            if not query.owed(now):
                return list(self.refuse(query, query.why, now))
        self.in_flight.retry(query)
        return []

    def next(self, now: float) -> list[Effect]:
        """Send the next retry once the one before has ended. A query that cannot be served yet waits with the others."""
        effects: list[Effect] = []
        queue, flight = self.in_flight.retries, self.in_flight
        if self._first:
            left = (uid for uid in self._first if uid in flight.dispatched or uid in flight.waiting)
            self._first = set(left) if now < self._first_until else set()
            if self._first:
                return effects
        while flight.retrying is None and (uid := next((u for u, q in queue.items() if q.crashes <= self.most), None)):
            query = queue.pop(uid)
            flight.waiting.went(query)
            effects.extend(self.decide(query, now))
            if query.uid in flight.dispatched:
                flight.retrying = query.uid
        return effects


# -- how queries end


MISSES = frozenset({"deadline", "overloaded", "model_error"})  # errors that count against an app's objective


@dataclass(slots=True, eq=False)
class OutcomeRecorder:
    """Makes the reply, the outcome event and the span of every query that ends. log: counts the events. said: the last replies to
    clients that may ask again. observe: of a user's own policy, called with each outcome. view: hears how long queries were away.
    releases: counts queries of releases.
    """

    dispatcher: str
    policy: str
    new_uid: Callable[[], bytes]
    observe: Callable[[OutcomeEvent], None] | None
    view: ClusterView
    log: OutcomeLog = field(init=False)
    said: RecentAnswers = field(default_factory=RecentAnswers)
    releases: Releases = field(init=False)
    # By app: items that ended since the last report, and those of them not in time.
    _served: dict[str, list[int]] = field(default_factory=dict)
    _record: Callable[[OutcomeEvent], Effect] = field(init=False)

    def __post_init__(self) -> None:
        self.log = OutcomeLog(self.view.workers)
        self._record = self.log.record if self.observe is None else self._observed

    def take_served(self) -> dict[str, tuple[int, int]]:
        """By app: items that ended since the last call, and how many of them were not answered in time."""
        served, self._served = self._served, {}
        return {app: (ended, missed) for app, (ended, missed) in served.items()}

    def _observed(self, event: OutcomeEvent) -> Effect:
        assert self.observe is not None, "there is one"
        self.observe(event)
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
            event = refused(route, error.code, now, cost=cost)
            self.releases.ended(query, event)
            return [self._record(event), *spans_of(query, now, error.code)]
        if error.code in MISSES:
            self._count(query.ask.app, query.ask.items, missed=True)
        default = default_answer(query, reason_of(error), now) if gets_default(query, error) else None
        reply = Refusal(id=query.head.id, error=error) if default is None else default
        event = refused(
            route,
            error.code,
            now,
            default=default is not None,
            cost=cost,
            missing=None if query.ensemble is None else missing,
            mistake=default is None and error.field == NEEDS and demands(query),
        )
        self.releases.ended(query, event)
        said = self._say(route, query, reply)
        return [said, self._record(event), *spans_of(query, now, error.code if default is None else "")]

    def unsure(self, query: Query, answer: Answer, reason: str, now: float) -> list[Effect]:
        """The query ends here with its app's default output, since its models do not agree enough. Nothing if no message can hold it.

        answer: what it would have been.
        """
        default = default_answer(query, reason, now)
        if default is None:
            return []
        route = self._route(query)
        return [
            self._say(route, query, default),
            self._record(
                refused(
                    route,
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
        route = self._route(query)
        event = joined(route, answer, now)
        ended: list[Effect] = [self._record(event), *spans_of(query, now, "")]
        if query.part is not None:
            return ended
        self._count(query.ask.app, query.ask.items, missed=event.outcome != "ok")
        return [self._say(route, query, answer), *ended]

    def _say(self, route: Route, query: Query, reply: Answer | Refusal) -> Publish:
        """The reply to its client. It is kept if that may ask again."""
        if route.resendable:
            self.said.keep(route, reply)
        return Publish(query.reply, reply, "", query.headers)

    def _route(self, query: Query) -> Route:
        rules = query.ensemble
        return query.route(self.dispatcher, "", self.policy if rules is None else rules.policy or self.policy)

    def refused_unadmitted(
        self, app: str, envelope: Envelope, label: str | None, error: Error, uid: bytes | None = None
    ) -> list[Effect]:
        """Refuse a message that was not admitted as a query; its outcome is recorded all the same. label: the client's id for it. uid: by its
        retry key, if it has one.
        """
        now = envelope.now
        route = Route(uid or self.new_uid(), 0, 0, envelope.reply, now, now, self.dispatcher, "", app[:64], 1, label)
        refusal = Refusal(id=label, error=error)
        if uid is not None:
            self.said.keep(route, refusal)
        return [Publish(envelope.reply, refusal), self._record(refused(route, error.code, now))]

    def not_adopted(self, route: Route, error: Error, now: float) -> list[Effect]:
        """Refuse a query of another dispatcher, whose app or model is not there any more."""
        refusal = Refusal(id=route.id, error=error)
        if route.resendable:
            self.said.keep(route, refusal)
        return [Publish(route.reply_to, refusal), self._record(refused(route, error.code, now))]

    def done(
        self,
        batch: DoneBatch,
        record: VariantRecord | None,
        ended: Iterable[Query | None],
        unknown: Callable[[bytes], None],
        now: float,
    ) -> list[Effect]:
        """An executor ended these and replied to their clients: record how. ended: None: one was not in flight, as `unknown` is told."""
        effects: list[Effect] = []
        way = INFINITE
        for i, query in enumerate(ended):
            if query is None:
                unknown(batch.uids[i])
            if query is None or query.sent is None or record is None:
                continue
            if not query.attempt:
                way = min(way, batch.started - query.arrived)
            code = batch.codes[i] if batch.codes is not None else ""
            event = answered(
                query.sent,
                record,
                worker=batch.worker,
                started=batch.started,
                finished=batch.finished,
                batch=batch.batch,
                cost_per_item=batch.cost,
                code=code,
                items=0 if batch.items is None else batch.items[i],
            )
            effects.append(self._record(event))
            if query.ask.arm is not None:
                self.releases.ended(query, event, None if batch.said is None else batch.said[i], record)
            if query.part is None and (event.code is None or event.code in MISSES):
                self._count(event.app, event.items, missed=event.outcome != "ok")
            if query.trace is not None:
                effects.extend(spans_of(query, batch.finished, code))
        self.view.took(way)
        self.log.covers(batch, now)
        return effects
