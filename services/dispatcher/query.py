"""A query as a dispatcher holds it, from its admission to its one end, and its part in a trace."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from hashlib import blake2b
from typing import Any, Protocol
from zlib import crc32

import msgspec
from msgspec import Raw, Struct

from bus.messages.catalog import AppRecord, Ensemble, PipelineRecord, PlannedStage
from bus.messages.flow import Origin, Route, TensorRef
from bus.messages.public import Answer, CancelQuery, Error, ObjectRef, QueryHead, Tensor
from bus.rights import OWN
from bus.subjects import WITHOUT_APP
from services.core.actor import Effect, Envelope
from services.core.cost import bucket_of
from services.core.selection.eligibility import INFINITE, Ask
from services.core.selection.instances import Instance
from services.core.selection.refusals import misstated
from services.core.trace import Span, Trace, read, span_id
from services.core.validation import WrongField, count_items, length_of, wrong_requirement
from services.dispatcher.apps import Apps
from services.dispatcher.needs import needs_again, needs_of, with_arm


class Query(Struct, eq=False):
    """One query from its arrival to its end: the body as it came, what it asks, where it is. Times: Unix seconds."""

    uid: bytes
    app: str
    head: QueryHead
    ask: Ask
    reply: str
    body: bytes
    arrived: float
    asked: float = 0.0  # when an echo was asked for, since its executor has said nothing; 0: it was not
    attempt: int = -1  # number of the last dispatch; the first is 0
    crashes: int = 0  # executors that died while they had it
    instance: Instance | None = None
    sent: Route | None = None  # with the last dispatch
    lent: tuple[Instance, int] | None = None  # an executor that was taken for dead may end it: where, which attempt
    moved: bool = False  # it was taken from an executor, or from a silent dispatcher, that may have had it answered already: nothing else is said of it before its deadline and an echo
    trace: Trace | None = None  # of its sender
    headers: Mapping[str, str] | None = None  # of its messages, if it is traced
    fallback: AppRecord | None = None  # its app, if that has a default output
    ensemble: Ensemble | None = None  # how several models answer it together, if they do
    pipeline: PipelineRecord | None = None  # which other apps it visits, if its app is a pipeline
    part: "QueryPart | None" = None  # which part of another query it is
    planned: PlannedStage | None = None  # what serves it, if it is a part that a plan provides for
    payer: str | None = None  # the app that pays for it, if that is another one
    refs: list[TensorRef] | None = None  # its inputs that are in the object store
    why: Error | None = None  # while it waits for a better answer: the refusal that it would get now

    def owed(self, now: float) -> bool:
        """Whether an executor that was taken for dead, or from which it was taken, may still answer it: it is not refused yet."""
        return self.lent is not None or (self.moved and now < self.ask.deadline)

    def route(
        self,
        dispatcher: str,
        instance: str,
        policy: str,
        *,
        more: bool = False,
        higher: tuple[int, float] | None = None,
        live: tuple[float, str] | None = None,
        keep: bool = False,
    ) -> Route:
        """What goes in front of the body, and into the outcome. more, higher, live, keep: as in `Route`."""
        head, ask, part = self.head, self.ask, self.part
        latency = ask.latency_s
        return Route(
            self.uid,
            0,
            self.attempt,
            self.reply,
            ask.deadline,
            self.arrived,
            dispatcher,
            instance,
            self.app,
            ask.items,
            head.id,
            latency * 1000.0 if latency < 1e9 else None,
            ask.accuracy or None,
            ask.cost if ask.cost < INFINITE else None,
            ask.priority,
            ask.context,
            head.input_digest,
            policy,
            None,
            ask.model,
            ask.version,
            ask.variant,
            head.retry_key is not None or part is not None,
            self.crashes > 0,
            ask.length,
            None if part is None else part.join.query.uid,
            None if part is None else part.stage,
            self.fallback is not None,
            None if part is None else part.origin,
            self.refs,
            more,
            ask.confidence,
            higher,
            self.payer,
            live,
            keep,
        )

    @property
    def raw(self) -> Raw:
        return Raw(self.body)


# -- a query with parts


class PartReply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.part.<dispatcher>.<uid>`: the Answer to a part, or its Refusal, in which `error` is set."""

    outputs: dict[str, Tensor] = {}
    outputs_ref: ObjectRef | None = None
    model: str = ""
    version: str = ""
    variant: str = ""
    hardware: str = ""
    worker: str = ""
    accuracy: float | None = None
    accuracy_source: str = "registered"
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    batch: int = 0
    cached: bool = False
    simulated: bool = False
    cost: float = 0.0
    missed: list[str] = []
    reason: str = ""
    error: Error | None = None
    members: list[str] = []
    zeros: bool = False
    missing: int | None = None
    confidence: float | None = None
    confidences: list[float] = []
    labels: list[str] = []


class QueryPart(Struct, eq=False):
    """One part of a query. stage: which one, for people; item: of an answer for each of whose items the stage is asked. reply: its answer;
    error: why there is none. Neither: it is under way.

    origin: goes with it, so that another dispatcher can start the query again. sent: an executor has it, or has answered it.
    """

    join: "Join"
    uid: bytes
    stage: str
    origin: Origin | None
    reply: PartReply | None = None
    error: Error | None = None
    sent: bool = False
    item: int | None = None

    @property
    def where(self) -> str:
        """Which one, in words."""
        return self.stage if self.item is None else f"{self.stage}, item {self.item}"


class Composite(Protocol):
    """How queries of a kind are answered from parts: by members of an ensemble, or by the vertices of a pipeline."""

    def start(self, query: Query, now: float) -> Iterable[Effect]:
        """A query begins: ask its parts."""

    def replied(self, uid: bytes, reply: PartReply, now: float) -> Iterable[Effect]:
        """A part was answered or refused elsewhere."""

    def refused(self, part: QueryPart, error: Error, now: float) -> Iterable[Effect]:
        """A part was refused here."""

    def due(self, join: "Join", now: float) -> Iterable[Effect]:
        """The time of a query has come: `join.due`, and `join.last` if it is open then."""


@dataclass(slots=True, eq=False)
class Join:
    """A query with parts. kind: what makes the answer. due: when its answer is made of what is there, in Unix seconds. last: when it is refused
    if it has no answer yet. plan: whatever made the parts keeps here.

    digest: of the inputs, where the app keeps answers. patient: where nothing is there at `due`, the first part is waited for. ended: its client has the answer, and only late parts are open. sent: how many parts executors have, or have answered. willed: only this dispatcher has it, and its successor
    would hand it on.
    """

    kind: Composite
    query: Query
    due: float
    last: float
    patient: bool
    dispatcher: InitVar[str]
    policy: InitVar[str]
    looked_at: bool = False  # its time has come
    digest: bytes | None = None
    ended: bool = False
    sent: int = 0
    willed: bool = False
    parts: list[QueryPart] = field(default_factory=list)
    plan: Any = None
    origin: Origin | None = field(init=False)

    def __post_init__(self, dispatcher: str, policy: str) -> None:
        query = self.query
        self.origin = Origin(query.route(dispatcher, "", policy)) if query.part is None else query.part.origin

    @property
    def answered(self) -> list[QueryPart]:
        return [part for part in self.parts if part.reply is not None]

    @property
    def under_way(self) -> bool:
        """Whether a part may still be answered."""
        # Those that were asked for last are usually the last to answer.
        return any(part.reply is None and part.error is None for part in reversed(self.parts))

    @property
    def cost(self) -> float:
        """US$ of all parts that were computed."""
        return sum(part.reply.cost for part in self.parts if part.reply is not None)


def answer_of_none(query: Query, outputs: dict[str, Tensor], seconds: float, **said: Any) -> Answer:
    """An answer that no one variant has made. seconds: since the query came. said: further fields."""
    blank = dict.fromkeys(("model", "version", "variant", "hardware", "worker"), "")
    more = {"batch": 0, "cached": False, "simulated": False, "cost": 0.0, **blank, **said}
    return Answer(id=query.head.id, outputs=outputs, latency_ms=1000.0 * seconds, query=query.uid.hex(), **more)


def outermost(join: Join) -> Join:
    """The query that a client asked, of which this one may be a part."""
    while join.query.part is not None:
        join = join.query.part.join
    return join


def keeps(query: Query, app: AppRecord | None) -> bool:
    """Whether a query is kept with its answer: all stages keep the same ones, and of an ensemble's members the first."""
    if app is None or not app.payloads:
        return False
    uid, part = query.uid, query.part
    if part is not None:
        if part.join.query.ensemble is not None and part is not part.join.parts[0]:
            return False
        uid = outermost(part.join).query.uid
    return crc32(uid) < app.payloads * 2**32


# -- tracing: one span from a query's arrival to its end

SPAN_PART = "dispatch"


def start_trace(query: Query, headers: Mapping[str, str]) -> None:
    """Read the trace from the headers that the query came with, and set the headers of its further messages."""
    query.trace = read(headers)
    if query.trace is not None:
        query.headers = query.trace.headers(span_id(query.uid, SPAN_PART))


def spans_of(query: Query, end: float, code: str = "") -> list[Span]:
    """The span of a query that has ended, if its trace is recorded. code: of its refusal."""
    trace, sent = query.trace, query.sent
    if trace is None or not trace.recorded:
        return []
    attributes: dict[str, str | int] = {
        "infaas.app": query.app,
        "infaas.query.uid": query.uid.hex(),
        "infaas.query.items": query.ask.items,
        "infaas.dispatches": query.attempt + 1,
    }
    if query.part is not None:
        attributes["infaas.stage"] = query.part.stage
    if query.head.id is not None:
        attributes["infaas.query.id"] = query.head.id
    if sent is not None and sent.instance:
        attributes["infaas.instance"] = sent.instance
    return [
        Span(
            trace=trace,
            span=span_id(query.uid, SPAN_PART),
            name="infaas query",
            kind="server",
            start=query.arrived,
            end=end,
            attributes=attributes,
            error=code,
        )
    ]


# -- admission: names, limits, requirements, inputs and deadline are checked here

SCOPES = 1024  # apps times inbox prefixes whose hashers are kept
_decode_head = msgspec.msgpack.Decoder(QueryHead).decode


class LabelOnly(msgspec.Struct, frozen=True):
    """The one field that may be readable in a malformed query."""

    id: str | None = None


_decode_label = msgspec.msgpack.Decoder(LabelOnly).decode


def label_of(body: bytes) -> str | None:
    """The id that the sender of a malformed query gave it. None if even that cannot be read."""
    try:
        return _decode_label(body).id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


class Admission(Struct, eq=False):
    """Makes queries from messages. default_deadline_s: of a query that states none. max_inline: bytes that a body may have."""

    apps: Apps
    new_uid: Callable[[], bytes]
    default_deadline_s: float
    max_inline: int
    _hashers: dict[tuple[str, str], blake2b] = {}

    def admit(self, app_name: str, envelope: Envelope, age: float = 0.0) -> Query | Error:
        """The query, or why it is refused. age: seconds since its client sent it first, which has that much less patience if it states no time."""
        head: QueryHead = envelope.message
        found = self.apps.of(app_name, head.model)
        if found is None:
            return self.apps.unknown(app_name, head.model)
        if len(envelope.body) > self.max_inline:
            text = f"{len(envelope.body)} bytes are more than {self.max_inline}: put the inputs into the object store"
            return Error(code="too_large", message=f"{text} and send inputs_ref")
        key, view = found
        now = envelope.now
        wrong = wrong_requirement(head)
        if wrong is not None:
            return Error(code="bad_request", message=str(wrong))
        if (head.accuracy or head.metric) and (error := misstated(head, app_name, view.measured_by(head))) is not None:
            return error
        try:
            items = count_items(head, view.app)
            length = None
            if view.open_axis is not None and view.lengths:
                length = length_of(head, view.open_axis)
                length = None if length is None else bucket_of(length, view.lengths)
            uid = self._uid(app_name, head, envelope.reply)
        except WrongField as error:
            return Error(code="bad_request", message=str(error))
        ask = needs_of(head, key, items, length, view.app.latency_ms, now, self.default_deadline_s - age)
        if view.app.release is not None:
            ask = with_arm(ask, view, uid)
        query = Query(uid, app_name, head, ask, envelope.reply, envelope.body, now)
        if view.app.default_output is not None:
            query.fallback = view.app
        if view.app.selection is not None:
            query.ensemble = ensemble_of(query, view.app)
        elif view.app.pipeline is not None:
            query.pipeline = view.app.pipeline
        if head.model is not None and app_name == WITHOUT_APP:
            query.payer = min(self.apps.catalog.apps_linking(head.model), default=None)
        if envelope.headers is not None:
            start_trace(query, envelope.headers)
        return query

    def known_as(self, app: str, head: QueryHead | CancelQuery, reply: str) -> bytes | None:
        """The uid of a query that has a retry key, whether it can be admitted or not. None: it has none."""
        key = head.retry_key
        return self._uid(app, head, reply) if key is not None and len(key) == 16 else None

    def _uid(self, app: str, head: QueryHead | CancelQuery, reply: str) -> bytes:
        """A new id, or one made from the client's retry key, the app and the caller, so that no caller can hit another's query."""
        key = head.retry_key
        if key is None:
            return self.new_uid()
        if len(key) != 16:
            raise WrongField(f"retry_key must be 16 random bytes, not {len(key)}")
        caller = reply[: reply.find(".")]
        if caller == OWN:  # the user's name comes after the app's
            caller = ".".join(reply.split(".", 3)[:3])
        scope = (app, caller)
        hasher = self._hashers.get(scope)
        if hasher is None:
            if len(self._hashers) >= SCOPES:
                self._hashers.clear()
            named = "/".join(scope).encode()
            hasher = blake2b(digest_size=16, key=named if len(named) <= 64 else blake2b(named).digest())
            self._hashers[scope] = hasher
        digest = hasher.copy()  # a third of what making one costs
        digest.update(key)
        return digest.digest()

    def adopt(self, route: Route, body: bytes, headers: Mapping[str, str] | None = None) -> Query | None:
        """Take over a query of another dispatcher that is gone. None if it cannot be understood here.

        headers: that came with it. They stay as they are, since its span is the other dispatcher's.
        """
        try:
            head = _decode_head(body)
        except msgspec.DecodeError:
            return None
        found = self.apps.of(route.app, route.model)
        if found is None:
            return None
        ask = with_arm(needs_again(route, found[0], head), found[1], route.uid)
        query = Query(route.uid, route.app, head, ask, route.reply_to, body, route.arrived)
        query.fallback = found[1].app if route.fallback and found[1].app.default_output is not None else None
        query.ensemble = ensemble_of(query, found[1].app)
        query.pipeline = found[1].app.pipeline
        query.payer = route.payer
        query.attempt = route.attempt
        query.headers = None if (trace := read(headers)) is None else trace.headers(trace.parent)
        query.crashes = int(route.alone)
        return query


def ensemble_of(query: Query, app: AppRecord) -> Ensemble | None:
    """How several models answer the query together. None: one variant answers, also where the query itself names a model."""
    ask = query.ask
    return app.selection if ask.model is None and ask.version is None and ask.variant is None else None
