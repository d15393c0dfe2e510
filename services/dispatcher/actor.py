"""The dispatcher: every query that it takes ends in exactly one answer or refusal.

It decides in memory on the view folded from heartbeats, `done` batches and its own dispatches, forwards the body as it came
with a route in front, and remembers it until done. What dies with an executor is dispatched again, one by one; what nobody can
serve at the moment waits within its deadline.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from bus.messages.catalog import AppRecord
from bus.messages.events import ScalingEvent
from bus.messages.fleet import DispatcherHeartbeat, EnsureLoaded, ExecutorExited, LoadReply, WorkerHeartbeat
from bus.messages.flow import DoneBatch, Execute, HandBack, Route
from bus.messages.public import Error, ListRequest, QueryHead, Refusal, Requirements
from bus.subjects import DISPATCHERS, Subjects
from services.core.actor import (
    After,
    Changed,
    Effect,
    Envelope,
    Inlet,
    Publish,
    Record,
    Recorded,
    Started,
    Stopping,
    Synced,
    Undelivered,
    Watch,
)
from services.core.ask import INFINITE, Ask, LoadOrder
from services.core.catalog import Catalog
from services.core.cluster import ClusterView, Instance
from services.core.intake import BadRequest, check_requirements, count_items
from services.core.outcome import answered, refused
from services.core.selection import SelectionPolicy
from services.dispatcher.explaining import explain
from services.dispatcher.flights import Flights
from services.dispatcher.listing import listing
from services.dispatcher.query import Query

HEARTBEAT = 0.5  # s
SWEEP = 0.25  # s; one timer for all deadlines
LOST_AFTER = 2.0  # s past its deadline, a query that its executor never ended is refused here
ORDER_AGAIN = 3.0  # s before an unanswered load order is repeated
NO_ROOM = 5.0  # s before a variant that found no room, or failed to load, is tried again
NOTHING: tuple[Effect, ...] = ()
_decode_head = msgspec.msgpack.Decoder(QueryHead).decode


class Beat(msgspec.Struct, frozen=True):
    """Timer: send a heartbeat."""


class Sweep(msgspec.Struct, frozen=True):
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
        self.view = ClusterView(prices)
        self.catalog = Catalog()
        self.flights = Flights()
        self._subjects = subjects
        self._policy = policy
        self._new_uid = new_uid
        self._default_deadline = default_deadline_s
        self._max_inline = max_inline
        self._failure_timeout = failure_timeout_s
        self._max_attempts = max_attempts
        self._max_queue = max_queue
        self._synced = False
        self._ordered: dict[str, float] = {}
        self._records = 0  # events recorded so far, and how many of them are stored
        self._stored = 0
        self._unflushed: deque[tuple[int, str, int]] = deque()
        self._flushed: dict[str, int] = {}
        self._prefix = len(subjects.query(""))
        self._undelivered = subjects.undelivered(name, "")
        self._own_space = subjects.prefix + "."
        self._queues: dict[tuple[str, str], str] = {}
        self._on: dict[type, Callable[[Envelope], Iterable[Effect]]] = {
            QueryHead: self._query,
            DoneBatch: self._done,
            WorkerHeartbeat: self._heartbeat,
            Recorded: self._recorded,
            HandBack: self._handed_back,
            Undelivered: self._not_delivered,
            ExecutorExited: self._exited,
            LoadReply: self._load_reply,
            Changed: self._changed,
            Synced: self._catalog_synced,
            Requirements: self._explain,
            ListRequest: self._list,
            Started: self._started,
            Stopping: self._stopping,
            Beat: self._beat,
            Sweep: self._sweep,
        }

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        s, name = self._subjects, self.name
        return (
            Inlet(subject=s.worker_heartbeat(), message=WorkerHeartbeat),
            Inlet(subject=s.exited(), message=ExecutorExited),
            Inlet(subject=s.done(name), message=DoneBatch),
            Inlet(subject=s.undelivered(name), message=DoneBatch),
            Inlet(subject=s.loads(name), message=LoadReply),
            Inlet(subject=s.resubmit(name), message=HandBack),
            Inlet(subject=s.resubmit(), message=HandBack, queue=DISPATCHERS),
            Inlet(subject=s.explain(), message=Requirements, queue=DISPATCHERS),
            Inlet(subject=s.list(), message=ListRequest, queue=DISPATCHERS),
            Inlet(subject=s.query(), message=QueryHead, queue=DISPATCHERS),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.catalog_bucket),)

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        return self._on[type(envelope.message)](envelope)

    # -- a query arrives

    def _query(self, envelope: Envelope) -> Iterable[Effect]:
        reply = envelope.reply
        head: QueryHead = envelope.message
        if not reply:
            return NOTHING  # nobody waits for an answer
        now = envelope.now
        app_name = envelope.subject[self._prefix :]
        if reply.startswith(self._own_space):
            return NOTHING  # an answer may go to a client only, never into the system
        try:
            query = self._take(app_name, head, envelope, now)
        except BadRequest as error:
            return self._refuse_intake(app_name, head, envelope, "bad_request", str(error))
        if query is None:
            return NOTHING
        if isinstance(query, Error):
            return self._refuse_intake(app_name, head, envelope, query.code, query.message)
        return self._decide(query, now)

    def _take(self, app_name: str, head: QueryHead, envelope: Envelope, now: float) -> Query | Error | None:
        """Check a query against contract, app and signature. None: already under way here."""
        view = self.view.apps.get(app_name)
        key = app_name
        if view is None:
            if app_name == "_":
                if head.model is None:
                    raise BadRequest("model is missing: a query without an app names a registered model")
                pseudo = self._model_app(head.model)
                if pseudo is None:
                    return Error(code="unknown_model", message=f"no model {head.model!r}: see infaas.list.models")
                key = pseudo
                view = self.view.apps[key]
            elif self._synced:
                return Error(
                    code="unknown_app", message=f"no app {app_name!r}: see infaas.list.apps, or register a model for it"
                )
            else:
                return Error(code="overloaded", message="the dispatcher has only just started: ask again")
        if len(envelope.body) > self._max_inline:
            limit = f"{len(envelope.body)} bytes are more than {self._max_inline}"
            return Error(code="too_large", message=f"{limit}: put the inputs into the object store and send inputs_ref")
        check_requirements(head)
        items = count_items(head, view.app)
        latency_s = INFINITE
        deadline = now + self._default_deadline
        latency_ms = head.latency_ms if head.latency_ms is not None else view.app.latency_ms
        if latency_ms is not None:
            latency_s = latency_ms / 1000.0
            deadline = min(deadline, now + latency_s) if latency_s < self._default_deadline else now + latency_s
        if head.deadline is not None and head.deadline < deadline:
            deadline = head.deadline
        if head.retry_key is not None:
            if len(head.retry_key) != 16:
                raise BadRequest(f"retry_key must be 16 random bytes, not {len(head.retry_key)}")
            caller = envelope.reply.partition(".")[0]
            uid = blake2b(head.retry_key, digest_size=16, key=f"{app_name}/{caller}".encode()[:64]).digest()
            if uid in self.flights:
                return None
        else:
            uid = self._new_uid()
        ask = Ask(
            key,
            items,
            deadline,
            latency_s,
            head.accuracy or 0.0,
            INFINITE if head.cost is None else head.cost,
            head.model,
            head.version,
            head.variant,
        )
        return Query(uid, app_name, head, ask, envelope.reply, envelope.body, now)

    def _model_app(self, model: str) -> str | None:
        """The pseudo app of a query by model alone; made when first asked for."""
        key = f"_.{model}"
        if key not in self.view.apps:
            record = self.catalog.model(model)
            if record is None:
                return None
            self._set_app(key, AppRecord(app="_", links={model: record.version}, signature=record.signature))
        return key

    # -- deciding

    def _decide(self, query: Query, now: float) -> Iterable[Effect]:
        decision = self._policy.select(query.ask, now, self.view)
        if decision.assignments:
            effect = self._dispatch(query, self.view.instances[decision.assignments[0]])
            return (effect,) if decision.load is None else (effect, *self._order(query.app, decision.load, now))
        effects: list[Effect] = []
        if decision.load is not None:
            effects.extend(self._order(query.app, decision.load, now))
        if decision.refusal is not None:
            effects.extend(self._refuse(query, decision.refusal, now))
        elif len(self.flights.waiting) >= self._max_queue:
            text = "too many queries wait for a worker: ask again later"
            effects.extend(self._refuse(query, Error(code="overloaded", message=text, retry_after_ms=1000.0), now))
        else:
            self.flights.waiting[query.uid] = query
        return effects

    def _dispatch(self, query: Query, instance: Instance) -> Publish:
        route = query.route(self.name, instance.id, self._policy.name)
        self.flights.depart(query, instance)
        key = (instance.worker.name, instance.device)
        subject = self._queues.get(key)
        if subject is None:
            subject = self._queues[key] = self._subjects.execute(*key)
        return Publish(subject, Execute(route, query.raw), self._undelivered + query.uid.hex())

    def _order(self, app: str, load: LoadOrder, now: float) -> list[Effect]:
        """Ask a worker to load a variant, unless that was asked a moment ago."""
        variant = load.record.variant
        if now - self._ordered.get(variant, -INFINITE) < ORDER_AGAIN:
            return []
        self._ordered[variant] = now
        order = EnsureLoaded(
            variant=load.record, at_least=1, app=app, orderer=self.name, reason="no instance meets a query's needs"
        )
        event = ScalingEvent(
            time=now,
            scaler="dispatcher",
            worker=load.worker,
            app=app,
            model=load.record.model,
            variant=variant,
            action="load",
            count=1,
            reason=order.reason,
        )
        return [
            Publish(self._subjects.worker(load.worker, "load"), order, self._subjects.loads(self.name)),
            self._record(event),
        ]

    def _record(self, event: Any) -> Record:
        self._records += 1
        return Record(event)

    # -- refusing

    def _refuse(self, query: Query, error: Error, now: float) -> list[Effect]:
        route = query.route(self.name, "", self._policy.name)
        return [
            Publish(query.reply, Refusal(id=query.head.id, error=error)),
            self._record(refused(route, error.code, now)),
        ]

    def _refuse_intake(self, app: str, head: QueryHead, envelope: Envelope, code: Any, text: str) -> list[Effect]:
        """Refuse what never became a query of ours; it is counted all the same."""
        route = Route(
            self._new_uid(), 0, 0, envelope.reply, envelope.now, envelope.now, self.name, "", app[:64], 1, head.id
        )
        return [
            Publish(envelope.reply, Refusal(id=head.id, error=Error(code=code, message=text))),
            self._record(refused(route, code, envelope.now)),
        ]

    # -- a batch is done

    def _done(self, envelope: Envelope) -> Iterable[Effect]:
        batch: DoneBatch = envelope.message
        instance = self.view.instances.get(batch.instance)
        effects: list[Effect] = []
        codes = batch.codes
        land = self.flights.land
        for i, uid in enumerate(batch.uids):
            query = land(uid)
            if query is None:
                continue
            record = self.view.records.get(batch.variant)
            if record is None:
                continue
            event = answered(
                query.route(self.name, batch.instance, self._policy.name),
                record,
                worker=batch.worker,
                finished=batch.finished,
                batch=batch.batch,
                cost_per_item=batch.cost,
                code=codes[i] if codes is not None else "",
            )
            effects.append(self._record(event))
        if instance is not None:
            instance.others = max(0, batch.queued - instance.own)
        if self._records <= self._stored:
            self._flushed[batch.queue] = batch.seq
        else:
            self._unflushed.append((self._records, batch.queue, batch.seq))
        if self.flights.retries and self.flights.retrying is None:
            effects.extend(self._next_retry(envelope.now))
        return effects

    def _recorded(self, envelope: Envelope) -> Iterable[Effect]:
        self._stored = through = envelope.message.through
        while self._unflushed and self._unflushed[0][0] <= through:
            _, queue, seq = self._unflushed.popleft()
            self._flushed[queue] = seq
        return NOTHING

    # -- what goes wrong

    def _not_delivered(self, envelope: Envelope) -> Iterable[Effect]:
        """Nobody listened on the queue's subject: its executor is gone, and this query never reached it."""
        token = envelope.message.reply_subject.rpartition(".")[2]
        try:
            query = self.flights.flying.get(bytes.fromhex(token))
        except ValueError:
            return NOTHING
        if query is None or query.instance is None:
            return NOTHING
        instance = query.instance
        self.flights.land(query.uid)
        effects = list(self._lost(self.view.lose_device(instance.worker.name, instance.device), envelope.now))
        effects.extend(self._decide(query, envelope.now))
        return effects

    def _exited(self, envelope: Envelope) -> Iterable[Effect]:
        gone: ExecutorExited = envelope.message
        return self._lost(self.view.lose_device(gone.worker, gone.device), envelope.now)

    def _lost(self, instances: list[Instance], now: float) -> list[Effect]:
        """Instances died with queries aboard: retry those one by one, so that a poisonous one harms nobody else."""
        effects: list[Effect] = []
        for query in self.flights.aboard(instances):
            query.attempt += 1
            if query.attempt > self._max_attempts:
                text = "the model's process ended each time this query was in its batch"
                effects.extend(self._refuse(query, Error(code="model_error", message=text), now))
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
        query = self.flights.land(route.uid)
        if query is None:
            if route.uid in self.flights:
                return NOTHING
            query = self._adopt(route, bytes(back.body))
            if query is None:
                return NOTHING
        if back.reason == "deadline":
            return self._elsewhere(query, route.instance, now)
        if back.reason == "crashed":
            query.attempt += 1
            if query.attempt > self._max_attempts:
                text = "the model failed each time this query was in its batch"
                return self._refuse(query, Error(code="model_error", message=text), now)
            self.flights.retries.append(query)
            return self._next_retry(now)
        instance = self.view.remove(route.instance)
        if back.reason == "load_failed" and instance is not None:
            self.view.not_before[instance.record.variant] = now + NO_ROOM
        return self._decide(query, now)

    def _elsewhere(self, query: Query, full: str, now: float) -> Iterable[Effect]:
        """An instance could not make it in time: another one may, within what is left."""
        decision = self._policy.select(query.ask, now, self.view)
        if decision.assignments and decision.assignments[0] != full:
            return (self._dispatch(query, self.view.instances[decision.assignments[0]]),)
        text = "the queue ahead grew and this query could not be answered in time: allow more time or ask again"
        return self._refuse(query, Error(code="deadline", message=text), now)

    def _adopt(self, route: Route, body: bytes) -> Query | None:
        """Take over a query that another dispatcher, now dead, had forwarded."""
        try:
            head = _decode_head(body)
        except msgspec.DecodeError:
            return None
        key = route.app if route.app != "_" else (self._model_app(head.model or "") or "")
        if key not in self.view.apps:
            return None
        latency_s = route.latency_ms / 1000.0 if route.latency_ms is not None else INFINITE
        cost = INFINITE if route.cost is None else route.cost
        ask = Ask(
            key,
            route.items,
            route.deadline,
            latency_s,
            route.accuracy or 0.0,
            cost,
            route.model,
            route.version,
            route.variant,
        )
        query = Query(route.uid, route.app, head, ask, route.reply_to, body, route.arrived)
        query.attempt = route.attempt
        return query

    def _load_reply(self, envelope: Envelope) -> Iterable[Effect]:
        reply: LoadReply = envelope.message
        if not reply.reason:
            return NOTHING  # the worker's next heartbeat shows the instance
        self.view.not_before[reply.variant] = envelope.now + NO_ROOM
        self._ordered.pop(reply.variant, None)
        return self._serve_waiting(envelope.now)

    def _serve_waiting(self, now: float) -> list[Effect]:
        """Something changed: decide again for all that wait."""
        effects = self._next_retry(now)
        if self.flights.waiting:
            queries = list(self.flights.waiting.values())
            self.flights.waiting.clear()
            for query in queries:
                if query.attempt and self.flights.retrying is not None:
                    self.flights.retries.append(query)
                    continue
                effects.extend(self._decide(query, now))
                if query.attempt and query.uid in self.flights.flying:
                    self.flights.retrying = query.uid
        return effects

    # -- the fleet and the catalogue

    def _heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        beat: WorkerHeartbeat = envelope.message
        known = self.view.workers.get(beat.worker)
        before = dict(known.instances) if known is not None else {}
        changed = self.view.heartbeat(beat, envelope.now)
        if not changed:
            return NOTHING
        lost = [i for name, i in before.items() if self.view.instances.get(name) is not i]
        effects = self._lost(lost, envelope.now) if lost else []
        for instance in self.view.workers[beat.worker].instances.values():
            self._ordered.pop(instance.record.variant, None)
        effects.extend(self._serve_waiting(envelope.now))
        return effects

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        change: Changed = envelope.message
        for app in self.catalog.apply(change.key, change.value):
            record = self.catalog.app(app)
            if record is None:
                self.view.drop_app(app)
            elif self._synced:
                self._set_app(app, record)
        if change.key.startswith("model."):
            self.view.drop_app(f"_.{change.key.split('.')[1]}")
        return NOTHING

    def _catalog_synced(self, envelope: Envelope) -> Iterable[Effect]:
        del envelope
        self._synced = True
        for app in list(self.catalog.apps):
            self._set_app(app.app, app)
        return NOTHING

    def _set_app(self, key: str, app: AppRecord) -> None:
        """All versions of the app's models: those not linked now serve queries that name them."""
        records = [
            record
            for model in sorted(app.links)
            for version in sorted(self.catalog.versions(model))
            for record in self.catalog.variants_at(model, version)
        ]
        self.view.set_app(app, records, key)

    # -- questions

    def _explain(self, envelope: Envelope) -> Iterable[Effect]:
        if not envelope.reply:
            return NOTHING
        app = envelope.subject.rpartition(".")[2]
        return (Publish(envelope.reply, explain(app, envelope.message, envelope.now, self.view, self._policy)),)

    def _list(self, envelope: Envelope) -> Iterable[Effect]:
        if not envelope.reply:
            return NOTHING
        what = envelope.subject.rpartition(".")[2]
        return (Publish(envelope.reply, listing(what, envelope.message, envelope.now, self.catalog, self.view)),)

    # -- time

    def _started(self, envelope: Envelope) -> Iterable[Effect]:
        del envelope
        return (After("beat", 0.0, Beat()), After("sweep", SWEEP, Sweep()))

    def _beat(self, envelope: Envelope) -> Iterable[Effect]:
        return (Publish(*self._goodbye(envelope.now, leaving=False)), After("beat", HEARTBEAT, envelope.message))

    def _goodbye(self, now: float, *, leaving: bool) -> tuple[str, DispatcherHeartbeat]:
        beat = DispatcherHeartbeat(
            dispatcher=self.name, incarnation=0, at=now, flushed=dict(self._flushed), leaving=leaving
        )
        return self._subjects.dispatcher_heartbeat(self.name), beat

    def _stopping(self, envelope: Envelope) -> Iterable[Effect]:
        """What is forwarded the executors answer; what waits here goes to the other dispatchers."""
        effects: list[Effect] = []
        for query in (*self.flights.waiting.values(), *self.flights.retries):
            route = query.route(self.name, "", self._policy.name)
            effects.append(Publish(self._subjects.resubmit(), HandBack(route, "gone", query.raw)))
        effects.append(Publish(*self._goodbye(envelope.now, leaving=True)))
        return effects

    def _sweep(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        effects: list[Effect] = []
        for worker in [w for w in self.view.workers.values() if now - w.seen > self._failure_timeout]:
            effects.extend(self._lost(self.view.lose_worker(worker.name), now))
        for query in self.flights.expired(now, LOST_AFTER):
            text = "no worker could answer this query before its deadline"
            effects.extend(self._refuse(query, Error(code="deadline", message=text, retry_after_ms=1000.0), now))
        if self.flights.waiting or self.flights.retries:
            effects.extend(self._serve_waiting(now))
        effects.append(After("sweep", SWEEP, envelope.message))
        return effects
