"""The executor of one device: queues queries for its instances, batches them, answers the clients, reports what is done.

It decides about its own queue: a query that cannot meet its deadline any more goes back to the dispatcher at once and is not
computed. The executor ends every query that it has taken, even if the dispatcher that sent it has died.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from bus.messages.fleet import DemoteInstance, DispatcherHeartbeat, LoadInstance, MoveInstance, UnloadInstance
from bus.messages.flow import Execute, HandBack, PartsEnded, Route, Trying
from bus.messages.public import Answer, Error, Refusal
from bus.subjects import Subjects
from services.core.actor import (
    NOTHING,
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Handler,
    Inlet,
    Publish,
    Recorded,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Watch,
)
from services.core.deadlines import DeadlineReached, Deadlines
from services.core.outcomes import default_at
from services.core.pipelines.branching import small_outputs
from services.core.placement import Device
from services.core.settings import DispatcherSettings, ExecutorSettings, Settings
from services.executor.answers import (
    RecentAnswers,
    SentAnswer,
    answer_headers,
    answer_of,
    bad_inputs,
    model_error,
    output_bytes,
    spans_of,
)
from services.executor.batching import BatchingRules
from services.executor.commands import BatchResult, FetchInputs, RunBatch, StoreOutputs
from services.executor.dispatchers import KnownDispatchers
from services.executor.instances import REPORT, BatchRuns, Loaded, MonitorReporter, ReportDue
from services.executor.loading import InstanceManager
from services.executor.queue import QueuedQuery, inputs_of, queued_query, unread_query

FETCH = 10.0  # s to get inputs from, or put outputs into, the object store


class BatchesDue(msgspec.Struct, frozen=True):
    """Timer: all queries that came in this turn are queued; form batches."""


def default_due(query: QueuedQuery) -> float:
    """When the default of a query's app is given, in Unix seconds."""
    return default_at(query.route.arrived, query.route.deadline)


class Executor:
    """Pure actor of one device. incarnation: grows with every start of this process. dispatchers: those it works for."""

    def __init__(
        self,
        worker: str,
        device: Device,
        incarnation: int,
        subjects: Subjects,
        settings: ExecutorSettings,
        dispatchers: DispatcherSettings,
    ) -> None:
        name = device.name
        self.worker = worker
        self.device = name
        self.incarnation = incarnation
        self._manager = InstanceManager(worker, name, incarnation, subjects)
        self.instances = self._manager.instances
        self.tallies = self._manager.tallies
        self.answers = RecentAnswers()
        self._subjects = subjects
        self._failure_timeout = dispatchers.failure_timeout_s
        silence_s = self._failure_timeout + REPORT
        self.dispatchers = KnownDispatchers(subjects, f"{worker}/{name}/{incarnation}", worker, silence_s)
        self._runs = BatchRuns(device, settings)
        self._rules = BatchingRules()
        self._max_inline = dispatchers.max_inline
        self._scheduled = False
        self._reporter = MonitorReporter(worker, name, incarnation, subjects)
        self.pending: dict[tuple[bytes, int], QueuedQuery] = {}  # taken, not yet ended
        self._default_deadlines: Deadlines[tuple[bytes, int], QueuedQuery] = Deadlines(default_due)
        self._fetching: dict[bytes, tuple[Loaded, QueuedQuery]] = {}
        self._on: dict[type, Handler] = {
            Execute: self._execute,
            BatchesDue: self._start_batches,
            Changed: self._changed,
            Synced: lambda _: NOTHING,
            DeadlineReached: self._defaults_due,
            Done: self._done,
            Failed: self._failed,
            TimedOut: self._failed,
            DispatcherHeartbeat: lambda e: self.dispatchers.heartbeat(e.message, e.now),
            PartsEnded: lambda e: self.dispatchers.parts_ended(e.subject.rpartition(".")[2], e.message),
            LoadInstance: lambda envelope: self._manager.load(envelope.message),
            MoveInstance: lambda envelope: self._manager.move(envelope.message),
            DemoteInstance: lambda envelope: self._manager.demote(envelope.message),
            UnloadInstance: lambda envelope: self._manager.unload(envelope.message),
            ReportDue: self._report,
            Recorded: lambda _: NOTHING,
            Started: self._started,
            Stopping: self._stopping,
        }

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        s, w, d = self._subjects, self.worker, self.device
        return (
            Inlet(subject=s.dispatcher_heartbeat(), message=DispatcherHeartbeat),
            Inlet(subject=s.ended(), message=PartsEnded),
            Inlet(subject=s.executor(w, d, "load"), message=LoadInstance),
            Inlet(subject=s.executor(w, d, "unload"), message=UnloadInstance),
            Inlet(subject=s.executor(w, d, "demote"), message=DemoteInstance),
            Inlet(subject=s.executor(w, d, "move"), message=MoveInstance),
            Inlet(subject=s.execute(w, d), message=Execute),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.control_bucket),)

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        return self._on[type(envelope.message)](envelope)

    # -- a query comes in

    def _execute(self, envelope: Envelope) -> Iterable[Effect]:
        execute: Execute = envelope.message
        route = execute.route
        key = (route.uid, route.part)
        if route.origin is not None:
            self.dispatchers.keep(route, execute.body, envelope.now)
        pending = self.pending.get(key)
        if pending is not None:
            pending.also = (*pending.also, route)
            return self._schedule()  # it may be the last of a batch
        known = self.answers.get(key)
        if known is not None:
            return (*self._again(route, known, envelope.now), *self._schedule())
        loaded = self.instances.get(route.instance)
        if loaded is None or loaded.leaving:
            return (self._hand_back(route, "gone", execute.body, envelope.headers),)
        try:
            taken = inputs_of(execute.body)
            if taken.inputs_ref is not None or route.refs:
                asked = self.pending[key] = unread_query(route, execute.body, envelope.headers, envelope.now)
                self._fetching[route.uid] = (loaded, asked)
                fetch = FetchInputs(None if route.refs else taken.inputs_ref, tuple(route.refs or ()), taken.inputs)
                return (Do(("fetch", route.uid), fetch, FETCH),)
            query = queued_query(route, execute.body, taken.inputs)
            if envelope.headers is not None:
                query.headers, query.taken = envelope.headers, envelope.now
        except msgspec.DecodeError as error:
            unread = unread_query(route, execute.body, envelope.headers, envelope.now)
            return self._refuse(loaded, unread, "bad_request", f"inputs: {error}", envelope.now)
        return self._take(loaded, query, envelope.now)

    def _take(self, loaded: Loaded, query: QueuedQuery, now: float) -> Iterable[Effect]:
        route, pending = query.route, self.pending
        key = (route.uid, route.part)
        pending[key] = query
        loaded.queue.push(query)
        if (policy := loaded.policy) is not None and policy.counts:
            policy.arrived(query.items, now)
        if route.more:
            return NOTHING  # with the last of its batch; if that is lost, with the next report
        if not route.fallback:
            return self._schedule()
        return (*self._schedule(), *self._default_deadlines.watch(key, query, now, pending))

    def _defaults_due(self, envelope: Envelope) -> Iterable[Effect]:
        """Dispatchers give the default output of these queries' apps. Their own results are not used any more."""
        now = envelope.now
        due = self._default_deadlines.due(now, self.pending if self.dispatchers.any_alive else {})
        for query in due:
            del self.pending[query.route.uid, query.route.part]
            query.abandoned = True
        return (*self._back(due, "late"), *self._default_deadlines.timer(now))

    def _again(self, route: Route, known: SentAnswer, now: float) -> list[Effect]:
        """It was answered before: a client that asks again gets the same answer, a dispatcher's retry only a `done`."""
        effects: list[Effect] = []
        if route.attempt == 0 and route.resendable:
            effects.append(Publish(route.reply_to, known.body))
        loaded = self.instances.get(route.instance)
        if loaded is not None:
            codes: list[str] | None = [known.code] if known.code else None
            effects.extend(
                self.dispatchers.report_done(route.dispatcher, loaded, [route], 1, (now, now), 0.0, codes, now)
            )
        return effects

    def _schedule(self) -> Iterable[Effect]:
        if self._scheduled:
            return NOTHING
        self._scheduled = True
        return (After("batches", 0.0, BatchesDue()),)

    # -- batches

    def _start_batches(self, envelope: Envelope) -> Iterable[Effect]:
        """Start the next batch of each ready instance that has cores, in the order of the setting."""
        self._scheduled = False
        effects: list[Effect] = []
        now = envelope.now
        for loaded in self._runs.ready(self.instances.values()):
            if not self._runs.has_room(loaded):  # its cores are busy: queries that cannot wait go back
                batch: list[QueuedQuery] = []
                late = loaded.queue.overdue(now)
            elif self._rules.present and (until := loaded.held_until(self._rules, now)) > now:
                effects.append(After(("held", loaded.id), until - now, BatchesDue()))
                continue
            else:
                batch, late = loaded.queue.form(now)
            for query in late:
                effects.extend(self._too_late(loaded, query, now))
            if batch:
                if batch[0].route.alone:
                    effects.extend(self._trying(batch[0]))
                effects.append(self._runs.begin(loaded, batch, now))
                if loaded.running < loaded.contexts and len(loaded.queue):
                    effects.extend(self._schedule())  # the next context's turn, after the other instances'
            elif loaded.leaving:  # all its queries were too late
                effects.extend(self._manager.settle(loaded))
        return effects

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        """A rule of batching holds from the next batch on. The bucket has other entries, too."""
        changed: Changed = envelope.message
        if not self._rules.apply(changed.key, changed.value):
            return NOTHING
        for loaded in self.instances.values():
            loaded.rules_changed(self._rules, envelope.now)
        return self._schedule()

    def _trying(self, suspect: QueuedQuery) -> list[Effect]:
        """Report that this query begins, in case that it ends this process."""
        return [Publish(self._subjects.trying(r.dispatcher), Trying(r.uid, r.attempt)) for r in suspect.routes]

    def _too_late(self, loaded: Loaded, query: QueuedQuery, now: float) -> Iterable[Effect]:
        if query.abandoned:
            return NOTHING
        self.pending.pop((query.route.uid, query.route.part), None)
        if query.route.fallback and self.dispatchers.any_alive:
            return self._back([query], "deadline" if query.route.deadline > now else "late")
        if query.route.deadline <= now or not self.dispatchers.alive(query.route.dispatcher):
            text = "the deadline passed in the queue: allow more time or ask again"
            return self._refuse(loaded, query, "deadline", text, now)
        return self._back([query], "deadline")

    def _done(self, envelope: Envelope) -> Iterable[Effect]:
        done: Done = envelope.message
        if type(done.id) is int:
            return self._ran(done.id, done.result, envelope.now)
        kind, key = done.id
        if kind in ("load", "transfer"):
            return (*self._manager.loaded(key, done.result), *self._schedule())
        if kind == "fetch":
            return self._fetched(key, done.result, envelope.now)
        if kind == "store":
            return self._stored(key, done.result)
        if kind == "move":
            return self._manager.moved(key, done.result)
        if kind == "process":
            self._reporter.measured(done.result)
        return NOTHING

    def _ran(self, number: int, result: BatchResult, now: float) -> Iterable[Effect]:
        entry = self._runs.end(number, now)
        if entry is None:
            return NOTHING
        loaded, run, items = entry
        queries = run.queries
        if result.errors is not None and len(queries) > 1:
            return self._one_by_one(loaded, run)
        seconds = result.finished - result.started
        loaded.measured(items, seconds, queries[0].route.length)
        if loaded.policy is not None and result.errors is None:
            loaded.learn(queries, items, seconds, now)
        cost = loaded.price_per_s * seconds / items
        effects: list[Effect] = []
        done: dict[str, list[Route]] = {}
        large = result.bytes > self._max_inline
        failed = result.errors is not None and not result.unfit
        for i, query in enumerate(queries):
            route = query.route
            loaded.served(route, query.items, result.finished - route.arrived, error=failed)
            if query.abandoned:
                continue  # its client has got the default output
            del self.pending[route.uid, route.part]
            if failed and result.errors and route.fallback and self.dispatchers.any_alive:
                effects.extend(self._back([query], "failed", result.errors[i]))
                continue
            done.setdefault(route.dispatcher, []).append(route)
            for other in query.also:
                done.setdefault(other.dispatcher, []).append(other)
            if query.headers is not None:
                where = {"worker": self.worker, "device": self.device, "variant": loaded.record.variant}
                effects.extend(spans_of(query, where, result, items))
            if result.errors is not None:
                refuse = bad_inputs if result.unfit else model_error
                answer: Answer | Refusal = refuse(route, result.errors[i])
            else:
                answer = answer_of(loaded, self.worker, query, result, i, items, cost)
                if large and output_bytes(answer) > self._max_inline:
                    effects.append(Do(("store", (query, answer)), StoreOutputs(route.uid.hex(), answer.outputs), FETCH))
                    continue
            if route.parent is None:
                effects.append(self._reply(route, answer, query))
            else:
                effects.extend(self._tell(query, answer))
        span = (result.started, result.finished)
        for dispatcher, routes in done.items():
            codes = None if result.errors is None else ["model_error" if failed else "bad_request"] * len(routes)
            effects.extend(self.dispatchers.report_done(dispatcher, loaded, routes, items, span, cost, codes, now))
        if loaded.queue.items or self._runs.starved:
            effects.extend(self._schedule())
        if loaded.leaving:
            effects.extend(self._manager.settle(loaded))
        return effects

    def _one_by_one(self, loaded: Loaded, run: RunBatch) -> Iterable[Effect]:
        """A batch failed: its queries run again alone, so that a bad one fails only itself."""
        for query in run.queries:
            query.alone = True
            if not query.abandoned:
                loaded.queue.push(query)
        return self._schedule()

    def _tell(self, query: QueuedQuery, answer: Answer | Refusal) -> list[Publish]:
        """The answer to all who wait for it: another dispatcher may ask for the same part by now."""
        route = query.route
        if route.parent is None or not query.also:
            return [self._reply(route, answer, query)]
        replies = {each.reply_to: each for each in query.routes}
        return [self._reply(each, answer, query) for each in replies.values()]

    def _reply(self, route: Route, answer: Answer | Refusal, query: QueuedQuery | None = None) -> Publish:
        """The answer to the client. It is kept if the client may ask again."""
        headers = None if query is None or query.headers is None else answer_headers(query)
        return Publish(route.reply_to, self.answers.keep(route, answer) if route.resendable else answer, "", headers)

    # -- refusing and handing back

    def _refuse(self, loaded: Loaded, query: QueuedQuery, code: Any, text: str, now: float) -> list[Effect]:
        route, span = query.route, (now, now)
        loaded.served(route, route.items, now - route.arrived, error=True)
        effects: list[Effect] = [*self._tell(query, Refusal(id=route.id, error=Error(code=code, message=text)))]
        for each in query.routes:
            effects.extend(
                self.dispatchers.report_done(each.dispatcher, loaded, [each], each.items, span, 0.0, [code], now)
            )
        return effects

    def _hand_back(self, route: Route, reason: str, body: msgspec.Raw, headers: Any = None, text: str = "") -> Publish:
        dispatcher = route.dispatcher if self.dispatchers.alive(route.dispatcher) else ""
        return Publish(self._subjects.resubmit(dispatcher), HandBack(route, reason, body, text), "", headers)

    def _back(self, queries: Iterable[QueuedQuery], reason: str, text: str = "") -> list[Effect]:
        return [
            self._hand_back(route, reason, query.body, query.headers, text)
            for query in queries
            for route in query.routes
        ]

    # -- large bodies

    def _fetched(self, uid: bytes, data: bytes, now: float) -> Iterable[Effect]:
        loaded, asked = self._arrived(uid)
        if self.instances.get(loaded.id) is not loaded or (loaded.leaving and not loaded.ready):
            return self._back([asked], "gone")  # unloaded or demoted meanwhile
        try:
            query = queued_query(asked.route, asked.body, data)
        except (msgspec.DecodeError, IndexError) as error:
            return self._refuse(loaded, asked, "bad_request", f"inputs_ref: the object holds no inputs: {error}", now)
        query.also, query.headers, query.taken = asked.also, asked.headers, asked.taken
        return self._take(loaded, query, now)

    def _arrived(self, uid: bytes) -> tuple[Loaded, QueuedQuery]:
        loaded, asked = self._fetching.pop(uid)
        del self.pending[uid, asked.route.part]
        return loaded, asked

    def _stored(self, key: tuple[QueuedQuery, Answer], ref: Any) -> Iterable[Effect]:
        query, answer = key
        # A pipeline decides by small outputs of a stage where to go on.
        small = {} if query.route.parent is None else small_outputs(answer.outputs)
        return self._tell(query, msgspec.structs.replace(answer, outputs=small, outputs_ref=ref))

    def _failed(self, envelope: Envelope) -> Iterable[Effect]:
        """The edge could not carry out a command."""
        failed: Failed | TimedOut = envelope.message
        reason = failed.error if isinstance(failed, Failed) else "it took too long"
        now = envelope.now
        if type(failed.id) is int:
            entry = self._runs.running.get(failed.id)
            if entry is None:
                return NOTHING
            errors = [reason] * len(entry[1].queries)
            return self._ran(failed.id, BatchResult(now, now, [], errors), now)
        kind, key = failed.id
        if kind == "load":
            return self._load_failed(*self._manager.failed(key, reason))
        if kind == "transfer":
            return self._load_failed(*self._manager.transfer_failed(key, reason))
        if kind == "move":
            return self._manager.moved(key, None, reason)
        if kind == "fetch":
            loaded, asked = self._arrived(key)
            return self._refuse(loaded, asked, "bad_request", f"inputs_ref cannot be read: {reason}", now)
        if kind == "store":
            query, answer = key
            error = Error(code="internal", message=f"the outputs could not be stored: {reason}")
            return self._tell(query, Refusal(id=answer.id, error=error))
        return NOTHING

    def _load_failed(self, loaded: Loaded | None, effects: Iterable[Effect]) -> Iterable[Effect]:
        """An instance that could not be loaded ends. None: none has."""
        return effects if loaded is None else (*effects, *self._back(self._drop(loaded), "load_failed"))

    # -- time

    def _report(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        gap = self._reporter.gap(now)
        if gap > self._failure_timeout:
            self._was_stopped(now)
        checked = self.dispatchers.check(now)
        return (*checked, *self._reporter.report(now, gap, self.instances.values(), self._runs), *self._schedule())

    def _was_stopped(self, now: float) -> None:
        """This process was stopped for longer than the failure time-out. Others have its queries now: drop them."""
        self.dispatchers.reset_silence(now)
        for loaded in self.instances.values():
            self._drop(loaded)

    def _drop(self, loaded: Loaded) -> list[QueuedQuery]:
        """Empty an instance's queue; returns the queries without an end."""
        queries = [query for query in loaded.queue.drop() if not query.abandoned]
        for query in queries:
            del self.pending[query.route.uid, query.route.part]
        return queries

    def _started(self, envelope: Envelope) -> Iterable[Effect]:
        return self._reporter.start(envelope.now)

    def _stopping(self, envelope: Envelope) -> Iterable[Effect]:
        """Queries that have not begun go back to the dispatchers. Running ones are answered within the grace."""
        del envelope
        return [effect for loaded in self.instances.values() for effect in self._back(self._drop(loaded), "gone")]


def make_executor(settings: Settings, subjects: Subjects, worker: str, device: Device, incarnation: int) -> Executor:
    """The executor of one device. Parameters as for `Executor`."""
    return Executor(worker, device, incarnation, subjects, settings.executor, settings.dispatcher)
