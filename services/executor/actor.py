"""The batch queue of one device: takes queries for its instances, batches them, answers the clients, reports what is done.

It is the authority on its own queue: what no longer fits its deadline goes back to the dispatcher at once, and nothing is
computed that cannot be in time. Every query that it has taken it ends itself, even when the dispatcher that sent it has died.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from bus.messages.fleet import DispatcherHeartbeat, LoadInstance, MoveInstance, UnloadInstance
from bus.messages.flow import Execute, HandBack, Route, Trying
from bus.messages.public import Answer, Error, Refusal
from bus.subjects import Subjects
from services.core.actor import (
    After,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Inlet,
    Publish,
    Recorded,
    Started,
    Stopping,
    TimedOut,
    Watch,
)
from services.executor.answers import (
    RecentAnswers,
    SentAnswer,
    answer_headers,
    answer_of,
    model_error,
    output_bytes,
    spans_of,
)
from services.executor.commands import BatchResult, FetchInputs, RunBatch, StoreOutputs
from services.executor.default_output import DefaultOutputDeadlines, DefaultOutputDue
from services.executor.dispatchers import KnownDispatchers
from services.executor.instances import REPORT, BatchRuns, InstanceManager, Loaded, MonitorReporter, ReportDue
from services.executor.queue import QueuedQuery, inputs_of, work_of

FETCH = 10.0  # s to get inputs from, or put outputs into, the object store
NOTHING: tuple[Effect, ...] = ()


class BatchesDue(msgspec.Struct, frozen=True):
    """Timer: everything that came in this turn is queued; form batches."""


class Executor:
    """Pure actor of one device. incarnation: grows with every start of this process."""

    def __init__(
        self,
        worker: str,
        device: str,
        incarnation: int,
        subjects: Subjects,
        *,
        cores: int = 1,
        inline_below_s: float = 0.001,
        max_inline: int = 2**20,
        failure_timeout_s: float = 2.0,
    ) -> None:
        self.worker = worker
        self.device = device
        self.incarnation = incarnation
        self._residents = InstanceManager(worker, device, incarnation, subjects)
        self.instances = self._residents.instances
        self.answers = RecentAnswers()
        self._subjects = subjects
        self.owners = KnownDispatchers(subjects, f"{worker}/{device}/{incarnation}", worker, failure_timeout_s + REPORT)
        self._runs = BatchRuns(max(1, cores), inline_below_s)
        self._max_inline = max_inline
        self._failure_timeout = failure_timeout_s
        self._pumping = False
        self._reporter = MonitorReporter(worker, device, incarnation, subjects)
        self._pending: dict[tuple[bytes, int], QueuedQuery] = {}  # taken, not yet ended
        self._lapses = DefaultOutputDeadlines()
        self._fetching: dict[bytes, tuple[Loaded, QueuedQuery]] = {}
        self._on: dict[type, Callable[[Envelope], Iterable[Effect]]] = {
            Execute: self._execute,
            BatchesDue: self._pump,
            DefaultOutputDue: self._lapse,
            Done: self._did,
            Failed: self._failed,
            TimedOut: self._failed,
            DispatcherHeartbeat: self._dispatcher,
            LoadInstance: lambda envelope: self._residents.load(envelope.message),
            MoveInstance: lambda envelope: self._residents.move(envelope.message),
            UnloadInstance: lambda envelope: self._residents.unload(envelope.message.instance),
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
            Inlet(subject=s.executor(w, d, "load"), message=LoadInstance),
            Inlet(subject=s.executor(w, d, "unload"), message=UnloadInstance),
            Inlet(subject=s.executor(w, d, "move"), message=MoveInstance),
            Inlet(subject=s.execute(w, d), message=Execute),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return ()

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        return self._on[type(envelope.message)](envelope)

    # -- a query comes in

    def _execute(self, envelope: Envelope) -> Iterable[Effect]:
        execute: Execute = envelope.message
        route = execute.route
        key = (route.uid, route.part)
        pending = self._pending.get(key)
        if pending is not None:
            pending.also = (*pending.also, route)
            return NOTHING
        known = self.answers.get(key)
        if known is not None:
            return self._again(route, known, envelope.now)
        loaded = self.instances.get(route.instance)
        if loaded is None or loaded.leaving:
            return (self._hand_back(route, "gone", execute.body, envelope.headers),)
        try:
            taken = inputs_of(execute.body)
            if taken.inputs_ref is not None:
                asked = self._pending[key] = QueuedQuery(route, execute.body, None, route.items, None)
                asked.headers, asked.taken = envelope.headers, envelope.now
                self._fetching[route.uid] = (loaded, asked)
                return (Do(("fetch", route.uid), FetchInputs(taken.inputs_ref), FETCH),)
            work = work_of(route, execute.body, taken.inputs)
            if envelope.headers is not None:
                work.headers, work.taken = envelope.headers, envelope.now
        except msgspec.DecodeError as error:
            unread = QueuedQuery(route, execute.body, None, route.items, None)
            unread.headers = envelope.headers
            return self._refuse(loaded, unread, "bad_request", f"inputs: {error}", envelope.now)
        return self._take(loaded, work, envelope.now)

    def _take(self, loaded: Loaded, work: QueuedQuery, now: float) -> Iterable[Effect]:
        self._pending[work.route.uid, work.route.part] = work
        loaded.queue.push(work)
        return (*self._arm(), *self._lapses.watch(work, now, self._pending)) if work.route.fallback else self._arm()

    def _lapse(self, envelope: Envelope) -> Iterable[Effect]:
        due = self._lapses.due(envelope.now, self._pending if self.owners.any_alive else {})
        return (*self._back(due, "late"), *self._lapses.wake(envelope.now))

    def _again(self, route: Route, known: SentAnswer, now: float) -> list[Effect]:
        """It was answered before: a client that asks again hears the same, a dispatcher's retry only that it is done."""
        effects: list[Effect] = []
        if route.attempt == 0 and route.resendable:
            effects.append(Publish(route.reply_to, known.body))
        loaded = self.instances.get(route.instance)
        if loaded is not None:
            codes: list[str] | None = [known.code] if known.code else None
            effects.extend(self.owners.tell(route.dispatcher, loaded, [route], 1, (now, now), 0.0, codes, now))
        return effects

    def _arm(self) -> Iterable[Effect]:
        if self._pumping:
            return NOTHING
        self._pumping = True
        return (After("pump", 0.0, BatchesDue()),)

    # -- batches

    def _pump(self, envelope: Envelope) -> Iterable[Effect]:
        """Start what can run now: for each ready instance the next batch, the most urgent instance first."""
        self._pumping = False
        effects: list[Effect] = []
        now = envelope.now
        for loaded in self._runs.ready(self.instances.values()):
            if not self._runs.has_room(loaded):  # others compute on its cores: what cannot wait for them goes back
                batch: list[QueuedQuery] = []
                late = loaded.queue.overdue(now)
            else:
                batch, late = loaded.queue.form(now)
            for work in late:
                effects.extend(self._too_late(loaded, work, now))
            if batch:
                if batch[0].route.alone:
                    effects.extend(self._trying(batch[0]))
                effects.append(self._runs.begin(loaded, batch))
            elif loaded.leaving:  # all that it waited for was too late
                effects.extend(self._residents.let_go(loaded))
        return effects

    def _trying(self, suspect: QueuedQuery) -> list[Effect]:
        """Say what is begun, in case that it ends this process."""
        return [Publish(self._subjects.trying(r.dispatcher), Trying(r.uid, r.attempt)) for r in suspect.routes]

    def _too_late(self, loaded: Loaded, work: QueuedQuery, now: float) -> Iterable[Effect]:
        if work.lapsed:
            return NOTHING
        self._pending.pop((work.route.uid, work.route.part), None)
        if work.route.fallback and self.owners.any_alive:
            return self._back([work], "deadline" if work.route.deadline > now else "late")
        if work.route.deadline <= now or not self.owners.alive(work.route.dispatcher):
            text = "the deadline passed in the queue: allow more time or ask again"
            return self._refuse(loaded, work, "deadline", text, now)
        return self._back([work], "deadline")

    def _did(self, envelope: Envelope) -> Iterable[Effect]:
        done: Done = envelope.message
        if type(done.id) is int:
            return self._ran(done.id, done.result, envelope.now)
        kind, key = done.id
        if kind == "load":
            return (*self._residents.loaded(key, done.result), *self._arm())
        if kind == "fetch":
            return self._fetched(key, done.result, envelope.now)
        if kind == "store":
            return self._stored(key, done.result)
        if kind == "move":
            return self._residents.moved(key, done.result)
        if kind == "memory":
            self._reporter.memory_mb = done.result
        return NOTHING

    def _ran(self, number: int, result: BatchResult, now: float) -> Iterable[Effect]:
        entry = self._runs.end(number)
        if entry is None:
            return NOTHING
        loaded, run = entry
        works = run.works
        if result.errors is not None and len(works) > 1:
            return self._one_by_one(loaded, run)
        items = sum(work.items for work in works)
        seconds = result.finished - result.started
        loaded.measured(items, seconds, works[0].route.length)
        cost = loaded.price_per_s * seconds / items
        effects: list[Effect] = []
        told: dict[str, list[Route]] = {}
        large = result.bytes > self._max_inline
        for i, work in enumerate(works):
            route = work.route
            loaded.served(route, work.items, result.finished - route.arrived, error=result.errors is not None)
            if work.lapsed:
                continue  # its app's default was answered meanwhile
            del self._pending[route.uid, route.part]
            if result.errors is not None and route.fallback and self.owners.any_alive:
                effects.extend(self._back([work], "failed", result.errors[i]))
                continue
            told.setdefault(route.dispatcher, []).append(route)
            for other in work.also:
                told.setdefault(other.dispatcher, []).append(other)
            if work.headers is not None:
                where = {"worker": self.worker, "device": self.device, "variant": loaded.record.variant}
                effects.extend(spans_of(work, where, result, items))
            if result.errors is not None:
                answer: Answer | Refusal = model_error(route, result.errors[i])
            else:
                answer = answer_of(loaded, self.worker, work, result, i, items, cost)
                if large and output_bytes(answer) > self._max_inline:
                    effects.append(Do(("store", (work, answer)), StoreOutputs(route.uid.hex(), answer.outputs), FETCH))
                    continue
            effects.append(self._reply(route, answer, work))
        span = (result.started, result.finished)
        for dispatcher, routes in told.items():
            codes = None if result.errors is None else ["model_error"] * len(routes)
            effects.extend(self.owners.tell(dispatcher, loaded, routes, items, span, cost, codes, now))
        if loaded.queue.items or self._runs.starved:
            effects.extend(self._arm())
        if loaded.leaving:
            effects.extend(self._residents.let_go(loaded))
        return effects

    def _one_by_one(self, loaded: Loaded, run: RunBatch) -> Iterable[Effect]:
        """A batch failed: its members run again alone, so that a bad one costs only its own query."""
        for work in run.works:
            work.alone = True
            if not work.lapsed:
                loaded.queue.push(work)
        return self._arm()

    def _reply(self, route: Route, answer: Answer | Refusal, work: QueuedQuery | None = None) -> Publish:
        """To the client; what it may ask for again is kept."""
        headers = None if work is None or work.headers is None else answer_headers(work)
        return Publish(route.reply_to, self.answers.keep(route, answer) if route.resendable else answer, "", headers)

    # -- refusing and handing back

    def _refuse(self, loaded: Loaded, work: QueuedQuery, code: Any, text: str, now: float) -> list[Effect]:
        route, span = work.route, (now, now)
        loaded.served(route, route.items, now - route.arrived, error=True)
        effects: list[Effect] = [self._reply(route, Refusal(id=route.id, error=Error(code=code, message=text)), work)]
        for each in work.routes:
            effects.extend(self.owners.tell(each.dispatcher, loaded, [each], each.items, span, 0.0, [code], now))
        return effects

    def _hand_back(self, route: Route, reason: str, body: msgspec.Raw, headers: Any = None, text: str = "") -> Publish:
        owner = route.dispatcher if self.owners.alive(route.dispatcher) else ""
        return Publish(self._subjects.resubmit(owner), HandBack(route, reason, body, text), "", headers)

    def _back(self, works: Iterable[QueuedQuery], reason: str, text: str = "") -> list[Effect]:
        return [
            self._hand_back(route, reason, work.body, work.headers, text) for work in works for route in work.routes
        ]

    # -- large bodies

    def _fetched(self, uid: bytes, data: bytes, now: float) -> Iterable[Effect]:
        loaded, asked = self._arrived(uid)
        if self.instances.get(loaded.id) is not loaded:
            return self._back([asked], "gone")  # unloaded meanwhile
        try:
            work = work_of(asked.route, asked.body, data)
        except (msgspec.DecodeError, IndexError) as error:
            return self._refuse(loaded, asked, "bad_request", f"inputs_ref: the object holds no inputs: {error}", now)
        work.also, work.headers, work.taken = asked.also, asked.headers, asked.taken
        return self._take(loaded, work, now)

    def _arrived(self, uid: bytes) -> tuple[Loaded, QueuedQuery]:
        loaded, asked = self._fetching.pop(uid)
        del self._pending[uid, asked.route.part]
        return loaded, asked

    def _stored(self, key: tuple[QueuedQuery, Answer], ref: Any) -> Iterable[Effect]:
        work, answer = key
        answer = msgspec.structs.replace(answer, outputs={}, outputs_ref=ref)
        return (self._reply(work.route, answer, work),)

    def _failed(self, envelope: Envelope) -> Iterable[Effect]:
        """The edge could not do it."""
        failed: Failed | TimedOut = envelope.message
        reason = failed.error if isinstance(failed, Failed) else "it took too long"
        now = envelope.now
        if type(failed.id) is int:
            entry = self._runs.under_way.get(failed.id)
            if entry is None:
                return NOTHING
            errors = [reason] * len(entry[1].works)
            return self._ran(failed.id, BatchResult(now, now, [], errors), now)
        kind, key = failed.id
        if kind == "load":
            return self._load_failed(key, reason)
        if kind == "move":
            return self._residents.moved(key, None, reason)
        if kind == "fetch":
            loaded, asked = self._arrived(key)
            return self._refuse(loaded, asked, "bad_request", f"inputs_ref cannot be read: {reason}", now)
        if kind == "store":
            work, answer = key
            error = Error(code="internal", message=f"the outputs could not be stored: {reason}")
            return (Publish(work.route.reply_to, Refusal(id=answer.id, error=error)),)
        return NOTHING

    def _load_failed(self, instance: str, reason: str) -> Iterable[Effect]:
        found = self._residents.failed(instance, reason)
        if found is None:
            return NOTHING
        loaded, fact = found
        return (fact, *self._back(self._drop(loaded), "load_failed"))

    # -- dispatchers and time

    def _dispatcher(self, envelope: Envelope) -> Iterable[Effect]:
        return self.owners.heard(envelope.message, envelope.now)

    def _report(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        gap = self._reporter.gap(now)
        if gap > self._failure_timeout:
            self._slept(now)
        checked = self.owners.check(now)
        return (*checked, *self._reporter.report(now, gap, self.instances.values()), *self._arm())

    def _slept(self, now: float) -> None:
        """This process was stopped longer than the failure time-out: its queries are with others now, drop them."""
        self.owners.excuse(now)
        for loaded in self.instances.values():
            self._drop(loaded)

    def _drop(self, loaded: Loaded) -> list[QueuedQuery]:
        """Empty an instance's queue."""
        works = [work for work in loaded.queue.drop() if not work.lapsed]
        for work in works:
            del self._pending[work.route.uid, work.route.part]
        return works

    def _started(self, envelope: Envelope) -> Iterable[Effect]:
        return self._reporter.start(envelope.now)

    def _stopping(self, envelope: Envelope) -> Iterable[Effect]:
        """What has not begun goes back to the dispatchers; what runs is answered within the grace."""
        del envelope
        return [effect for loaded in self.instances.values() for effect in self._back(self._drop(loaded), "gone")]
