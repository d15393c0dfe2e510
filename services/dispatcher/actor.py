"""The dispatcher: every query that it takes ends in exactly one answer or refusal.

It decides in memory on the view folded from heartbeats, `done` batches and its own dispatches, forwards the body as it came
with a route in front, and remembers it until done. What dies with an executor is dispatched again, one by one; what nobody can
serve at the moment waits within its deadline.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from bus.messages.fleet import ExecutorExited, LoadReply, WorkerHeartbeat
from bus.messages.flow import DoneBatch, Execute, HandBack, Trying
from bus.messages.public import Error, ListRequest, QueryHead, Requirements
from bus.subjects import DISPATCHERS, Subjects
from services.core.actor import (
    After,
    Changed,
    Effect,
    Envelope,
    Inlet,
    Malformed,
    Publish,
    Recorded,
    Started,
    Stopping,
    Synced,
    Undelivered,
    Watch,
)
from services.core.selection.cluster import ClusterView
from services.core.selection.instances import Instance
from services.core.selection.policy import LoadOrder, SelectionPolicy
from services.dispatcher.apps import Apps
from services.dispatcher.default_output import DefaultDeadlines, DefaultDue, ended, expired
from services.dispatcher.demand import DemandCounter, FleetDigests, LoadsOnDemand
from services.dispatcher.inflight import InFlight, Outcomes
from services.dispatcher.query import Admission, Query, label_of
from services.dispatcher.questions import question

HEARTBEAT = 0.5  # s
SWEEP = 0.25  # s; one timer for all deadlines
LOST_AFTER = 2.0  # s past its deadline, a query that its executor never ended is refused here
BOUNCES = 4  # dispatches after which a query that keeps coming back is not sent on at once
NO_ROOM = 5.0  # s before a variant that found no room, or failed to load, is tried again
NOTHING: tuple[Effect, ...] = ()


class HeartbeatDue(msgspec.Struct, frozen=True):
    """Timer: send a heartbeat."""


class DeadlineCheck(msgspec.Struct, frozen=True):
    """Timer: look for what is overdue and for silent workers."""


class Dispatcher:
    """Pure actor. name: unique id of this dispatcher's life. new_uid: 16 fresh bytes."""

    def __init__(
        self,
        name: str,
        subjects: Subjects,
        policy: SelectionPolicy,
        prices: Mapping[str, float],
        new_uid: Callable[[], bytes],
        *,
        default_deadline_s: float = 30.0,
        max_inline: int = 2**20,
        failure_timeout_s: float = 2.0,
        max_attempts: int = 2,
        max_queue: int = 100_000,
    ) -> None:
        self.name = name
        self.view = ClusterView(prices, getattr(policy, "goal", "cost"))
        self.apps = Apps(self.view)
        self.flights = InFlight()
        self._fallbacks = DefaultDeadlines()
        self._subjects = subjects
        self._policy = policy
        self._intake = Admission(self.apps, new_uid, default_deadline_s, max_inline)
        self._failure_timeout = failure_timeout_s
        self._max_attempts = max_attempts
        self._max_queue = max_queue
        self._orders = LoadsOnDemand(name, subjects)
        self._endings = Outcomes(name, policy.name, new_uid)
        self._demand = DemandCounter(name, subjects)
        self._outlook = FleetDigests(name, subjects, self.apps)
        self._prefix = len(subjects.query(""))
        self._undelivered = subjects.undelivered(name, "")
        self._own_space = subjects.prefix + "."
        self._queues: dict[tuple[str, str], str] = {}
        self._on: dict[type, Callable[[Envelope], Iterable[Effect]]] = {
            QueryHead: self._query,
            Malformed: self._malformed,
            DoneBatch: self._done,
            WorkerHeartbeat: self._heartbeat,
            Recorded: self._recorded,
            HandBack: self._handed_back,
            Undelivered: self._not_delivered,
            Trying: self._trying,
            ExecutorExited: self._exited,
            LoadReply: self._load_reply,
            Changed: lambda envelope: self.apps.heard(envelope.message),
            Synced: lambda envelope: self.apps.heard(envelope.message),
            Requirements: self._question,
            ListRequest: self._question,
            Started: lambda _: (After("beat", 0.0, HeartbeatDue()), After("sweep", SWEEP, DeadlineCheck())),
            Stopping: self._stopping,
            HeartbeatDue: self._beat,
            DeadlineCheck: self._sweep,
            DefaultDue: self._due,
        }

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        s, name = self._subjects, self.name
        return (
            Inlet(subject=s.worker_heartbeat(), message=WorkerHeartbeat),
            Inlet(subject=s.exited(), message=ExecutorExited),
            Inlet(subject=s.done(name), message=DoneBatch),
            Inlet(subject=s.undelivered(name), message=DoneBatch),
            Inlet(subject=s.trying(name), message=Trying),
            Inlet(subject=s.loads(name), message=LoadReply),
            Inlet(subject=s.resubmit(name), message=HandBack),
            Inlet(subject=s.resubmit(), message=HandBack, queue=DISPATCHERS),
            Inlet(subject=s.explain(), message=Requirements, queue=DISPATCHERS),
            Inlet(subject=s.list(), message=ListRequest, queue=DISPATCHERS),
            Inlet(subject=s.query(), message=QueryHead, queue=DISPATCHERS, malformed=True),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.catalog_bucket),)

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        return self._on[type(envelope.message)](envelope)

    # -- a query arrives

    def _query(self, envelope: Envelope) -> Iterable[Effect]:
        reply = envelope.reply
        if not reply or reply.startswith(self._own_space):
            return NOTHING  # nobody waits for an answer; and an answer may go to a client only, never into the system
        app_name = envelope.subject[self._prefix :]
        query = self._intake.take(app_name, envelope)
        if isinstance(query, Error):
            return self._endings.turned_away(app_name, envelope, envelope.message.id, query)
        if query.head.retry_key is not None and query.uid in self.flights:
            return NOTHING  # the client asks again for what is under way here: it will be answered
        effects = self._decide(query, envelope.now)
        self._demand.came(query)
        return effects

    def _malformed(self, envelope: Envelope) -> Iterable[Effect]:
        """What is no query at all is refused, and recorded, like any other that cannot be taken."""
        reply = envelope.reply
        if not reply or reply.startswith(self._own_space):
            return NOTHING
        error = Error(code="bad_request", message=envelope.message.error)
        return self._endings.turned_away(envelope.subject[self._prefix :], envelope, label_of(envelope.body), error)

    # -- deciding

    def _decide(self, query: Query, now: float) -> Iterable[Effect]:
        decision = self._policy.select(query.ask, now, self.view)
        if decision.assignments:
            effect = self._dispatch(query, self.view.instances[decision.assignments[0]])
            return (effect,) if decision.load is None else (effect, *self._order(query, decision.load, now))
        effects: list[Effect] = []
        if decision.load is not None:
            effects.extend(self._order(query, decision.load, now))
        if decision.refusal is not None:
            effects.extend(self._end(query, decision.refusal, now))
        elif len(self.flights.waiting) >= self._max_queue:
            text = "too many queries wait for a worker: ask again later"
            effects.extend(
                self._endings.refused(query, Error(code="overloaded", message=text, retry_after_ms=1000.0), now)
            )
        else:
            effects.extend(self._wait(query, now))
        return effects

    def _wait(self, query: Query, now: float) -> Iterable[Effect]:
        self.flights.waiting[query.uid] = query
        return self._fallbacks.hold(query, now, self.flights.waiting)

    def _end(self, query: Query, error: Error, now: float) -> Iterable[Effect]:
        """Refuse it, unless its app has a default output and something better may come before the deadline."""
        if self._fallbacks.holds(query, error, now) and len(self.flights.waiting) < self._max_queue:
            return self._wait(query, now)
        return self._endings.refused(query, error, now)

    def _dispatch(self, query: Query, instance: Instance) -> Publish:
        self.flights.depart(query, instance)
        route = query.sent = query.route(self.name, instance.id, self._policy.name)
        key = (instance.worker.name, instance.device)
        subject = self._queues.get(key)
        if subject is None:
            subject = self._queues[key] = self._subjects.execute(*key)
        undelivered = f"{self._undelivered}{query.uid.hex()}-{query.attempt}"
        return Publish(subject, Execute(route, query.raw), undelivered, query.headers)

    def _order(self, query: Query, load: LoadOrder, now: float) -> list[Effect]:
        order = self._orders.order(query.ask, load, now, app=query.app)
        return [] if order is None else [order]

    # -- a batch is done

    def _done(self, envelope: Envelope) -> Iterable[Effect]:
        batch: DoneBatch = envelope.message
        effects = self._endings.done(batch, self.view.records.get(batch.variant), self.flights.land)
        instance = self.view.instances.get(batch.instance)
        if instance is not None:
            instance.others = max(0, batch.queued - instance.own)
        if self.flights.retries and self.flights.retrying is None:
            effects.extend(self._next_retry(envelope.now))
        return effects

    def _recorded(self, envelope: Envelope) -> Iterable[Effect]:
        self._endings.history.stored(envelope.message.through)
        return NOTHING

    # -- what goes wrong

    def _not_delivered(self, envelope: Envelope) -> Iterable[Effect]:
        """Nobody listened on the queue's subject: its executor is gone, and this query never reached it."""
        query = self.flights.returned(envelope.message.reply_subject)
        if query is None or query.instance is None:
            return NOTHING  # it has been dispatched elsewhere since
        instance = query.instance
        self.flights.land(query.uid)
        effects = self._lost_device(instance.worker.name, instance.device, envelope.now)
        effects.extend(self._decide(query, envelope.now))
        return effects

    def _exited(self, envelope: Envelope) -> Iterable[Effect]:
        gone: ExecutorExited = envelope.message
        return self._lost_device(gone.worker, gone.device, envelope.now)

    def _trying(self, envelope: Envelope) -> Iterable[Effect]:
        self.flights.tried[envelope.message.uid] = envelope.message.attempt
        return NOTHING

    def _lost_device(self, worker: str, device: str, now: float) -> list[Effect]:
        return self._lost(self.flights.aboard(self.view.lose_device(worker, device), worker, device), now)

    def _lost(self, queries: list[Query], now: float) -> list[Effect]:
        """Instances died with these aboard: retry them one by one, so that a poisonous one harms nobody else."""
        effects: list[Effect] = []
        for query in queries:
            query.crashes += self.flights.guilty(query)
            if query.crashes > self._max_attempts:
                text = "the model's process ended each time this query was in its batch"
                effects.extend(self._endings.refused(query, Error(code="model_error", message=text), now))
            else:
                self.flights.retries.append(query)
        effects.extend(self._next_retry(now))
        return effects

    def _next_retry(self, now: float) -> list[Effect]:
        """Send the next retry once the one before has ended; what cannot be served yet waits with the others."""
        effects: list[Effect] = []
        while self.flights.retries and self.flights.retrying is None:
            query = self.flights.retries.popleft()
            effects.extend(self._decide(query, now))
            if query.uid in self.flights.flying:
                self.flights.retrying = query.uid
        return effects

    def _handed_back(self, envelope: Envelope) -> Iterable[Effect]:
        """An executor could not serve it after all."""
        back: HandBack = envelope.message
        route, now = back.route, envelope.now
        flying = self.flights.flying.get(route.uid)
        if flying is not None and flying.attempt != route.attempt:
            return NOTHING  # it has been dispatched elsewhere since
        query = self.flights.land(route.uid)
        if query is None:
            if route.dispatcher == self.name or route.uid in self.flights:
                return NOTHING  # it has ended here already, or is under way again
            query = self._intake.adopt(route, bytes(back.body), envelope.headers)
            if query is None:
                return NOTHING
        error = ended(back)
        if error is not None:
            return self._endings.refused(query, error, now)
        if back.reason == "deadline":
            return self._elsewhere(query, route.instance, now)
        if back.reason == "crashed":
            query.crashes += 1
            if query.crashes > self._max_attempts:
                text = "the model failed each time this query was in its batch"
                return self._endings.refused(query, Error(code="model_error", message=text), now)
            self.flights.retries.append(query)
            return self._next_retry(now)
        instance = self.view.remove(route.instance)
        if back.reason == "load_failed" and instance is not None:
            self.view.not_before[instance.record.variant] = now + NO_ROOM
        if query.attempt >= BOUNCES:
            return self._wait(query, now)  # our view is behind: let the next heartbeat decide
        return self._decide(query, now)

    def _elsewhere(self, query: Query, full: str, now: float) -> Iterable[Effect]:
        """An instance could not make it in time: another one may, within what is left."""
        decision = self._policy.select(query.ask, now, self.view)
        if decision.assignments and decision.assignments[0] != full and query.attempt < BOUNCES:
            return (self._dispatch(query, self.view.instances[decision.assignments[0]]),)
        text = "the queue ahead grew and this query could not be answered in time: allow more time or ask again"
        return self._end(query, Error(code="deadline", message=text), now)

    def _load_reply(self, envelope: Envelope) -> Iterable[Effect]:
        reply: LoadReply = envelope.message
        if not reply.reason:
            return NOTHING  # the worker's next heartbeat shows the instance
        self.view.not_before[reply.variant] = envelope.now + NO_ROOM
        self._orders.settled(reply.variant)
        return self._serve_waiting(envelope.now)

    def _serve_waiting(self, now: float) -> list[Effect]:
        """Something changed: decide again for all that wait."""
        effects = self._next_retry(now)
        if self.flights.waiting:
            queries = list(self.flights.waiting.values())
            self.flights.waiting.clear()
            for query in queries:
                if query.crashes and self.flights.retrying is not None:
                    self.flights.retries.append(query)
                    continue
                effects.extend(self._decide(query, now))
                if query.crashes and query.uid in self.flights.flying:
                    self.flights.retrying = query.uid
        return effects

    # -- the fleet

    def _heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        beat: WorkerHeartbeat = envelope.message
        self._outlook.heard(beat, envelope.now)
        known = self.view.workers.get(beat.worker)
        before = dict(known.instances) if known is not None else {}
        changed = self.view.heartbeat(beat, envelope.now)
        if not changed:
            return NOTHING
        lost = [i for name, i in before.items() if self.view.instances.get(name) is not i]
        effects = self._lost(self.flights.aboard(lost), envelope.now) if lost else []
        for instance in self.view.workers[beat.worker].instances.values():
            self._orders.settled(instance.record.variant)
        effects.extend(self._serve_waiting(envelope.now))
        return effects

    # -- questions

    def _question(self, envelope: Envelope) -> Iterable[Effect]:
        return question(envelope, self.apps.catalog, self.view, self._policy)

    # -- time

    def _beat(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        told = (*self._outlook.tell(now), *self._demand.report(now, self._outlook.responsible))
        return (self._alive(now), *told, After("beat", HEARTBEAT, envelope.message))

    def _alive(self, now: float, *, leaving: bool = False) -> Publish:
        beat = self._endings.history.heartbeat(self.name, now, leaving=leaving)
        return Publish(self._subjects.dispatcher_heartbeat(self.name), beat)

    def _stopping(self, envelope: Envelope) -> Iterable[Effect]:
        """What is forwarded the executors answer; what waits here goes to the other dispatchers."""
        effects: list[Effect] = []
        for query in (*self.flights.waiting.values(), *self.flights.retries):
            route = query.route(self.name, "", self._policy.name)
            effects.append(Publish(self._subjects.resubmit(), HandBack(route, "gone", query.raw), "", query.headers))
        effects.append(self._alive(envelope.now, leaving=True))
        return effects

    def _sweep(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        effects: list[Effect] = []
        for worker in [w for w in self.view.workers.values() if now - w.seen > self._failure_timeout]:
            effects.extend(self._lost(self.flights.aboard(self.view.lose_worker(worker.name)), now))
        effects.extend(self._expire(self.flights.expired(now, LOST_AFTER), now))
        if self.flights.waiting or self.flights.retries:
            effects.extend(self._serve_waiting(now))
        effects.append(After("sweep", SWEEP, envelope.message))
        return effects

    def _expire(self, queries: list[Query], now: float) -> list[Effect]:
        return [effect for query in queries for effect in self._endings.refused(query, expired(query), now)]

    def _due(self, envelope: Envelope) -> Iterable[Effect]:
        due, again = self._fallbacks.due(envelope.now, self.flights.waiting)
        return (*self._expire(due, envelope.now), *again)
