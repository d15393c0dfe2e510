"""The way of a query inside the system: dispatcher -> executor queue -> done. Arrays on the wire, since they are the hot path."""

from msgspec import Raw, Struct


class Route(Struct, frozen=True, array_like=True, gc=False):
    """What travels in front of a query's body from dispatcher to executor, and back when it is handed back.

    uid (16 bytes) and part name the work; attempt counts its dispatches from 0; deadline and arrived are Unix seconds.
    alone: it was aboard when an executor died and shares no batch again. resendable: the client may ask again by retry key.
    fallback: the app has a default output, so it goes back to its dispatcher instead of being refused or late.
    missed: requirements that the chosen variant is already known to miss. length: of the axis that varies, rounded up to one
    that was profiled, where it is known. parent/stage: for ensembles and pipelines.
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


class Execute(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.execute.<worker>.<device>`: a route and the query's body exactly as it came."""

    route: Route
    body: Raw


class HandBack(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.resubmit` (queue group of dispatchers): an executor could not serve this; decide again or refuse.

    reason: "deadline" (no longer fits here), "gone" (instance unloaded), "load_failed", "crashed" (its batch died); of a query
    whose app has a default output also "late" (its deadline came before its answer) and "failed" (the model did; text says how).
    """

    route: Route
    reason: str
    body: Raw
    text: str = ""


class Trying(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.trying.<dispatcher>`: this query was aboard when an executor died, and is now begun alone.

    When the executor dies again it was this query, and none of those that wait there.
    """

    uid: bytes
    attempt: int


class DoneBatch(Struct, frozen=True, array_like=True, gc=False):
    """`infaas.done.<dispatcher>`: one batch has been answered, straight to the clients.

    queue: "<worker>/<device>/<incarnation>"; seq grows by one for each (queue, dispatcher). batch: items that were computed
    together. codes: None when all went well, else per query "" or a refusal code. The latency of each = finished - arrived,
    which the dispatcher knows. queued: items left in this instance's queue. cost: US$ per item.
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
