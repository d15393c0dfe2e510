"""The path of a query inside the system: dispatcher -> executor queue -> done.

These messages are encoded as arrays, since they are on the hot path.
"""

from hashlib import blake2b
from typing import Any

from msgspec import Raw, Struct

from bus.messages.public import Error, Feedback, Tensor


class Route(Struct, frozen=True, array_like=True, gc=False):
    """The header that a dispatcher puts in front of a query's body. An executor sends it back if it hands the query back.

    uid (16 bytes), part: together they identify the work. attempt: counts its dispatches from 0. deadline, arrived: Unix seconds.
    alone: the query was in an executor when that died, so it never shares a batch again. resendable: the client may ask again by retry
    key. fallback: the app has a default output, so the query goes back to its dispatcher instead of being refused or late.
    missed: requirements that the chosen variant is already known to miss. length: the length of the variable axis, rounded up to a
    profiled length; None if it is not known. parent, stage: of a part of another query: the uid of that query, and which part it is (the
    member of an ensemble, the vertex of a pipeline). origin: with the same, so that another dispatcher can start that query again. refs: inputs
    that are in the object store, beside those of the body. more: the next query to this queue belongs to the same batch.
    higher: a query of higher priority that this instance had no time for a moment ago: its priority, and the seconds that it had.
    payer: the app that pays, if it is another one: a pipeline for the visits of its stages; for a query that names a model and no app, the first
    app that links the model. live: the variant's accuracy in production, and what that was measured by, where it has left the registered one.
    keep: the query is kept with its answer (`Payload`).
    """

    uid: bytes
    part: int
    attempt: int
    reply_to: str
    deadline: float
    arrived: float
    dispatcher: str
    instance: str
    app: str
    items: int
    id: str | None
    latency_ms: float | None = None
    accuracy: float | None = None
    cost: float | None = None
    priority: int = 5
    context: str | None = None
    input_digest: str | None = None
    policy: str = ""
    missed: list[str] | None = None
    model: str | None = None
    version: str | None = None
    variant: str | None = None
    resendable: bool = False
    alone: bool = False
    length: int | None = None
    parent: bytes | None = None
    stage: str | None = None
    fallback: bool = False
    origin: "Origin | None" = None
    refs: "list[TensorRef] | None" = None
    more: bool = False
    confidence: float | None = None
    higher: tuple[int, float] | None = None
    payer: str | None = None
    live: tuple[float, str] | None = None
    keep: bool = False


class TensorRef(Struct, frozen=True, array_like=True, gc=False):
    """A tensor in the object store. name: the input, or output, that it becomes. tensor: its name in the object, which holds a map of tensors.

    If the object holds one tensor and no map, it is that one.
    """

    name: str
    bucket: str
    key: str
    tensor: str


class Origin(Struct, frozen=True, array_like=True, gc=False):
    """The query that a part belongs to; of a part of a part, the outermost. body: as its client sent it; None: the part's body is the same."""

    route: Route
    body: bytes | None = None


class Payload(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A query with its answer, as one variant computed it. query: the uid of what its client asked, in hexadecimal digits; id: the client's own.
    time: Unix seconds. inputs, outputs: by name, [items, ...].
    """

    query: str
    time: float
    variant: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    id: str | None = None


def payload_key(app: str, query: str, id: str | None, uid: str) -> str:
    """In the payloads bucket. uid: of what an executor had, which is several where one query asks a stage of a pipeline more than once."""
    return f"{app}.{query}.{id_digest(id)}.{uid}"


def id_digest(id: str | None) -> str:
    """A client's id as part of a key."""
    return "_" if id is None else blake2b(id.encode(), digest_size=8).hexdigest()


class Execute(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.execute.<worker>.<device>`: a route and the query's body, unchanged."""

    route: Route
    body: Raw


class HandBack(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.resubmit` (queue group of dispatchers): an executor could not serve this query. A dispatcher decides again or refuses.

    reason: "deadline" (it does not meet its deadline here), "gone" (the instance is unloaded), "load_failed", "crashed" (the executor
    died with its batch). "late" (the deadline came before the answer). If the app has a default output, also "failed" (the model
    failed; text says how). "orphaned": route and body are those of a query whose parts are here, and whose dispatcher is gone.
    "taken": to a dispatcher that was silent; another one has the query now, or to that one: it had ended before. "sought": a dispatcher was
    killed while it asked others for this query; text "answered": of which it knew that an executor had replied;
    route.deadline: when its client had sent it again.
    "stopped": the executor stood still for so long that others may have it; it is only decided again if it is still dispatched there.
    """

    route: Route
    reason: str
    body: Raw
    text: str = ""


class Trying(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.trying.<dispatcher>`: this query was in an executor when that died. It now starts alone.

    If the executor dies again, this query is the cause, not one of those that wait there.
    """

    uid: bytes
    attempt: int


class Echo(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.echo.<dispatcher>`: from a dispatcher to itself. What had reached servers before comes before it. at: when it was sent, Unix seconds."""

    at: float


class Withdraw(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.executor.<worker>.<device>.withdraw`: the dispatcher has given the first dispatch of these queries to another executor, as this one
    said nothing for too long. This one says that it turns, with a `DoneBatch` without queries. uids may be empty. instance: where they were.
    again: what it has said of late may be lost; it says it again. cancelled: nobody else has these queries, and their client has taken them back: it ends those
    that have not begun. reply: where the client waits for `QueryCancelled`.
    """

    dispatcher: str
    instance: str
    uids: list[bytes]
    attempt: int = 0
    again: bool = False
    cancelled: bool = False
    reply: str = ""


class ResentSought(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.resent`: a dispatcher asks all others, and the executors, who has this query or has ended it: its client has sent it again.

    uid: of the query. reply: where its client waits. An executor that has replied, and a dispatcher that has ended it itself, says the same again.
    Empty: an executor has handed it on, as its dispatcher died; its client has not asked again.
    again: the same dispatcher has asked before, and waits only for dispatchers: executors say nothing.
    cancelled: its client has taken it back: who has it ends it, and answers at `reply`. Executors say nothing.
    sent: when its client has sent it again, Unix seconds: who is heir of a dispatcher that asked gets no second answer for the same sending.
    """

    dispatcher: str
    uid: bytes
    reply: str
    again: bool = False
    cancelled: bool = False
    sent: float = 0.0


class ResentKnown(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.resent.<dispatcher>`: what the sender knows of the query of a `ResentSought`. dispatcher: the sender; empty: an executor.

    what: "has" (it has it, or has said again how it ended), "answered" (an executor has replied), "no", or, from who had asked, "taken": nobody
    had it, and it was taken as a new one: that goes to `infaas.resent.all`.
    """

    dispatcher: str
    uid: bytes
    what: str


class PartsEnded(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.ended.<dispatcher>`: these queries, of which executors have had parts, have ended: nobody needs to start them again."""

    parents: list[bytes]


class DoneBatch(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.done.<dispatcher>`: one batch is done. The executor sent the answers directly to the clients.

    queue: "<worker>/<device>/<incarnation>". seq: grows by one for each (queue, dispatcher); 0: a dispatcher passes on what one ended that
    had it from there, to the dispatcher that took the query over. batch: items that were computed together.
    uids: those that have ended. storing: those that are computed and take no more of the instance's time, and whose outputs go to the object
    store. Each ends with a message of its own later, in which started is finished.
    codes: None if all queries succeeded, else "" or a refusal code for each query. queued: items left in the queue of this instance.
    mixed: items of a batch there with queries of several priorities, at most; 0: as of any batch. levels: items that wait there by priority, whoever
    sent them.
    cost: US$ per item. The latency of each query is finished - arrived; the dispatcher knows when it arrived. items: of each query, where one's
    inputs came from the object store: nobody had counted them before. said: of each query, of each item, what a label is compared with
    (`services.core.ensemble.outputs.said`); None: it is not known.
    """

    queue: str
    worker: str
    seq: int
    instance: str
    variant: str
    batch: int
    started: float
    finished: float
    cost: float
    queued: int
    uids: list[bytes]
    codes: list[str] | None = None
    mixed: int = 0
    items: list[int] | None = None
    storing: list[bytes] | None = None
    levels: dict[int, int] = {}
    said: list[list[Any] | None] | None = None


class ContextChanged(Struct, frozen=True, array_like=True):
    """`infaas.selection.changed`: what a selection policy has learnt about an app, or one of its contexts, has changed.

    key: in the selection bucket, at this revision with this value. value None: it begins anew; then an empty key stands for all of the app.
    """

    app: str
    key: str
    revision: int
    value: bytes | None


class FeedbackSought(Struct, frozen=True, array_like=True):
    """`infaas.selection.sought`: whose prediction is this feedback for, or who has applied it? That dispatcher takes it over.

    dispatcher, number: who asks, and which question of its this is. mark: 8 bytes by which the feedback is known again. query: uid of the prediction. digest: of the inputs, by the
    dispatchers' own hash. reply: who waits for `Accepted`. applied: it has been applied, and only who did that is asked for.
    """

    dispatcher: str
    number: int
    mark: bytes
    app: str
    feedback: Feedback
    query: bytes | None
    digest: bytes | None
    reply: str
    applied: bool = False


class FeedbackTold(Struct, frozen=True, kw_only=True):
    """`infaas.selection.told.<dispatcher>.<list>.<item>`: the reply to a feedback of a list, to the dispatcher that has got the list."""

    error: Error | None = None


class FeedbackTaken(Struct, frozen=True, array_like=True):
    """`infaas.selection.taken.<dispatcher>`: the sender sees to the feedback of this `FeedbackSought`.

    query: it does not yet, but has the prediction of this query, made at `at`, which has the `id` that the feedback names: who asks takes the
    latest of all.
    """

    number: int
    query: bytes | None = None
    at: float = 0.0
