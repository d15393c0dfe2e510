"""The queries that an executor has taken, and how each ends there: answered, refused, handed back, or left to its dispatcher. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from bus.messages.fleet import DispatcherHeartbeat
from bus.messages.flow import HandBack, ResentKnown, ResentSought, Route, Withdraw
from bus.messages.public import Answer, Error, QueryCancelled, Refusal
from bus.subjects import Subjects
from services.core.actor import Effect, Envelope, Handler, Inlet, Publish, Undelivered
from services.core.deadlines import EarliestDeadline
from services.core.outcomes import (
    CANCELLED,
    GRACE,
    PART_GRACE,
    SPEAKS,
    RecentAnswers,
    SentAnswer,
    default_at,
    latency_of,
)
from services.core.trace import Span, read, span_id
from services.executor.commands import BatchResult
from services.executor.dispatchers import KnownDispatchers
from services.executor.instances import BatchRuns, HeldInstance
from services.executor.queue import QueuedQuery

# -- from a computed batch to each query's answer


def answer_of(
    loaded: HeldInstance, worker: str, query: QueuedQuery, result: BatchResult, i: int, batch: int, cost: float
) -> Answer:
    """The i-th query's answer. batch: items computed together; cost: US$ per item."""
    record = loaded.record
    route = query.route
    latency_ms = latency_of(route.arrived, result.started, result.finished)
    missed = route.missed or []
    if result.finished > route.deadline or (route.latency_ms is not None and latency_ms > route.latency_ms):
        missed = [*missed, "latency"]
    accuracy, source = (record.accuracy, "registered") if route.live is None else route.live
    if route.accuracy is not None and (accuracy is None or accuracy < route.accuracy):
        missed = [*missed, "accuracy"]  # it was never measured
    if route.cost is not None and cost * query.items * 1000.0 > route.cost:
        missed = [*missed, "cost"]  # more than its profile promised: the batch was disturbed
    # Made for every query: positional arguments cost a tenth of keywords.
    return Answer(
        route.id,
        result.outputs[i],
        record.model,
        record.version,
        record.variant,
        record.hardware,
        worker,
        accuracy,
        latency_ms,
        max(0.0, result.started - route.arrived) * 1000.0,  # queued
        (result.finished - result.started) * 1000.0,  # computed
        batch,
        False,  # cached
        record.simulated,
        cost * query.items,
        missed,
        UNSET,  # outputs_ref
        UNSET if route.confidence is None else 1.0,  # one model agrees with itself
        UNSET,  # members
        UNSET,  # missing
        UNSET,  # default
        result.note or UNSET,  # reason
        route.uid.hex(),
        UNSET,  # confidences
        UNSET if result.labels is None else result.labels[i],
        True if result.note else UNSET,  # zeros
        loaded.target[0] or UNSET,
        loaded.target[1] or UNSET,  # its unit
        loaded.metric or UNSET,
        source,
    )


def too_dear(loaded: HeldInstance, query: QueuedQuery) -> str:
    """Why a query whose items nobody had counted before exceeds its limit of cost. Empty if it does not."""
    route = query.route
    cost = 1000.0 * loaded.price_per_s * loaded.table.at(route.length).charged_seconds(query.items)
    if route.cost is None or cost <= route.cost:
        return ""
    each = f"US$ {cost:.6g} per 1,000 queries, more than {route.cost:.6g}"
    return f"cost: {query.items} items cost {each}: allow more, or send fewer items"


def model_error(route: Route, reason: str) -> Refusal:
    """The model failed on this very query."""
    return Refusal(id=route.id, error=Error(code="model_error", message=f"the model failed on these inputs: {reason}"))


def bad_inputs(route: Route, reason: str) -> Refusal:
    """The query's inputs do not fit the model, which only their values tell."""
    return Refusal(id=route.id, error=Error(code="bad_request", message=reason))


def output_bytes(answer: Answer) -> int:
    return sum(len(tensor.data) for tensor in answer.outputs.values())


# -- tracing: one span from taking a query to answering it, and within it one for the batch that computed it

SPAN_PART, SPAN_BATCH = "execute", "compute"


def answer_headers(query: QueuedQuery) -> Mapping[str, str] | None:
    """The headers of the query's answer. None if the query is not traced."""
    trace = read(query.headers)
    return None if trace is None else trace.headers(span_id(query.route.uid, SPAN_PART))


def spans_of(query: QueuedQuery, where: Mapping[str, str], result: BatchResult, batch: int) -> list[Span]:
    """The spans of a query that was computed in a batch of so many items, if its trace is recorded. where: worker, device, variant."""
    trace = read(query.headers)
    if trace is None or not trace.recorded:
        return []
    uid = query.route.uid
    whole, inner = span_id(uid, SPAN_PART), span_id(uid, SPAN_BATCH)
    about = {f"infaas.{key}": value for key, value in where.items()}
    error = "" if result.errors is None else "bad_request" if result.unfit else "model_error"
    more = {"infaas.app": query.route.app, "infaas.query.uid": uid.hex(), "infaas.query.items": query.items}
    before_s, after_s = result.functions_s or (0.0, 0.0)

    def part(name: str, parent: str, start: float, end: float, attributes: dict[str, Any]) -> Span:
        return Span(
            trace=replace(trace, parent=parent),
            span=span_id(uid, name),
            name=f"infaas {name}",
            kind="internal",
            start=start,
            end=end,
            attributes=attributes,
            error=error,
        )

    found = [
        Span(
            trace=trace,
            span=whole,
            name="infaas execute",
            kind="consumer",
            start=query.taken,
            end=result.finished,
            attributes={**about, **more},
            error=error,
        ),
        part(SPAN_BATCH, whole, result.started, result.finished, {**about, "infaas.batch.items": batch}),
    ]
    if before_s:
        found.append(part("before", inner, result.started, result.started + before_s, about))
    if after_s:
        found.append(part("after", inner, result.finished - after_s, result.finished, about))
    return found


Key = tuple[bytes, int]  # uid, part


def ends(route: Route, *, default: bool = True) -> float:
    """When a query ends that has no answer, in Unix seconds. default: a dispatcher gives the default output of its app, if there is one."""
    if route.fallback and default:
        return default_at(route.arrived, route.deadline)
    return route.deadline + (GRACE if route.parent is None else PART_GRACE)


class PendingQueries(dict[Key, QueuedQuery]):
    """By uid and part. earliest: when the first of them ends. fetching: those whose inputs are on their way, by uid."""

    def __init__(self) -> None:
        self.earliest = EarliestDeadline()
        self.fetching: dict[bytes, tuple[HeldInstance, QueuedQuery]] = {}

    def take(self, query: QueuedQuery) -> None:
        """It has come, or its inputs have."""
        route = query.route
        self[route.uid, route.part] = query
        if route.deadline < self.earliest.at or route.fallback:  # else it ends later
            self.earliest.at = min(self.earliest.at, ends(route))

    def fetch(self, loaded: HeldInstance, query: QueuedQuery) -> None:
        """It has come without its inputs."""
        self.fetching[query.route.uid] = (loaded, query)
        self.take(query)

    def arrived(self, uid: bytes) -> tuple[HeldInstance, QueuedQuery] | None:
        """What the inputs are for, which is not pending until it is taken again. None: it has ended meanwhile."""
        found = self.fetching.pop(uid, None)
        if found is None or found[1].abandoned:
            return None
        del self[uid, found[1].route.part]
        return found

    def due(self, now: float, *, default: bool) -> list[QueuedQuery]:
        """Those whose time is up. They stay; the caller ends them. default: as of `ends`."""
        found, earliest = [], float("inf")
        for query in self.values():
            due = ends(query.route, default=default)
            if due <= now:
                found.append(query)
            elif due < earliest:
                earliest = due
        self.earliest.looked(earliest, len(self), now)
        return found


_decode_answer = msgspec.msgpack.Decoder(Answer).decode


@dataclass(eq=False)
class Endings:
    """What one executor says about its queries, and to whom. instances: by id. settle: of one that may be idle now. schedule: has batches formed soon."""

    worker: str
    device: str
    subjects: Subjects
    dispatchers: KnownDispatchers
    answers: RecentAnswers
    instances: Mapping[str, HeldInstance]
    pending: PendingQueries
    runs: BatchRuns
    settle: Callable[[HeldInstance], Iterable[Effect]]
    schedule: Callable[[], Iterable[Effect]]

    def __post_init__(self) -> None:
        self.inlets = (
            Inlet(subject=self.subjects.executor(self.worker, self.device, "withdraw"), message=Withdraw),
            Inlet(subject=f"{self.dispatchers.inbox}*", message=HandBack),
        )
        self.handlers: dict[type, Handler] = {
            Withdraw: self._withdraw,
            Undelivered: self._not_heard,
            DispatcherHeartbeat: self._heartbeat,
        }
        self._cancelled: list[tuple[bytes, str]] = []  # uids, and where their clients wait

    def leaves(self, route: Route, now: float, *, comes: bool = False) -> bool:
        """Whether its dispatcher ends this query, which is so late that it may have done so: nothing is said about it here. comes: it is read only now;
        its dispatcher may have given it to another executor.
        """
        last = ends(route, default=self.dispatchers.any_alive) + SPEAKS
        if comes and route.parent is None:
            last = min(last, route.deadline)
        return now > last and self.dispatchers.alive(route.dispatcher)

    def again(self, route: Route, known: SentAnswer, now: float) -> list[Effect]:
        """It was answered before: a client that asks again gets the same answer, a dispatcher's retry only a `done`.

        Whichever dispatcher's outcome is recorded first, it is charged.
        """
        effects: list[Effect] = []
        if route.attempt == 0 and route.resendable and not self.leaves(route, now):
            effects.append(Publish(route.reply_to, known.body))
        loaded = self.instances.get(route.instance)
        if loaded is not None:
            batch, cost, ended, codes = route.items, 0.0, now, [known.code] if known.code else None
            if not known.code:  # the row says when its client was told
                answer = _decode_answer(known.body)
                batch, cost = answer.batch, answer.cost / route.items
                ended = min(now, route.arrived + answer.latency_ms / 1000.0)
            span = (ended, ended)
            done = self.dispatchers.report_done(route.dispatcher, loaded, [route], batch, span, cost, codes, now)
            effects.extend(done)
        return effects

    def sought(self, asked: ResentSought, *, pending: bool) -> tuple[Effect, ...]:
        """A client has sent this query again: it gets the same reply, once. pending: it is here."""
        if asked.again:
            return ()
        known, there = self.answers.get((asked.uid, 0)), pending or self.dispatchers.has_parts_of(asked.uid)
        if known is None and not there and not self.dispatchers.is_over(asked.uid):
            return ()
        what = "has" if known is not None or there else "answered"  # who has that answer may be cut off
        has = Publish(self.subjects.resent(asked.dispatcher), ResentKnown("", asked.uid, what))
        if known is None or not asked.reply or self.answers.repeats(asked.uid, asked.sent):
            return (has,)
        return (Publish(asked.reply, known.body), has)

    def tell(self, query: QueuedQuery, answer: Answer | Refusal) -> list[Publish]:
        """The answer to all who wait for it: another dispatcher may ask for the same part by now."""
        route = query.route
        if route.parent is None or not query.also:
            return [self.reply(route, answer, query)]
        replies = {each.reply_to: each for each in query.routes}
        return [self.reply(each, answer, query) for each in replies.values()]

    def reply(self, route: Route, answer: Answer | Refusal, query: QueuedQuery | None = None) -> Publish:
        """The answer to the client. It is kept if the client may ask again."""
        headers = None if query is None or query.headers is None else answer_headers(query)
        return Publish(route.reply_to, self.answers.keep(route, answer) if route.resendable else answer, "", headers)

    def refuse(self, loaded: HeldInstance, query: QueuedQuery, code: Any, text: str, now: float) -> list[Effect]:
        """It ends here without an answer, unless it is so late that its dispatcher may have said so."""
        route = query.route
        if self.leaves(route, now):
            return self.back([query], "late")
        loaded.served(route, 0 if query.storing else route.items)
        refusal = Refusal(id=route.id, error=Error(code=code, message=text))
        return [*self.tell(query, refusal), *self.dispatchers.report_ended(loaded, query, refusal, now)]

    def hand_back(
        self, route: Route, reason: str, body: msgspec.Raw, headers: Any = None, text: str = ""
    ) -> list[Effect]:
        """Its dispatcher ends it, or if that is dead, another one. The dead one is told, as it may only have been stopped."""
        back = HandBack(route, reason, body, text)
        if not self.dispatchers.alive(route.dispatcher):
            return self.dispatchers.to_any(back, headers)
        return [self.dispatchers.hand(route.dispatcher, back, headers)]

    def _heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        """A dispatcher lives, or did when it sent this: what it has missed is handed back to it again."""
        heartbeat: DispatcherHeartbeat = envelope.message
        effects = self.dispatchers.heartbeat(heartbeat, envelope.now)
        missed = self.dispatchers.missed(heartbeat.dispatcher)
        return (
            [*effects, *(self.dispatchers.hand(heartbeat.dispatcher, *back) for back in missed)] if missed else effects
        )

    def _not_heard(self, envelope: Envelope) -> list[Effect]:
        """The dispatcher to which a query was handed is not there: it has died, or its connection is broken."""
        return self.dispatchers.unheard(envelope.subject.rpartition(".")[2])

    def back(self, queries: Iterable[QueuedQuery], reason: str, text: str = "") -> list[Effect]:
        return [
            effect
            for query in queries
            for route in query.routes
            for effect in self.hand_back(route, reason, query.body, query.headers, text)
        ]

    # -- taken back, by a dispatcher or by the client

    def _withdraw(self, envelope: Envelope) -> Iterable[Effect]:
        """Another executor has these queries: nothing is said about them here. Or their clients have taken them back."""
        order: Withdraw = envelope.message
        if order.cancelled:
            self._cancelled.extend((uid, order.reply) for uid in order.uids)
            return self.schedule()  # many may come together
        self.dispatchers.withdrawn(order.dispatcher, order.uids, order.attempt)
        asked = [query for uid in order.uids if (query := self.pending.get((uid, 0))) is not None]
        effects = self.forget([query for query in asked if query.only_of(order.dispatcher, order.attempt)])
        loaded, now = self.instances.get(order.instance), envelope.now
        if order.again:
            effects.extend(self.dispatchers.say_again(order.dispatcher))
        elif loaded is not None:
            effects += self.dispatchers.report_done(order.dispatcher, loaded, [], 0, (now, now), 0.0, None, now)
        return effects

    def forget(self, queries: list[QueuedQuery]) -> list[Effect]:
        """These queries end without a word, wherever they are."""
        for query in queries:
            query.abandoned = True
            del self.pending[query.route.uid, query.route.part]
        gone = {query.route.uid for query in queries}
        for loaded in self.instances.values():
            loaded.queue.forget(gone)
        leaving = [loaded for loaded in self.instances.values() if loaded.leaving and gone]
        return [effect for loaded in leaving for effect in self.settle(loaded)]

    def end_cancelled(self, now: float) -> list[Effect]:
        """End the queries that their clients have taken back, if they have not begun."""
        if not self._cancelled:
            return []
        asked, self._cancelled = self._cancelled, []
        begun = {query.route.uid for _, run, _ in self.runs.running.values() for query in run.queries}
        here = {uid: query for uid, _ in asked if (query := self.pending.get((uid, 0))) is not None}
        gone = [
            (self.instances.get(query.route.instance), query)
            for uid, query in here.items()
            if uid not in begun and not query.storing
        ]
        effects = self.forget([query for _, query in gone])
        for loaded, query in gone:
            if loaded is None or self.leaves(query.route, now):
                effects += self.back([query], "gone")  # its dispatcher ends it
                continue
            refusal = Refusal(id=query.route.id, error=CANCELLED)
            effects += (*self.tell(query, refusal), *self.dispatchers.report_ended(loaded, query, refusal, now))
        for uid, reply in asked:
            known = self.answers.get((uid, 0))
            if reply and (known is not None or uid in here):  # what was never here, its dispatcher hears of, and ends
                said = QueryCancelled(cancelled=known is not None and known.code == CANCELLED.code)
                effects.append(Publish(reply, said))
        return effects
