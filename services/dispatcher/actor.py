"""The dispatcher: every query that it admits ends in exactly one answer or refusal.

It decides in memory, on a view of the cluster that heartbeats, `done` batches and its own dispatches keep up to date. It forwards
the body as it came with a route in front, and remembers the query until it is done. If an executor dies, its queries are
dispatched again, one by one. A query that no worker can serve at the moment waits within its deadline.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec import UNSET

from bus.messages.fleet import ExecutorExited, LoadReply, WorkerHeartbeat
from bus.messages.flow import ContextChanged, DoneBatch, Execute, HandBack, Trying
from bus.messages.public import Error, ListRequest, QueryHead, Requirements
from bus.subjects import DISPATCHERS, Subjects
from services.core.actor import (
    NOTHING,
    After,
    Changed,
    Effect,
    Envelope,
    Handler,
    Inlet,
    Malformed,
    Publish,
    Recorded,
    Started,
    Stopping,
    Synced,
    TableActor,
    Undelivered,
    Watch,
)
from services.core.deadlines import DeadlineReached
from services.core.line import ECHO_S
from services.core.outcomes import CANCELLED
from services.core.selection.cluster import LOAD_AGAIN, ClusterView, RefusedLoad
from services.core.selection.eligibility import Ask
from services.core.selection.instances import Instance
from services.core.selection.policy import Decision, SelectionPolicy, note
from services.core.selection.refusals import not_loaded
from services.core.settings import DispatcherSettings, EnsembleSettings, JobsSettings, QualitySettings, Settings
from services.dispatcher.apps import Apps
from services.dispatcher.cancelling import Cancelling
from services.dispatcher.central import FULL, LATE, CentralQueues, PullDue
from services.dispatcher.composites import Composites
from services.dispatcher.default_output import executor_error, may_wait
from services.dispatcher.demand import DemandCounter, LoadsOnDemand
from services.dispatcher.inflight import InFlight, OutcomeRecorder, Retries, urgency
from services.dispatcher.query import Admission, Query, keeps, label_of
from services.dispatcher.questions import Questions
from services.dispatcher.releases import lacks_new
from services.dispatcher.resent import WAITED, Resent
from services.dispatcher.silence import Clocks, Silence

HEARTBEAT = 0.5  # s
CHECK = 0.25  # s
MOST_DISPATCHES = 4  # a query that was handed back after so many is not dispatched again at once
STRANDED_S = 0.5  # s that a query waits which nothing serves or loads, and for which asking again is of no use


class HeartbeatDue(msgspec.Struct, frozen=True):
    """Timer: send a heartbeat."""


class CheckDue(msgspec.Struct, frozen=True):
    """Timer: find silent workers, and decide again on what waits."""


class Dispatcher(TableActor):
    """Pure actor.

    name: unique id of this dispatcher's life. prices: US$ per hour by kind. new_uid: 16 fresh bytes. slo_target: of apps without a
    target of their own. boots: as of MachineSettings.
    """

    def __init__(
        self, name: str, subjects: Subjects, policy: SelectionPolicy, prices: Mapping[str, float], new_uid: Callable[[], bytes],
        settings: DispatcherSettings, slo_target: float, ensemble: EnsembleSettings, quality: QualitySettings, jobs: JobsSettings,
        boots: Mapping[tuple[str, bool], float],
    ) -> None:  # fmt: skip
        self.name = name
        self.view = ClusterView(prices, policy.goal, boots)
        self.apps = Apps(self.view)
        self.in_flight = InFlight()
        self.policy_failures = policy.failures  # by method, of a user's own policy
        self._subjects, self._policy, self._settings = subjects, policy, settings
        self._admission = Admission(self.apps, new_uid, settings.default_deadline_s, settings.max_inline)
        self._outcomes = OutcomeRecorder(name, policy.name, new_uid, policy.observe, self.view)
        self._loads, self._demand = LoadsOnDemand(name, subjects), DemandCounter(name, subjects)
        self._wait, self._waiting, self._earliest = self.in_flight.wait, self.in_flight.waiting, self.in_flight.earliest
        self._retries = Retries(self.in_flight, settings.max_attempts, self._decide, self._refuse)
        ways = (self._retries, settings.failure_timeout_s, self._refuse, self._select, self._dispatch, self.handle)
        self.silence = Silence(name, subjects, self.in_flight, self.view, *ways, self._alive)
        self._line, self.clocks = self.silence.line, Clocks(self.silence.line, self.view.workers)
        given = (self._outcomes, self._take, new_uid, settings, ensemble, policy.name, quality, jobs)
        self.composites = Composites(name, subjects, self.apps, *given)
        self.composites.by_app.append(self.silence.crossings)
        known = (self._admission, self._outcomes.said, self.in_flight, self.composites)
        self.resent = Resent(name, subjects, self.silence, *known, self._begin, self._adopt)
        self.cancelling = Cancelling(name, subjects, self.resent, self._outcomes, self._refuse)
        self.central = CentralQueues(self.view, self.in_flight, self._dispatch, self._decide, self._refuse)
        asked = (policy, self.composites, self.central, slo_target, settings.default_deadline_s)
        self._questions = Questions(self.apps, self.view, *asked)
        self._prefix = len(subjects.query(""))
        self._undelivered = subjects.undelivered(name, "")
        self._list_selection = subjects.list("selection")
        self._on: dict[type, Handler] = {
            Malformed: self._malformed,
            DoneBatch: self._done,
            WorkerHeartbeat: self._heartbeat,
            Recorded: self._recorded,
            HandBack: self._handed_back,
            Undelivered: self._not_delivered,
            Trying: lambda envelope: self.in_flight.tries(envelope.message),
            **self.silence.handlers,
            **self.resent.handlers,
            **self.cancelling.handlers,
            ExecutorExited: self._exited,
            LoadReply: self._load_reply,
            **self.composites.handlers,
            Changed: self._changed,
            Synced: self._synced,
            Requirements: self._question,
            ListRequest: self._question,
            Started: self._started,
            Stopping: self._stopping,
            HeartbeatDue: self._send_heartbeat,
            CheckDue: self._check,
            DeadlineReached: self._deadline_reached,
            PullDue: lambda due: self.central.due(due.message.variant, due.now),
        }
        self.silence.hold.guard(self._on, (HandBack, *self.composites.ending))
        self.inlets = (
            Inlet(subject=subjects.worker_heartbeat(), message=WorkerHeartbeat),
            Inlet(subject=subjects.exited(), message=ExecutorExited),
            *(Inlet(subject=one, message=DoneBatch) for one in (subjects.done(name), subjects.undelivered(name))),
            Inlet(subject=subjects.trying(name), message=Trying),
            *self.silence.inlets,
            *self.resent.inlets,
            *self.cancelling.inlets,
            Inlet(subject=subjects.loads(name), message=LoadReply),
            Inlet(subject=subjects.resubmit(name), message=HandBack),
            Inlet(subject=subjects.resubmit(), message=HandBack, queue=DISPATCHERS),
            Inlet(subject=subjects.explain(), message=Requirements, queue=DISPATCHERS),
            Inlet(subject=subjects.list(), message=ListRequest, queue=DISPATCHERS),
            Inlet(subject=subjects.selection("changed"), message=ContextChanged),
            *self.composites.inlets,
            Inlet(subject=subjects.query(), message=QueryHead, queue=DISPATCHERS, malformed=True),
        )
        self.watches = (Watch(bucket=self._subjects.catalog_bucket), Watch(bucket=self._subjects.control_bucket))

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        effects = self._on[type(envelope.message)](envelope)
        earliest = self._earliest
        if self._waiting.changed:
            effects = (*effects, *self.silence.waiting_changed(self._policy.name))
        return (*effects, earliest.timer(envelope.now)) if earliest.at < earliest.set_for else effects

    # -- a query arrives

    def _begin(self, envelope: Envelope, now: float, age: float = 0.0, *, owed: bool = False) -> Iterable[Effect]:
        """A new query. Its time counts from when it reached the server. age: seconds since its client sent it first. owed: to `Query.moved`."""
        head, app_name = envelope.message, envelope.subject[self._prefix :]
        query = self._admission.admit(app_name, envelope, age)
        if isinstance(query, Error):
            uid = self._admission.known_as(app_name, head, envelope.reply)
            error = CANCELLED if uid in self.resent.cancelled else query
            return self._outcomes.refused_unadmitted(app_name, envelope, head.id, error, uid)
        if head.retry_key is not None and self.resent.has(query.uid):
            return NOTHING  # the client asks again for a query in flight: it will be answered
        if query.uid in self.resent.cancelled:
            return self.cancelling.again(query, now)
        query.arrived -= age
        query.moved = owed
        if (age or envelope.now < now) and now >= query.ask.deadline:
            waits = NOTHING if age else self.resent.waits(query.uid, envelope, now)
            return waits or self._refuse(query, WAITED, now)
        if query.ensemble is not None or query.pipeline is not None:
            return self.composites.begin(query, now)
        effects = self._decide(query, now) if query.ask.context is None else self.composites.begin(query, now)
        self._demand.count(query, self.view)
        return effects

    def _take(self, query: Query, now: float) -> Iterable[Effect]:
        """Decide on a query, or a part of one, for the first time."""
        under_way = self.in_flight.find(query.uid) if query.part is not None else None
        if under_way is not None:  # its query has ended without it, and was asked again
            under_way.part = query.part
            return NOTHING
        effects = self._decide(query, now)
        if query.planned is None or not self.central.serves(query.planned, query.ask):  # a plan provides for the others
            self._demand.count(query, self.view)
        return effects

    def _malformed(self, envelope: Envelope) -> Iterable[Effect]:
        """A message that is no query is refused and recorded, like any query that cannot be admitted."""
        error = Error(code="bad_request", message=envelope.message.error)
        app, label = envelope.subject[self._prefix :], label_of(envelope.body)
        return self._outcomes.refused_unadmitted(app, envelope, label, error) if envelope.reply else NOTHING

    # -- deciding

    def _decide(self, query: Query, now: float) -> Iterable[Effect]:
        if query.why is CANCELLED:
            return self._end(query, CANCELLED, now)
        if query.ask.arm is not None and lacks_new(query.ask, self.view):
            ordered = self._load(query, query.ask, now)
            query.ask = msgspec.structs.replace(query.ask, arm=None, version=None)
            return (*ordered, *self._decide(query, now))
        if query.planned is not None and not query.crashes and self.central.serves(query.planned, query.ask):
            if query.attempt >= MOST_DISPATCHES:
                return self._refuse(query, LATE, now)
            return self._make_wait(query, now, self.central.push)
        decision = self._select(query.ask, now)
        if decision.instance is not None:
            effect = self._dispatch(query, self.view.instances[decision.instance], now)
            return (effect,) if decision.load is None else (effect, *self._loads.order(query, decision.load, now))
        orders = () if decision.load is None else self._loads.order(query, decision.load, now)
        if decision.refusal is not None:
            self.view.had_no_time(query.ask, now)
            copies, absent = self.composites.unreached(query, now)
            if absent is not None:
                orders = self._load(query, msgspec.structs.replace(query.ask, accuracy=0.0, variant=absent), now)
            return (*orders, *copies, *self._end(query, decision.refusal, now))
        query.why = why = not_loaded(query.ask, self.view, now, waits=True) if decision.load is None else None
        if why is not None and why.retry_after_ms is UNSET and now >= query.arrived + STRANDED_S:
            return self._end(query, why, now)
        return (*orders, *self._make_wait(query, now, self._wait))

    def _select(self, ask: Ask, now: float) -> Decision:
        """The policy's decision, noted in the view."""
        decision = self._policy.select(ask, now, self.view)
        note(ask, decision, now, self.view)
        return decision

    def _load(self, query: Query, ask: Ask, now: float) -> tuple[Effect, ...]:
        """Order what would serve these needs, if nothing does."""
        load = self._select(ask, now).load
        return () if load is None else (*self._loads.order(query, load, now),)

    def _make_wait(self, query: Query, now: float, wait: Callable[[Query], Iterable[Effect]]) -> Iterable[Effect]:
        """It waits. Where there is no room among the waiting queries, one of lower priority is refused, or it is."""
        room: list[Effect] = []
        if len(self.in_flight.waiting) >= self._settings.max_queue and not query.owed(now):
            last = self.in_flight.gives_way(query.ask.priority, now)
            if last is None:
                return self._refuse(query, FULL, now)
            del self.in_flight.waiting[last.uid]
            room = self._refuse(last, FULL, now)
        return (*room, *wait(query))

    def _end(self, query: Query, error: Error, now: float) -> Iterable[Effect]:
        """Refuse it, unless its app has a default output and a better answer may come before the deadline."""
        if may_wait(query, error, now) and (query.owed(now) or len(self.in_flight.waiting) < self._settings.max_queue):
            return self._wait(query)
        return self._refuse(query, error, now)

    def _refuse(self, query: Query, error: Error, now: float) -> list[Effect]:
        """The query ends here without an answer of a model. If it is a part, its join goes on without it."""
        effects = self._outcomes.refused(query, error, now)
        if error is CANCELLED:
            effects += self.cancelling.ended(query)
        if query.part is not None:
            effects.extend(query.part.join.kind.refused(query.part, error, now))
        return effects

    def _dispatch(self, query: Query, instance: Instance, now: float, *, more: bool = False) -> Publish:
        self.in_flight.dispatch(query, instance, now)
        higher, instance.no_time = instance.no_time, None
        live = self.view.production(query.ask, instance.record.variant)
        keep = keeps(query, self.apps.catalog.app(query.app))
        route = query.sent = query.route(
            self.name, instance.id, self._policy.name, more=more, higher=higher, live=live, keep=keep
        )
        subject = self._subjects.execute(instance.worker.name, instance.device)
        undelivered = f"{self._undelivered}{query.uid.hex()}-{query.attempt}"
        if self.clocks.off:
            route = self.clocks.sent(route, instance.worker.name)
        return Publish(subject, Execute(route, query.raw), undelivered, query.headers)

    # -- a batch is done

    def _done(self, envelope: Envelope) -> Iterable[Effect]:
        batch: DoneBatch = self.clocks.done(envelope.message)
        record = self.view.records.get(batch.variant)
        ended = self.in_flight.ended(batch.uids)
        effects = self.composites.done(batch, ended, envelope.now)
        effects += self._outcomes.done(batch, record, ended, self.silence.crossed, envelope.now)
        effects += (*self.resent.ended(envelope.message), *self.silence.settled(batch, ended))
        for uid in batch.storing or ():
            self.in_flight.computed(uid)
        instance = self.view.instances.get(batch.instance)
        if instance is not None:
            self.view.told(instance, batch.levels)
            if batch.finished > batch.started:
                instance.batch_done(batch.queued, min(batch.finished, envelope.now), envelope.now, batch.mixed)
            else:
                instance.ended_without_batch(batch.queued)
        effects.extend(self.central.done(batch, envelope.now))
        if self.in_flight.retries and self.in_flight.retrying is None:
            effects.extend(self._retries.next(envelope.now))
        return effects

    def _recorded(self, envelope: Envelope) -> Iterable[Effect]:
        self._outcomes.log.stored(envelope.message.through)
        return self.composites.feedback.learning.stored()

    # -- what goes wrong

    def _not_delivered(self, envelope: Envelope) -> Iterable[Effect]:
        """Nobody listened on the subject of the queue: its executor is gone, and this query never reached it."""
        query = self.in_flight.undelivered(envelope.message.reply_subject)
        if query is None or (instance := query.instance) is None:
            return NOTHING  # it has been dispatched elsewhere since
        self.in_flight.remove(query.uid)
        self._waiting.back(query.part)
        if self.view.lose_device(instance.worker.name, instance.device):
            self.in_flight.hold(instance.worker.name, instance.device, envelope.now)
        return self._decide(query, envelope.now)

    def _exited(self, envelope: Envelope) -> Iterable[Effect]:
        gone: ExecutorExited = envelope.message
        if gone.succeeded:
            return NOTHING  # its successor may have all
        self.in_flight.told(gone.worker, gone.device)
        self.composites.exited(gone, envelope.now)
        return self.silence.exited(gone, self.view.lose_device(gone.worker, gone.device), envelope.now)

    def _handed_back(self, envelope: Envelope) -> Iterable[Effect]:
        """An executor could not serve a query after all."""
        back: HandBack = self.clocks.back(envelope.message)
        route, now = back.route, envelope.now
        if back.reason in ("orphaned", "sought"):
            return self.resent.handed_on(envelope)
        dispatched = self.in_flight.dispatched.get(route.uid)
        if self.composites.copies.lost(route) or (dispatched is not None and dispatched.attempt != route.attempt):
            return NOTHING  # nobody waits for it, or it has been dispatched elsewhere since
        if back.reason == "taken":  # this process was stopped, and another dispatcher ends it
            return self.resent.forget(route.uid, now)
        query = self.in_flight.remove(route.uid)
        if query is None:
            if route.dispatcher == self.name or route.uid in self.in_flight or route.parent is not None:
                return NOTHING  # it has ended here, is in flight again, or is a part of one that is started again as a whole
            query = self._admission.adopt(route, bytes(back.body), envelope.headers)
            if query is None:
                return self._outcomes.not_adopted(route, self.apps.unknown(route.app, route.model), now)
        self._waiting.back(query.part)
        error = CANCELLED if query.why is CANCELLED else executor_error(back)
        if error is not None:
            return self._end(query, error, now) if query.owed(now) else self._refuse(query, error, now)
        if back.reason == "deadline":
            central = query.planned is not None and self.central.serves(query.planned, query.ask)
            return self._decide(query, now) if central else self._elsewhere(query, route.instance, now)
        if back.reason in ("crashed", "stopped"):
            return self._retries.crashed(query, now) if back.reason == "crashed" else self._decide(query, now)
        instance = self.view.instances.get(route.instance)
        if instance is not None and instance.state not in ("Unloading", "Warm"):  # the view is out of date
            self.view.remove(route.instance)
        if back.reason == "load_failed" and instance is not None:
            refused = RefusedLoad(f"its last load failed: {back.text}", now + LOAD_AGAIN)
            self.view.load_refused(instance.record.variant, instance.worker.name, refused)
        if query.attempt >= MOST_DISPATCHES:
            return self._wait(query)  # the view is out of date: the next heartbeat decides
        return self._decide(query, now)

    def _adopt(self, envelope: Envelope, now: float) -> Iterable[Effect]:
        """A query with parts has lost its dispatcher: start it again, once. Executors repeat what they have answered of it."""
        back: HandBack = envelope.message
        if not self.composites.joins.adopt(back.route.uid, now):
            return NOTHING
        query = self._admission.adopt(back.route, bytes(back.body), envelope.headers)
        if query is None:
            return self._outcomes.not_adopted(back.route, self.apps.unknown(back.route.app, back.route.model), now)
        return self.composites.begin(query, now)

    def _elsewhere(self, query: Query, full: str, now: float) -> Iterable[Effect]:
        """An instance could not answer in time: another one may, in the time left."""
        instance = self.view.instances.get(full)
        if instance is not None:
            instance.shut()
        found = self._select(query.ask, now).instance
        if instance is not None:
            instance.reopen()
        if found is not None and found != full:
            if query.attempt >= MOST_DISPATCHES:
                return self._wait(query)  # the view is out of date: the next heartbeat decides
            return (self._dispatch(query, self.view.instances[found], now),)
        ask = query.ask
        if instance is not None and not query.attempt and instance.alone_s(ask.items, ask.length) <= ask.deadline - now:
            return (self._dispatch(query, instance, now),)  # nowhere else: it may go faster there than predicted
        text = "the queue ahead grew and this query could not be answered in time: allow more time or ask again"
        return self._end(query, Error(code="deadline", message=text), now)

    def _load_reply(self, envelope: Envelope) -> Iterable[Effect]:
        reply: LoadReply = envelope.message
        if not reply.reason:
            self.view.load_accepted(reply.variant, reply.worker)
            return NOTHING  # the worker's next heartbeat shows the instance
        refused = RefusedLoad(reply.reason, envelope.now + LOAD_AGAIN, reply.lasting)
        self.view.load_refused(reply.variant, reply.worker, refused)
        self._loads.settled(reply.variant)
        return self._serve_waiting(envelope.now)

    def _serve_waiting(self, now: float) -> list[Effect]:
        """Something changed: decide again for all waiting queries, unless others may have taken them meanwhile."""
        if self._line.waits(now):
            return []
        effects = self.central.serve(now)
        waiting = self.in_flight.waiting
        queries = sorted((query for query in waiting.values() if query not in self.central), key=urgency)
        for query in queries:
            del waiting[query.uid]
        for query in queries:
            if query.crashes:  # it comes after all others
                self.in_flight.retry(query)
            else:
                effects.extend(self._decide(query, now))
        return [*effects, *self._retries.next(now)]

    # -- the fleet

    def _heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        heartbeat: WorkerHeartbeat = envelope.message
        self.clocks.heard(heartbeat, envelope.now)
        before = dict(known.instances) if (known := self.view.workers.get(heartbeat.worker)) is not None else {}
        if not self.view.heartbeat(heartbeat, envelope.now):
            return NOTHING
        lost = [i for name, i in before.items() if self.view.instances.get(name) is not i]
        effects = self.silence.gone(lost, envelope.now) if lost else []
        for instance in self.view.workers[heartbeat.worker].instances.values():
            self._loads.settled(instance.record.variant)
        return [*effects, *self._serve_waiting(envelope.now)]

    # -- the catalogue, and questions

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        change: Changed = envelope.message
        if change.bucket == self._subjects.control_bucket:
            self.apps.kept.change(change.key, change.value)
            self.composites.releases.book.change(change.key, change.value)
            return NOTHING
        self.apps.change(change)
        self.composites.changed(deleted=change.value is None)
        return NOTHING

    def _synced(self, envelope: Envelope) -> Iterable[Effect]:
        if envelope.message.bucket == self._subjects.catalog_bucket:
            self.apps.complete()
        return NOTHING

    def _question(self, envelope: Envelope) -> Iterable[Effect]:
        return (self.composites.ask if envelope.subject == self._list_selection else self._questions.answer)(envelope)

    # -- time

    def _started(self, _: Envelope) -> Iterable[Effect]:
        return (After("heartbeat", 0.0, HeartbeatDue()), After("check", CHECK, CheckDue()), self.silence.start)

    def _send_heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        reports = (*self._demand.report(now, self._outcomes.take_served()), *self.composites.releases.report())
        return (self._alive(self._line.reached(now)), *reports, After("heartbeat", HEARTBEAT, envelope.message))

    def _alive(self, now: float, *, leaving: bool = False) -> Publish:
        heartbeat = self._outcomes.log.heartbeat(self.name, now, self.view.missing, leaving=leaving, adopts=True)
        return Publish(self._subjects.dispatcher_heartbeat(self.name), heartbeat)

    def _stopping(self, envelope: Envelope) -> Iterable[Effect]:
        """Executors answer the queries that were dispatched. The waiting ones go to the other dispatchers."""
        left = self.in_flight.leave(self.name, self._policy.name, self._subjects.resubmit())
        parts = self.composites.joins.leave(self.in_flight.dispatched.values())
        return (*left, *parts, self._alive(envelope.now, leaving=True))

    def _check(self, envelope: Envelope) -> Iterable[Effect]:
        now, again = envelope.now, After("check", CHECK, envelope.message)
        if self._line.waits(now):  # for heartbeats
            return (again,)
        effects = self.silence.lost(now)
        if self.in_flight.waiting or self.in_flight.retries:
            effects.extend(self._serve_waiting(now))
        effects.extend(self.composites.check(now))
        return [*effects, again]

    def _deadline_reached(self, envelope: Envelope) -> Iterable[Effect]:
        if self._line.waits(envelope.now):  # for what has ended them, perhaps
            return (After(envelope.message.of, ECHO_S, envelope.message),)
        ended = self.composites.due(envelope.message.of, envelope.now)
        return self.silence.expired(envelope.now) if ended is None else ended


def make_dispatcher(
    settings: Settings, subjects: Subjects, name: str, policy: SelectionPolicy, prices: Mapping[str, float], new_uid: Callable[[], bytes],
) -> Dispatcher:  # fmt: skip
    """A dispatcher. Parameters as for `Dispatcher`."""
    target, boots = settings.autoscaler.slo_target, settings.machines.boots(settings.worker.simulate)
    more = settings.selection, settings.quality, settings.jobs, boots
    return Dispatcher(name, subjects, policy, prices, new_uid, settings.dispatcher, target, *more)
