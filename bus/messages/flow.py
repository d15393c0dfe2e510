"""The path of a query inside the system: dispatcher -> executor queue -> done.

These messages are encoded as arrays, since they are on the hot path.
"""

from msgspec import Raw, Struct

from bus.messages.public import Feedback


class Route(Struct, frozen=True, array_like=True, gc=False):
    """The header that a dispatcher puts in front of a query's body. An executor sends it back if it hands the query back.

    uid (16 bytes), part: together they identify the work. attempt: counts its dispatches from 0. deadline, arrived: Unix seconds.
    alone: the query was in an executor when that died, so it never shares a batch again. resendable: the client may ask again by retry
    key. fallback: the app has a default output, so the query goes back to its dispatcher instead of being refused or late.
    missed: requirements that the chosen variant is already known to miss. length: the length of the variable axis, rounded up to a
    profiled length; None if it is not known. parent, stage: of a part of another query: the uid of that query, and which part it is (the
    member of an ensemble, the vertex of a pipeline). origin: with the same, so that another dispatcher can start that query again. refs: inputs
    that are in the object store, beside those of the body. more: the next query to this queue belongs to the same batch.
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


class Execute(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.execute.<worker>.<device>`: a route and the query's body, unchanged."""

    route: Route
    body: Raw


class HandBack(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.resubmit` (queue group of dispatchers): an executor could not serve this query. A dispatcher decides again or refuses.

    reason: "deadline" (it does not meet its deadline here), "gone" (the instance is unloaded), "load_failed", "crashed" (the executor
    died with its batch). If the app has a default output, also "late" (the deadline came before the answer) and "failed" (the model
    failed; text says how). "orphaned": route and body are those of a query whose parts are here, and whose dispatcher is gone.
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


class PartsEnded(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.ended.<dispatcher>`: these queries, of which executors have had parts, have ended: nobody needs to start them again."""

    parents: list[bytes]


class DoneBatch(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.done.<dispatcher>`: one batch is done. The executor sent the answers directly to the clients.

    queue: "<worker>/<device>/<incarnation>". seq: grows by one for each (queue, dispatcher). batch: items that were computed together.
    codes: None if all queries succeeded, else "" or a refusal code for each query. queued: items left in the queue of this instance.
    cost: US$ per item. The latency of each query is finished - arrived; the dispatcher knows when it arrived.
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


class SelectionChanged(Struct, frozen=True, array_like=True):
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


class FeedbackTaken(Struct, frozen=True, array_like=True):
    """`infaas.selection.taken.<dispatcher>`: the sender sees to the feedback of this `FeedbackSought`."""

    number: int
