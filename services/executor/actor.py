"""The executor of one device: queues queries for its instances, batches them, answers the clients, reports what is done.

It decides about its own queue: a query that cannot meet its deadline any more goes back to the dispatcher at once and is not
computed. The executor ends every query that it has taken, even if the dispatcher that sent it has died, and soon after its deadline, even if
its model hangs.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from bus.messages.fleet import DispatcherHeartbeat, HeldInstances
from bus.messages.flow import Execute, PartsEnded, ResentSought, Trying
from bus.messages.jobs import SYSTEM
from bus.messages.public import Answer, Refusal
from bus.subjects import EXECUTORS, Subjects
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
    TableActor,
    TimedOut,
    Watch,
)
from services.core.cost import query_cost
from services.core.deadlines import DeadlineReached
from services.core.line import Stillness
from services.core.outcomes import DEFAULT_MOST, NOT_ANSWERED, NOT_STORED, SPEAKS, RecentAnswers
from services.core.pipelines.branching import small_outputs
from services.core.placement import Device
from services.core.settings import DispatcherSettings, ExecutorSettings, Settings
from services.executor.batching import BatchingRules
from services.executor.commands import BatchResult, FetchInputs, RunBatch, StoreOutputs
from services.executor.dispatchers import TOLD, KnownDispatchers
from services.executor.endings import (
    Endings,
    PendingQueries,
    answer_of,
    bad_inputs,
    ends,
    model_error,
    output_bytes,
    spans_of,
    too_dear,
)
from services.executor.instances import REPORT, BatchRuns, HeldInstance, MonitorReporter, ReportDue
from services.executor.loading import InstanceManager, Succession
from services.executor.queue import QueuedQuery, inputs_of, queued_query, unread_query

FETCH = 10.0  # s to get inputs from, or put outputs into, the object store


class BatchesDue(msgspec.Struct, frozen=True):
    """Timer: all queries that came in this turn are queued; form batches."""


class Executor(TableActor):
    """Pure actor of one device. incarnation: grows with every start of this process. dispatchers: those it works for. held: by the process before it."""

    def __init__(
        self,
        worker: str,
        device: Device,
        incarnation: int,
        subjects: Subjects,
        settings: ExecutorSettings,
        dispatchers: DispatcherSettings,
        held: HeldInstances | None = None,
    ) -> None:
        name = device.name
        life, incarnation = incarnation, incarnation if held is None else held.incarnation
        self.worker = worker
        self.device = name
        self.incarnation = incarnation
        self._manager = InstanceManager(worker, name, incarnation, subjects, self._hand_on)
        self.succession = Succession(worker, name, incarnation, subjects, self._manager, held)
        self.instances = self._manager.instances
        self.tallies = self._manager.tallies
        self.answers = RecentAnswers()
        self._subjects = subjects
        self._failure_timeout = dispatchers.failure_timeout_s
        silence_s = self._failure_timeout + REPORT
        inbox = subjects.executor(worker, name, "unheard.*").removesuffix("*")
        self.dispatchers = KnownDispatchers(subjects, f"{worker}/{name}/{life}", worker, silence_s, inbox)
        self._runs = BatchRuns(device, settings)
        self._rules = BatchingRules()
        self._max_inline = dispatchers.max_inline
        self._scheduled = False
        self._reporter = MonitorReporter(worker, name, incarnation, subjects)
        self.pending = PendingQueries()
        here = (self.dispatchers, self.answers, self.instances, self.pending, self._runs)
        self._endings = endings = Endings(worker, name, subjects, *here, self._manager.settle, self._schedule)
        self._leaves, self._again = endings.leaves, endings.again
        self._tell, self._reply = endings.tell, endings.reply
        self._refuse, self._hand_back, self._back = endings.refuse, endings.hand_back, endings.back
        busy = lambda: bool(self.pending)  # noqa: E731
        self._stillness = Stillness(worker, name, subjects, self.handle, busy, self._was_still)
        self._on: dict[type, Handler] = {
            Execute: self._execute,
            BatchesDue: self._start_batches,
            Changed: self._changed,
            DeadlineReached: self._deadline_reached,
            Done: self._done,
            Failed: self._failed,
            TimedOut: self._failed,
            ResentSought: lambda e: endings.sought(e.message, pending=(e.message.uid, 0) in self.pending),
            PartsEnded: lambda e: self.dispatchers.parts_ended(e.subject.rpartition(".")[2], e.message),
            **self._manager.handlers,
            ReportDue: self._report,
            **endings.handlers,
            **self._stillness.handlers,
            **self.succession.handlers,
            **dict.fromkeys((Recorded, Synced), lambda _: NOTHING),
            Started: self._started,
            Stopping: self._stopping,
        }
        self._stillness.guard(self._on, (BatchesDue, DeadlineReached, Done, Failed, TimedOut, ReportDue))
        self.watches = (Watch(bucket=subjects.control_bucket),)
        self.inlets = (
            Inlet(subject=subjects.dispatcher_heartbeat(), message=DispatcherHeartbeat),
            Inlet(subject=subjects.ended(), message=PartsEnded),
            Inlet(subject=subjects.resent(), message=ResentSought),
            *self._manager.inlets,
            *endings.inlets,
            *self._stillness.inlets,
            *self.succession.inlets,
            Inlet(subject=subjects.execute(worker, name), message=Execute, queue=EXECUTORS),
        )

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        effects = self._on[type(envelope.message)](envelope)
        earliest = self.pending.earliest
        return (*effects, earliest.timer(envelope.now)) if earliest.at < earliest.set_for else effects

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
        if envelope.now > route.deadline - DEFAULT_MOST and self._leaves(route, envelope.now, comes=True):
            return (*self._hand_back(route, "late", execute.body, envelope.headers), *self._schedule())
        if envelope.now > route.deadline and envelope.subject and not self.dispatchers.alive(route.dispatcher):
            # That was clogged, or has died: its heartbeats say which, and who speaks.
            return (After(("silent", *key), TOLD, execute), *self._schedule())
        loaded = self.instances.get(route.instance)
        if loaded is None or loaded.leaving:
            return self._hand_back(route, "gone", execute.body, envelope.headers)
        try:
            taken = inputs_of(execute.body)
            if taken.inputs_ref is not None or route.refs:
                self.pending.fetch(loaded, unread_query(route, execute.body, envelope.headers, envelope.now))
                fetch = FetchInputs(None if route.refs else taken.inputs_ref, tuple(route.refs or ()), taken.inputs)
                return (Do(("fetch", route.uid), fetch, FETCH),)
            query = queued_query(route, execute.body, taken.inputs)
            if envelope.headers is not None:
                query.headers, query.taken = envelope.headers, envelope.now
        except msgspec.DecodeError as error:
            unread = unread_query(route, execute.body, envelope.headers, envelope.now)
            return self._refuse(loaded, unread, "bad_request", f"inputs: {error}", envelope.now)
        return self._take(loaded, query, envelope.now)

    def _take(self, loaded: HeldInstance, query: QueuedQuery, now: float) -> Iterable[Effect]:
        if loaded.comes_late(query, now) and self.dispatchers.may_move(query.route):
            return (*self._back([query], "deadline"), *self._schedule())  # another instance may still be in time
        self.pending.take(query)
        if not loaded.queue.items:
            loaded.waits_since = now
        loaded.queue.push(query)
        if (policy := loaded.policy) is not None and policy.counts:
            policy.arrived(query.items, now)
        if query.route.more:
            return NOTHING  # with the last of its batch; if that is lost, with the next report
        return self._schedule()

    def _deadline_reached(self, envelope: Envelope) -> Iterable[Effect]:
        """End the queries whose time is up, wherever they are, and those that wait for a device and could not be in time any more."""
        now, effects = envelope.now, list[Effect]()
        for query in self.pending.due(now, default=self.dispatchers.any_alive):
            effects.extend(self._expire(query, now))
        for loaded in [*self.instances.values()]:
            late = loaded.queue.overdue(now)
            for query in late:
                effects.extend(self._too_late(loaded, query, now))
            if late and loaded.leaving:
                effects.extend(self._manager.settle(loaded))
        return effects

    def _expire(self, query: QueuedQuery, now: float) -> list[Effect]:
        """It ends now, refused or with its app's default output. Its own result is not used any more."""
        route = query.route
        loaded = self.instances.get(route.instance)
        del self.pending[route.uid, route.part]
        query.abandoned = True
        if loaded is None or (route.fallback and self.dispatchers.any_alive) or self._leaves(route, now):
            return self._back([query], "late")
        why = NOT_STORED if query.storing else NOT_ANSWERED
        return self._refuse(loaded, query, "deadline", f"{why}: allow more time or ask again", now)

    def _schedule(self) -> Iterable[Effect]:
        if self._scheduled:
            return NOTHING
        self._scheduled = True
        return (After("batches", 0.0, BatchesDue()),)

    # -- batches

    def _start_batches(self, envelope: Envelope) -> Iterable[Effect]:
        """Start the next batch of each ready instance that has cores, in the order of the setting."""
        self._scheduled = False
        now = envelope.now
        effects = self._endings.end_cancelled(now)
        if self._stillness.rests and self.pending:
            effects.extend(self._stillness.wake(now))
        for loaded in self._runs.ready(self.instances.values(), now):
            if not self._runs.has_room(loaded):  # its cores are busy: queries that cannot wait go back
                batch: list[QueuedQuery] = []
                late = loaded.queue.overdue(now)
            elif self._rules.present and (until := loaded.held_until(self._rules, now)) > now:
                effects.append(After(("held", loaded.id), until - now, BatchesDue()))
                continue
            else:
                batch, late = loaded.queue.form(now, self.dispatchers.may_move)
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

    def _too_late(self, loaded: HeldInstance, query: QueuedQuery, now: float) -> Iterable[Effect]:
        if query.abandoned:
            return NOTHING
        self.pending.pop((query.route.uid, query.route.part), None)
        if query.route.fallback and self.dispatchers.any_alive:
            return self._back([query], "deadline" if query.route.deadline > now else "late")
        if self._leaves(query.route, now):
            return self._back([query], "late")
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
            return self._stored(key, done.result, envelope.now)
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
        loaded.measured(items, seconds, now, queries[0].route.length)
        if loaded.policy is not None and result.errors is None:
            loaded.learn(queries, items, seconds, now)
        cost = query_cost(loaded.price_per_s, seconds, items, 1)
        effects: list[Effect] = []
        ended: list[QueuedQuery] = []
        large = result.bytes > self._max_inline
        failed = result.errors is not None and not result.unfit
        for i, query in enumerate(queries):
            route = query.route
            if query.abandoned:
                continue
            loaded.served(route, query.items)
            if now > route.deadline - DEFAULT_MOST and self._leaves(route, now):
                effects.extend(self._expire(query, now))
                continue
            if failed and result.errors and route.fallback and self.dispatchers.any_alive:
                del self.pending[route.uid, route.part]
                effects.extend(self._back([query], "failed", result.errors[i]))
                continue
            ended.append(query)
            if query.headers is not None:
                where = {"worker": self.worker, "device": self.device, "variant": loaded.record.variant}
                effects.extend(spans_of(query, where, result, items))
            if result.errors is not None:
                refuse = bad_inputs if result.unfit else model_error
                answer: Answer | Refusal = refuse(route, result.errors[i])
            else:
                answer = answer_of(loaded, self.worker, query, result, i, items, cost)
                query.said = None if result.said is None else result.said[i]
                if large and route.payer != SYSTEM and output_bytes(answer) > self._max_inline:
                    query.storing = True
                    store = StoreOutputs(route.uid.hex(), answer.outputs)
                    limit = min(FETCH, max(0.001, ends(route, default=False) + SPEAKS - now))  # it has ended before
                    effects.append(Do(("store", (loaded, query, answer)), store, limit))
                    continue
            del self.pending[route.uid, route.part]
            if route.payer != SYSTEM:  # else nobody waits for it
                effects += (self._reply(route, answer, query),) if route.parent is None else self._tell(query, answer)
        span = (result.started, result.finished)
        code = "" if result.errors is None else "model_error" if failed else "bad_request"
        effects.extend(self.dispatchers.report_batch(loaded, ended, items, span, cost, code, now))
        if loaded.queue.items or self._runs.starved:
            effects.extend(self._schedule())
        if loaded.leaving:
            effects.extend(self._manager.settle(loaded))
        return effects

    def _one_by_one(self, loaded: HeldInstance, run: RunBatch) -> Iterable[Effect]:
        """A batch failed: its queries run again alone, so that a bad one fails only itself."""
        for query in run.queries:
            query.alone = True
            if not query.abandoned:
                loaded.queue.push(query)
        return self._schedule()

    # -- large bodies

    def _fetched(self, uid: bytes, data: bytes, now: float) -> Iterable[Effect]:
        found = self.pending.arrived(uid)
        if found is None:
            return NOTHING
        loaded, asked = found
        if self.instances.get(loaded.id) is not loaded or (loaded.leaving and not loaded.ready):
            return self._back([asked], "gone")  # unloaded or demoted meanwhile
        try:
            query = queued_query(asked.route, asked.body, data)
        except (msgspec.DecodeError, IndexError) as error:
            return self._refuse(loaded, asked, "bad_request", f"inputs_ref: the object holds no inputs: {error}", now)
        dear = too_dear(loaded, query)
        if dear:
            return self._refuse(loaded, asked, "unsatisfiable", dear, now)
        query.headers, query.taken, query.fetched = asked.headers, asked.taken, True
        query.route, *also = [msgspec.structs.replace(route, items=query.items) for route in asked.routes]
        query.also = tuple(also)
        return self._take(loaded, query, now)

    def _stored(self, key: tuple[HeldInstance, QueuedQuery, Answer], ref: Any, now: float) -> Iterable[Effect]:
        loaded, query, answer = key
        route = query.route
        if query.abandoned:
            return NOTHING
        if self._leaves(route, now):
            return self._expire(query, now)
        del self.pending[route.uid, route.part]
        # A pipeline decides by small outputs of a stage where to go on.
        small = {} if route.parent is None else small_outputs(answer.outputs)
        told = self._tell(query, msgspec.structs.replace(answer, outputs=small, outputs_ref=ref))
        return (*told, *self.dispatchers.report_ended(loaded, query, answer, now))

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
            return self._load_failed(*self._manager.failed(key, reason), reason)
        if kind == "transfer":
            return self._load_failed(*self._manager.transfer_failed(key, reason), reason)
        if kind == "move":
            return self._manager.moved(key, None, reason)
        if kind == "fetch":
            found = self.pending.arrived(key)
            text = f"inputs_ref cannot be read: {reason}"
            return NOTHING if found is None else self._refuse(*found, "bad_request", text, now)
        if kind == "store":
            loaded, query, _ = key
            if query.abandoned:
                return NOTHING
            if ends(query.route, default=self.dispatchers.any_alive) <= now:
                return self._expire(query, now)
            del self.pending[query.route.uid, query.route.part]
            code = "deadline" if isinstance(failed, TimedOut) else "internal"  # jobs try again whatever was late
            return self._refuse(loaded, query, code, f"the outputs could not be stored: {reason}", now)
        return NOTHING

    def _load_failed(self, loaded: HeldInstance | None, effects: Iterable[Effect], reason: str) -> Iterable[Effect]:
        """An instance that could not be loaded ends. None: none has."""
        return effects if loaded is None else (*effects, *self._back(self._drop(loaded), "load_failed", reason))

    # -- time

    def _report(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        if self.succession.missing:
            return self._reporter.start(now, REPORT)
        gap = self._reporter.gap(now)
        if gap > self._failure_timeout:
            self.dispatchers.stood_still(now)  # the silence was this process's own
        checked = self.dispatchers.check(now)
        self.dispatchers.settle()
        return (*checked, *self._reporter.report(now, gap, self.instances.values(), self._runs), *self._schedule())

    def _was_still(self, seconds: float, now: float) -> Iterable[Effect]:
        """This process was still for so long. Beyond the failure time-out others may have its queries: only their dispatchers know."""
        if seconds <= self._failure_timeout:
            return NOTHING
        self.dispatchers.stood_still(now)
        left = [*self.pending.values()]
        return [*self._endings.forget(left), *self._back(left, "stopped")]

    def _drop(self, loaded: HeldInstance) -> list[QueuedQuery]:
        """Empty an instance's queue; returns the queries without an end."""
        queries = [query for query in loaded.queue.drop() if not query.abandoned]
        for query in queries:
            del self.pending[query.route.uid, query.route.part]
        return queries

    def _hand_on(self, loaded: HeldInstance) -> list[Effect]:
        """What queues for an instance that does not compute it after all goes back to the dispatchers."""
        return self._back(self._drop(loaded), "gone")

    def _started(self, envelope: Envelope) -> Iterable[Effect]:
        return (*self.succession.begin(), *self._reporter.start(envelope.now))

    def _stopping(self, _: Envelope) -> Iterable[Effect]:
        """Queries that have not begun go back to the dispatchers. Running ones are answered within the grace."""
        left = [effect for loaded in self.instances.values() for effect in self._hand_on(loaded)]
        return [*self.dispatchers.leave(), *left]


def make_executor(
    settings: Settings, subjects: Subjects, worker: str, device: Device, incarnation: int,
    held: HeldInstances | None = None,
) -> Executor:  # fmt: skip
    """The executor of one device. Parameters as for `Executor`."""
    return Executor(worker, device, incarnation, subjects, settings.executor, settings.dispatcher, held)
